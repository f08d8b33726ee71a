"""`submit --smoke-test`: all ranks start and meet, and do once what the run is for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.run.find import list_runs
from clusterddp.system.files import read_json
from clusterddp.train.device import RankVariables
from clusterddp.train.smoke_test import check_program
from tests.support.waiting import PATIENCE

TRAINER = """\
name: tiny
launcher: slurm
resources: {nodes: 2, gpus_per_node: 1}
train: {model: fastnet, width: 0.125, dataset: shapes, samples: 300, batch_size: 64, epochs: 500, accumulate: 2}
"""
PROGRAM = "name: mine\nresources: {nodes: 1, procs_per_node: 2}\n"


def smoke_test(place: Path, spec: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", "submit", "-", "--smoke-test", *arguments],
        cwd=place,
        input=spec,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 120,
        check=False,
        **options,
    )


def proved(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what was proved, without how long it took."""
    return [line[4:].rpartition(" (")[0] for line in done.stdout.splitlines() if line.startswith("ok  ")]


def test_the_trainer_takes_a_step_on_all_ranks_and_reads_its_checkpoint_back(tmp_path: Path) -> None:
    done = smoke_test(tmp_path, TRAINER)
    assert done.returncode == 0, done.stderr
    assert proved(done) == [
        "2 ranks meet over gloo",
        "an all-reduce over 2 ranks gives the right sum",
        "the data set shapes is there",
        "fastnet takes a step of 16 images on cpu",
        "a checkpoint is written, and read back the same",
    ]
    assert "the smoke test is on the CPU" in done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert "epochs: 500" in run.spec.read_text()
    assert (read_json(run.plan) or {})["spec"]["train"]["max_steps"] == 1
    assert len(list(run.checkpoints.glob("*.pt"))) == 1


def test_a_program_is_not_executed_and_what_it_imports_is(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("open('imported', 'w').close()\nnumber = 1\n")
    (tmp_path / "train.py").write_text("import json, torch\nfrom beside import number\nwhile True: pass\n")
    done = smoke_test(tmp_path, PROGRAM + "entry: {script: train.py}\n")
    assert done.returncode == 0, done.stderr
    assert proved(done)[2:] == ["train.py compiles, and what it imports at its top level is there"]
    assert (tmp_path / "imported").exists()


def test_a_package_that_is_missing_fails_the_run_with_the_line_that_imports_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nimport no_such_package\n")
    done = smoke_test(tmp_path, PROGRAM + "entry: {script: train.py}\n")
    assert done.returncode == 5
    assert "train.py:2: import no_such_package: ModuleNotFoundError: No module named" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "kind", "target", "complaint"),
    [
        (
            "from json import no_such_name\n",
            "script",
            "train.py",
            "train.py:1: from json import no_such_name: ImportErr",
        ),
        ("x = 1\n1 +\n", "script", "train.py", "train.py:2: invalid syntax"),
        ("def train(): pass\n", "function", "train.py:trane", "train.py has no function trane"),
        ("", "script", "other.py", "other.py: no such file on this host"),
        ("", "module", "no_such_module", "no_such_module: no module of that name"),
        ("", "command", "no-such-program", "entry.command: no-such-program: no such program on this host"),
        ("", "shell", "if true; echo", "entry.command: /bin/sh: "),
    ],
)
def test_what_would_fail_at_the_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, text: str, kind: str, target: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (tmp_path / "train.py").write_text(text)
    entry = {"kind": "command" if kind == "shell" else kind, "target": target, "shell": kind == "shell"}
    with pytest.raises(ClusterddpError) as error:
        check_program(entry, RankVariables(rank=0, local_rank=0, world_size=1, backend="gloo"), code_dir=tmp_path)
    assert complaint in str(error.value)


def test_the_plan_of_a_smoke_test_can_be_seen(tmp_path: Path) -> None:
    done = smoke_test(tmp_path, TRAINER, "-n", "-o", "json")
    plan = json.loads(done.stdout)
    assert (plan["launcher"], plan["gang"]["entry"]["target"]) == ("local", "clusterddp.train.smoke_test")
    assert plan["gang"]["on_cpu"]
    assert not (tmp_path / "runs").exists()


def test_a_sweep_is_no_smoke_test(tmp_path: Path) -> None:
    done = smoke_test(tmp_path, TRAINER, "--sweep", "train.lr=0.1,0.2")
    assert (done.returncode, "--smoke-test is for one run" in done.stderr) == (2, True)
