"""How the head explains Slurm's signals by the controller's answers, and what follows the end of an attempt."""

import time
from types import SimpleNamespace

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.node.attempt import Attempt, Restarts
from clusterddp.node.head import Intent, JoinedNodes
from clusterddp.node.link import Clock
from clusterddp.node.rank_network import choose_address
from clusterddp.places.slurm.commands import JobNow, read_duration_s, read_kill_wait_s, read_time_left_s
from clusterddp.places.slurm.job_watch import PATIENCE_S, Allocation, Answer, SlurmJobWatch
from clusterddp.run.attempts import AttemptEnd
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RankEnd
from clusterddp.run.supervisors import JobOrder
from tests.support.gang_runs import make_gang

SHOWN = (
    "JobId=2 JobName=wrap UserId=root(0) JobState=RUNNING Reason=None Restarts=0 RunTime=00:01:30 TimeLimit=00:10:00"
    " StartTime=2026-11-21T11:20:00 EndTime=2026-11-21T11:30:00 PreemptTime=None SuspendTime=None"
)
SLURM = JobOrder(job_id="2", restart_count=1, used_restarts=0, job_tag=None, heads=("node1",))
RUNNING = JobNow(state="RUNNING", reason="None", restarts=1, preempted=False)


class Controller:
    """Gives the answers of the test, one after the other."""

    kill_wait_s = 30.0
    asking = False

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0
        self.ready = None

    def ask_config(self):
        pass

    def ask(self):
        self.asked += 1
        self.ready = self.answers.pop(0) if self.answers else None

    def take(self):
        answer, self.ready = self.ready, None
        return answer


def watch(*answers):
    return SlurmJobWatch(SLURM, Controller(*answers), stop_lead_s=60.0)


def after_term(job):
    """Return the intent that is seen in this job after SIGTERM."""
    watched = watch(Answer(job=job, asked=100.2))
    watched._ask_at = float("inf")  # no question before
    watched.on_term(100.0)
    intents = [watched.tick(100.0 + step / 10) for step in range(1, 60)]
    assert not watched.undecided
    return next(filter(None, intents), None)


def job(**changes):
    facts = {"state": "COMPLETING", "reason": "None", "restarts": 1, "preempted": False}
    return JobNow(**facts | changes)


@pytest.mark.parametrize(
    ("now", "kind", "reason"),
    [
        (job(), "cancelled", "cancelled (scancel)"),
        (job(restarts=2), "goes_on", "the job was requeued"),
        (job(preempted=True), "goes_on", "the job was preempted"),
        (job(state="RUNNING", preempted=True), "goes_on", "the job was preempted"),
        (job(reason="TimeLimit"), "goes_on", "the time limit of the job is reached"),
        (job(reason="NodeDown"), "goes_on", "Slurm ended the job (NodeDown)"),
        (
            job(reason="JobLaunchFailure"),
            "failed",
            "the job's batch script was killed, or ended before its ranks (JobLaunchFailure)",
        ),
    ],
)
def test_the_controller_s_answer_explains_sigterm(now, kind, reason):
    intent = after_term(now)
    assert (intent.kind, intent.reason) == (kind, reason)


def test_a_sigterm_that_slurm_did_not_send_changes_nothing():
    assert after_term(RUNNING) is None


def test_a_controller_that_does_not_answer_leaves_the_run_its_restarts():
    deaf = [Answer(job=None, asked=100.0 + step) for step in range(20)]
    watched = watch(*deaf)
    watched.on_term(100.0)
    intents = [watched.tick(100.0 + step / 10) for step in range(int(PATIENCE_S * 10) + 20)]
    assert [intent.kind for intent in intents if intent] == ["goes_on"]


def test_in_a_container_the_end_of_the_job_is_known_from_its_environment(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000 + clock.now)
    environ = {"PATH": "/nowhere", "SLURM_JOB_END_TIME": "1800000600"}
    watched = SlurmJobWatch(SLURM, Allocation("2", environ, clock), stop_lead_s=60.0)
    intents = {}
    while clock.now < 620:
        clock.now += 1
        if clock.now == 602:
            watched.on_term(clock.now)
        if intent := watched.tick(clock.now):
            intents[clock.now] = intent
    (approaches, first), (reached, last) = intents.items()
    assert (540 <= approaches <= 542, first.kind) == (True, "time_is_up")
    assert (reached > 602, last.reason) == (True, "the time limit of the job is reached")


