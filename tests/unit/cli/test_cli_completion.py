"""What a shell completes besides commands and runs: states, keys of a spec, and their values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from clusterddp.cli.main import cli, main
from clusterddp.spec.keys import complete_override
from tests.support.paths import ROOT


def completed(*words: str, incomplete: str) -> list[str]:
    completion = ShellComplete(cli, {}, "clusterddp", "_CLUSTERDDP_COMPLETE")
    return [item.value for item in completion.get_completions(list(words), incomplete)]


def test_states_and_orders_of_list_are_completed() -> None:
    assert completed("list", "--state", incomplete="com") == ["COMPLETED"]
    assert completed("list", "--sort", incomplete="t") == ["time"]


@pytest.mark.parametrize("words", [("submit", "job.yaml"), ("resume", "run-1"), ("doctor", "j")])
def test_keys_of_a_spec_are_completed_after_it(words: tuple[str, ...]) -> None:
    assert "train.lr=" in completed(*words, incomplete="train.l")
    assert completed(*words, "train.lr=0.2", incomplete="resources.nod") == ["resources.nodes="]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("trai", ["train."]),
        ("laun", ["launcher="]),
        ("launcher=s", ["launcher=ssh", "launcher=slurm"]),
        ("train.model=", ["train.model=resnet18", "train.model=fastnet"]),
        ("train.download=f", ["train.download=false"]),
        ("train.dataset=cifar100", ["train.dataset=cifar100"]),
        ("+env", ["+env."]),
        ("~train.see", ["~train.seed"]),
        ("train.lr=", []),
        ("nothing.lr", []),
        ("env.HOME", []),
        ("ssh.hosts=", []),
    ],
)
def test_an_argument_goes_on(typed: str, expected: list[str]) -> None:
    assert [text for text, _ in complete_override(typed)] == expected


def test_a_key_is_described_in_a_sentence() -> None:
    assert dict(complete_override("train.epo"))["train.epochs="] == "Passes over the training images."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["submit", "job.yaml", "resources.nod"], ["resources.nodes="]),
        # bash parts a word at =, and replaces what comes after it
        (["submit", "job.yaml", "launcher", "=", "sl"], ["slurm"]),
        (["submit", "job.yaml", "train.model", "="], ["resnet18", "fastnet"]),
    ],
)
def test_the_script_of_bash_completes_keys_and_values(
    words: list[str], expected: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capfd.readouterr().out
    program = tmp_path / "clusterddp"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m clusterddp\n")
    program.chmod(0o755)
    asks = f'COMP_WORDS=(clusterddp "$@"); COMP_CWORD=$#; _clusterddp_completion {program}'
    shows = 'printf "%s\\n" "${COMPREPLY[@]}"'
    argv = ["bash", "-c", f"compopt() {{ :; }}\n{script}\n{asks}\n{shows}", "bash", *words]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split() == expected
