"""States of runs on SSH hosts: what the files and the hosts' last words come to."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.places.ssh.host_run import ago, is_unknown, reports_path
from clusterddp.places.state import read_state
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.record import ProcessIdentity, RankEnd, read_run, write_run
from clusterddp.run.state import RunState
from clusterddp.system.files import append_jsonl
from clusterddp.view.status import read_status
from tests.support.agent_hosts import Hosts, running_hosts

LOST_HEAD = AttemptEnd(
    outcome="FAILED",
    reason="node 0 was lost",
    root_cause=RankEnd(rank=0, host="gpu01", exit_code=None, error="gpu01 does not answer", log=None),
)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running_hosts(tmp_path, "gpu01", "gpu02") as hosts:
        yield hosts


def seen(hosts: Hosts) -> tuple[str, str]:
    hosts.look()
    view = read_state(hosts.run)
    return view.state.value, view.reason


def test_a_run_whose_hosts_were_never_asked_is_unknown(hosts: Hosts) -> None:
    view = read_state(hosts.run)
    assert view.state is RunState.UNKNOWN
    assert view.reason == "gpu01 has not been asked; last known: started as 7@gpu01"


def test_a_supervisor_on_any_host_keeps_the_run_running(hosts: Hosts) -> None:
    hosts.start()
    hosts.process("s1")
    assert seen(hosts) == ("RUNNING", "runs")


def test_before_its_ranks_are_started_it_is_pending(hosts: Hosts) -> None:
    hosts.process("s0")
    assert seen(hosts) == ("PENDING", "starting")


def test_it_is_pending_while_its_submitter_lives(hosts: Hosts) -> None:
    submitter = dataclasses.asdict(ProcessIdentity.of())
    write_run(hosts.run, dataclasses.replace(read_run(hosts.run), job_id=None, submitter=submitter))
    assert seen(hosts) == ("PENDING", "is being submitted")
    assert hosts.sessions == []


def test_between_two_attempts_it_is_requeued(hosts: Hosts) -> None:
    hosts.process("s0")
    write_end(hosts.start()[0], AttemptEnd(outcome="FAILED", reason="rank 1 failed", will_restart=True))
    assert seen(hosts) == ("REQUEUED", "restarts after: rank 1 failed")


def test_the_end_that_the_head_recorded_is_the_end(hosts: Hosts) -> None:
    write_end(hosts.start()[0], AttemptEnd(outcome="COMPLETED", reason="all ranks ended with exit code 0"))
    assert seen(hosts)[0] == "COMPLETED"


def test_a_run_without_supervisors_and_without_an_end_is_lost(hosts: Hosts) -> None:
    hosts.start()
    assert seen(hosts) == (
        "LOST",
        "its supervisors on gpu01, gpu02 are gone, and no process recorded how the run ended",
    )


def test_ranks_do_not_supervise_a_run_but_are_named(hosts: Hosts) -> None:
    hosts.start()
    hosts.process("n1")
    state, reason = seen(hosts)
    assert state == "LOST"
    assert reason.endswith("; its processes are left on gpu02 (clusterddp cancel brisk-otter-3 ends them)")


def test_a_head_that_does_not_answer_leaves_it_open_and_says_what_was_known(hosts: Hosts) -> None:
    hosts.start()
    hosts.process("s0")
    append_jsonl(hosts.head.metrics, {"kind": "train", "step": 1200})
    hosts.look()
    hosts.down.add("gpu01")
    state, reason = seen(hosts)
    assert state == "UNKNOWN"
    assert reason.startswith("gpu01 cannot be reached (timed out); last known: RUNNING, step 1200, ")


def test_a_head_that_does_not_answer_leaves_it_open_while_other_nodes_go_on(hosts: Hosts) -> None:
    hosts.start()
    hosts.process("s1")
    hosts.down.add("gpu01")
    state, reason = seen(hosts)
    words = "gpu01 cannot be reached (timed out); it is still supervised on gpu02; last known: started as 7@gpu01"
    assert (state, reason) == ("UNKNOWN", words)


def test_another_node_that_saw_the_head_go_is_believed_while_the_head_does_not_answer(hosts: Hosts) -> None:
    attempts = hosts.start()
    hosts.process("s0")
    hosts.look()
    hosts.down.add("gpu01")
    write_end(attempts[1], LOST_HEAD)
    assert seen(hosts) == ("FAILED", "node 0 was lost")
    assert read_status(hosts.run).root_cause == LOST_HEAD.root_cause


def test_a_head_that_answers_and_goes_on_is_believed_before_another_node(hosts: Hosts) -> None:
    attempts = hosts.start()
    hosts.process("s0")
    write_end(attempts[1], LOST_HEAD)
    assert seen(hosts)[0] == "RUNNING"


def test_the_end_of_an_earlier_attempt_on_another_node_does_not_count(hosts: Hosts) -> None:
    attempts = hosts.start()
    write_end(attempts[1], LOST_HEAD)
    write_end(attempts[0], dataclasses.replace(LOST_HEAD, will_restart=True))
    hosts.start(1)
    hosts.look()
    hosts.down.add("gpu01")
    assert seen(hosts)[0] == "UNKNOWN"


def test_a_host_that_has_rebooted_is_named(hosts: Hosts) -> None:
    attempt = hosts.start()[0]
    text = attempt.start.read_text()
    attempt.start.write_text(text.replace(ProcessIdentity.of().boot, "an earlier boot"))
    assert "; gpu01 has rebooted since" in seen(hosts)[1]


def test_a_directory_that_is_gone_on_the_head_is_named(hosts: Hosts) -> None:
    shutil.rmtree(hosts.head.path)
    assert seen(hosts)[1].endswith("; its directory on gpu01 is gone")


def test_one_that_was_never_started_is_lost(hosts: Hosts) -> None:
    gone = dataclasses.asdict(dataclasses.replace(ProcessIdentity.of(), boot="an earlier boot"))
    write_run(hosts.run, dataclasses.replace(read_run(hosts.run), job_id=None, submitter=gone))
    assert seen(hosts) == ("LOST", "was never started: the process that submitted it is gone")


def test_one_that_is_submitted_on_another_machine_is_left_open(hosts: Hosts) -> None:
    elsewhere = dataclasses.asdict(dataclasses.replace(ProcessIdentity.of(), host="laptop"))
    write_run(hosts.run, dataclasses.replace(read_run(hosts.run), job_id=None, submitter=elsewhere))
    assert seen(hosts) == ("UNKNOWN", "is being submitted on laptop, which cannot be asked from here")


def test_reports_from_before_a_resume_do_not_count_after_it(hosts: Hosts) -> None:
    hosts.start()
    hosts.look()
    hosts.run.attempt(1).path.mkdir()
    write_run(hosts.run, dataclasses.replace(read_run(hosts.run), job_id="9@gpu01", base_attempt=1))
    assert read_state(hosts.run).reason == "gpu01 has not been asked; last known: started as 9@gpu01"


def test_ranks_of_a_host_that_does_not_answer_are_unknown(hosts: Hosts) -> None:
    hosts.start()
    hosts.process("s0")
    hosts.look()
    hosts.down.add("gpu02")
    hosts.look()
    status = read_status(hosts.run)
    assert [rank.state for rank in status.ranks] == ["RUNNING", "RUNNING", "UNKNOWN", "UNKNOWN"]


def test_a_damaged_file_of_reports_counts_as_none(hosts: Hosts) -> None:
    hosts.start()
    hosts.process("s0")
    hosts.look()
    reports_path(hosts.run).write_text('{"hosts": {"gpu01"')
    assert seen(hosts) == ("RUNNING", "runs")


def test_nothing_is_known_of_one_whose_hosts_were_never_reached(hosts: Hosts) -> None:
    hosts.down.update(hosts.names)
    hosts.look()
    assert is_unknown(hosts.run, RunState.UNKNOWN)


def test_something_is_known_of_one_that_was_reached_once(hosts: Hosts) -> None:
    hosts.look()
    hosts.down.update(hosts.names)
    hosts.look()
    assert not is_unknown(hosts.run, RunState.UNKNOWN)


@pytest.mark.root
def test_root_does_not_ask_the_hosts_of_another_user(hosts: Hosts) -> None:
    os.chown(hosts.run.path, 12345, 12345)
    state, reason = seen(hosts)
    assert (state, hosts.sessions) == ("UNKNOWN", [])
    words = "belongs to another user, and only that user can connect to its hosts; last known: started as 7@gpu01"
    assert reason == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0 s ago"), (59, "59 s ago"), (180, "3 min ago"), (3600, "1 h ago"), (1e5, "27 h ago"), (2e5, "2 days ago")],
)
def test_how_long_ago_is_written_in_the_largest_unit_that_fits(seconds: float, words: str) -> None:
    assert ago(seconds) == words
