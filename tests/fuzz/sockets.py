"""What the fuzzer mutates between supervisors, ranks and machines: conversations, over a stand-in for a socket."""

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

from clusterddp.rendezvous.connection import Connection, Protocol
from clusterddp.rendezvous.handshake import VERSION, Role, Signer
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity
from tests.fuzz.mutations import TOKEN, Example, Target, rows


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


def said_over_sockets() -> Iterator[Target]:
    yield _link()
    yield from _ranks()
    yield from _joining()
    yield _probed()


def _link() -> Target:
    from clusterddp.node.link import SUPERVISORS, Limits, Peer
    from clusterddp.rendezvous.client import Attempt

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


def _ranks() -> Iterator[Target]:
    from clusterddp.network.interface import read_links
    from clusterddp.network.socket_links import faster_networks, names_in
    from clusterddp.ranks.launched import Launched
    from clusterddp.rendezvous.client import Found
    from clusterddp.rendezvous.rank_client import _await_decision
    from clusterddp.rendezvous.rank_messages import RANKS, introduce_rank
    from clusterddp.rendezvous.rank_server import RankServer
    from clusterddp.submission.worker.place import Decided, nodes_of

    own = introduce_rank(rank=0, world_size=2, world_size_from="WORLD_SIZE", spec="0" * 64, identity="job")
    hello = {"kind": "join", **dataclasses.asdict(dataclasses.replace(own, rank=1, nonce="other"))}
    launched = Launched(launcher=None, world_size=2)

    def read_hello(what: Any, data: bytes, rng: random.Random) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = RankServer(listener, launched, own, deadline=1e9, key="k")
            server._participants.server._unauthenticated.append(connection_with(data, RANKS, "server"))
            try:
                for member in server.take_turn(0.0):
                    server._admit(member)
                    nodes_of((own, member.introduction))
                    faster_networks([own.links, member.introduction.links], "127.0.0.1")
            finally:
                server.close()

    def read_decided(what: Any, data: bytes, rng: random.Random) -> None:
        connection = connection_with(b'{"kind": "complete"}\n' + data, RANKS, "client")
        verdict = _await_decision(Found(connection, connection.receive(1.0)), time.monotonic() - 10)
        if isinstance(verdict, dict):
            names_in(Decided.from_json(verdict, world_size=4).networks, read_links())

    decided = Decided(
        run="brisk-otter-3", token=TOKEN, attempt=0, identity="job", nodes=(("a", (0, 1)), ("b", (2, 3))), gpus=False,
        backend="gloo", master_addr="10.0.0.1", master_port=29500, reached="10.0.0.1",
        networks=("10.1.0.0/16",),
    )  # fmt: skip
    answers = [Example(value={"kind": "decided", "decided": dataclasses.asdict(decided)})]
    yield Target(name="a rank that comes", examples=[Example(value=hello)], read=read_hello)
    yield Target(name="what rank 0 decides", examples=answers, read=read_decided)
    refused = [
        Example(value={"kind": "refused", "reason": "no", "hint": "none"}),
        Example(value={"kind": "other_job"}),
    ]
    yield Target(name="what rank 0 refuses", examples=refused, read=read_decided, reads_examples=False)


def _joining() -> Iterator[Target]:
    from clusterddp.rendezvous.client import Found
    from clusterddp.rendezvous.server import Participants
    from clusterddp.submission.join.client import JoinClient
    from clusterddp.submission.join.messages import JOIN
    from clusterddp.submission.join.server import JoinServer

    facts: dict[str, str | None] = {"clusterddp": "1", "torch": "2", "Python": "3.12"}

    def join_client() -> JoinClient:
        return JoinClient(hosts=("a", "b"), node_rank=1, port=1, key="k", report=lambda text: None)

    def read_member(what: Any, data: bytes, rng: random.Random) -> None:
        here = JoinServer(hosts=("a", "b"), spec={"name": "x"}, facts=facts, key="k", port=1, report=lambda text: None)
        with contextlib.closing(here), socket.create_server(("127.0.0.1", 0)) as listener:
            here.clients = Participants(listener, protocol=JOIN, key="k", num_expected=2, report=lambda text: None)
            here.clients.server._unauthenticated.append(connection_with(data, JOIN, "server"))
            here.take_turn(here.clients, 0.0)
            here.take_turn(here.clients, 0.0)

    who = {"kind": "join", "node_rank": 1, "host": "b", "pid": 7, "facts": facts, "spec": {"name": "x"}}
    yield Target(name="a machine that joins", examples=[Example(value=who)], read=read_member)

    def read_beginning(what: Any, data: bytes, rng: random.Random) -> None:
        connection = connection_with(data, JOIN, "client")
        with contextlib.closing(join_client()) as client:
            client._await_beginning(Found(connection, connection.receive(1.0)), time.monotonic() - 10, 0.1)

    begin = {
        "kind": "begin", "run": "x", "token": TOKEN, "attempt": 0, "link": {"host": "a", "port": 7},
        "master_addr": "10.0.0.1",
    }  # fmt: skip
    said = rows({"kind": "waiting", "for": ["node 2 (c)"]}, begin)
    yield Target(name="what node 0 says to a machine", examples=[Example(value=said)], read=read_beginning)

    def read_update(what: Any, data: bytes, rng: random.Random) -> None:
        from clusterddp.submission.join.updates import Joined

        run = RunDir(Path.cwd() / "joined")
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir()
        supervisor = SimpleNamespace(pid=os.getpid(), poll=lambda: None, stdin=None)
        with contextlib.closing(join_client()) as client:
            client._connection = connection_with(data, JOIN, "client")
            Joined(run, 1, supervisor, client)._exchange()  # type: ignore[arg-type]

    start = {"attempt": 0, "supervisor": dataclasses.asdict(ProcessIdentity.of()), "nodes": []}
    end = {"outcome": "FAILED", "reason": "x", "ended": 1.0, "root_cause": None}
    updates = [
        Example(value={"kind": "started", "attempt": 0, "record": start}),
        Example(value={"kind": "ended", "attempt": 0, "record": end}),
    ]
    yield Target(name="updates of a joined run", examples=updates, read=read_update)


def _probed() -> Target:
    from clusterddp.agent.network import PROBE, Try
    from clusterddp.agent.operations import Target as Address

    def read_answer(what: Any, data: bytes, rng: random.Random) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            way = Address(target=0, address="127.0.0.1", port=listener.getsockname()[1], name="gpu01")
            attempt = Try(way, "k", None)
            attempt._attempt.connected = True
            attempt._attempt._connection = connection_with(data, PROBE, "client")
            attempt.go_on()
            attempt.close()
            attempt.result(0)

    answer = {"kind": "here", "name": "gpu01", "seen": "10.0.0.2", "padding": " " * 99}
    return Target(name="who answers at an address", examples=[Example(value=answer)], read=read_answer)
