"""What the fuzzer mutates between processes: conversations, over a stand-in for a socket, and requests to dash."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clusterddp.network.rendezvous.connection import VERSION, Connection, Protocol, Role, Signer
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity
from tests.fuzz.mutations import TOKEN, Example, Target
from tests.support.handmade_runs import make_run, start_attempt


class Wire:
    """Stands for a socket whose other end has sent all that it will send."""

    def __init__(self, said: bytes) -> None:
        self._said = io.BytesIO(said)

    def recv(self, size: int) -> bytes:
        return self._said.read(size)

    def send(self, data: bytes) -> int:
        return len(data)

    sendall = send

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 29500

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.2", 40000

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


def signed(ours: Signer, role: Role, data: bytes) -> bytes:
    """Return what the other end of a connection sends: its hello, its proof, then `data`, line by line, signed."""
    theirs = Signer(ours._protocol, "k", role)
    theirs.meet(ours.hello())
    lines = [b"{}", *data[:1_000_000].split(b"\n")]
    return theirs.hello() + b"".join(
        theirs._mac(role, number, line) + b" " + line + b"\n" for number, line in enumerate(lines)
    )


def connection_with(data: bytes, protocol: Protocol, role: Role) -> Connection:
    """Return our end of a connection over which the other end has sent all that it will send."""
    connection = Connection(Wire(b""), protocol=protocol, key="k", role=role, now=time.monotonic())  # type: ignore[arg-type]
    said = signed(connection.signer, "client" if role == "server" else "server", data)
    connection.sock = Wire(said)  # type: ignore[assignment]
    return connection


def said_over_sockets(root: Path) -> Iterator[Target]:
    yield _link()
    yield from _meeting()
    yield _dash(root / "served")


def _link() -> Target:
    from clusterddp.network.rendezvous.client import Attempt
    from clusterddp.node.link import SUPERVISORS, Limits, Peer

    limits = Limits(host_silence_s=30, heartbeat_timeout_s=60, spans_hosts=True)

    def read(is_signed: bool, data: bytes, rng: random.Random) -> None:
        ours = connection_with(data.replace(b"\n", b" "), SUPERVISORS, "server")
        if not is_signed:
            ours.sock = Wire(data + b"\n" + data)  # type: ignore[assignment]
        received = ours.receive(1.0) + ours.receive(1.0)
        peer = Peer(limits, lambda now: Attempt(("127.0.0.1", 1), now), when_quiet=False)
        peer.take(received)
        if ours.lost is None or not all(isinstance(each["kind"], str) for each in received):
            raise AssertionError(f"{ours.lost}: {received}")

    said = [{"kind": "exit", "rank": 1, "exit_code": 1, "error": "x"}, {"kind": "heartbeat", "received": 3}]
    hello = {"clusterddp": "supervisor", "version": VERSION, "nonce": "a" * 32}
    examples = [Example(value=each, what=True) for each in said] + [Example(value=hello, what=False)]
    return Target(name="the link of supervisors", examples=examples, read=read)


def _dash(runs_dir: Path) -> Target:
    from clusterddp.cli.dash import DashServer

    attempt = start_attempt(make_run(runs_dir, "brisk-otter-3"))
    attempt.stdout(0).write_text("a line of the run\n")
    server = DashServer(runs_dir, port=0, environ={})

    def read(has_key: bool, data: bytes, rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        said = io.StringIO()
        with ours, contextlib.redirect_stderr(said):
            ours.sendall(data[:100_000])
            ours.shutdown(socket.SHUT_WR)
            server.receiving.acquire()
            server.process_request_thread(theirs, ("127.0.0.1", 1))
            answer = b""
            with contextlib.suppress(ConnectionError):  # more was sent than is read
                while chunk := ours.recv(1 << 16):
                    answer += chunk
        if said.getvalue():
            raise AssertionError(said.getvalue())
        if not has_key and (b"a line of the run" in answer or b"<table" in answer):
            raise AssertionError("a request without the key has read a run")

    paths = ("/", "/run?run=brisk-otter-3", "/compare?run=brisk-otter-3", "/bytes?run=brisk-otter-3&rank=0&offset=2")
    key = {True: f"X-Clusterddp-Key: {server.key}\r\n", False: "Cookie: a=1\r\n"}
    examples = [
        Example(
            value=f"GET {path} HTTP/1.1\r\nHost: localhost:8271\r\n{key[has_key]}If-None-Match: x\r\n\r\n", what=has_key
        )
        for path in paths
        for has_key in (True, False)
    ]
    return Target(name="requests to dash", examples=examples, read=read)


def _meeting() -> Iterator[Target]:
    from clusterddp.network.rendezvous.client import Found
    from clusterddp.places.worker.meeting import WORKER, Hello, MeetingServer, Result, Seat, await_decision
    from clusterddp.places.worker.place import group_by_host
    from clusterddp.places.worker.worker import Carried, Decided

    own = Hello(noun="rank", number=0, size=2, size_from="WORLD_SIZE", spec={"name": "0"}, facts={"torch": "2"})
    hello = {"kind": "join", **dataclasses.asdict(dataclasses.replace(own, number=1, nonce="other"))}

    def read_hello(what: Any, data: bytes, rng: random.Random) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            seat = Seat(noun="rank", size=2)
            server = MeetingServer(listener, seat, own, deadline=1e9, key="k", report=lambda text: None)
            server._server._unauthenticated.append(connection_with(data, WORKER, "server"))
            try:
                for member in server.take_turn(0.0):
                    server._admit(member)
                    group_by_host((own, member.hello))
            finally:
                server.close()

    def read_decided(what: Any, data: bytes, rng: random.Random) -> None:
        connection = connection_with(b'{"kind": "complete"}\n' + data, WORKER, "client")
        verdict = await_decision(Found(connection, connection.receive(1.0)), time.monotonic() - 10)
        if isinstance(verdict, Result):
            noun: Any = "node" if verdict.decided.get("link") else "rank"
            Decided.from_json(verdict.decided, Seat(noun=noun, size=4))

    ranks = Decided(
        run="brisk-otter-3", token=TOKEN, attempt=0, identity="job", nodes=(("a", (0, 1)), ("b", (2, 3))), gpus=False,
        backend="gloo", master_addr="10.0.0.1", master_port=29500, reached="10.0.0.1",
    )  # fmt: skip
    nodes = Decided(run="x", token=TOKEN, attempt=0, reached="10.0.0.1", link={"host": "a", "port": 7})
    answers = [Example(value={"kind": "decided", "decided": dataclasses.asdict(each)}) for each in (ranks, nodes)]
    yield Target(name="a rank that comes", examples=[Example(value=hello)], read=read_hello)
    yield Target(name="what the first one decides", examples=answers, read=read_decided)
    refused = [
        Example(value={"kind": "refused", "reason": "no", "hint": "none"}),
        Example(value={"kind": "other_job"}),
    ]
    yield Target(name="what the first one refuses", examples=refused, read=read_decided, reads_examples=False)

    def read_record(what: Any, data: bytes, rng: random.Random) -> None:
        run = RunDir(Path.cwd() / "carried")
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir()
        carried = Carried(run, 1, SimpleNamespace(pid=os.getpid()), writes=True)  # type: ignore[arg-type]
        carried._connections, carried._unread = [connection_with(data, WORKER, "client")], []
        carried._receive()

    start = {"attempt": 0, "supervisor": dataclasses.asdict(ProcessIdentity.of()), "nodes": []}
    end = {"outcome": "FAILED", "reason": "x", "ended": 1.0, "root_cause": None}
    records = [
        Example(value={"kind": "record", "file": "start", "attempt": 0, "record": start}),
        Example(value={"kind": "record", "file": "end", "attempt": 0, "record": end}),
    ]
    yield Target(name="records of node 0", examples=records, read=read_record)
