"""The storage of a Slurm run that is away for a while, runs full, or turns read-only: what is borne, what is told."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gang_runs import processes_with
from launch_runs import read_plan, wait_until
from rack.plan import HEAD
from rack.rack import Rack
from slurm_runs import await_final_end, environment, make_slurm_run, start_run
from storage_faults import away, shared_disk

from clusterddp.run.directory import RunDir

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

UNTIL_GO = """
import os, sys, time
print("up", flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.05)
if os.path.exists({fail!r}) and os.environ["RANK"] == "1":
    os._exit(3)
"""


def start(rack: Rack, name: str) -> tuple[RunDir, Path]:
    """Start a run of two nodes whose ranks go on until a file is there that does not lie beside it."""
    go, fail = (rack.dir / "home" / f"{name}.{what}" for what in ("go", "fail"))
    run = make_slurm_run(rack, name, UNTIL_GO.format(go=str(go), fail=str(fail)))
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


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_the_cause_of_an_end_is_told_though_the_disk_takes_no_record(rack, what):
    with shared_disk(rack, rack.dir / "shared" / what) as disk:
        run, go = start(rack, what)
        disk.fill() if what == "full" else disk.make_read_only()
        go.with_suffix(".fail").touch()
        go.touch()
        status = await_status(rack, run, "FAILED")
        assert status["root_cause"]["error"] == "rank 1 on node2 left with exit code 3"
        assert ("No space left on device" if what == "full" else "Read-only file system") in status["reason"]


def await_status(rack: Rack, run: RunDir, state: str) -> dict[str, Any]:
    """Ask as a user on the head does, until a run is in this state."""
    status: dict[str, Any] = {}

    def ask() -> bool:
        argv = [sys.executable, "-m", "clusterddp", "status", str(run.path), "-o", "json"]
        done = rack.run(HEAD, argv, env=environment(), check=False)
        status.update(json.loads(done.stdout) if done.stdout else {"state": done.stderr})
        return status["state"] == state

    wait_until(ask, 40)
    return status
