"""What the fuzzer mutates between supervisors, ranks and machines: conversations, over a stand-in for a socket."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from clusterddp.rendezvous.signed import Signer
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity
from tests.fuzz.mutations import TOKEN, Example, Target, rows


class Wire:
    """Stands for a socket at whose other end somebody has said all that he will say."""

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


def signed(greeting: bytes, side: Literal["head", "member"], of: str, data: bytes) -> bytes:
    """Return what the other end of a signed connection sends: its greeting, then `data`, line by line, signed."""
    theirs = Signer("k", side)
    theirs.meet(greeting, of)
    lines = (
        theirs._mac(theirs._sends_as, number, line) + b" " + line + b"\n"
        for number, line in enumerate(data[:1_000_000].split(b"\n"))
    )
    return theirs.greeting(of) + b"".join(lines)


def said_over_sockets() -> Iterator[Target]:
    yield _link()
    yield from _muster()
    yield from _joining()
    yield _probed()


def _link() -> Target:
    from clusterddp.node.connecting import Connecting
    from clusterddp.node.link import Channel
    from clusterddp.node.peer import Limits, Peer

    limits = Limits(host_silence_s=30, heartbeat_timeout_s=60, spans_hosts=True)

    def read(is_signed: bool, data: bytes, rng: random.Random) -> None:
        nonce = b'{"nonce": "' + b"a" * 32 + b'"}\n'
        ours = Channel(Wire(b""), token=TOKEN, side="head", now=0.0)  # type: ignore[arg-type]
        ours._nonce = "b" * 32
        body = data.replace(b"\n", b" ")
        ours._nonces = ("b" * 32 + "a" * 32).encode()
        signed = ours._mac(b"member", 0, body) + b" " + body + b"\n"
        ours._nonces = None
        ours.sock = Wire(nonce + signed if is_signed else data + b"\n" + data)  # type: ignore[assignment]
        heard = ours.receive(1.0)
        peer = Peer(limits, SimpleNamespace(unregister=lambda sock: None), Connecting, when_quiet=False)  # type: ignore[arg-type]
        peer.take(heard)
        if ours.lost is None or not all(isinstance(each["kind"], str) for each in heard):
            raise AssertionError(f"{ours.lost}: {heard}")

    said = [{"kind": "exit", "rank": 1, "exit_code": 1, "error": "x"}, {"kind": "heartbeat", "heard": 3}]
    examples = [Example(value=each, what=True) for each in said] + [Example(value={"nonce": "a" * 32}, what=False)]
    return Target(name="the link of supervisors", examples=examples, read=read)


def _muster() -> Iterator[Target]:
    from clusterddp.network.interface import read_links
    from clusterddp.network.socket_links import faster_networks, names_in
    from clusterddp.rendezvous.muster_guest import COMMAND, Visit, _stay
    from clusterddp.rendezvous.muster_host import Guest, _Muster
    from clusterddp.rendezvous.muster_words import own_hello
    from clusterddp.submission.worker.place import Decided, nodes_of

    own = own_hello(rank=0, world_size=2, world_size_from="WORLD_SIZE", spec="0" * 64, identity="job")
    hello = dataclasses.asdict(dataclasses.replace(own, rank=1, nonce="other"))

    def read_hello(what: Any, data: bytes, rng: random.Random) -> None:
        muster = object.__new__(_Muster)
        muster._own, muster._guests, muster._left = own, {}, {}
        muster._selector, muster._scout, muster._deadline = (
            SimpleNamespace(unregister=lambda sock: None),
            SimpleNamespace(),
            1e9,
        )  # type: ignore[assignment]
        from collections import Counter

        muster._reached, muster._reached_at_home = Counter(), []
        signer = Signer("k", "head")
        guest = Guest(Wire(signed(signer.greeting(COMMAND), "member", COMMAND, data)), signer)  # type: ignore[arg-type]
        muster._strangers = [guest]
        if muster._read(guest) and guest.hello is not None:
            muster._admit(guest)
            nodes_of((own, guest.hello))
            faster_networks([own.links, guest.hello.links], "127.0.0.1")

    def read_decided(what: Any, data: bytes, rng: random.Random) -> None:
        signer = Signer("k", "member")
        said = signed(signer.greeting(COMMAND), "head", COMMAND, b'{"complete": true}\n' + data)
        visit = Visit(Wire(said), signer)  # type: ignore[arg-type]
        assert visit.meet(time.monotonic() + 1)
        answer = _stay(visit, visit.read(time.monotonic() + 1), time.monotonic() + 1)
        if not isinstance(answer, str):
            names_in(Decided.from_json(answer, world_size=4).networks, read_links())

    decided = Decided(
        run="brisk-otter-3", token=TOKEN, attempt=0, identity="job", nodes=(("a", (0, 1)), ("b", (2, 3))), gpus=False,
        backend="gloo", master_addr="10.0.0.1", master_port=29500, reached="10.0.0.1",
        networks=("10.1.0.0/16",),
    )  # fmt: skip
    answers = [Example(value={"decided": dataclasses.asdict(decided)})]
    yield Target(name="a rank that comes", examples=[Example(value=hello)], read=read_hello)
    yield Target(name="what rank 0 decides", examples=answers, read=read_decided)
    refused = [Example(value={"refused": "no", "hint": "none"}), Example(value={"other": True})]
    yield Target(name="what rank 0 refuses", examples=refused, read=read_decided, reads_examples=False)


def _joining() -> Iterator[Target]:
    from clusterddp.rendezvous.acceptor import Refusals
    from clusterddp.submission.join.head import Gathering, Visitor
    from clusterddp.submission.join.member import Seat
    from clusterddp.submission.join.words import Line

    facts: dict[str, str | None] = {"clusterddp": "1", "torch": "2", "Python": "3.12"}

    def line_with(data: bytes, side: Literal["head", "member"]) -> Line:
        line = Line(Wire(b""), "k", side)  # type: ignore[arg-type]
        said = signed(line.signer.greeting("join"), "member" if side == "head" else "head", "join", data)
        line.sock = Wire(said)  # type: ignore[assignment]
        return line

    def gathering() -> Gathering:
        return Gathering(hosts=("a", "b"), spec={"name": "x"}, facts=facts, key="k", port=1, tell=lambda text: None)

    def read_visitor(what: Any, data: bytes, rng: random.Random) -> None:
        here = gathering()
        visitor = Visitor(line=line_with(data, "head"), came=time.monotonic(), peer="p", reached="r")
        here._strangers.append(visitor)
        refusals = Refusals(lambda text: None)
        here._hear_all(refusals)
        here._hear_all(refusals)

    who = {"node_rank": 1, "host": "b", "pid": 7, "facts": facts, "spec": {"name": "x"}}
    yield Target(name="a machine that joins", examples=[Example(value=who)], read=read_visitor)

    def read_seat(what: Any, data: bytes, rng: random.Random) -> None:
        seat = Seat(hosts=("a", "b"), node_rank=1, port=1, key="k", tell=lambda text: None)
        line = line_with(data, "member")
        line.hear_all = line.hear()  # type: ignore[attr-defined]
        seat._heard = line.hear_all  # type: ignore[attr-defined]
        line.ended = True
        seat._connect = lambda head, deadline, timeout_s: line  # type: ignore[method-assign]
        seat._next = lambda deadline: seat._heard.pop(0) if seat._heard else None  # type: ignore[method-assign]
        seat.take({"name": "x"}, facts, 0.1)

    begin = {"run": "x", "token": TOKEN, "attempt": 0, "link": {"host": "a", "port": 7}, "master_addr": "10.0.0.1"}
    words = rows({"node_rank": 0}, {"waiting_for": ["node 2 (c)"]}, begin)
    yield Target(name="what node 0 says to a machine", examples=[Example(value=words)], read=read_seat)

    def read_news(what: Any, data: bytes, rng: random.Random) -> None:
        from clusterddp.submission.join.news import Joined

        run = RunDir(Path.cwd() / "joined")
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir()
        supervisor = SimpleNamespace(pid=os.getpid(), poll=lambda: None, stdin=None)
        seat = Seat(hosts=("a", "b"), node_rank=1, port=1, key="k", tell=lambda text: None)
        seat._line = line_with(data, "member")
        Joined(run, 1, supervisor, seat)._exchange()  # type: ignore[arg-type]

    started = {
        "started": {"attempt": 0, "supervisor": dataclasses.asdict(ProcessIdentity.of()), "nodes": []},
        "attempt": 0,
    }
    ended = {"ended": {"outcome": "FAILED", "reason": "x", "ended": 1.0, "root_cause": None}, "attempt": 0}
    yield Target(name="news of a joined run", examples=[Example(value=started), Example(value=ended)], read=read_news)


def _probed() -> Target:
    from clusterddp.agent.listener import PAYLOAD
    from clusterddp.agent.ways import Target as Way
    from clusterddp.agent.ways import Try

    def read(what: Any, data: bytes, rng: random.Random) -> None:
        attempt = object.__new__(Try)
        attempt.target = Way(target=0, address="10.0.0.1", port=7, name="gpu01")
        attempt.outcome, attempt.detail, attempt.left_from, attempt.seen_from, attempt.round_trip_ms = (
            None,
            "",
            None,
            None,
            None,
        )
        attempt._unsent, attempt._heard, attempt._connected = b"", b"", True
        attempt.socket = SimpleNamespace(  # type: ignore[assignment]
            recv=Wire(data.ljust(PAYLOAD)).recv, getsockopt=lambda *names: bytes(104)
        )
        attempt.go_on()
        attempt.facts()

    return Target(
        name="who answers at an address", examples=[Example(value={"name": "gpu01", "seen": "10.0.0.2"})], read=read
    )
