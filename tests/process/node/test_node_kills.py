"""Supervisors, guards and their parents are killed: no process is left, and the record has the cause."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from clusterddp.run.record import read_events
from tests.support.gang_runs import running
from tests.support.waiting import PATIENCE, wait_until

FOREVER = "forever()"
QUICK = {"host_silence_s": 1.5, "heartbeat_timeout_s": 1.5}
STUBBORN = "leave_daemon(); signal.signal(signal.SIGTERM, signal.SIG_IGN); forever()"


def kill(*pids: int) -> float:
    """Kill processes, one right after the other; return the time."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def test_a_killed_head_ends_the_gang_and_its_guard_records_the_end(tmp_path):
    with running(tmp_path, STUBBORN) as gang:
        gang.await_up()
        kill(gang.supervisors[0])
        gang.await_nothing_left()
        cause = gang.end().root_cause
        pid = gang.supervisors[0]
        assert cause.error == f"supervisor of node 0 on host0 (pid {pid}) was killed; its ranks 0-1 ended with it"
        assert (cause.rank, cause.log) == (0, "attempts/0/logs/rank-000.err")
        assert [(record.exit_code, record.ended is not None) for record in gang.ranks()][:2] == [(137, True)] * 2


def test_a_killed_supervisor_of_another_node_ends_the_gang(tmp_path):
    with running(tmp_path, STUBBORN) as gang:
        gang.await_up()
        killed = kill(gang.supervisors[1])
        gang.await_end(after_kill=True)
        assert time.monotonic() - killed < PATIENCE * 5
        cause = gang.end().root_cause
        pid = gang.supervisors[1]
        assert cause.error == f"supervisor of node 1 on host1 (pid {pid}) was killed; its ranks 2-3 ended with it"
        assert cause.rank == 2
        assert [record.exit_code for record in gang.ranks()] == [137] * 4


def test_all_supervisors_killed_at_once_leave_nothing(tmp_path):
    with running(tmp_path, STUBBORN) as gang:
        gang.await_up()
        kill(*gang.supervisors)
        gang.await_nothing_left()
        assert (gang.end().outcome, gang.end().root_cause.rank) == ("FAILED", 0)


def test_a_supervisor_and_its_guard_killed_together_leave_nothing(tmp_path):
    with running(tmp_path, STUBBORN) as gang:
        gang.await_up()
        killed = kill(*gang.pids("g1"), gang.supervisors[1])
        gang.await_end(after_kill=True)
        assert time.monotonic() - killed < PATIENCE * 5
        assert gang.end().root_cause.rank == 2


def test_a_killed_parent_of_the_supervisors_ends_the_gang(tmp_path):
    with running(tmp_path, STUBBORN) as gang:
        gang.await_up()
        kill(gang.task.pid)
        gang.await_nothing_left()
        cause = gang.end().root_cause
        pid = gang.task.pid
        assert cause.error == f"the task that carries the run (pid {pid}) was killed; ranks 0-3 ended with it"
        assert (cause.rank, cause.host) == (0, "host0")


def test_parent_supervisors_and_guards_killed_at_once_leave_no_rank(tmp_path):
    with running(tmp_path, FOREVER) as gang:
        gang.await_up()
        guards = gang.pids("g0") + gang.pids("g1")
        assert len(guards) == 2
        kill(gang.task.pid, *gang.supervisors, *guards)
        gang.await_nothing_left()


def test_a_head_and_its_guard_killed_together_are_cleaned_up_by_the_other_node(tmp_path):
    with running(tmp_path, STUBBORN) as gang:
        gang.await_up()
        kill(*gang.pids("g0"), gang.supervisors[0])
        gang.await_nothing_left()


