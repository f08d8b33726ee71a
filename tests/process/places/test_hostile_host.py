"""A host that answers nonsense, for ever, or too much: an error of that host alone, and bounded memory and disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.login_command import LoginCommand, run_at_login
from clusterddp.errors import SshError
from clusterddp.places.ssh.host_run import read_reports
from clusterddp.places.ssh.launcher import lease_gpus
from clusterddp.places.ssh.network import probe_network
from clusterddp.places.ssh.session import Session
from clusterddp.places.ssh.sessions import SessionPool
from clusterddp.planning.ssh import SshNode
from clusterddp.spec.hosts import Login
from clusterddp.system.files import write_json
from clusterddp.view.ps import Hosts
from tests.support.agent_hosts import Hosts as AgentHosts
from tests.support.agent_hosts import make_channel, running_hosts, stand_ins
from tests.support.handmade_runs import make_gang

Answer = Callable[[dict[str, Any]], bytes]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[AgentHosts]:
    with running_hosts(tmp_path, "gpu01", "gpu02") as hosts:
        yield hosts


def hostile_session(answer: Answer, host: str = "gpu01") -> Session:
    """Return a session with a host that answers each request as it likes."""
    channel, theirs = make_channel()

    def serve() -> None:
        with contextlib.suppress(OSError), theirs, theirs.makefile("rb") as requests:
            for line in requests:
                theirs.sendall(answer(json.loads(line)))

    threading.Thread(target=serve, daemon=True).start()
    return Session(**stand_ins(host), channel=channel)


def say(data: bytes = b"", **words: Any) -> bytes:
    return json.dumps({"ok": True, "size": len(data), **words}).encode() + b"\n" + data


@pytest.mark.parametrize(
    "answer",
    [
        b"not JSON\n",
        b"[]\n",
        b"null\n",
        b"[" * 100_000 + b"\n",
        b'{"ok": true}\n',
        b'{"ok": true, "parts": [{}]}\n',
        b'{"ok": true, "parts": "x"}\n',
        b'{"ok": true, "size": -1, "parts": []}\n',
        b'{"ok": true, "size": 1e99, "parts": []}\n',
        b'{"ok": true, "size": 99999999999, "parts": []}\n',
        b"\xff\xfe\n",
    ],
)
def test_nonsense_is_an_error_of_that_host_which_is_then_left(answer: bytes) -> None:
    session = hostile_session(lambda request: answer)
    with pytest.raises(SshError, match="gpu01: ask: the answer of its agent is invalid") as error:
        session.ask("run.read", timeout_s=5)
    assert error.value.dropped
    with pytest.raises(SshError):
        session.ask("beat", timeout_s=5)


def test_a_line_without_end_is_not_kept() -> None:
    def flood(request: dict[str, Any]) -> bytes:
        return b"x" * (64 << 20)

    begun = time.monotonic()
    with pytest.raises(SshError, match="more than 4,194,304 bytes in a line"):
        hostile_session(flood).ask("beat", timeout_s=5)
    assert time.monotonic() - begun < 5


def test_a_late_answer_is_not_taken_for_that_to_the_next_question() -> None:
    def late(request: dict[str, Any]) -> bytes:
        time.sleep(0.5)
        return say(time=1.0)

    session = hostile_session(late)
    with pytest.raises(SshError, match=r"no answer within 0\.1 s"):
        session.ask("beat", timeout_s=0.1)
    time.sleep(0.6)
    with pytest.raises(SshError):
        session.ask("beat", timeout_s=0.1)


def test_a_host_without_a_network_is_refused() -> None:
    session = hostile_session(lambda request: say(network=None))
    gang = dataclasses.replace(
        make_gang(nodes=1), nodes=(dataclasses.replace(make_gang(nodes=1).nodes[0], host="gpu01"),)
    )
    with pytest.raises(SshError, match="gpu01: ask: the answer of its agent is invalid: no network"):
        probe_network(gang, {"gpu01": session})


def test_a_lease_of_fewer_gpus_than_were_asked_for_is_refused() -> None:
    session = hostile_session(lambda request: say(gpus=[], hold=[], busy={}))
    with pytest.raises(SshError, match="gpu01: ask: the answer of its agent is invalid: a lease of 0 GPUs, for 1"):
        lease_gpus({"gpu01": session}, {"gpu01": 1}, run="brisk-otter-3")


def test_a_host_that_lists_nothing_old_is_an_error_of_that_host() -> None:
    with Hosts([SshNode(host="gpu01")], {}) as machines:
        machines._pool = SessionPool(lambda access: hostile_session(lambda request: say(runs=[], stored=None)))
        (found,) = machines.stored(1.0).values()
    assert "the answer of its agent is invalid: no old files" in str(found)


def listed(files: dict[str, list[int]]) -> dict[str, Any]:
    rest = {"boot": "b", "alive": [], "has_run": True, "end_attempt": None, "end": None, "more": False}
    return rest | {"files": files}


def answering(hosts: AgentHosts, files: dict[str, list[int]], read: Answer) -> Answer:
    """Answer as a host does that has these files and sends of them what `read` makes."""

    def answer(request: dict[str, Any]) -> bytes:
        if request["do"] == "run.look":
            return say(runs={run["name"]: listed(files) for run in request["runs"]})
        return read(request) if request["do"] == "run.read" else say()

    return answer


def read_part(**facts: Any) -> dict[str, Any]:
    return {"gone": False, "length": 0, "size": 0, "mtime_ns": 1} | facts


LOG = "attempts/0/logs/rank-000.out"
ANSWERS_TO_READ: dict[str, Answer] = {
    "nothing comes of a file that is long": lambda request: say(
        parts=[read_part(size=1 << 40) for _ in request["parts"]]
    ),
    "fewer bytes than before": lambda request: say(parts=[read_part(size=5) for _ in request["parts"]]),
    "fewer parts": lambda request: say(parts=[]),
    "more bytes than said": lambda request: say(b"xx", parts=[read_part(size=1) for _ in request["parts"]]),
    "a negative length": lambda request: say(parts=[read_part(length=-1) for _ in request["parts"]]),
    "more than was asked for": lambda request: say(
        b"x" * (5 << 20), parts=[read_part(length=5 << 20, size=5 << 20) for _ in request["parts"]]
    ),
}


@pytest.mark.parametrize("how", ANSWERS_TO_READ)
def test_a_pull_without_progress_ends(hosts: AgentHosts, how: str) -> None:
    answer = answering(hosts, {LOG: [1 << 40, 1]}, ANSWERS_TO_READ[how])
    good = hosts.open

    def open_session(access: SshNode) -> Session:
        return hostile_session(answer) if access.host == "gpu01" else good(access)

    hosts.open = open_session  # type: ignore[method-assign]
    hosts.start()
    begun = time.monotonic()
    hosts.logs(0, 2)
    assert time.monotonic() - begun < 8
    assert "gpu02" in read_reports(hosts.run)
    assert len(list(hosts.run.attempt(0).logs.iterdir())) <= 1


def test_a_log_that_always_begins_anew_is_kept_some_times(hosts: AgentHosts) -> None:
    def anew(request: dict[str, Any]) -> bytes:
        parts = [read_part(length=9, size=9) for _ in request["parts"]]
        return say(os.urandom(9 * len(parts)), parts=parts)

    number = iter(range(1, 1000))

    def answer(request: dict[str, Any]) -> bytes:
        return answering(hosts, {LOG: [9, next(number)]}, anew)(request)

    hosts.open = lambda access: hostile_session(answer, access.host)  # type: ignore[method-assign]
    hosts.start()
    for _ in range(40):
        hosts.logs(0)
    assert len(list(hosts.run.attempt(0).logs.iterdir())) == 17
    assert any("begun anew" in text for text in hosts.said)


def with_hostile(hosts: AgentHosts, answer: Answer) -> None:
    """Let gpu01 answer as it likes; gpu02 is an honest agent."""
    honest = hosts.open

    def open_session(access: SshNode) -> Session:
        return hostile_session(answer) if access.host == "gpu01" else honest(access)

    hosts.open = open_session  # type: ignore[method-assign]
    hosts.start()


@pytest.mark.parametrize("name", ["attempts/{}/end.json", "checkpoints/step-{}-a0.json", "attempts/0/logs/rank-{}.out"])
def test_a_listed_number_without_end_harms_no_host(hosts: AgentHosts, name: str) -> None:
    nothing: Answer = lambda request: say(parts=[read_part(gone=True) for _ in request["parts"]])  # noqa: E731
    with_hostile(hosts, answering(hosts, {name.format("9" * 5000): [1, 1]}, nothing))
    hosts.look()
    assert {host: report.error for host, report in read_reports(hosts.run).items()} == {"gpu01": None, "gpu02": None}


def test_a_list_that_goes_on_for_ever_is_an_error_of_that_host(hosts: AgentHosts) -> None:
    def endless(request: dict[str, Any]) -> bytes:
        (run,) = request["runs"]
        return say(runs={run["name"]: listed({f"tb/{run['begin']}": [1, 1]}) | {"more": True}})

    with_hostile(hosts, endless)
    hosts.look()
    reports = read_reports(hosts.run)
    assert "more than 16 files of brisk-otter-3" in str(reports["gpu01"].error)
    assert reports["gpu02"].error is None


def test_whatever_breaks_the_work_on_one_host_is_an_error_of_that_host(hosts: AgentHosts) -> None:
    honest = hosts.open

    def open_session(access: SshNode) -> Session:
        if access.host == "gpu01":
            raise IndexError("an odd packet")  # as paramiko does
        return honest(access)

    hosts.open = open_session  # type: ignore[method-assign]
    hosts.start()
    hosts.look()
    reports = read_reports(hosts.run)
    assert "its answer is invalid: IndexError: an odd packet" in str(reports["gpu01"].error)
    assert reports["gpu02"].error is None


def test_an_error_of_a_host_is_cut() -> None:
    session = hostile_session(lambda request: json.dumps({"ok": False, "error": "x" * 3_000_000}).encode() + b"\n")
    with pytest.raises(SshError) as error:
        session.ask("beat", timeout_s=5)
    assert len(error.value.message) < 2100


@pytest.mark.parametrize("line", ["x", "noise\n"])
def test_a_login_node_that_prints_for_ever_is_left(tmp_path: Path, line: str) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!{sys.executable}\nwhile True: print({line!r} * 10_000, end='')\n")
    ssh.chmod(0o755)
    command = LoginCommand(arguments=["--version"])
    with pytest.raises(SshError, match="its login shell printed more than 262,144 bytes"):
        run_at_login(Login(host="hpc"), command, environ={"PATH": str(tmp_path)}, write_out=lambda data: None)


def test_a_long_list_of_files_comes_in_parts(tmp_path: Path) -> None:
    with running_hosts(tmp_path, "gpu01", fetch=["metrics"]) as hosts:
        hosts.start()
        folder = hosts.head.path / "tb"
        folder.mkdir()
        for number in range(15_000):
            (folder / f"{number}-{'x' * 200}").touch()
        (folder / "events").write_text("a curve")
        write_json(hosts.head.attempt(0).path / "end.json", {"outcome": "COMPLETED", "reason": "", "ended": 1.0})
        hosts.look()
        assert hosts.sessions[0].asked.count("run.look") == 2
        assert read_reports(hosts.run)["gpu01"].end_attempt == 0
        assert hosts.fetch()
        assert (hosts.run.path / "tb" / "events").read_text() == "a curve"
        assert len(list((hosts.run.path / "tb").iterdir())) == 15_001


def test_names_that_no_disk_takes_are_left_there(hosts: AgentHosts) -> None:
    files = {"tb/\ud800": [1, 1], "tb/" + "x" * 5000: [1, 1], "tb/../../../escaped": [1, 1], "/etc/x": [1, 1]}
    answer = answering(hosts, files, lambda request: say(b"x", parts=[read_part(length=1, size=1)]))
    hosts.open = lambda access: hostile_session(answer, access.host)  # type: ignore[method-assign]
    hosts.start()
    write_json(hosts.run.attempt(0).path / "end.json", {"outcome": "COMPLETED", "reason": "", "ended": 1.0})
    hosts.fetch()
    assert not list(hosts.directory.rglob("escaped"))
