"""Programs that people have: they run unchanged, with torch, through a real submit on this machine."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

import clusterddp

ENTRIES = Path(__file__).parent / "entries"
MODELARTS = """
entry:
  script: modelarts.py
  data_dir: data
  args: [--init_method, "{init_method}", --rank, "{rank}", --world_size, "{world_size}", --data_url, "{data_dir}",
         --output_dir, "{output_dir}", --lr, 0.1, --enable_gpu, "false"]
"""


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


def result_of(run: clusterddp.Run) -> dict[str, Any]:
    found = json.loads((run.path / "output/result.json").read_text())
    assert isinstance(found, dict)
    return found


def lines_of(run: clusterddp.Run, ranks: int) -> list[str]:
    return sorted(
        line for rank in range(ranks) for line in run.logs(rank).splitlines() if line.startswith(("rank ", "local "))
    )


def test_modelarts_interface_runs_unchanged() -> None:
    result = result_of(run_spec(MODELARTS, nodes=2, procs=1))
    assert result["world_size"] == 2
    assert result["slope"] == pytest.approx(3, abs=0.1)
    assert result["init"].startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("init", ["env", "file"])
def test_ranks_meet_as_network_init_says(init: str) -> None:
    run = run_spec(MODELARTS + f"network: {{init: {init}}}")
    assert result_of(run)["init"] == {"env": "env://", "file": f"file://{run.path}/attempts/0/rendezvous"}[init]


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


def test_a_script_that_spawns_its_ranks_is_started_once_on_each_node() -> None:
    entry = "entry: {script: spawning.py, owns_ranks: true, args: [--nprocs, '{procs_per_node}']}"
    run = run_spec(entry, nodes=2)
    assert lines_of(run, 2) == [f"rank {rank} of 4: 4" for rank in range(4)]
    assert len(run.status()["ranks"]) == 2


def test_an_exception_in_a_spawned_rank_is_the_root_cause() -> None:
    entry = "entry: {script: spawning.py, owns_ranks: true, args: [--nprocs, 2, --fail-rank, 3]}"
    cause = run_spec(entry, nodes=2, expected="FAILED").status()["root_cause"]
    assert (cause["rank"], cause["error"].partition(": ")[2]) == (
        1,
        "ProcessRaisedException: ValueError: rank 3 has bad data",
    )


def test_a_script_of_torch_distributed_launch_gets_its_local_rank() -> None:
    run = run_spec("entry: {script: launched.py, local_rank_arg: true, args: [--lr, 0.1]}")
    assert lines_of(run, 2) == ["local rank 0, sum 1, lr 0.1", "local rank 1, sum 1, lr 0.1"]


def test_torchrun_as_a_command_needs_no_option() -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    entry = f"entry: {{command: [{torchrun}, spawned_by_torchrun.py], owns_ranks: true}}"
    Path("spawned_by_torchrun.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('rank', dist.get_rank(), 'of', dist.get_world_size(), flush=True)\n"
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    assert lines_of(run_spec(entry, nodes=2), 2) == [f"rank {rank} of 4" for rank in range(4)]


def test_what_a_rank_under_torchrun_raises_is_the_root_cause() -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    Path("bad.py").write_text("raise KeyError('label')\n")
    entry = f"entry: {{command: [{torchrun}, bad.py], owns_ranks: true}}"
    cause = run_spec(entry, procs=1, expected="FAILED").status()["root_cause"]
    assert cause["error"].endswith("KeyError: 'label'")