def test_a_supervisor_killed_before_it_joined_is_named_at_once(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('CLUSTERDDP_COOKIE', '').endswith('.s1'): time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(tmp_path, FOREVER) as gang:
        kill(gang.supervisors[1])
        gang.await_end(timeout_s=10)
        error = "supervisor of node 1 on host1 was killed by SIGKILL before any rank was started"
        assert (gang.end().root_cause.error, gang.end().root_cause.rank) == (error, None)


def test_a_killed_guard_is_replaced_and_the_gang_goes_on(tmp_path):
    with running(tmp_path, "until_stop()") as gang:
        gang.await_up()
        guards = gang.pids("g1")
        kill(*guards)
        wait_until(lambda: set(gang.pids("g1")) - set(guards), what="another guard")
        kill(gang.supervisors[1])
        gang.await_end(after_kill=True)
        assert gang.end().root_cause.rank == 2


def test_a_supervisor_killed_while_ranks_start_leaves_nothing(tmp_path):
    with running(tmp_path, STUBBORN) as gang:
        wait_until(lambda: gang.pids("n1"), what="a rank of node 1")
        kill(gang.supervisors[1])
        gang.await_end(after_kill=True)
        assert gang.end().outcome == "FAILED"


def test_a_stopped_supervisor_is_lost_when_its_heartbeat_timeout_is_over(tmp_path):
    with running(tmp_path, STUBBORN, **QUICK) as gang:
        gang.await_up()
        pid = gang.supervisors[1]
        os.kill(pid, signal.SIGSTOP)
        wait_until(gang.attempt().end.exists, 8)
        assert gang.pids("n0") + gang.pids("n1") == []
        assert gang.end().root_cause.error == (
            f"supervisor of node 1 on host1 (pid {pid}) is lost: no heartbeat for 1.5 s; its ranks 2-3 ended with it"
        )
        os.kill(pid, signal.SIGCONT)
        gang.await_end()
        failed = next(event for event in read_events(gang.run) if event["event"] == "rank_failed")
        assert failed["silent_s"] >= 1.5
        assert failed["noticed"] < gang.end().ended


def test_a_head_that_was_stopped_for_too_long_is_the_root_cause(tmp_path):
    with running(tmp_path, STUBBORN, **QUICK) as gang:
        gang.await_up()
        os.kill(gang.supervisors[0], signal.SIGSTOP)
        wait_until(lambda: not gang.pids("n1"), 8, what="node 1 has ended its ranks")
        wait_until(lambda: not gang.pids("s1"), 20, what="node 1 has left")
        gang.attempt().end.unlink(missing_ok=True)  # node 1's account; over SSH it is in a directory of its own
        os.kill(gang.supervisors[0], signal.SIGCONT)
        gang.await_end()
        cause = gang.end().root_cause
        error = "node 0 on host0 was given up by node 1 on host1: no heartbeat for 1.5 s; its ranks 0-1 ended with it"
        assert (cause.error, cause.host) == (error, "host0")


def test_a_gang_that_is_suspended_as_a_whole_goes_on_afterwards(tmp_path):
    with running(tmp_path, "until_stop()", **QUICK) as gang:
        gang.await_up()
        pids = [pid for pid, _ in gang.left()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(2 * QUICK["heartbeat_timeout_s"])
        assert gang.pids("s0") + gang.pids("s1") == gang.supervisors
        gang.attempt().stop_file.touch()
        assert gang.await_end() == [0, 0]


@pytest.mark.root
def test_a_gang_whose_connections_are_reset_goes_on_over_others(tmp_path):
    with running(tmp_path, "until_stop()") as gang:
        gang.await_up()
        log = gang.run.launcher_dir / "supervisor-1.log"
        for number in range(3):
            for end in ("dport", "sport"):
                port = f":{gang.link['port']}"
                subprocess.run(["ss", "-K", "state", "established", end, "=", port], check=True, capture_output=True)
            wait_until(lambda: log.read_text().count("connected again") > number, what="another connection")  # noqa: B023
        assert gang.pids("s0") + gang.pids("s1") == gang.supervisors
        gang.attempt().stop_file.touch()
        assert gang.await_end() == [0, 0]


def test_a_node_that_never_joins_is_named_after_the_start_timeout(tmp_path):
    with running(tmp_path, FOREVER, nodes=3, start_timeout_s=6.0, order={"only": (0, 1)}) as gang:
        assert gang.await_end() == [1, 1]
        assert gang.end().root_cause.error == "node 2 on host2 did not join within 6 s"
        assert gang.end().root_cause.rank is None
        assert gang.ranks() == []


def test_a_parent_killed_before_all_have_joined_is_named(tmp_path):
    with running(tmp_path, FOREVER, nodes=3, order={"only": (0, 1)}) as gang:
        kill(gang.task.pid)
        gang.await_nothing_left()
        assert gang.end().root_cause.error.endswith("was killed before any rank was started")


FAULT = """
import os, pathlib
if os.environ.get("CLUSTERDDP_COOKIE", "").endswith(".s{node}"):
    import clusterddp.node.local_ranks as local_ranks
    tick = local_ranks.LocalRanks.tick
    def fault(self, now):
        if pathlib.Path(__file__).with_name("break").exists():
            raise KeyError("a mistake of ours")
        tick(self, now)
    local_ranks.LocalRanks.tick = fault
"""


def put_fault_into_supervisor(node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the supervisor of `node` break once the returned file exists: a fault in the real process."""
    (tmp_path / "sitecustomize.py").write_text(FAULT.replace("{node}", str(node)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "break"


@pytest.mark.parametrize("node", [0, 1])
def test_an_unexpected_exception_in_a_supervisor_ends_its_ranks_and_is_recorded(tmp_path, monkeypatch, node):
    fault = put_fault_into_supervisor(node, tmp_path, monkeypatch)
    with running(tmp_path, STUBBORN) as gang:
        gang.await_up()
        fault.touch()
        gang.await_end()
        error = f"supervisor of node {node} on host{node} failed: KeyError: 'a mistake of ours'"
        assert gang.end().root_cause.error.startswith(error)
        assert "a mistake of ours" in (gang.run.launcher_dir / f"supervisor-{node}.log").read_text()


def test_a_supervisor_that_breaks_before_the_start_is_named_at_once(tmp_path, monkeypatch):
    put_fault_into_supervisor(1, tmp_path, monkeypatch).touch()
    with running(tmp_path, FOREVER) as gang:
        gang.await_end(timeout_s=5, after_kill=True)
        assert "supervisor of node 1 on host1 failed: KeyError" in gang.end().root_cause.error
        assert [record.rank for record in gang.ranks() if record.node_rank == 1] == []


def test_clients_without_the_key_are_refused_and_harm_nothing(tmp_path):
    def connect(*lines: bytes) -> socket.socket:
        client = socket.create_connection((gang.link["host"], gang.link["port"]))
        for line in lines:
            try:
                client.sendall(line)
            except OSError:  # refused already
                break
        return client

    nonce = json.dumps({"nonce": "0" * 32}).encode() + b"\n"
    join = b'{"kind": "join", "node_rank": 1, "pid": 1}'
    with running(tmp_path, "until_stop()", start_timeout_s=20.0) as gang:
        clients = [
            connect(b"GET / HTTP/1.1\r\n\r\n"),
            connect(os.urandom(3000) + b"\n"),
            connect(nonce, b"0" * 64 + b" " + join + b"\n"),
            connect(nonce, b"\xff\n"),
            connect(nonce, b"[" * 100_000 + b"\n"),
            connect(b"x" * 10_000_000),
            connect(nonce, b"y" * 10_000_000),
            connect(b"half a li"),
            connect(),
            *[connect() for _ in range(50)],
        ]
        gang.await_up()
        assert [rank.exit_code for rank in gang.ranks()] == [None] * 4
        gang.attempt().stop_file.touch()
        assert gang.await_end() == [0, 0]
        for client in clients:
            client.close()
