"""What an unauthenticated client gets from the listeners of a run: nothing that needs the key."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import clusterddp
from clusterddp.errors import PreflightError
from clusterddp.network.rendezvous.connection import Signer, UnprovenError, VersionError
from clusterddp.network.rendezvous.server import PER_TURN, REST_S, Acceptor, Refusals
from clusterddp.places.worker.meeting import Hello, Seat, digest_spec, meet
from clusterddp.places.worker.worker import Decided
from tests.support.gang_runs import GangRun, running
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until
from tests.support.worker_ranks import Place, meeting, wait_for, worker

FACTS = {"torch": "2.13.0"}
SPEC = {"name": "lan", "env.API_KEY": "a-secret-value", "restarts": "2"}
DECIDED: dict[str, Any] = {
    "run": "brisk-otter-3",
    "token": "0" * 32,
    "attempt": 0,
    "identity": "hand",
    "nodes": [["node1", [0]], ["node2", [1]]],
    "gpus": False,
    "backend": "gloo",
    "master_addr": "127.0.0.1",
    "master_port": 29500,
    "reached": "127.0.0.1",
}


class Stranger:
    """One end of a connection that speaks as our own do; it knows a key, or none."""

    def __init__(self, sock: socket.socket, of: str, side: Any, key: str = "") -> None:
        sock.settimeout(PATIENCE * 10)
        self.got = b""
        """Everything that came."""
        self._sock, self._signer = sock, Signer(of, key, side)
        self._unread = b""
        sock.sendall(self._signer.hello())
        self._signer.meet(self._line())
        self.send({})

    def send(self, words: dict[str, Any]) -> None:
        self._sock.sendall(self._signer.sign(words))

    def read(self) -> dict[str, Any]:
        return self._signer.read(self._line())

    def read_all(self) -> bytes:
        """Return everything that comes until the other end hangs up."""
        with contextlib.suppress(ConnectionError):
            while data := self._sock.recv(65536):
                self.got += data
        return self.got

    def _line(self) -> bytes:
        while b"\n" not in self._unread:
            data = self._sock.recv(65536)
            assert data, "the other end has hung up"
            self.got += data
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """Serve the first connection to a port in a thread; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError, AssertionError), server.accept()[0] as sock:
                serve(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
        thread.join(PATIENCE * 20)
        assert not thread.is_alive()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def seat(number: int, port: int) -> Seat:
    return Seat(
        noun="node", number=number, size=2, size_from="ssh.hosts", names=("a", "b"), hosts=("127.0.0.1",), port=port
    )


def hello(of: Seat, key: str) -> Hello:
    return Hello(
        noun=of.noun, number=of.number, size=2, size_from="ssh.hosts", spec=digest_spec(SPEC, key), facts=FACTS
    )


@contextlib.contextmanager
def waiting(key: str, reports: list[str], timeout_s: float) -> Iterator[int]:
    """Let node 0 wait for the others meanwhile; yield its port."""
    node_0 = seat(0, free_port())

    def gather() -> None:
        with contextlib.suppress(PreflightError):
            meet(node_0, hello(node_0, key), lambda met: {}, timeout_s=timeout_s, key=key, report=reports.append)

    thread = threading.Thread(target=gather)
    thread.start()
    yield node_0.port or 0
    thread.join(PATIENCE * 20)
    assert not thread.is_alive()


def call(port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE * 5
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def join_as_node_1(port: int, key: str, timeout_s: float = 5.0) -> None:
    """Be node 1, and leave."""
    node_1 = seat(1, port)
    met = meet(node_1, hello(node_1, key), lambda met: {}, timeout_s=PATIENCE * timeout_s, key=key)
    for connection in met.connections:
        connection.close()
    Decided.from_json(met.decided, node_1)


def test_lines_are_read_once_in_their_direction_and_with_their_key() -> None:
    def pair(key: str, other: str) -> tuple[Signer, Signer]:
        head, client = Signer("x", key, "server"), Signer("x", other, "client")
        head.meet(client.hello())
        client.meet(head.hello())
        return head, client

    head, client = pair("mum", "mum")
    line = head.sign({"n": 1}).rstrip()
    assert client.read(line) == {"n": 1}
    for reader, text in ((client, line), (head, line), (pair("mum", "mum")[1], line)):
        with pytest.raises(UnprovenError):
            reader.read(text)
    head, client = pair("mum", "dad")
    with pytest.raises(UnprovenError):
        client.read(head.sign({}).rstrip())


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.0\r\n", b"[" * 9000, b'{"nonce": 1}', b"\xff\xfe"])
def test_what_is_no_hello_is_refused(words: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Signer("worker", "", "server").meet(words)


@pytest.mark.parametrize("version", ['"version": 2, ', ""])
def test_another_version_is_named(version: str) -> None:
    hello = Signer("worker", "", "client").hello().replace(b'"version": 3, ', version.encode())
    with pytest.raises(
        VersionError, match=r"another version of clusterddp: its rendezvous is (2|an earlier one), here"
    ):
        Signer("worker", "", "server").meet(hello)


def test_a_machine_and_a_node_0_of_other_versions_refuse_each_other_by_name() -> None:
    reports: list[str] = []
    of_before = Signer("worker", "", "client").hello().replace(b'"version": 3', b'"version": 2')
    with waiting("", reports, 2.0) as port, call(port) as stranger:
        stranger.sendall(of_before)
        stranger.settimeout(PATIENCE * 5)
        while stranger.recv(4096):
            pass
    assert any(
        "127.0.0.1: it has another version of clusterddp: its rendezvous is 2, here it is 3" in each for each in reports
    )
    refused = pytest.raises(PreflightError, match=r"did not reach node 0 at .*: it has another version of clusterddp")
    with serving(lambda sock: (sock.sendall(of_before), sock.recv(4096))) as port, refused:
        join_as_node_1(port, "")


def test_a_false_node_0_without_the_key_gets_nothing_of_the_spec() -> None:
    got: list[bytes] = []
    refused = pytest.raises(PreflightError, match="does not know the same CLUSTERDDP_JOIN_KEY")
    with serving(lambda sock: got.append(_false_node_0(sock))) as port, refused:
        join_as_node_1(port, "mum")
    assert b"a-secret-value" not in got[0]
    assert b"API_KEY" not in got[0]
    assert b"torch" not in got[0]


def test_without_a_key_a_node_0_gets_no_value_of_the_spec() -> None:
    got: list[bytes] = []
    with serving(lambda sock: got.append(_false_node_0(sock))) as port, pytest.raises(PreflightError):
        join_as_node_1(port, "")
    assert b"API_KEY" in got[0]
    assert b"a-secret-value" not in got[0]


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../escaped"},
        {"token": "short"},
        {"attempt": -1},
        {"attempt": 10**9},
        {"attempt": "1"},
        {"link": {"host": "127.0.0.1", "port": 70000}},
        {"link": None},
        {"reached": ["a"]},
        {"reached": "10.0.0.1\0"},
    ],
)
def test_an_answer_that_no_node_0_gives_is_refused(change: dict[str, Any]) -> None:
    link = {"host": "127.0.0.1", "port": 4711}
    decided = {"run": "brisk-otter-3", "token": "0" * 32, "attempt": 0, "reached": "127.0.0.1", "link": link}

    def answer(sock: socket.socket) -> None:
        head = Stranger(sock, "worker", "server")
        head.read(), head.read()
        head.send({"kind": "decided", "decided": decided | change})
        head.read_all()

    refused = pytest.raises(PreflightError, match="another process answers as node 0")
    with serving(answer) as port, refused:
        join_as_node_1(port, "")


def test_node_0_with_a_key_sends_a_stranger_nothing_but_a_nonce_and_a_signature() -> None:
    reports: list[str] = []
    with waiting("mum", reports, 2.0) as port:
        stranger = Stranger(call(port), "worker", "client")
        stranger.send({"kind": "join", **dataclasses.asdict(hello(seat(1, port), ""))})
        got = stranger.read_all()
    assert not any(word in got for word in (b"a-secret-value", b"API_KEY", b"2.13.0", b"refuse"))
    assert "a connection was refused: 127.0.0.1: it does not know the same CLUSTERDDP_JOIN_KEY" in reports


def test_node_0_without_a_key_sends_no_value_and_no_key_that_the_other_does_not_name() -> None:
    with waiting("", [], 1.0) as port:
        stranger = Stranger(call(port), "worker", "client")
        false = dataclasses.replace(hello(seat(1, port), ""), spec={"restarts": "0"})
        stranger.send({"kind": "join", **dataclasses.asdict(false), "left_s": 60.0})
        got = stranger.read_all()
    assert b"other values of restarts, 2 more" in got
    assert not any(word in got for word in (b"a-secret-value", b"API_KEY", b"lan"))


def test_ranks_with_the_same_key_meet_and_their_programs_do_not_see_it(tmp_path: Path) -> None:
    place = Place(tmp_path).write("import os\nassert 'CLUSTERDDP_JOIN_KEY' not in os.environ\n")
    ended = place.by_hand([0, 1], 2, CLUSTERDDP_JOIN_KEY="mum")
    assert [each.code for each in ended] == [0, 0], ended


def test_a_rank_without_the_key_is_refused_and_rank_0_reports_its_address(tmp_path: Path) -> None:
    place = Place(tmp_path, start_timeout="0:12").write()
    variables = {"WORLD_SIZE": "2", **meeting()}
    first = place.start(*worker(), RANK="0", CLUSTERDDP_JOIN_KEY="mum", **variables)
    other = place.start(*worker(), RANK="1", **variables)
    ended = wait_for([first, other])
    assert [each.code for each in ended] == [3, 3]
    assert "from 127.0.0.1 did not know the same CLUSTERDDP_JOIN_KEY" in ended[0].err
    assert "the process that answers there does not know the same CLUSTERDDP_JOIN_KEY" in ended[1].err
    assert "has to have the same value for all ranks, or be set for none" in ended[1].err


def test_a_false_rank_0_makes_no_directory_outside_that_of_the_runs(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    place = Place(tmp_path / "place", start_timeout="0:10").write()

    def answer(sock: socket.socket) -> None:
        head = Stranger(sock, "worker", "server")
        head.read(), head.read()
        head.send({"kind": "decided", "decided": DECIDED | {"run": "../../escaped/evil"}})
        head.read_all()

    with serving(answer) as port:
        (ended,) = place.by_hand([1], 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert (ended.code, "another process answers as rank 0" in ended.err) == (3, True)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"run": "a/b"},
        {"run": "."},
        {"token": "../x"},
        {"attempt": -1},
        {"attempt": 1.5},
        {"attempt": 10**7},
        {"master_port": 0},
        {"master_port": 65536},
        {"nodes": [["node1", [0, 2]]]},
        {"nodes": [["node1", [0, 0]]]},
        {"nodes": [[7, [0]]]},
        {"nodes": "node1"},
        {"nodes": [["node1", [0]]]},
        {"nodes": [["node1", [0, 1, 2]]]},
        {"nodes": [["node\x1b[2J", [0, 1]]]},
        {"master_addr": "10.0.0.1\0"},
        {"reached": "x" * 5000},
        {"gpus": "yes"},
    ],
)
def test_what_no_rank_0_decides_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PreflightError, match="another process answers as rank 0"):
        Decided.from_json(DECIDED | change, Seat(noun="rank", size=2))


