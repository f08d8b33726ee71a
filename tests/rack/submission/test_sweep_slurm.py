"""Sweeps on a real Slurm: one job array, and each task a run like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from clusterddp.run.find import list_runs
from clusterddp.run.record import read_run
from clusterddp.run.sweep import SweepDir, read_sweep
from clusterddp.system.files import read_json
from tests.support.slurm_runs import await_final_end, stand_in
from tests.support.sweep_runs import SweepPerson, log_of
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

HELLO = "import os\nprint('seed', os.environ['SEED'], flush=True)\n"
SLEEP = HELLO + "import time\ntime.sleep(120)\n"
SLEEP_ONE = HELLO + "import time\ntime.sleep(120 if os.environ['SEED'] == '1' else 0)\n"
FAIL_ONE = HELLO + "if os.environ['SEED'] == '1':\n    raise ValueError('no luck')\n"
COUNT = """
import os, time
from pathlib import Path
here = Path(os.environ["CLUSTERDDP_RUN_DIR"]).parent
mine = here / f"on-{os.environ['SEED']}"
mine.touch()
(here / f"seen-{os.environ['SEED']}").write_text(str(len(list(here.glob("on-*")))))
time.sleep(0.5)
mine.unlink()
"""
STOPPABLE = (
    HELLO + "import time, clusterddp\nwhile not clusterddp.should_stop():\n    time.sleep(0.02)\nprint('stops')\n"
)
GO_ON_ONCE = """
import sys, time
from pathlib import Path
from clusterddp.run.directory import RunDir
from clusterddp.run.attempts import AttemptEnd, write_end
number = int(sys.argv[2])
again = {"will_restart": True, "needs_job": True} if number == 0 else {}
write_end(RunDir(Path(sys.argv[1])).attempt(number), AttemptEnd(outcome="STOPPED", reason="so it says", **again))
"""


THROTTLED = "sweep: {values: {env.SEED: [0, 1, 2, 3, 4, 5]}, throttle: 2}"


@pytest.fixture(scope="module")
def cluster(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        yield rack


def await_start(sweep: SweepDir, *indices: int) -> None:
    def all_speak() -> bool:
        logs = [sweep.runs()[index].attempt(0).stdout(0) for index in indices]
        return all(log.exists() and log.stat().st_size for log in logs)

    wait_until(all_speak, 60)


def queue(rack: Rack) -> list[str]:
    return rack.run(HEAD, ["squeue", "-h", "--array", "-t", "pending,running,completing", "-o", "%i"]).stdout.split()


def test_each_task_is_a_run_with_its_own_value_log_and_record(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "own", HELLO)
    sweep = place.submit_sweep("env.SEED=0,1,2")
    assert place.clusterddp("wait", sweep.name).returncode == 0
    assert [log_of(run) for run in sweep.runs()] == ["seed 0\n", "seed 1\n", "seed 2\n"]
    job_id = read_sweep(sweep).job_id
    assert [read_run(run).job_id for run in sweep.runs()] == [f"{job_id}_0", f"{job_id}_1", f"{job_id}_2"]
    claims = [read_json(run.attempt(0).claim) or {} for run in sweep.runs()]
    assert [claim["job_id"] for claim in claims] == [read_run(run).job_id for run in sweep.runs()]


def test_a_run_that_fails_fails_alone_and_wait_reports_it(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "fail", FAIL_ONE)
    sweep = place.submit_sweep("env.SEED=0,1,2")
    waited = place.clusterddp("wait", "@last", check=False)
    assert (waited.returncode, place.states(sweep)) == (5, ["COMPLETED", "FAILED", "COMPLETED"])
    assert f"{sweep.name}.1  SEED=1  rank 0 on node" in waited.stderr
    assert "ValueError: no luck" in place.clusterddp("status", f"{sweep.name}.1").stdout


def test_no_more_runs_than_the_throttle_go_at_a_time(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "throttle", COUNT, more=THROTTLED)
    sweep = place.submit_sweep()
    assert place.clusterddp("wait", sweep.name).returncode == 0
    seen = [int(path.read_text()) for path in sweep.path.glob("seen-*")]
    assert (len(seen), max(seen) <= 2) == (6, True)


def test_one_run_is_cancelled_and_the_others_go_on(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "one", SLEEP_ONE)
    sweep = place.submit_sweep("env.SEED=0,1,2")
    await_start(sweep, 1)
    job_id = str(read_sweep(sweep).job_id)
    place.clusterddp("cancel", f"{job_id}_1")
    assert place.clusterddp("wait", job_id, check=False).returncode == 6
    assert sweep.runs()[0].name in place.clusterddp("status", f"{job_id}_0").stdout
    assert place.states(sweep) == ["COMPLETED", "CANCELLED", "COMPLETED"]


def test_all_runs_are_cancelled_with_the_sweep_those_that_wait_too(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "all", SLEEP)
    sweep = place.submit_sweep("env.SEED=0,1,2,3", "sweep.throttle=2")
    await_start(sweep, 0, 1)
    place.clusterddp("cancel", sweep.name)
    assert place.states(sweep) == ["CANCELLED"] * 4
    wait_until(lambda: queue(cluster) == [], 20)
    assert not sweep.runs()[3].attempt(0).start.exists()


def test_a_sweep_that_has_ended_is_left_as_it_is(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "ended", HELLO)
    sweep = place.submit_sweep("env.SEED=0,1")
    place.clusterddp("wait", sweep.name)
    assert "has already ended: 2 COMPLETED" in place.clusterddp("cancel", sweep.name).stderr
    assert place.states(sweep) == ["COMPLETED"] * 2


def test_saving_stops_what_runs_and_cancels_what_waits(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "save", STOPPABLE)
    sweep = place.submit_sweep("env.SEED=0,1,2", "sweep.throttle=2")
    await_start(sweep, 0, 1)
    place.clusterddp("cancel", sweep.name, "--save")
    assert [log_of(run) for run in sweep.runs()[:2]] == ["seed 0\nstops\n", "seed 1\nstops\n"]
    assert not sweep.runs()[2].attempt(0).start.exists()
    wait_until(lambda: queue(cluster) == [], 20)


def test_a_task_that_slurm_starts_again_goes_on_as_the_same_run(cluster: Rack) -> None:
    code = HELLO + "import time\nwhile os.environ['CLUSTERDDP_ATTEMPT'] == '0':\n    time.sleep(0.1)\n"
    place = SweepPerson.at(cluster, "requeue", code, more="restarts: 1")
    sweep = place.submit_sweep("env.SEED=0,1")
    await_start(sweep, 0, 1)
    for run in sweep.runs():
        cluster.run(HEAD, ["scontrol", "requeue", str(read_run(run).job_id)])
    for run in sweep.runs():
        assert await_final_end(run).outcome == "COMPLETED"
    assert [[attempt.number for attempt in run.attempts()] for run in sweep.runs()] == [[0, 1], [0, 1]]


def test_a_task_goes_on_in_a_job_of_its_own_where_none_is_requeued(needs_rack: None) -> None:
    with running_rack(RackPlan(nodes=["node1"], job_requeue=False)) as rack:
        place = SweepPerson.at(rack, "follow", HELLO, more="restarts: 1\nslurm: {hold: true}")
        sweep = place.submit_sweep("env.SEED=0,1")
        run, other = sweep.runs()
        for one in (run, other):
            stand_in(one, GO_ON_ONCE)
        rack.run(HEAD, ["scontrol", "update", f"JobId={read_sweep(sweep).job_id}", "Requeue=0"])
        rack.run(HEAD, ["scontrol", "release", str(read_sweep(sweep).job_id)])
        wait_until(lambda: "_" not in (read_run(run).job_id or "_"), 60)
        assert read_run(run).array_index is None
        rack.run(HEAD, ["scontrol", "release", str(read_run(run).job_id)])
        assert (await_final_end(run).outcome, run.attempts()[-1].number) == ("STOPPED", 1)


def test_the_job_is_found_when_the_answer_of_sbatch_is_lost(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "lost", HELLO)
    wrapper = place.path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\n/usr/bin/sbatch "$@" >/dev/null\necho "Socket timed out" >&2\nexit 1\n')
    wrapper.chmod(0o755)
    place.put_first(wrapper.parent)
    sweep = place.submit_sweep("env.SEED=0,1,2")
    assert place.clusterddp("wait", sweep.name).returncode == 0
    job_id = read_sweep(sweep).job_id
    assert [read_run(run).job_id for run in sweep.runs()] == [f"{job_id}_{index}" for index in range(3)]


def test_a_refusal_of_slurm_leaves_nothing(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "refused", HELLO)
    done = place.clusterddp("submit", "job.yaml", "env.SEED=0,1", "--sweep", "slurm.partition=nope", check=False)
    assert (done.returncode, "Invalid partition name specified" in done.stderr) == (3, True)
    assert list_runs(place.path / "runs") == []


def test_what_a_submit_prints_names_the_sweep_and_its_runs(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "prints", HELLO)
    text = place.clusterddp("submit", "job.yaml", "env.SEED=0,1", "--sweep", "-o", "json").stdout
    answer = json.loads(text)
    sweep = SweepDir(place.path / "runs" / answer["sweep"])
    assert answer == {
        "schema": 1,
        "sweep": sweep.name,
        "launcher": "slurm",
        "job_id": read_sweep(sweep).job_id,
        "runs": [f"{sweep.name}.0", f"{sweep.name}.1"],
    }
    assert place.clusterddp("submit", "job.yaml", "env.SEED=0,1", "--sweep", "--wait").returncode == 0


def test_a_plan_that_is_only_shown_lists_the_variants_and_asks_the_scheduler(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "shown", HELLO)
    lines = place.clusterddp("submit", "job.yaml", "env.SEED=7,8", "--sweep", "-n").stdout.splitlines()
    assert lines[0].endswith(": 2 runs, one Slurm job array")
    assert [line.split()[1] for line in lines[2:5]] == ["env.SEED", "7", "8"]
    assert any(line.startswith("scheduler accepts it: ") for line in lines)
    assert not (place.path / "runs").exists()


def test_list_shows_the_runs_of_one_sweep_with_the_values_in_which_they_differ(cluster: Rack) -> None:
    place = SweepPerson.at(cluster, "listed", HELLO)
    place.submit_sweep("env.SEED=5,6")
    sweep = place.submit_sweep("env.SEED=7,8")
    place.clusterddp("wait", sweep.name)
    rows = [line.split() for line in place.clusterddp("list", sweep.name).stdout.splitlines()]
    assert [row[:3] for row in rows] == [
        ["RUN", "VARIANT", "STATE"],
        [f"{sweep.name}.0", "SEED=7", "COMPLETED"],
        [f"{sweep.name}.1", "SEED=8", "COMPLETED"],
    ]
