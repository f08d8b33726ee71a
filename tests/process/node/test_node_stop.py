"""The stop contract, the time limit and cancel, on real gangs."""

import dataclasses
import json
import os
import signal
import sys
import time

import pytest

from clusterddp.cli.text.status import next_steps
from clusterddp.node.attempt import NEVER_ASKED
from clusterddp.run.gang import Entry
from clusterddp.run.record import ProcessIdentity, RunRecord, write_run
from clusterddp.run.stop import request_stop
from clusterddp.system.files import write_json
from clusterddp.view.status import read_status
from tests.support.gang_runs import make_gang, running, started
from tests.support.waiting import PATIENCE, wait_until

UNTIL_STOP = "until_stop()"


def ask_by_file(gang):
    gang.attempt().stop_file.touch()


def ask_head_usr2(gang):
    os.kill(gang.supervisors[0], signal.SIGUSR2)


def ask_member_term(gang):
    os.kill(gang.supervisors[1], signal.SIGTERM)


def ask_rank_usr2(gang):
    os.kill(gang.ranks()[3].pid, signal.SIGUSR2)


def ask_rank_term(gang):
    os.kill(gang.ranks()[0].pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (ask_by_file, "the file STOP"),
        (ask_head_usr2, "SIGUSR2 to the supervisor of node 0"),
        (ask_member_term, "SIGTERM to the supervisor of node 1"),
        (ask_rank_usr2, "SIGUSR2 to rank 3"),
        (ask_rank_term, "SIGTERM to rank 0"),
    ],
)
def test_all_ranks_stop_whichever_process_is_asked(tmp_path, ask, reason):
    with running(tmp_path, UNTIL_STOP, restarts=3) as gang:
        gang.await_up()
        ask(gang)
        assert gang.await_end() == [0, 0]
        assert (gang.end().outcome, gang.end().reason, gang.end().will_restart) == ("STOPPED", reason, False)
        assert [record.exit_code for record in gang.ranks()] == [0] * 4
        events = [json.loads(line)["event"] for line in gang.run.events.read_text().splitlines()]
        assert events == ["attempt_started", "stop_requested", "attempt_ended"]


def test_the_approaching_time_limit_stops_the_gang_and_a_restart_goes_on(tmp_path):
    program = "until_stop() if attempt == 0 else up()"
    with running(tmp_path, program, time_limit_s=2.0, stop_lead_s=1.0, restarts=1) as gang:
        assert gang.await_end() == [0, 0]
        events = [json.loads(line) for line in gang.run.events.read_text().splitlines()]
        times = {event["event"]: event["time"] for event in events if event["attempt"] == 0}
        assert times["stop_requested"] - times["attempt_started"] == pytest.approx(1.0, abs=0.5)
        first = gang.end(0)
        assert (first.outcome, first.will_restart) == ("STOPPED", True)
        assert first.reason == "the time limit of 2 s approaches"
        assert gang.end(1).outcome == "COMPLETED"


def test_a_start_that_waits_for_a_node_names_it_while_it_waits_and_when_it_is_asked_to_stop(tmp_path):
    with running(tmp_path, UNTIL_STOP, start_timeout_s=8.0, order={"only": (0,)}, restarts=1) as gang:
        me = dataclasses.asdict(ProcessIdentity.of())
        record = RunRecord(
            run=gang.run.name, token=gang.gang.token, name="", launcher="local", created_ns=1, submitter=me
        )
        write_run(gang.run, record)
        said = "node 1 on host1 did not join within 4 s; the start waits up to 8 s"
        wait_until(lambda: read_status(gang.run).warning == said, 8, what=lambda: read_status(gang.run).warning)
        os.kill(gang.supervisors[0], signal.SIGUSR2)
        assert gang.await_end() == [0]
        reason = "ended before its ranks started: node 1 on host1 did not join; SIGUSR2 to the supervisor of node 0"
        assert (gang.end().outcome, gang.end().reason, gang.end().will_restart) == ("STOPPED", reason, False)
        status = read_status(gang.run)
        assert (status.state.value, status.reason, status.warning) == ("CANCELLED", reason, "")
        assert next_steps("CANCELLED", gang.run.name, gang.run, None)[0].startswith("  try again  clusterddp submit")


def test_ranks_that_do_not_stop_in_time_are_ended_and_named(tmp_path):
    program = "if rank == 0: until_stop()\nelse: forever()"
    with running(tmp_path, program, stop_grace_s=0.5, restarts=1) as gang:
        gang.await_up()
        gang.attempt().stop_file.touch()
        assert gang.await_end() == [0, 0]
        end = gang.end()
        assert (end.outcome, end.will_restart, end.root_cause) == ("CANCELLED", False, None)
        assert end.reason == (
            "ended without a checkpoint: ranks 1-3 did not stop within 0.5 s of the request (the file STOP)"
            "; the program never asked clusterddp.should_stop()"
        )


def test_ranks_that_pass_the_time_limit_are_ended_and_named(tmp_path):
    with running(tmp_path, "forever()", time_limit_s=1.0, stop_grace_s=60) as gang:
        assert gang.await_end() == [1, 1]
        assert gang.end().reason == "ranks 0-3 did not stop before the time limit of 1 s"


