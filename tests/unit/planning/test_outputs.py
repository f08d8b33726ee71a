"""Relative paths of results in a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp.planning.program import relative_outputs
from tests.support.launch_runs import plan_script, plan_text


def outputs(*args: str, **kwargs: Any) -> tuple[str, ...]:
    return relative_outputs({"words": (), "args": args, "kwargs": kwargs})


@pytest.mark.parametrize(
    "args",
    [
        ("--out", "ckpt"),
        ("--output-dir=ckpt",),
        ("--save_dir", "./ckpt"),
        ("-o", "ckpt"),
        ("--trainer.default_root_dir", "ckpt"),
        ("hydra.out_dir=ckpt",),
        ("--logdir", "ckpt/"),
    ],
)
def test_options_that_name_results_are_found_by_their_names(args: tuple[str, ...]) -> None:
    assert outputs(*args) == ("ckpt",)


def test_words_of_a_command_and_arguments_of_a_function_count() -> None:
    assert relative_outputs({"words": ("t.py", "--out", "a"), "args": (), "kwargs": {"save_dir": "b"}}) == ("a", "b")


@pytest.mark.parametrize(
    "args",
    [
        ("--out", "/data/ckpt"),
        ("--out", "{output_dir}/x"),
        ("--out", "~/x"),
        ("--out", "s3://bucket/x"),
        ("--save", "--lr", "0.1"),
        ("--save", "true"),
        ("--save", "10"),
        ("--out",),
        ("--data", "data"),
        ("--layout", "nhwc"),
    ],
)
def test_other_values_and_options_are_no_relative_results(args: tuple[str, ...]) -> None:
    assert outputs(*args) == ()


def test_the_plan_says_what_other_runs_overwrite(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("")
    text = "name: job\nentry: {script: entry.py, args: [--out, ckpt]}\n"
    assert plan_text(text, tmp_path).notes == (
        f"{tmp_path}/ckpt: other runs with this argument overwrite it; {{output_dir}} is the run's own",
    )
    assert plan_script(tmp_path).notes == ()
