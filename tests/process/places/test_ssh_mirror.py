"""Synchronising the copy of a run with its hosts: real agents, real files; connections break, hosts are down."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterddp.cli.terminal import Terminal
from clusterddp.cli.watch import watch_until_ended, write_logs
from clusterddp.errors import PreflightError
from clusterddp.places.ssh.agent import runs as host_runs
from clusterddp.places.ssh.host_run import read_reports
from clusterddp.run.attempts import AttemptEnd, read_end, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import log_event, read_ranks
from clusterddp.run.state import RunState
from clusterddp.system.files import append_jsonl, read_jsonl
from clusterddp.view.logs import LogQuery, read_logs
from tests.support.agent_hosts import Hosts, running_hosts
from tests.support.waiting import wait_until


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running_hosts(tmp_path, "gpu01", "gpu02") as hosts:
        yield hosts


def add(path: Path, text: bytes) -> None:
    with open(path, "ab") as file:
        file.write(text)


def test_records_come_from_the_host_of_each_rank(hosts: Hosts) -> None:
    hosts.start()
    hosts.look()
    assert [(record.rank, record.host) for record in read_ranks(hosts.run.attempt(0))] == [
        (0, "gpu01"), (1, "gpu01"), (2, "gpu02"), (3, "gpu02"),
    ]  # fmt: skip


def test_a_rank_that_is_not_of_that_host_is_not_believed(hosts: Hosts) -> None:
    hosts.start()
    shutil.copy(hosts.on("gpu02").attempt(0).rank_record(2), hosts.on("gpu02").attempt(0).rank_record(0))
    hosts.look()
    assert read_ranks(hosts.run.attempt(0))[0].host == "gpu01"


def test_that_the_program_asked_whether_to_stop_is_known_here_while_the_run_goes_on(hosts: Hosts) -> None:
    attempts = hosts.start()
    hosts.look()
    assert not hosts.run.attempt(0).asked.exists()
    attempts[0].asked.touch()
    hosts.look()
    assert hosts.run.attempt(0).asked.exists()


def test_the_time_of_the_last_output_comes_without_the_logs(hosts: Hosts) -> None:
    attempts = hosts.start()
    attempts[1].stderr(2).write_bytes(b"step 1")
    os.utime(attempts[1].stderr(2), (1_000_000, 1_000_000))
    hosts.look()
    assert {host: report.last_output for host, report in read_reports(hosts.run).items()} == {
        "gpu01": None,
        "gpu02": 1_000_000.0,
    }
    assert not hosts.run.attempt(0).stderr(2).exists()


def test_only_the_logs_that_are_wanted_are_downloaded(hosts: Hosts) -> None:
    attempts = hosts.start()
    for rank in range(4):
        attempts[rank // 2].stdout(rank).write_bytes(b"of rank %d" % rank)
    hosts.logs(2)
    assert [path.name for path in sorted(hosts.run.attempt(0).logs.iterdir())] == ["rank-002.out"]


def test_the_times_of_lines_come_with_the_logs_that_are_wanted(hosts: Hosts) -> None:
    for node, attempt in enumerate(hosts.start()):
        log = attempt.stdout(2 * node)
        log.write_bytes(b"a line\n")
        append_jsonl(attempt.log_times(node), {"time": 1e9, "sizes": {log.name: 7}})
    hosts.logs(2)
    assert sorted(path.name for path in hosts.run.attempt(0).logs.iterdir()) == ["node-001.times", "rank-002.out"]
    pieces = read_logs(hosts.run, (2,), LogQuery(timestamps=True))
    assert [piece.written for piece in pieces] == [1e9]


def test_what_grows_is_downloaded_piece_by_piece(hosts: Hosts) -> None:
    log = hosts.start()[0].stdout(0)
    for number in range(3):
        add(log, b"line %d\n" % number)
        hosts.logs(0)
    assert hosts.run.attempt(0).stdout(0).read_bytes() == log.read_bytes()


def test_a_log_larger_than_any_answer_is_downloaded_whole(hosts: Hosts) -> None:
    log = hosts.start()[0].stdout(0)
    log.write_bytes(os.urandom(1 << 20) * 25)
    hosts.logs(0)
    assert hosts.run.attempt(0).stdout(0).read_bytes() == log.read_bytes()


def tail(
    hosts: Hosts, capfdbinary: pytest.CaptureFixture[bytes], query: LogQuery, rank: str = "0"
) -> tuple[bytes, int]:
    """Show the end of a log as `logs --tail` does; return it, and how many bytes of files came for it."""
    sync, before = hosts.sync(), len(hosts.sessions)
    write_logs(hosts.run, rank, Terminal({}), sync, follow=False, query=query)
    sync.close()
    return capfdbinary.readouterr().out, sum(session.received_bytes for session in hosts.sessions[before:])


@pytest.mark.parametrize("end", [b"\n", b"\r"])
@pytest.mark.parametrize("mirrored_bytes", [0, 20_000_000])
def test_for_a_tail_the_end_of_a_log_is_downloaded(
    hosts: Hosts, capfdbinary: pytest.CaptureFixture[bytes], end: bytes, mirrored_bytes: int
) -> None:
    log, ours = hosts.start()[0].stdout(0), hosts.run.attempt(0).stdout(0)
    lines = [b"step %d: %s" % (number, b"x" * 90) for number in range(250_000)]
    log.write_bytes(end.join(lines) + end)
    if mirrored_bytes:
        ours.write_bytes(log.read_bytes()[:mirrored_bytes])
    shown, received_bytes = tail(hosts, capfdbinary, LogQuery(tail_lines=3))
    assert shown == end.join(lines[-3:]) + end
    assert received_bytes < 2_000_000
    assert (ours.stat().st_size if ours.exists() else 0) == mirrored_bytes
    hosts.logs(0)
    assert ours.read_bytes() == log.read_bytes()


def test_a_tail_of_lines_that_are_long_is_complete(hosts: Hosts, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = hosts.start()[0].stdout(0)
    lines = [b"%d" % number * 2_000_000 for number in range(5)]
    log.write_bytes(b"\n".join(lines))
    assert tail(hosts, capfdbinary, LogQuery(tail_lines=3))[0] == b"\n".join(lines[-3:])


def test_a_tail_has_the_times_of_its_lines_and_those_of_the_attempt_that_is_asked_for(
    hosts: Hosts, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for number in (0, 1):
        attempt = hosts.start(number)[0]
        log = attempt.stdout(0)
        log.write_bytes(b"%d\n" % number * 2_000_000)
        append_jsonl(attempt.log_times(0), {"time": 1e9 + number, "sizes": {log.name: 4_000_000}})
    query = LogQuery(tail_lines=1, timestamps=True, attempt=0)
    assert tail(hosts, capfdbinary, query)[0].endswith(b" 0\n")
    assert time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1e9)).encode() in tail(hosts, capfdbinary, query)[0]


def test_a_connection_that_breaks_while_a_user_follows_loses_no_byte_and_doubles_none(hosts: Hosts) -> None:
    log = hosts.start()[0].stdout(0)
    sync = hosts.sync()
    sync.want_logs([0], 0)
    for number in range(5):
        add(log, os.urandom(1000 + number))
        sync.update_logs()
        hosts.break_links()
    sync.close()
    assert hosts.run.attempt(0).stdout(0).read_bytes() == log.read_bytes()


def test_a_log_that_shrank_begins_anew_and_the_old_one_is_kept(hosts: Hosts) -> None:
    log = hosts.start()[0].stdout(0)
    for text in (b"the first words\n", b"anew\n"):
        log.write_bytes(text)
        hosts.logs(0)
    ours = hosts.run.attempt(0).stdout(0)
    assert (ours.read_bytes(), ours.with_name("rank-000.out.1").read_bytes()) == (b"anew\n", b"the first words\n")


def test_a_log_that_was_replaced_by_a_longer_one_begins_anew(hosts: Hosts) -> None:
    log = hosts.start()[0].stdout(0)
    for text in (b"the first words\n", b"quite other words, and more of them\n"):
        log.write_bytes(text)
        hosts.logs(0)
    assert hosts.run.attempt(0).stdout(0).read_bytes() == log.read_bytes()


def test_a_log_that_was_replaced_by_one_of_its_size_begins_anew(hosts: Hosts) -> None:
    log = hosts.start()[0].stdout(0)
    for text in (b"one\n", b"two\n"):
        log.write_bytes(text)
        hosts.logs(0)
    assert hosts.run.attempt(0).stdout(0).read_bytes() == b"two\n"


def test_a_log_that_is_gone_stays_as_it_was(hosts: Hosts) -> None:
    log = hosts.start()[0].stdout(0)
    log.write_bytes(b"words\n")
    hosts.logs(0)
    log.unlink()
    hosts.logs(0)
    assert hosts.run.attempt(0).stdout(0).read_bytes() == b"words\n"


def test_the_history_has_the_rows_of_both_sides_once(hosts: Hosts) -> None:
    hosts.start()
    log_event(hosts.run, "submitted")
    for event in ("attempt_started", "attempt_ended"):
        log_event(hosts.head, event)
        hosts.look()
    hosts.look()
    assert [row["event"] for row in read_jsonl(hosts.run.events)] == ["submitted", "attempt_started", "attempt_ended"]


def test_history_and_metrics_have_the_rows_of_each_head(tmp_path: Path) -> None:
    with running_hosts(tmp_path, "gpu01", "gpu02", min_nodes=1) as hosts:
        first, second = hosts.on("gpu01"), hosts.on("gpu02")

        def write(run: RunDir, *steps: int) -> None:
            for step in steps:
                append_jsonl(run.metrics, {"step": step, "attempt": int(run is second)})
                append_jsonl(run.events, {"event": step})

        hosts.start(0)
        write(first, 1, 2, 3)
        hosts.look()
        write(first, 4)
        hosts.down.add("gpu01")
        hosts.start(1, head=1)
        write(second, 5)
        hosts.look()
        assert [row["step"] for row in read_jsonl(hosts.run.metrics)] == [1, 2, 3, 5]
        hosts.down.clear()
        write(second, 6, 7, 8, 9)
        hosts.look()
        assert [row["step"] for row in read_jsonl(hosts.run.metrics)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert [row["event"] for row in read_jsonl(hosts.run.events)] == [1, 2, 3, 5, 6, 7, 8, 9]


def test_the_first_end_here_stays(hosts: Hosts) -> None:
    attempt = hosts.start()[0]
    write_end(hosts.run.attempt(0), AttemptEnd(outcome="FAILED", reason="restarts", will_restart=True))
    write_end(attempt, AttemptEnd(outcome="COMPLETED", reason="done"))
    hosts.look()
    assert read_end(hosts.run.attempt(0)).reason == "restarts"


def test_what_has_not_changed_is_not_asked_for_again(hosts: Hosts) -> None:
    hosts.start()
    hosts.process("s0")
    sync = hosts.sync()
    for _ in range(2):
        sync.update_logs()
    asked = [session.asked for session in hosts.sessions if session.host == "gpu01"]
    sync.close()
    assert asked[0][-1] == "run.look"


def test_a_host_that_is_down_hides_no_other(hosts: Hosts) -> None:
    hosts.start()
    hosts.down.add("gpu02")
    hosts.look()
    assert [record.rank for record in read_ranks(hosts.run.attempt(0))] == [0, 1]


def test_a_host_that_is_down_is_said_to_be_once(hosts: Hosts) -> None:
    hosts.start()
    hosts.down.add("gpu02")
    sync = hosts.sync()
    for _ in range(3):
        sync.update()
    sync.close()
    assert hosts.said == ["gpu02 cannot be reached: timed out (hint: is it up?)"]


def test_a_host_that_comes_back_is_said_to(hosts: Hosts) -> None:
    hosts.start()
    sync = hosts.sync()
    sync.update()
    hosts.down.add("gpu02")
    hosts.break_links()
    sync.update()
    hosts.down.clear()
    wait_until(lambda: sync.update() or len(hosts.said) > 1, 20)
    sync.close()
    assert hosts.said == ["gpu02 cannot be reached: timed out (hint: is it up?)", "gpu02 answers again"]


def test_who_waits_asks_hosts_again_that_have_not_answered_yet(hosts: Hosts) -> None:
    hosts.start()
    write_end(hosts.head.attempt(0), AttemptEnd(outcome="COMPLETED", reason="done"))
    hosts.down.update(hosts.names)
    threading.Timer(1.0, hosts.down.clear).start()
    sync = hosts.sync()
    assert watch_until_ended(hosts.run, Terminal({}), sync, timeout_s=60).state is RunState.COMPLETED
    sync.close()


def test_an_error_says_for_how_long_hosts_were_asked_in_vain(hosts: Hosts) -> None:
    hosts.down.update(hosts.names)
    sync = hosts.sync()
    with pytest.raises(PreflightError, match=r"gpu01 cannot be reached .*; its hosts were asked for 1 s"):
        watch_until_ended(hosts.run, Terminal({}), sync, timeout_s=1.0)
    sync.close()


def test_what_a_host_said_last_stays_known_while_it_is_down(hosts: Hosts) -> None:
    hosts.start()
    hosts.process("s1")
    hosts.look()
    hosts.down.add("gpu02")
    hosts.look()
    report = read_reports(hosts.run)["gpu02"]
    assert (report.error, report.alive, report.reached is not None) == ("timed out", ("s1",), True)


def test_a_hanging_host_holds_up_no_other(hosts: Hosts) -> None:
    hosts.start()
    sync = hosts.sync()
    sync.update()
    hang = next(session for session in hosts.sessions if session.host == "gpu02")
    hang.process.send_signal(signal.SIGSTOP)
    append_jsonl(hosts.head.metrics, {"step": 1})
    sync.update(timeout_s=0.5)
    assert hosts.run.metrics.exists()
    hang.process.send_signal(signal.SIGCONT)
    sync.close()


def test_two_at_once_lose_nothing_and_double_nothing(hosts: Hosts) -> None:
    log = hosts.start()[0].stdout(0)
    over = threading.Event()

    def follow() -> None:
        sync = hosts.sync()
        sync.want_logs([0], 0)
        while not over.is_set():
            sync.update()
        sync.update_logs()
        sync.close()

    followers = [threading.Thread(target=follow) for _ in range(2)]
    for follower in followers:
        follower.start()
    for number in range(50):
        add(log, b"%d\n" % number * 100)
        log_event(hosts.head, "event", number=number)
        time.sleep(0.01)
    over.set()
    for follower in followers:
        follower.join()
    assert hosts.run.attempt(0).stdout(0).read_bytes() == log.read_bytes()
    assert [row["number"] for row in read_jsonl(hosts.run.events)] == list(range(50))


def test_a_damaged_record_keeps_no_other_run_from_being_looked_at(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start()
    damaged = RunDir(tmp_path / "damaged")
    shutil.copytree(hosts.run.path, damaged.path)
    sync = hosts.sync(damaged, hosts.run)
    damaged.record.write_text("{")
    sync.update()
    sync.close()
    assert len(read_ranks(hosts.run.attempt(0))) == 4


def test_a_directory_that_was_copied_elsewhere_goes_on_there(hosts: Hosts, tmp_path: Path) -> None:
    log = hosts.start()[0].stdout(0)
    add(log, b"one\n")
    hosts.logs(0)
    moved = tmp_path / "elsewhere" / hosts.run.name
    shutil.copytree(hosts.run.path, moved, copy_function=shutil.copyfile)
    add(log, b"two\n")
    sync = hosts.sync(RunDir(moved))
    sync.want_logs([0], 0)
    sync.update_logs()
    sync.close()
    assert [path.read_bytes() for path in (moved / "attempts/0/logs").iterdir()] == [b"one\ntwo\n"]


def test_hosts_are_asked_to_end_a_run_over_the_connections_that_are_there(hosts: Hosts) -> None:
    hosts.start()
    sync = hosts.sync()
    sync.update()
    answers = sync.ask_hosts(hosts.run, "run.ask", {"name": hosts.head.path.name, "what": "cancel", "reason": "a test"})
    sync.close()
    assert (answers, len(hosts.sessions)) == ({"gpu01": {"found": True}, "gpu02": {"found": True}}, 2)


def test_a_host_that_is_down_is_named_when_others_are_asked(hosts: Hosts) -> None:
    hosts.down.add("gpu02")
    sync = hosts.sync()
    answers = sync.ask_hosts(hosts.run, "beat", {})
    sync.close()
    assert (list(answers["gpu01"]), str(answers["gpu02"])) == (["time"], "gpu02: connect: timed out; hint: is it up?")


def test_a_late_answer_to_one_question_is_not_taken_for_an_answer_to_another(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterddp.places.ssh.sync.FIRST_ANSWER_S", 0.2)
    hosts.start()
    sync = hosts.sync()
    sync.update(timeout_s=20)
    late = next(session for session in hosts.sessions if session.host == "gpu02").process
    late.send_signal(signal.SIGSTOP)
    answers = sync.ask_hosts(hosts.run, "run.ask", {"name": hosts.head.path.name, "what": "stop", "reason": "a test"})
    assert (answers["gpu01"], str(answers["gpu02"])) == ({"found": True}, "gpu02: ask: no answer within 0.5 s")

    def answer_meanwhile(do: str) -> None:
        late.send_signal(signal.SIGCONT)
        time.sleep(0.5)

    for session in hosts.sessions:
        session.before_ask = answer_meanwhile
    sync.update(timeout_s=20)
    sync.update(timeout_s=20)
    sync.close()
    assert set(read_reports(hosts.run)) == {"gpu01", "gpu02"}


def test_a_host_looks_through_its_processes_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[tuple[str, ...]] = []
    monkeypatch.setattr(host_runs, "find_processes", lambda *prefixes: looks.append(prefixes) or [])
    host = SimpleNamespace(run_dir=lambda name: tmp_path / name, listed={})
    runs = [
        {"name": f"run-{number}", "token": str(number) * 32, "begin": 0, "rejoins": False} for number in (1, 2, 1, 2)
    ]
    listed = host_runs.look(host, {"runs": runs}, None)  # type: ignore[arg-type]
    assert looks == [(f"{'1' * 32}.", f"{'2' * 32}.")]
    assert list(listed["runs"]) == ["run-1", "run-2"]
