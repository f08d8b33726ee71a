"""The storage of a Slurm run that is away for a while, runs full, or turns read-only: what is borne, what is told."""

import time
from pathlib import Path

import pytest
from gang_runs import processes_with
from launch_runs import read_plan, wait_until
from rack.rack import Rack
from slurm_runs import await_final_end, make_slurm_run, start_run
from storage_faults import away

from clusterddp.run.directory import RunDir

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

UNTIL_GO = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


def start(rack: Rack, name: str) -> tuple[RunDir, Path]:
    """Start a run of two nodes whose ranks go on until a file is there that does not lie beside it."""
    go = rack.dir / "home" / f"{name}.go"
    run = make_slurm_run(rack, name, UNTIL_GO.replace("sys.argv[1]", repr(str(go))))
    start_run(rack, run)
    logs = [run.attempt(0).stdout(rank) for rank in (0, 1)]
    wait_until(lambda: run.attempt(0).start.exists() and all(log.read_text() for log in logs), 60)
    return run, go


def test_a_run_bears_storage_that_is_away_for_two_seconds(rack):
    run, go = start(rack, "away")
    with away(run.path.parent):
        time.sleep(2)
        assert not run.path.parent.exists()
    go.touch()
    assert await_final_end(run).outcome == "COMPLETED"
    assert not (run.path.parent.parent / "runs.away").exists()


def test_a_run_that_ends_while_its_storage_is_away_is_recorded_afterwards(rack):
    run, go = start(rack, "away-at-the-end")
    with away(run.path.parent):
        go.touch()
        time.sleep(3)
    assert await_final_end(run).outcome == "COMPLETED"
    wait_until(lambda: not processes_with(str(read_plan(run)["token"])), 20)