def test_every_file_that_listens_is_in_the_table_of_listeners() -> None:
    package, table = Path(clusterddp.__file__).parent, (ROOT / "SECURITY.md").read_text()
    files = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\.(listen|bind|create_server)\([^)*]|bind_port\(", path.read_text())
    }
    assert {"node/link.py", "network/port.py"} < files
    assert [name for name in sorted(files) if f"`{name}`" not in table] == []


def test_a_turn_takes_some_connections_and_the_next_one_more() -> None:
    with selectors.DefaultSelector() as selector, socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        acceptor = Acceptor(server, selector)
        callers = [socket.create_connection(server.getsockname()) for _ in range(PER_TURN + 2)]
        turns = [acceptor.accept(0.0) for _ in range(3)]
        assert [len(turn) for turn in turns] == [PER_TURN, 2, 0]
        for sock in [*callers, *(connection for turn in turns for connection, _ in turn)]:
            sock.close()


def test_a_listener_without_descriptors_pauses_and_continues() -> None:
    with selectors.DefaultSelector() as selector, socket.create_server(("127.0.0.1", 0)) as server:
        acceptor = Acceptor(server, selector)
        caller = socket.create_connection(server.getsockname())
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            assert acceptor.accept(0.0) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert selector.select(0) == []
        ((connection, _),) = acceptor.accept(REST_S)
        assert selector.get_key(server)
        for sock in (caller, connection):
            sock.close()