@pytest.mark.parametrize("text", ["", "soon", "1e99", "9" * 40])
def test_an_end_of_the_job_that_is_no_time_is_ignored(text):
    allocation = Allocation("2", {"PATH": "/nowhere", "SLURM_JOB_END_TIME": text}, Clock())
    allocation.ask()
    assert allocation.take().time_left_s is None


def test_what_is_left_of_the_job_ends_before_slurm_kills():
    assert after_term(job(restarts=2)).ends_by == 100.0 + 30.0 - 3.0


def test_a_warning_of_preemption_leaves_the_time_that_the_cluster_grants():
    assert after_term(job(state="RUNNING", preempted=True)).ends_by is None


def test_the_end_of_a_preemption_s_grace_is_no_time_limit():
    warned = Answer(job=job(state="RUNNING", preempted=True), asked=100.2, time_left_s=30.0)
    watched = watch(Answer(job=RUNNING, asked=0.0, time_left_s=600.0), warned)
    watched.tick(0.0)
    watched.tick(0.1)
    watched.on_term(100.0)
    reasons = [intent.reason for step in range(300) if (intent := watched.tick(100.0 + step / 10))]
    assert reasons == ["the job was preempted"]


def test_the_time_limit_does_not_rename_a_preemption(tmp_path):
    attempt = Attempt(RunDir(tmp_path), make_gang(tmp_path, ""), 0)
    for intent in (
        Intent(kind="goes_on", reason="the job was preempted"),
        Intent(kind="time_is_up", reason="the time limit approaches"),
    ):
        intent.apply(attempt)
        attempt.stop(intent.reason, 1.0)
    assert attempt.stop_reason == "the job was preempted"


def test_a_killed_batch_script_fails_the_run_and_does_not_cancel_it(tmp_path):
    attempt = Attempt(RunDir(tmp_path), make_gang(tmp_path, ""), 0)
    attempt.begun = 1.0
    attempt.stop("SIGTERM to the supervisor of node 0", 2.0)
    Intent(kind="failed", reason="the script was killed").apply(attempt)
    end = attempt.verdict(stop_confirmed=True)
    assert (end.outcome, end.reason) == ("FAILED", "the script was killed; the ranks stopped at a checkpoint")
    assert restarts(tmp_path).after(attempt, end, all_gone=True) == "none"


def test_ranks_are_asked_to_stop_a_lead_before_the_job_s_end():
    watched = watch(*[Answer(job=RUNNING, asked=0.0, time_left_s=600.0)] * 9)
    intents = {now: watched.tick(float(now)) for now in range(0, 600, 5)}
    assert [now for now, intent in intents.items() if intent] == [540]
    assert intents[540].reason == "the time limit of the job approaches, 60 s are left"


def test_the_lead_is_at_most_half_of_what_was_left():
    watched = watch(*[Answer(job=RUNNING, asked=0.0, time_left_s=20.0)] * 9)
    assert [now for now in range(20) if watched.tick(float(now))] == [10]


def test_an_extended_time_limit_is_noticed():
    watched = watch(
        Answer(job=RUNNING, asked=0.0, time_left_s=600.0), *[Answer(job=RUNNING, asked=530.0, time_left_s=600.0)] * 9
    )
    assert [now for now in range(0, 1200, 5) if watched.tick(float(now))] == [1070]


def test_the_time_that_is_left_follows_from_slurm_s_own_clock():
    assert read_time_left_s(SHOWN) == 510.0


@pytest.mark.parametrize(
    ("end", "limit", "left_s"),
    [
        ("Unknown", "00:10:00", 510.0),
        ("Unknown", "UNLIMITED", None),
        ("2026-11-21T11:25:00", "UNLIMITED", 210.0),
        ("2026-11-21T11:25:00+01:00", "UNLIMITED", 210.0),
    ],
)
def test_an_end_that_slurm_does_not_name_follows_from_the_limit(end, limit, left_s):
    text = SHOWN.replace("EndTime=2026-11-21T11:30:00", f"EndTime={end}").replace("00:10:00", limit)
    assert read_time_left_s(text) == left_s


def test_durations_are_read_as_slurm_writes_them():
    texts = ["2-03:04:05", "03:04:05", "04:05", "UNLIMITED", ""]
    assert [read_duration_s(text) for text in texts] == [183845.0, 11045.0, 245.0, None, None]