def test_a_program_that_confirms_stops_itself_was_completed_when_it_did_not(tmp_path):
    with running(tmp_path, UNTIL_STOP, stop_aware=True) as gang:
        gang.await_up()
        gang.attempt().stop_file.touch()
        gang.await_end()
        assert gang.end().outcome == "COMPLETED"


def test_a_program_that_confirmed_its_stop_was_stopped(tmp_path):
    program = UNTIL_STOP + "\nif rank == 0: (run_dir / f'attempts/{attempt}/stopped.json').write_text('{}')"
    with running(tmp_path, program, stop_aware=True) as gang:
        gang.await_up()
        gang.attempt().stop_file.touch()
        gang.await_end()
        assert gang.end().outcome == "STOPPED"


@pytest.mark.parametrize("asks", [False, True])
def test_a_program_that_never_asked_and_ended_well_may_have_completed(tmp_path, asks):
    with running(tmp_path, UNTIL_STOP) as gang:
        gang.await_up()
        if asks:
            gang.attempt().asked.touch()
        gang.attempt().stop_file.touch()
        gang.await_end()
        assert (gang.end().outcome, gang.end().warning) == ("STOPPED", "" if asks else NEVER_ASKED)


@pytest.mark.parametrize(
    ("kind", "more", "ends"),
    [
        ("script", "", [("COMPLETED", False)]),
        ("command", "", [("COMPLETED", False)]),
        ("script", "import clusterddp; clusterddp.should_stop()", [("STOPPED", True), ("COMPLETED", False)]),
        ("script", "# looks for $CLUSTERDDP_STOP_FILE", [("STOPPED", True), ("COMPLETED", False)]),
    ],
)
def test_only_a_program_that_takes_part_in_the_stop_contract_is_restarted_after_exit_code_0(tmp_path, kind, more, ends):
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, sys, time\n{more}\n"
        "while os.environ['CLUSTERDDP_ATTEMPT'] == '0' and not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"
    )
    asked = str(tmp_path / "run" / "attempts" / "0" / "STOP")
    words = {"target": sys.executable, "words": (str(script),)} if kind == "command" else {"target": str(script)}
    entry = Entry(kind=kind, args=(asked,), working_dir=str(tmp_path), **words)
    with started(tmp_path, make_gang(tmp_path, "", entry=entry, nodes=1, time_limit_s=8.0, restarts=1)) as gang:
        gang.await_end()
        found = [gang.end(number) for number in range(len(ends))]
        assert [(end.outcome, end.will_restart) for end in found] == ends
        assert not gang.attempt(len(ends)).path.exists()


def test_a_script_that_never_asked_has_completed_and_its_end_names_the_request(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n")
    stop_file = tmp_path / "run" / "attempts" / "0" / "STOP"
    entry = Entry(kind="script", target=str(script), args=(str(stop_file),), working_dir=str(tmp_path))
    with started(tmp_path, make_gang(tmp_path, "", entry=entry, nodes=1)) as gang:
        wait_until(lambda: len(gang.ranks()) == 2, what="rank records")
        request_stop(stop_file, "cancel --save")
        gang.await_end()
        end = gang.end()
        assert (end.outcome, end.warning) == ("COMPLETED", "")
        assert end.reason == "ranks 0-1 exited with code 0, not because of the request to stop (cancel --save)"


def test_a_rank_that_fails_while_stopping_fails_the_run_without_a_restart(tmp_path):
    with running(tmp_path, UNTIL_STOP + "\nif rank == 1: os._exit(5)\ntime.sleep(60)", restarts=1) as gang:
        gang.await_up()
        gang.attempt().stop_file.touch()
        assert gang.await_end() == [1, 1]
        assert (gang.end().outcome, gang.end().will_restart, gang.end().root_cause.rank) == ("FAILED", False, 1)


def test_a_cancelled_gang_is_gone_at_once(tmp_path):
    with running(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nforever()", restarts=3) as gang:
        gang.await_up()
        write_json(gang.run.cancel_file, {"by": "somebody", "time": time.time()})
        cancelled = time.monotonic()
        assert gang.await_end() == [0, 0]
        assert time.monotonic() - cancelled < PATIENCE * 3  # 1.3 s on a machine with nothing else to do
        end = gang.end()
        assert (end.outcome, end.reason, end.will_restart) == ("CANCELLED", "cancelled by somebody", False)
        assert end.root_cause is None


def test_a_gang_that_was_cancelled_before_it_started_starts_no_rank(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "CANCEL").touch()
    with running(tmp_path, "forever()") as gang:
        gang.await_end()
        assert gang.end().outcome == "CANCELLED"
        assert gang.ranks() == []


def test_a_stop_before_the_start_starts_no_rank(tmp_path):
    with running(tmp_path, "forever()", nodes=3, order={"only": (0, 1)}) as gang:
        wait_until(lambda: "node 1 on host1 has joined" in gang.logs())
        os.kill(gang.supervisors[1], signal.SIGUSR2)
        assert gang.await_end() == [0, 0]
        assert gang.end().outcome == "STOPPED"
        assert gang.ranks() == []


def test_a_cancel_between_two_attempts_starts_no_other(tmp_path):
    program = "(run_dir / 'CANCEL').touch(); os._exit(1)"
    with running(tmp_path, program, restarts=5) as gang:
        gang.await_end()
        assert gang.end().will_restart is False
        assert not gang.attempt(1).path.exists()