def test_refusals_are_reported_at_once_and_then_as_a_number() -> None:
    reports: list[str] = []
    refusals = Refusals(reports.append)
    for now in (0.0, 1.0, 2.0, 100.0):
        refusals.add(f"came at {now:g}", now)
    assert reports == ["a connection was refused: came at 0", "3 connections were refused, the last one: came at 100"]


def test_a_flood_of_connections_stops_no_heartbeat_and_fills_no_log(tmp_path: Path) -> None:
    with running(tmp_path, "until_stop()", order={"lease_s": 3.0}) as gang:
        gang.await_up()
        over = time.monotonic() + 5.0
        floods = [threading.Thread(target=_flood, args=(gang, over)) for _ in range(3)]
        for flood in floods:
            flood.start()
        for flood in floods:
            flood.join()
        assert [rank.exit_code for rank in gang.ranks()] == [None] * 4, gang.logs()
        gang.attempt().stop_file.touch()
        assert gang.await_end() == [0, 0]
        assert gang.logs().count("refused") < 5


def test_a_supervisor_without_descriptors_waits_and_does_not_turn(tmp_path: Path) -> None:
    with running(tmp_path, "until_stop()") as gang:
        gang.await_up()
        wait_until(gang.attempt().start.exists)
        pid = gang.supervisors[0]
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
        lowest_free = min(set(range(len(taken) + 1)) - taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        callers = [socket.create_connection((gang.link["host"], gang.link["port"])) for _ in range(4)]
        time.sleep(0.5)
        before = _runnable_s(pid)
        time.sleep(3.0)
        assert Path(f"/proc/{pid}").exists(), gang.logs()
        assert _runnable_s(pid) - before < 2.0
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        for caller in callers:
            caller.close()
        gang.attempt().stop_file.touch()
        assert gang.await_end() == [0, 0]


def _false_node_0(sock: socket.socket) -> bytes:
    """Be a node 0 that knows no key; return all that came."""
    head = Stranger(sock, "worker", "server")
    with contextlib.suppress(AssertionError, ValueError, OSError):
        head.read(), head.read()
        head.send({"kind": "refused", "reason": "no", "hint": None})
    return head.read_all()


def _flood(gang: GangRun, until: float) -> None:
    open_now: list[socket.socket] = []
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            open_now.append(socket.create_connection((gang.link["host"], gang.link["port"]), timeout=1.0))
        if len(open_now) > 100:
            open_now.pop(0).close()
    for sock in open_now:
        sock.close()


def _runnable_s(pid: int) -> float:
    """Return how long a process has computed, or waited for a core to compute on."""
    computed, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return (int(computed) + int(waited)) / 1e9
