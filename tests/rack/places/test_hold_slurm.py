"""A hold on Slurm: runs come and go in its job, one after another, and end with it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.cleanup import find_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from tests.support.slurm_person import SlurmPerson
from tests.support.slurm_runs import await_final_end
from tests.support.waiting import wait_until
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = """name: job
launcher: slurm
device: cpu
resources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1, memory_gb: 8, time: "0:10:00"}
snapshot: false
entry: {script: entry.py}
"""
SHOW = """
import os
names = ("RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK")
print(*(os.environ.get(name, "none") for name in names), os.environ["SLURM_JOB_ID"], flush=True)
"""
UNTIL_STOP = (
    SHOW
    + """
import time, clusterddp
while not clusterddp.should_stop():
    time.sleep(0.02)
"""
)
FAILS_AT_FIRST = (
    SHOW
    + """
import time
if os.environ["CLUSTERDDP_ATTEMPT"] == "0" and os.environ["RANK"] == "3":
    raise ValueError("no")
time.sleep(1)
"""
)
FOREVER_AT_FIRST = SHOW + 'import time\nif os.environ["CLUSTERDDP_ATTEMPT"] == "0":\n    time.sleep(600)\n'
FOREVER = SHOW + "import time\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"], cores_per_host=8, memory_mb=64_000)) as rack:
        yield rack


def person_at(rack: Rack, name: str, code: str = SHOW) -> SlurmPerson:
    person = SlurmPerson.at(rack, name)
    (person.path / "job.yaml").write_text(SPEC)
    (person.path / "entry.py").write_text(code)
    return person


def hold(person: SlurmPerson, *arguments: str) -> RunDir:
    done = person.clusterddp("hold", "job.yaml", "-o", "json", *arguments, check=True)
    run = RunDir(person.runs_dir / json.loads(done.stdout)["run"])
    wait_until(run.attempt(0).claim.exists, 60)
    return run


def submit_in(person: SlurmPerson, hold: RunDir, *arguments: str) -> RunDir:
    done = person.clusterddp("submit", "job.yaml", "--in", hold.name, "-o", "json", *arguments, check=True)
    return find_run(person.runs_dir, json.loads(done.stdout)["run"])


def await_rank(run: RunDir, rank: int = 3) -> str:
    log = run.newest_attempt().stdout(rank)
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), 60, what=lambda: said_of(run))
    return log.read_text()


def said_of(run: RunDir) -> str:
    return "\n".join(path.read_text()[-2000:] for path in run.launcher_dir.glob("*.log"))


def jobs(person: SlurmPerson) -> list[str]:
    return [line.split()[0] for line in person.slurm("squeue", "-h", "-o", "%i %T").splitlines()]


def test_five_runs_in_one_job_and_each_rank_has_the_variables_of_a_task(rack: Rack):
    person = person_at(rack, "five")
    kept = hold(person)
    runs = []
    for _ in range(5):
        runs.append(submit_in(person, kept, "--wait"))
        assert read_end(runs[-1].attempt(0)).outcome == "COMPLETED"
    job = person.status(kept)["job_id"]
    for run in runs:
        lines = [run.attempt(0).stdout(rank).read_text() for rank in range(4)]
        assert lines == [f"{rank} {rank} {rank % 2} 4 2(x2) 1 {job}\n" for rank in range(4)]
    state = person.status(kept)
    assert (state["state"], state["held"], state["hold"], state["ranks"]) == ("RUNNING", [], kept.name, [])
    assert jobs(person) == [job]
    listed = person.clusterddp("list").stdout
    assert re.search(rf"{kept.name} .*RUNNING +slurm hold", listed)
    own = person.clusterddp("submit", "job.yaml", "--wait", check=True).stdout.strip()
    alone = (person.runs_dir / own / "attempts/0/logs/rank-003.out").read_text().rsplit(" ", 1)[0]
    assert alone == lines[3].rsplit(" ", 1)[0]  # the same variables as in a job of its own
    person.clusterddp("cancel", kept.name)
    assert person.status(kept)["state"] == "CANCELLED"
    wait_until(lambda: not jobs(person), 30)


def test_a_cancelled_run_leaves_the_hold_and_those_behind_it_have_their_turn(rack: Rack):
    person = person_at(rack, "turns", FOREVER)
    kept = hold(person)
    first = submit_in(person, kept)
    await_rank(first)
    second, third = submit_in(person, kept), submit_in(person, kept)
    waits = person.status(third)
    assert (waits["state"], waits["reason"]) == ("PENDING", f"waits in hold {kept.name} for {first.name}")
    assert person.status(kept)["held"] == [first.name, second.name, third.name]
    person.clusterddp("cancel", second.name)  # while it waits
    assert await_final_end(second).reason == "cancelled before it was started"
    person.clusterddp("cancel", first.name)
    assert await_final_end(first).outcome == "CANCELLED"
    await_rank(third)
    assert person.status(third)["state"] == "RUNNING"
    assert person.clusterddp("exec", third.name, "--rank", "2", "--", "uname", "-n").stdout == "node2\n"
    person.clusterddp("cancel", kept.name)
    assert {read_end(run.attempt(0)).outcome for run in (third, kept)} == {"CANCELLED"}
    wait_until(lambda: not jobs(person) and not person.processes(third), 30)


def test_a_hold_that_ends_stops_its_run_at_a_checkpoint_which_goes_on_in_a_job_of_its_own(rack: Rack):
    person = person_at(rack, "stops", UNTIL_STOP)
    kept = hold(person)
    run = submit_in(person, kept)
    await_rank(run)
    behind = submit_in(person, kept)
    person.clusterddp("cancel", "--save", kept.name)
    assert read_end(run.attempt(0)).outcome == "STOPPED"
    assert "ended before it was started" in await_final_end(behind).reason
    assert read_end(kept.attempt(0)).outcome == "COMPLETED"
    refused = person.clusterddp("submit", "job.yaml", "--in", kept.name, check=False)
    assert (refused.returncode, f"hold {kept.name} has ended" in refused.stderr) == (2, True)
    (person.path / "entry.py").write_text(SHOW)
    person.clusterddp("resume", run.name, "--from-start", "--wait")
    assert read_end(run.attempt(1)).outcome == "COMPLETED"
    assert person.record(run).hold is None
    refused = person.clusterddp("resume", kept.name, check=False)
    assert (refused.returncode, "is a hold, which has no ranks" in refused.stderr) == (2, True)


def test_the_time_of_a_hold_is_that_of_its_runs(rack: Rack):
    person = person_at(rack, "time", UNTIL_STOP)
    kept = hold(person, "--for", "1m")
    run = submit_in(person, kept, "restarts=1")  # in the hold no time is left for another attempt
    end = await_final_end(run, 100)
    assert (end.outcome, "time limit" in end.reason, "its hold ends" in end.reason) == ("STOPPED", True, True)
    assert await_final_end(kept, 60).reason == "its time is over"
    wait_until(lambda: not jobs(person), 60)


def test_what_does_not_fit_is_refused_with_numbers(rack: Rack):
    person = person_at(rack, "fit")
    kept = hold(person)
    wide = ("resources.nodes=3", "resources.cpus_per_task=4", "resources.memory_gb=16")
    done = person.clusterddp("submit", "job.yaml", "--in", kept.name, *wide, check=False)
    assert done.returncode == 2
    lacks = "it needs 3 nodes, of 2, it needs 8 cores on a node, of 2, it needs 16 GB on a node, of 8"
    assert f"job does not fit into {kept.name}: {lacks}" in done.stderr
    small = submit_in(person, kept, "resources.nodes=1", "resources.procs_per_node=1", "--wait")
    job = person.status(kept)["job_id"]
    assert small.attempt(0).stdout(0).read_text() == f"0 0 0 1 1 1 {job}\n"
    done = person.clusterddp("submit", "job.yaml", "--in", small.name, check=False)
    assert f"{small.name} is a run, not a hold" in done.stderr
    person.clusterddp("cancel", kept.name)


def test_the_ranks_see_the_gpus_of_the_hold_on_their_node(rack: Rack):
    person = person_at(rack, "gpus", SHOW + 'print(os.environ["CUDA_VISIBLE_DEVICES"])\n')
    gpus = ("device=auto", "resources.gpus_per_node=2")
    kept = hold(person, *gpus)
    runs = [submit_in(person, kept, *gpus, "--wait"), submit_in(person, kept, "--cpu", "--wait")]
    lines = [run.attempt(0).stdout(3).read_text().splitlines()[1] for run in runs]
    assert lines == ["0,1", ""]
    more = ("device=auto", "resources.gpus_per_node=4", "resources.procs_per_node=2")
    done = person.clusterddp("submit", "job.yaml", "--in", kept.name, *more, check=False)
    assert "it needs 4 GPUs on a node, of 2" in done.stderr
    person.clusterddp("cancel", kept.name)


def test_a_rank_fails_and_the_run_starts_again_in_the_same_hold(rack: Rack):
    person = person_at(rack, "again", FAILS_AT_FIRST)
    kept = hold(person)
    run = submit_in(person, kept, "--wait", "restarts=1")
    first = read_end(run.attempt(0))
    assert (first.root_cause.rank, first.root_cause.host, read_end(run.attempt(1)).outcome) == (3, "node2", "COMPLETED")
    assert person.status(kept)["state"] == "RUNNING"
    person.clusterddp("cancel", kept.name)


def test_a_killed_supervisor_ends_the_step_and_the_next_attempt_is_another_step(rack: Rack):
    person = person_at(rack, "step", FOREVER_AT_FIRST)
    kept = hold(person)
    run = submit_in(person, kept, "restarts=1")
    await_rank(run)
    (supervisor,) = find_processes(f"{person.record(run).token}.s1")
    os.kill(supervisor.pid, signal.SIGKILL)
    assert await_final_end(run, 60).outcome == "COMPLETED"
    first = read_end(run.attempt(0))
    assert (first.outcome, first.needs_job, first.root_cause.host) == ("FAILED", True, "node2")
    assert person.status(kept)["state"] == "RUNNING"
    wait_until(lambda: person.status(kept)["held"] == [], 30)
    person.clusterddp("cancel", kept.name)


def test_a_run_whose_supervisors_do_not_answer_is_cancelled_and_the_hold_stays(rack: Rack):
    person = person_at(rack, "hangs", FOREVER)
    kept = hold(person)
    run = submit_in(person, kept)
    await_rank(run)
    token = person.record(run).token
    for supervisor in find_processes(f"{token}.s0", f"{token}.s1"):
        os.kill(supervisor.pid, signal.SIGSTOP)
    person.clusterddp("cancel", run.name, check=False)
    assert await_final_end(run, 60).outcome == "CANCELLED"
    wait_until(lambda: not person.processes(run), 20, what=lambda: person.processes(run))
    assert person.status(kept)["state"] == "RUNNING"
    person.clusterddp("cancel", kept.name)


def test_a_submit_that_is_killed_leaves_a_run_that_goes_on_or_was_never_started(rack: Rack):
    person = person_at(rack, "killed")
    kept = hold(person)
    states = set()
    for delay_s in (0.4, 0.7, 1.0, 1.3):
        process = person.start("submit", "job.yaml", "--in", kept.name)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for run in list_runs(person.runs_dir):
        if run.name != kept.name:
            state = person.await_status(run, lambda now: now["state"] in {"COMPLETED", "LOST"}, 60)
            states.add(state["state"])
    assert states <= {"COMPLETED", "LOST"}
    assert person.status(kept)["held"] == []
    submit_in(person, kept, "--wait")
    person.clusterddp("cancel", kept.name)


def test_a_lost_node_ends_the_hold_and_is_named_in_its_run(needs_rack: None):
    with running_rack(RackPlan(nodes=["node1", "node2"], slurmd_timeout_s=5)) as rack:
        person = person_at(rack, "lost", FOREVER)
        kept = hold(person)
        run = submit_in(person, kept, "network.host_silence=0:08", "network.heartbeat_timeout=0:10")
        await_rank(run)
        rack.power_off("node2")
        end = await_final_end(run, 90)
        assert (end.outcome, end.root_cause.host) == ("FAILED", "node2")
        state = person.await_status(kept, lambda now: now["state"] not in {"RUNNING", "PENDING", "UNKNOWN"}, 90)
        assert state["state"] in {"FAILED", "LOST"}
