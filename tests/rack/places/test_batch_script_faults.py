"""What breaks under an unchanged batch script, on a real Slurm: its step's cause is named, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from tests.support.batch_faults import FORMS, LINES, await_up, begin, role_of, start, submit
from tests.support.gang_runs import processes_with
from tests.support.hang_kinds import SCRIPT as HANG
from tests.support.slurm_person import SlurmPerson
from tests.support.slurm_runs import stopped_batch_process
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("needs_rack")]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def own_rack(needs_rack: None) -> Iterator[Rack]:
    """A rack for tests that break it."""
    with running_rack(RackPlan(slurmd_timeout_s=20, debian_hosts=False)) as rack:
        yield rack


def output(person: SlurmPerson) -> str:
    return "".join(path.read_text() for path in person.path.glob("slurm-*.out"))


def await_end(person: SlurmPerson, run: RunDir) -> dict[str, Any]:
    """Wait until the run has ended and nothing of it is left; return its status."""
    ends = {"FAILED", "COMPLETED", "CANCELLED", "STOPPED", "TIMEOUT"}
    status = person.await_status(run, lambda seen: seen["state"] in ends, 40)
    token = person.record(run).token
    wait_until(lambda: not processes_with(f"CLUSTERDDP_COOKIE={token}"), 20, what=lambda: person.processes(run))
    wait_until(lambda: person.queue() == [], 60)
    print(output(person), json.dumps(status, indent=1))
    return status


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("raise", 1, "ValueError: no such label"), ("kill", 137, "was killed by SIGKILL")],
)
def test_a_rank_that_fails_is_named_with_the_line_of_its_step(
    rack: Rack, form: str, how: str, code: int, words: str
) -> None:
    person, run = start(rack, form, how)
    (person.path / "go").write_text(how)
    status = await_end(person, run)
    cause = status["root_cause"]
    assert (status["state"], cause["rank"], cause["exit_code"]) == ("FAILED", 3, code)
    assert words in cause["error"]
    assert f"line {LINES[form]}" in person.clusterddp("status", run.name).stdout
    assert "ended 0" not in output(person)


def test_a_rank_that_hangs_is_named_with_its_stacks(rack: Rack, form: str) -> None:
    person = SlurmPerson.at(rack, f"hang-{form}")
    (person.path / "hang.py").write_text(HANG)
    run = submit(person, FORMS[form].replace("train.py", "hang.py sleeps 3").format(options=""))
    hang = person.await_status(run, lambda seen: bool(seen["hang"]), 100)["hang"]
    assert hang["ranks"] == [3]
    assert "rank 3 on node2 is in sleeps (hang.py:" in hang["text"]
    stacks = person.clusterddp("stacks", run.name).stdout
    assert "in all_reduce" in stacks
    person.clusterddp("cancel", run.name)
    assert await_end(person, run)["state"] == "CANCELLED"


def test_a_supervisor_that_is_killed_ends_its_step_and_is_named(rack: Rack, form: str) -> None:
    person, run = start(rack, form, "supervisor")
    wait_until(lambda: any(run.attempt(0).steps.glob("*/start.json")), 30)  # a torchrun's ranks run before that
    token = person.record(run).token
    found = [pid for pid, _ in processes_with(f"CLUSTERDDP_COOKIE={token}.") if role_of(pid).endswith(".s1")]
    os.kill(found[0], signal.SIGKILL)
    cause = await_end(person, run)["root_cause"]
    assert "supervisor of node 1" in cause["error"]
    assert "was killed" in cause["error"]


@pytest.mark.parametrize("killed", [("s0",), ("s1",), ("s0", "s1")], ids="+".join)
def test_supervisors_that_are_killed_before_they_have_met_end_their_step(
    rack: Rack, form: str, killed: tuple[str, ...]
) -> None:
    person, run = begin(rack, form, f"early-{'-'.join(killed)}")
    supervisors = stop_supervisors(person.record(run).token)
    if form == "torchrun":
        await_up(person)  # torchrun has chosen their rendezvous, so they have begun
    for role in killed:
        os.kill(supervisors[role], signal.SIGKILL)
    for pid in supervisors.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    status = await_end(person, run)
    assert status["state"] == "FAILED"
    assert re.search(rf"supervisor of node [{''.join(killed)}] on node\d .*was killed", status["root_cause"]["error"])
    assert "ended 0" not in output(person)


def stop_supervisors(token: str) -> dict[str, int]:
    """Stop both supervisors of a step as they start, so that they do not meet; return their pids by role."""
    found: dict[str, int] = {}

    def look() -> bool:
        for pid, command in processes_with(f"CLUSTERDDP_COOKIE={token}."):
            role = role_of(pid).rpartition(".")[2]
            if role in {"s0", "s1"} and "supervisor" in command and role not in found:
                os.kill(pid, signal.SIGSTOP)
                found[role] = pid
        return len(found) == 2

    wait_until(look, 60, interval_s=0.005)
    return found


def test_scancel_ends_the_step_and_leaves_nothing(rack: Rack, form: str) -> None:
    person, run = start(rack, form, "scancel")
    rack.run(HEAD, ["scancel", person.queue()[0].split()[0]])
    assert await_end(person, run)["state"] == "CANCELLED"


def test_a_cancel_before_the_script_has_begun_is_recorded(rack: Rack, form: str) -> None:
    person, run = begin(rack, form, "scancel-early")
    job = person.queue()[0].split()[0]
    with stopped_batch_process(run):
        rack.run(HEAD, ["scancel", job])
        wait_until(lambda: person.job(job)["JobState"] != "RUNNING", 20)
    status = await_end(person, run)
    end = read_end(run.attempt(0))
    assert end is not None
    assert (status["state"], end.outcome, end.reason) == ("CANCELLED", "CANCELLED", "the job was cancelled")


def test_the_time_limit_ends_the_step_and_is_the_reason(rack: Rack, form: str) -> None:
    person, run = start(rack, form, "limit", "--time=1")
    status = await_end(person, run)
    assert "time limit" in status["reason"]
    assert status["state"] == "FAILED"
    assert person.job(status["job_id"])["JobState"] == "TIMEOUT"
    assert "ended" not in output(person)


def test_a_preempted_job_starts_again_as_the_next_attempt(own_rack: Rack, form: str) -> None:
    person, run = start(own_rack, form, "preempted", "--requeue --open-mode=append --mem=1000")
    other = own_rack.run(HEAD, ["sbatch", "--parsable", "-phigh", "-N4", "--exclusive", "--wrap", "sleep 5"])
    assert other.stdout.strip()
    await_up(person, 1)
    (person.path / "go").write_text("end")
    status = await_end(person, run)
    assert (status["state"], len(run.attempts())) == ("COMPLETED", 2)
    assert "ended 0" in output(person)


def test_a_node_that_loses_power_is_the_reason(own_rack: Rack, form: str) -> None:
    person, run = start(own_rack, form, "power", "--no-requeue")
    own_rack.power_off("node2")
    status = await_end(person, run)
    assert status["state"] == "FAILED"
    assert status["root_cause"]["host"] == "node2"
    assert re.match(r"node2 is down: |step \d .*node2.* is lost", status["root_cause"]["error"])