def test_kill_wait_is_read_from_the_configuration():
    assert read_kill_wait_s("KeepAliveTime = SYSTEM_DEFAULT\nKillWait                = 7 sec\n") == 7.0
    assert read_kill_wait_s("") == 30.0


def restarts(tmp_path):
    return Restarts(make_gang(tmp_path, "", restarts=1), first_attempt=0, first_restart=0, in_job=True)


def make_attempt(tmp_path, **facts):
    attempt = Attempt(RunDir(tmp_path), make_gang(tmp_path, ""), 0)
    attempt.begun = 0.0
    for name, value in facts.items():
        setattr(attempt, name, value)
    return attempt


@pytest.mark.parametrize(
    ("facts", "outcome", "able", "restart"),
    [
        ({"job_ends": True, "stop_reason": "preempted"}, "STOPPED", True, "another job"),
        ({"job_ends": True, "stop_reason": "preempted"}, "FAILED", False, "another job"),
        ({"job_ends": True}, "COMPLETED", True, "none"),
        ({"job_ends": True}, "CANCELLED", True, "none"),
        ({"stop_reason": "asked"}, "STOPPED", True, "none"),
    ],
)
def test_what_slurm_ends_goes_on_in_another_start_of_the_job(tmp_path, facts, outcome, able, restart):
    attempt, end = make_attempt(tmp_path, **facts), AttemptEnd(outcome=outcome, reason="")
    assert restarts(tmp_path).after(attempt, end, all_gone=able) == restart


@pytest.mark.parametrize(
    ("failure", "able", "restart"),
    [
        ("here", True, "here"),
        ("here", False, "another job"),
        ("another job", False, "another job"),
        ("none", True, "none"),
    ],
)
def test_a_failed_rank_is_started_again_in_place_and_a_lost_node_elsewhere(tmp_path, failure, able, restart):
    attempt, end = make_attempt(tmp_path), AttemptEnd(outcome="FAILED", reason="")
    attempt.fail(RankEnd(rank=1, host="a", restart=failure), 1.0)
    assert restarts(tmp_path).after(attempt, end, all_gone=able) == restart


@pytest.mark.parametrize(("by_people", "follows"), [(False, "another job"), (True, "none")])
def test_a_node_lost_after_the_sigterm_that_srun_sends_when_a_task_was_killed_goes_on(tmp_path, by_people, follows):
    attempt = make_attempt(tmp_path, stop_reason="SIGTERM to the supervisor of node 0", stopped_by_people=by_people)
    attempt.fail(RankEnd(rank=1, host="b", error="node 1 is lost", restart="another job"), 1.0)
    end = AttemptEnd(outcome="FAILED", reason="")
    assert restarts(tmp_path).after(attempt, end, all_gone=False) == follows


def test_a_node_that_does_not_join_is_named(tmp_path):
    joined = JoinedNodes(make_gang(tmp_path, ""), timeout_s=120, now=0.0)
    assert joined.overdue(119.0) is None
    assert joined.overdue(120.0).error == "node 0 on host0 and node 1 on host1 did not join within 120 s"


def test_a_task_that_does_not_start_is_named_with_its_host(tmp_path):
    gang = make_gang(tmp_path, "")
    joined = JoinedNodes(gang, timeout_s=120, now=0.0)
    joined.join(gang.nodes[0], {"pid": 1}, 0.0)
    joined.join(gang.nodes[1], {"pid": 2, "missing": [3]}, 0.0)
    assert joined.choose(119.0) is None
    assert joined.overdue(120.0).error == "the tasks of rank 3 on host1 did not start within 120 s"


def test_the_master_is_where_most_nodes_have_reached_the_head(tmp_path):
    gang = make_gang(tmp_path, "", interface=None, master_addr="")
    assert choose_address(gang, {1: "10.0.0.1", 2: "10.1.0.1", 3: "10.1.0.1"}) == "10.1.0.1"
    assert choose_address(gang, {1: "10.0.0.1", 2: "10.1.0.1"}) == "10.0.0.1"


def test_a_master_on_the_loopback_is_none_for_other_hosts(tmp_path):
    with pytest.raises(ClusterddpError, match="no node has reached node 0's supervisor"):
        choose_address(make_gang(tmp_path, "", interface=None, master_addr=""), {1: "127.0.1.1"})
