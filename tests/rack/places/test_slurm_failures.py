"""What breaks under Slurm, on a real one: ranks, tasks, supervisors, hosts; what is recorded and what is left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RankRecord, read_ranks
from clusterddp.system.python import module_command
from clusterddp.view.logs import parse_ranks
from tests.support.gang_runs import processes_with
from tests.support.launch_runs import IMPATIENT, read_plan
from tests.support.paths import ROOT
from tests.support.slurm_runs import await_final_end, make_slurm_run, start_run
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

RANK_3 = """
import os, signal, sys, time
print("up", flush=True)
while not os.path.exists(os.path.join(os.environ["CLUSTERDDP_RUN_DIR"], "go")) or os.environ["RANK"] != "3":
    time.sleep(0.05)
{failure}
"""
FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.05)\n"
UNTIL_STOP = "import time, clusterddp\nprint('up', flush=True)\nwhile not clusterddp.should_stop(): time.sleep(0.05)\n"
ONCE = """
import os, time
print("up", flush=True)
while os.environ["CLUSTERDDP_ATTEMPT"] == "0": time.sleep(0.05)
"""
TWO_BY_TWO = "{nodes: 2, procs_per_node: 2}"


@pytest.fixture
def own_rack(needs_rack: None) -> Iterator[Rack]:
    """A rack for tests that break it; its controller notices a lost node long after an impatient run does."""
    with running_rack(RackPlan(slurmd_timeout_s=20)) as rack:
        yield rack


def start(rack: Rack, name: str, code: str, *, more: str = "") -> RunDir:
    """Start a run of two nodes with two ranks each, and wait until its ranks run."""
    run = make_slurm_run(rack, name, code, more=more, resources=TWO_BY_TWO)
    start_run(rack, run)
    await_up(run, 0)
    return run


def await_up(run: RunDir, attempt: int) -> list[RankRecord]:
    directory = run.attempt(attempt)
    logs = [directory.stdout(rank) for rank in range(4)]
    wait_until(lambda: all(log.exists() and log.read_text() for log in logs), 60)
    wait_until(lambda: len(read_ranks(directory)) == 4, 20)
    wait_until(directory.start.exists, 20)
    return read_ranks(directory)


def token_of(run: RunDir) -> str:
    return str(read_plan(run)["token"])


def processes(run: RunDir, role: str = "") -> list[tuple[int, str]]:
    """List the live processes of a run on all hosts that are on, by a role if one is given."""
    return processes_with(f"CLUSTERDDP_COOKIE={token_of(run)}.{role}" + ("\0" if role else ""))


def tasks(run: RunDir) -> list[int]:
    """List the tasks, in no order."""
    command = " ".join(module_command("clusterddp.places.slurm.task"))
    return [pid for pid, words in processes(run, "task") if words.startswith(command)]


def await_nothing_left(run: RunDir, within_s: float = 15) -> None:
    wait_until(lambda: not processes(run), within_s)


def since(moment: float) -> float:
    return time.monotonic() - moment


@pytest.mark.parametrize(
    ("failure", "exit_code", "words"),
    [
        ("raise ValueError('no such label')", 1, "rank 3 on {host}: ValueError: no such label"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 3 on {host} was killed by SIGKILL"),
    ],
    ids=["raises", "killed"],
)
def test_a_rank_that_fails_ends_the_gang_and_is_named(rack, failure, exit_code, words, request):
    run = start(rack, f"rank-{request.node.callspec.id}", RANK_3.format(failure=failure))
    (run.path / "go").touch()
    end = await_final_end(run, 15)
    assert (end.outcome, end.root_cause.rank, end.root_cause.exit_code) == ("FAILED", 3, exit_code)
    assert end.root_cause.error == words.format(host=end.root_cause.host)
    await_nothing_left(run)


def test_a_rank_that_fails_is_started_again_in_place(rack):
    failure = "sys.exit(5) if os.environ['CLUSTERDDP_ATTEMPT'] == '0' else None"
    more = "restarts: 1"
    code = RANK_3.format(failure=failure).replace('["RANK"] != "3"', '["RANK"] != "3" and attempt == "0"')
    code = 'import os\nattempt = os.environ["CLUSTERDDP_ATTEMPT"]\n' + code
    run = start(rack, "in-place", code, more=more)
    (run.path / "go").touch()
    assert await_final_end(run, 30).outcome == "COMPLETED"
    first = read_end(run.attempt(0))
    assert (first.will_restart, first.needs_job, first.root_cause.exit_code) == (True, False, 5)
    assert not run.attempt(1).claim.exists()
    await_nothing_left(run)


def test_a_task_that_is_killed_takes_its_rank_along_and_is_the_cause(rack):
    run = start(rack, "task", FOREVER)
    os.kill(tasks(run)[0], signal.SIGKILL)
    end = await_final_end(run, 15)
    assert "the task of rank " in end.root_cause.error
    assert "was killed; the rank ended with it" in end.root_cause.error
    await_nothing_left(run)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_supervisor_that_is_killed_ends_the_gang_and_is_named(rack, node_rank):
    run = start(rack, f"supervisor-{node_rank}", FOREVER)
    ((pid, _),) = processes(run, f"s{node_rank}")
    os.kill(pid, signal.SIGKILL)
    end = await_final_end(run, 15)
    assert re.match(rf"supervisor of node {node_rank} on node\d \(pid \d+\) was killed", end.root_cause.error)
    assert end.root_cause.rank == 2 * node_rank
    await_nothing_left(run)


def test_a_supervisor_and_its_guard_that_are_killed_together_leave_nothing(rack):
    run = start(rack, "both", FOREVER)
    for role in ("g0", "s0"):
        for pid, _ in processes(run, role):
            os.kill(pid, signal.SIGKILL)
    assert await_final_end(run, 40).outcome == "FAILED"
    await_nothing_left(run)


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_host_that_loses_power_ends_the_gang_and_is_named(own_rack, node):
    run = start(own_rack, "power", FOREVER, more=IMPATIENT)
    own_rack.power_off(node)
    off = time.monotonic()
    end = await_final_end(run, 20)
    assert since(off) < 30
    assert (end.root_cause.host, end.root_cause.rank) == (node, 0 if node == "node1" else 2)
    assert "its host does not answer" in end.root_cause.error
    await_nothing_left(run, 15)


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_gang_that_loses_a_host_goes_on_with_others(own_rack, node):
    run = start(own_rack, "goes-on", ONCE, more=f"restarts: 1\n{IMPATIENT}")
    own_rack.power_off(node)
    wait_until(lambda: read_end(run.attempt(0)) is not None, 20)
    first = read_end(run.attempt(0))
    assert (first.outcome, first.will_restart, first.needs_job) == ("FAILED", True, True)
    assert await_final_end(run, 170).outcome == "COMPLETED"
    await_nothing_left(run)


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_host_that_is_cut_off_ends_its_own_ranks_too(own_rack, node):
    run = start(own_rack, "cable", FOREVER, more=IMPATIENT)
    own_rack.pull_cable(node)
    assert await_final_end(run, 20).root_cause.host == node
    wait_until(lambda: not [role for role in ("n0", "n1") if processes(run, role)], 15)
    own_rack.plug_cable(node)
    await_nothing_left(run, 30)


def test_scancel_ends_the_gang_at_once(rack):
    run = make_slurm_run(rack, "scancel", FOREVER, resources=TWO_BY_TWO)
    job = start_run(rack, run)
    await_up(run, 0)
    rack.run(HEAD, ["scancel", job])
    assert await_final_end(run, 10).outcome == "CANCELLED"
    await_nothing_left(run)


def test_usr2_to_the_tasks_of_a_job_asks_for_a_stop(rack):
    run = make_slurm_run(rack, "usr2", UNTIL_STOP, resources=TWO_BY_TWO)
    job = start_run(rack, run)
    await_up(run, 0)
    rack.run(HEAD, ["scancel", "--signal=USR2", job])
    end = await_final_end(run, 20)
    assert (end.outcome, end.reason.partition(" of node")[0]) == ("STOPPED", "SIGUSR2 to the supervisor")


def test_a_suspended_run_goes_on_when_it_is_resumed(rack):
    run = make_slurm_run(rack, "suspended", UNTIL_STOP, resources=TWO_BY_TWO)
    job = start_run(rack, run)
    await_up(run, 0)
    rack.run(HEAD, ["scontrol", "suspend", job])
    time.sleep(5)
    rack.run(HEAD, ["scontrol", "resume", job])
    run.attempt(0).stop_file.touch()
    assert await_final_end(run, 20).outcome == "STOPPED"


def test_a_killed_batch_script_is_no_cancel(rack):
    run = make_slurm_run(rack, "script", UNTIL_STOP, more="restarts: 1", resources=TWO_BY_TWO)
    job = start_run(rack, run)
    await_up(run, 0)
    rack.run(HEAD, ["scancel", "--batch", "--signal=KILL", job])
    end = await_final_end(run, 20)
    assert (end.outcome, end.root_cause.rank) == ("FAILED", None)
    assert "the job's batch script was killed" in end.reason


def test_a_requeued_job_goes_on_with_the_next_attempt(rack):
    code = ONCE + "import clusterddp\n"
    code = code.replace('== "0": time', '== "0" and not clusterddp.should_stop(): time')
    run = make_slurm_run(rack, "requeue", "import clusterddp\n" + code, more="restarts: 1", resources=TWO_BY_TWO)
    job = start_run(rack, run)
    await_up(run, 0)
    argv = [sys.executable, "-m", "clusterddp", "logs", "-f", "--rank", "all", str(run.path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(rack.argv(HEAD, argv, env={"PYTHONPATH": str(ROOT)}), **pipes) as following:
        rack.run(HEAD, ["scontrol", "requeue", job])
        assert await_final_end(run, 60).outcome == "COMPLETED"
        out, err = following.communicate(timeout=60)
    shown = re.findall(r"\[(?:ranks ([\d, -]+)|r(\d) \S+)\] up\n", out)
    assert sum(len(parse_ranks(several or one, 4)) for several, one in shown) == 8
    assert f"attempt 1 of {run.name} starts\n" in err
    first = read_end(run.attempt(0))
    assert (first.outcome, first.reason, first.needs_job) == ("STOPPED", "the job was requeued", True)


def test_a_gang_is_asked_to_stop_before_the_time_limit(rack):
    resources = TWO_BY_TWO.replace("}", ', time: "0:01:00"}')
    run = make_slurm_run(rack, "limit", UNTIL_STOP, resources=resources)
    start_run(rack, run)
    end = await_final_end(run, 80)
    assert (end.outcome, end.will_restart) == ("STOPPED", False)
    assert "the time limit of the job approaches" in end.reason


def test_another_start_of_the_job_that_has_taken_over_ends_this_one(rack):
    run = start(rack, "superseded", FOREVER)
    later = run.attempt(1)
    later.path.mkdir()
    later.claim.write_text("{}")
    wait_until(lambda: not tasks(run), 20)
    assert read_end(run.attempt(0)).reason.startswith("attempt 1 of the run has begun elsewhere")
    Path(later.end).write_text('{"outcome": "FAILED", "reason": "made by a test"}')
    await_nothing_left(run)
