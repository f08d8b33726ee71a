"""Programs that people have: they run unchanged, with torch, through a real submit on this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import clusterddp
from tests.support.paths import ENTRIES
from tests.support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _in_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/slope.json").write_text("3.0")
    for script in ENTRIES.glob("*.py"):
        shutil.copy(script, tmp_path)


def run_spec(more: str, *, nodes: int = 1, procs: int = 2, expected: str = "COMPLETED") -> clusterddp.Run:
    text = f"name: job\ndevice: cpu\nresources: {{nodes: {nodes}, procs_per_node: {procs}}}\n{more}\n"
    run = clusterddp.submit(text)
    assert run.wait(PATIENCE * 60) == expected, (run.status(), run.logs())
    return run


def lines_of(run: clusterddp.Run, ranks: int) -> list[str]:
    return sorted(
        line for rank in range(ranks) for line in run.logs(rank).splitlines() if line.startswith(("rank ", "local "))
    )


def test_the_file_by_which_ranks_met_is_gone_after_the_run(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(
        "import os, sys, torch.distributed as dist\n"
        "rank = int(os.environ['RANK'])\n"
        "dist.init_process_group('gloo', init_method=sys.argv[1], rank=rank, world_size=2)\n"
        "assert os.path.exists(sys.argv[1].removeprefix('file://'))\n"
        "dist.barrier()\n"
        "if os.environ['CLUSTERDDP_ATTEMPT'] == '0': os.kill(os.getpid(), 9)\n"
        "print('rank met', flush=True)\n"
    )
    entry = 'entry: {script: killed.py, args: ["{init_method}"]}\nnetwork: {init: file}\nrestarts: 1\n'
    run = run_spec(entry)
    assert lines_of(run, 2) == ["rank met", "rank met"]
    assert not list(run.path.glob("attempts/*/rendezvous"))


def test_an_exception_in_a_spawned_rank_is_the_root_cause() -> None:
    entry = "entry: {script: spawning.py, owns_ranks: true, args: [--nprocs, 2, --fail-rank, 3]}"
    status = run_spec(entry, nodes=2, expected="FAILED").status()
    assert (status["world_size"], [list(rank["owns"]) for rank in status["ranks"]]) == (4, [[0, 1], [2, 3]])
    cause = status["root_cause"]
    who, _, words = cause["error"].partition(": ")
    assert (cause["rank"], who.partition(" on ")[0]) == (1, "the program of ranks 2-3")
    assert words == "ProcessRaisedException: ValueError: rank 3 has bad data"


def test_what_a_rank_under_torchrun_raises_is_the_root_cause() -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    Path("bad.py").write_text("raise KeyError('label')\n")
    entry = f"entry: {{command: [{torchrun}, bad.py], owns_ranks: true}}"
    cause = run_spec(entry, procs=1, expected="FAILED").status()["root_cause"]
    assert cause["error"].endswith("KeyError: 'label'")
