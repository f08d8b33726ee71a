"""The meeting of all participants of a run over TCP, before torch is imported: ranks, or nodes that start their ranks.

Participant 0 listens, counts the others as they connect, decides, and sends all of them its decision. When one is
missing or does not match, every participant that has connected ends with the same error, which names the machine and
the value, instead of a hang in init_process_group.

    N    {"kind": "join", ...: a Hello}                        once participant 0 is authenticated
    0    {"kind": "welcome"}
         {"kind": "complete"}                                  all have connected; the decision follows
         {"kind": "decided", "decided": {...}}                 its token is masked with the key
         {"kind": "refused", "reason": str, "hint": str | null}   the last message
         {"kind": "other_job"}                                 participants of another job meet here
         {"kind": "record", "file", "attempt", "record"}       to nodes, while the run lasts (worker.py)

With a key both sides prove that they know it before they send data of the run. Without one no process is authenticated:
the meeting then detects mistakes only, and torch's own store does no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.network.interface import LOOPBACK_ADDRESS, addresses_of, is_loopback
from clusterddp.network.port import bind_port, reserve_port, walk_ports
from clusterddp.network.rendezvous.client import Found, NotFound, Search
from clusterddp.network.rendezvous.connection import (
    JOIN_KEY,
    Connection,
    Loss,
    Message,
    Protocol,
    flush_all,
    raise_if_refused,
    refusal,
)
from clusterddp.network.rendezvous.server import Arrival, Server
from clusterddp.places.base import Report, no_report
from clusterddp.ranks.environment import LISTENER_FD, spell_ranks
from clusterddp.run.record import boot_id
from clusterddp.wire import build

WORKER = Protocol(name="worker", key=JOIN_KEY, max_bytes_to_server=250_000, max_bytes_to_client=4_000_000)
"""A hello has some 50 bytes for each key of the spec; participant 0 sends a few dozen bytes for each rank."""
IN_USE_S = 10.0
"""How long to retry while a port is in use: an earlier start may just be ending."""
LINGER_S = 10.0
"""How long participant 0 still accepts and refuses late ones after a failure."""
_PORTS = 8
"""How many ports participant 0 tries when none is given."""
_FLUSH_S = 5.0
_DECISION_S = 300.0
"""How long participant 0 may take to decide, once all have been counted."""
_EXTRA_S = 5.0
"""How long a decision may take that is due when this participant's time is up."""
_MAX_DIFFERENCES = 3
_MAX_TEXT = 1024
_STRANGER = Loss("stranger", "another program answers there")
_OTHER_JOB = Loss("failed", "the participants of another job meet there")
_NO_DECISION = Loss("failed", "the connection was accepted and no decision was sent")
_NO_KEY = Loss("unproven", f"the process that answers there does not know the same {JOIN_KEY}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The place of a participant among all, and where they meet; each value with the variable or key that has it."""

    noun: Literal["rank", "node"]
    number: int = 0
    size: int = 1
    size_from: str = "alone"
    names: tuple[str, ...] = ()
    """The hosts of all participants, where they are known before the meeting."""
    hosts: tuple[str, ...] = ()
    """Candidate addresses of participant 0, tried in this order."""
    hosts_from: str = "the launcher"
    port: int | None = None
    """None: participant 0 takes the first free port of a list that follows from `identity`."""
    port_from: str = "the job's name"
    identity: str = ""
    """Identifies the job where no port is given: participants of another job may connect to the same port."""

    @property
    def ports(self) -> list[int]:
        return [self.port] if self.port is not None else walk_ports(self.identity, _PORTS)

    def spell(self, numbers: Sequence[int]) -> str:
        """Write participants: `ranks 0-2`, `node 2 (gpu03)`."""
        if self.names:
            return ", ".join(f"{self.noun} {number} ({self.names[number]})" for number in numbers)
        return spell_ranks(numbers).replace("rank", self.noun, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message of a participant."""

    noun: str
    number: int
    size: int
    size_from: str
    """The variable or key that has the size."""
    spec: dict[str, str]
    """A digest of each value of the spec that this participant has read, by dotted key; see `digest_spec`."""
    facts: dict[str, str]
    """What has to be the same for all: its name -> its version, empty: none."""
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=boot_id)
    """An id of the machine: the same for two host names of one machine."""
    pid: int = field(default_factory=os.getpid)
    local_rank: int | None = None
    gpus: int = 0
    """How many GPUs this rank sees."""
    identity: str = ""
    left_s: float = 0.0
    """How long this participant still waits, in seconds."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """A random id of the process."""

    @property
    def name(self) -> str:
        return f"{self.noun} {self.number} on {self.host}"

    @property
    def place(self) -> tuple[str, str]:
        """Equal for the ranks of one node."""
        return self.host, self.machine

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Hello:
        """Read a participant's first message."""
        hello: Hello = build(cls, data, "hello")
        if min(hello.number, hello.size, hello.pid) < 0:
            raise ValueError("a number from 0 is expected")
        texts = (hello.noun, hello.host, hello.size_from, *hello.facts, *hello.facts.values(), *hello.spec)
        if not all(text.isprintable() and len(text) < _MAX_TEXT for text in texts):
            raise ValueError("a name is expected")
        return hello


@dataclass(frozen=True, kw_only=True, slots=True)
class Met:
    """All participants, once participant 0 has counted them."""

    hellos: tuple[Hello, ...]
    """By number."""
    reached: str
    """The address at which most others have reached participant 0."""
    port: int
    """The port on which participant 0 listened."""


Decide = Callable[[Met], dict[str, Any]]
"""Makes participant 0's decision, which all receive; its `token` is a hexadecimal secret."""


@dataclass(frozen=True, slots=True)
class MasterPort:
    """The port on which participant 0 listens: for this meeting, then for torch's store.

    `holder` reserves the port, without listening, for a program that binds it later (network/port.py).
    """

    listener: socket.socket
    holder: socket.socket

    def keep_over_exec(self, *, listening: bool) -> dict[str, str]:
        """Keep the port open in the program that this process executes; return the variables for it.

        `listening`: its store takes over the listener (node/store_listener.py); otherwise it binds the port itself.
        """
        kept, closed = (self.listener, self.holder) if listening else (self.holder, self.listener)
        closed.close()
        kept.set_inheritable(True)
        return {LISTENER_FD: str(kept.fileno())} if listening else {}

    def close(self) -> None:
        self.listener.close()
        self.holder.close()


@dataclass(kw_only=True, slots=True)
class Result:
    """What a meeting leaves."""

    decided: dict[str, Any]
    port: MasterPort | None = None
    """On rank 0: the port, which is still open."""
    connections: list[Connection] = field(default_factory=list)
    """Between nodes: those of node 0 to all others, or the one to node 0."""
    unread: list[Message] = field(default_factory=list)
    """Messages that came right after the decision."""


def digest_spec(values: Mapping[str, str], key: str) -> dict[str, str]:
    """Return a digest of each value; without the key it reveals a value only to a process that can guess it."""
    return {
        name: hmac.new(key.encode(), f"{name} {value}".encode(), hashlib.sha256).hexdigest()[:16]
        for name, value in values.items()
    }


def meet(
    seat: Seat, own: Hello, decide: Decide, *, timeout_s: float, key: str = "", report: Report = no_report
) -> Result:
    """Meet the other participants; return participant 0's decision.

    `key`: the key that all have; empty: none. `report` receives sentences on who has come. Nodes keep their
    connections, and node 0 releases the port before it decides; ranks close them, and rank 0 keeps the port.
    Raises: PreflightError: not all come, or they do not match; all that have connected raise the same error.
    """
    deadline = time.monotonic() + timeout_s
    if seat.size == 1:
        holder, port = reserve_port(own.nonce)
        holder.close()
        return Result(decided=decide(Met(hellos=(own,), reached=LOOPBACK_ADDRESS, port=seat.port or port)))
    where = f"port {seat.ports[0]}" if seat.port else f"one of the ports {seat.ports[0]} to {seat.ports[-1]}"
    if seat.number:
        report(
            f"{seat.noun} {seat.number} of {seat.size} connects to {seat.hosts[0]}, {where}; timeout {timeout_s:g} s"
        )
        answer = ask_first(seat, own, seat.hosts, deadline, key)
        if isinstance(answer, Result):
            return answer
        raise _unreached(seat, own, answer, timeout_s)
    master = _open_master_port(seat, own, deadline, key)
    others = seat.spell(range(1, seat.size))
    report(f"{seat.noun} 0 of {seat.size} waits at {where} for {others}; timeout {timeout_s:g} s")
    if not key:
        report(f"note: {JOIN_KEY} is not set: any process that reaches the port can take part")
    server = MeetingServer(master.listener, seat, own, deadline=deadline, key=key, report=report)
    try:
        server.await_all(timeout_s)
        server.send_all({"kind": "complete"})
        met = server.met()
        if seat.noun == "node":
            master.close()
        decided = decide(met)
        for connection, hello in server.members.values():
            masked = mask(decided["token"], key, hello.nonce)
            connection.send({"kind": "decided", "decided": decided | {"token": masked}})
        if seat.noun == "node":
            return Result(decided=decided, connections=server.release())
        return Result(decided=decided, port=master)
    except ClusterddpError as error:
        server.refuse_all(error)
        raise
    finally:
        server.close()


class Member(NamedTuple):
    """A participant that has authenticated and introduced itself."""

    connection: Connection
    hello: Hello


class MeetingServer:
    """Participant 0's server, and the participants that have connected to it."""

    def __init__(
        self, listener: socket.socket, seat: Seat, own: Hello, *, deadline: float, key: str, report: Report
    ) -> None:
        self._port = int(listener.getsockname()[1])
        self._seat = seat
        self._own = own
        self._deadline = deadline
        self._key = key
        self._report = report
        self.members: dict[int, Member] = {}
        """Those that are counted, by number."""
        self._left: dict[int, Hello] = {}
        """Those that were counted and have disconnected."""
        self._arrived: list[Member] = []
        """Those that have introduced themselves, and are neither counted nor refused yet."""
        self._refused: set[int] = set()
        """Those that know why the run cannot begin."""
        self._reached: Counter[str] = Counter()
        """The addresses at which participants on other hosts have reached this one."""
        self._reached_locally: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._server = Server(listener, self._selector, protocol=WORKER, key=key, num_expected=seat.size, report=report)
        self._elsewhere = ""
        """Says that the address of participant 0 is not this host's."""
        self._twin: PreflightError | None = None
        """What another participant 0, which listens at that address, has answered."""
        if seat.hosts and not any(map(_is_here, seat.hosts)):
            named = f"{seat.hosts[0]} (from {seat.hosts_from})"
            self._elsewhere = f"; {named} is not an address of {own.host}, where {seat.noun} 0 is"
            threading.Thread(target=self._look_for_twin, daemon=True).start()

    def release(self) -> list[Connection]:
        """Return the connections to all others; `close` leaves them open."""
        connections = [member.connection for member in self.members.values()]
        self.members.clear()
        return connections

    def close(self) -> None:
        """Close all connections; the listener stays open for torch's store."""
        connections = self.release()
        flush_all(connections, _FLUSH_S)
        for connection in connections:
            connection.close()
        self._server.close_unauthenticated()
        self._selector.close()

    def await_all(self, timeout_s: float) -> None:
        """Wait until every participant has connected."""
        while len(self.members) + 1 < self._seat.size:
            if self._twin is not None:
                raise self._twin
            if time.monotonic() >= self._deadline:
                raise self._missing(timeout_s)
            self._arrived = self.take_turn()
            while self._arrived:
                self._admit(self._arrived.pop(0))

    def _look_for_twin(self) -> None:
        there = dataclasses.replace(self._seat, port=self._port)
        try:
            ask_first(there, self._own, self._seat.hosts[:1], self._deadline, self._key)
        except PreflightError as error:
            self._twin = error

    def met(self) -> Met:
        hellos = {0: self._own} | {number: member.hello for number, member in self.members.items()}
        reached = self._reached or Counter(self._reached_locally)
        return Met(
            hellos=tuple(hellos[number] for number in sorted(hellos)),
            reached=reached.most_common(1)[0][0],
            port=self._port,
        )

    def send_all(self, message: Message) -> None:
        for member in self.members.values():
            member.connection.send(message)

    def refuse_all(self, error: ClusterddpError) -> None:
        """Send all the error that ends the meeting, and for `LINGER_S` also those that connect late."""
        self.send_all(refusal(error))
        self._refused |= self.members.keys()
        others = set(range(1, self._seat.size))
        until = time.monotonic() + LINGER_S
        while True:
            for member in self._arrived:
                self._refuse(member, error)
            if others <= self._refused or time.monotonic() >= until:
                return
            self._arrived = self.take_turn()

    def take_turn(self, wait_s: float = 0.2) -> list[Member]:
        """Wait up to `wait_s`; return the participants that have introduced themselves."""
        ready = {key.fileobj for key, _ in self._selector.select(wait_s)}
        now = time.monotonic()
        for number, (connection, hello) in list(self.members.items()):
            if connection.sock in ready:
                connection.receive(now)
            if connection.lost is not None:
                connection.close()
                self._left[number] = self.members.pop(number).hello
                self._report(f"{hello.name} has disconnected")
        introduced = [self._read_introduction(arrival) for arrival in self._server.accept(now)]
        return [member for member in introduced if member is not None]

    def _read_introduction(self, arrival: Arrival) -> Member | None:
        """Read the introduction of a client; None: it is no participant of this job."""
        connection, message = arrival
        try:
            hello = Hello.from_json(message)
        except ValueError:
            connection.close()
            return None
        if hello.nonce == self._own.nonce:  # the address is none of this host, but leads here, as behind NAT
            self._elsewhere = ""
        elif hello.identity == self._own.identity:
            return Member(connection, hello)
        connection.send({"kind": "other_job"})
        connection.close()
        return None

    def _admit(self, member: Member) -> None:
        """Count a participant."""
        connection, hello = member
        error = find_mismatch(self._own, hello)
        for other in [self._own, *(each.hello for each in self.members.values())]:
            error = error or find_twin(other, hello)
        if error:
            self._refuse(member, error)
            raise error
        self.members[hello.number] = member
        self._left.pop(hello.number, None)
        if hello.place == self._own.place:
            self._reached_locally.append(connection.own_address)
        elif not is_loopback(connection.own_address):
            self._reached[connection.own_address] += 1
        self._deadline = min(self._deadline, time.monotonic() + max(0.0, float(hello.left_s)))
        connection.send({"kind": "welcome"})
        absent = self._absent()
        self._report(f"{hello.name} has connected" + (f"; missing: {self._seat.spell(absent)}" if absent else ""))

    def _refuse(self, member: Member, error: ClusterddpError) -> None:
        """Send the reason, and close the connection: left open it would wake the selector again and again."""
        member.connection.send(refusal(error))
        flush_all([member.connection], 1.0)
        member.connection.close()
        self._refused.add(member.hello.number)

    def _absent(self) -> list[int]:
        return [number for number in range(1, self._seat.size) if number not in self.members]

    def _missing(self, timeout_s: float) -> PreflightError:
        """Make the error that names the missing participants, and those that have connected."""
        seat, unproven = self._seat, self._server.unproven
        hosts: dict[str, list[int]] = {self._own.host: [0]}
        for number, member in sorted(self.members.items()):
            hosts.setdefault(member.hello.host, []).append(number)
        spell = dataclasses.replace(seat, names=()).spell
        here = "; ".join(f"{spell(numbers)} on {host}" for host, numbers in hosts.items())
        gone = "".join(f"; {hello.name} had connected and has disconnected" for hello in self._left.values())
        if unproven:
            address, count = unproven.most_common(1)[0]
            gone += f"; {count} connections from {address} did not know the same {JOIN_KEY}"
        return PreflightError(
            f"{seat.spell(self._absent())} of {seat.size} did not connect to {self._own.host}, port {self._port}, "
            f"within {timeout_s:g} s (here: {here}{gone}){self._elsewhere}",
            hint=f"look at the output of those {seat.noun}s; network.start_timeout waits longer",
        )


def ask_first(seat: Seat, own: Hello, hosts: Sequence[str], deadline: float, key: str) -> Result | NotFound | None:
    """Look for participant 0 until the deadline; return its decision, or why it was not found."""

    def introduce(connection: Connection) -> Message:
        left_s = max(0.0, deadline - time.monotonic())
        return {"kind": "join", **dataclasses.asdict(own), "left_s": left_s}

    def list_addresses() -> list[str]:
        return [address for host in hosts for address in addresses_of(host) or (host,)]

    with selectors.DefaultSelector() as selector:
        search = Search(list_addresses, seat.ports, protocol=WORKER, key=key, introduce=introduce, selector=selector)
        try:
            while isinstance(found := search.wait(deadline), Found):
                answer = await_decision(found, deadline)
                if not isinstance(answer, Loss):
                    token = mask(str(answer.decided.get("token")), key, own.nonce)
                    answer.decided = answer.decided | {"token": token}
                    answer.connections = [found.connection]
                    if seat.noun == "rank":
                        found.connection.close()
                    return answer
                search.reject(found, answer)
        finally:
            search.close()
    return found


def await_decision(found: Found, deadline: float) -> Result | Loss:
    """Wait until participant 0 has counted all; return its decision, or why this server is not participant 0."""
    connection, messages = found
    while messages:
        for number, message in enumerate(messages, 1):
            raise_if_refused(message)
            if message["kind"] == "decided":
                decided = message.get("decided")
                return Result(decided=decided, unread=messages[number:]) if isinstance(decided, dict) else _STRANGER
            if message["kind"] == "other_job":
                return _OTHER_JOB
            if message["kind"] == "complete":
                deadline = time.monotonic() + _DECISION_S
        messages = connection.wait(deadline + _EXTRA_S)
    return _NO_DECISION


def mask(token: str, key: str, nonce: str) -> str:
    """Encrypt a token (hexadecimal) with a pad from the key; a second call decrypts it. Another text stays as it is."""
    pad = hmac.new(key.encode(), f"token {nonce}".encode(), hashlib.sha256).digest()
    try:
        return bytes(a ^ b for a, b in zip(bytes.fromhex(token), pad, strict=False)).hex()
    except ValueError:
        return token


def find_mismatch(own: Hello, other: Hello) -> PreflightError | None:
    """Return why a participant does not match, or None; `own` is participant 0's."""
    if (other.noun, other.size) != (own.noun, own.size) or other.number >= own.size:
        return PreflightError(
            f"{other.name} was started for {other.size} {other.noun}s ({other.size_from}), "
            f"{own.name} for {own.size} {own.noun}s ({own.size_from})",
            hint=f"all {own.noun}s need the same size",
        )
    if other.spec != own.spec:
        # Of keys that only this spec has, nothing is said to another process.
        differing = [key for key in other.spec if own.spec.get(key) != other.spec[key]]
        unnamed = max(0, len(differing) - _MAX_DIFFERENCES) + sum(key not in other.spec for key in own.spec)
        keys = ", ".join([*differing[:_MAX_DIFFERENCES], *([f"{unnamed} more"] if unnamed else [])])
        return PreflightError(
            f"{other.name} reads another spec than {own.name}: other values of {keys}",
            hint="the file, the KEY=VALUE arguments and the profiles have to be the same",
        )
    for name, ours in own.facts.items():
        theirs = other.facts.get(name, "")
        if theirs != ours:
            return PreflightError(
                f"{other.name} has {name} {theirs or '(none)'}, {own.name} has {name} {ours or '(none)'}",
                hint=f"all {own.noun}s need the same",
            )
    return None


def find_twin(earlier: Hello, later: Hello) -> PreflightError | None:
    """Return an error when two processes have the same number, or the same local rank on one host; else None."""
    if earlier.number == later.number:
        return PreflightError(
            f"{later.noun} {later.number} was started twice: on {earlier.host} (process {earlier.pid}) and on "
            f"{later.host} (process {later.pid})",
            hint="each rank has a number of its own, and each machine a node rank of its own",
        )
    if earlier.place == later.place and earlier.local_rank is not None and earlier.local_rank == later.local_rank:
        return PreflightError(
            f"ranks {earlier.number} and {later.number} on {later.host} both have LOCAL_RANK {later.local_rank}",
            hint="leave LOCAL_RANK unset: the ranks of a host are then counted",
        )
    return None


def _open_master_port(seat: Seat, own: Hello, deadline: float, key: str) -> MasterPort:
    """Listen on the first port that is free."""
    until = min(deadline, time.monotonic() + IN_USE_S)
    while True:
        for port in seat.ports:
            master = _try_port(port, own)
            if master is not None:
                return master
        if seat.port is not None:  # raises, if it is another participant 0 that has the port
            ask_first(seat, own, [LOOPBACK_ADDRESS], min(until, time.monotonic() + 1.0), key)
        if time.monotonic() >= until:
            named = f"port {seat.port} (from {seat.port_from})" if seat.port is not None else f"ports {seat.ports}"
            names = "MASTER_PORT" if seat.noun == "rank" else "network.master_port"
            raise PreflightError(f"{own.name}: {named} is in use by another program", hint=f"{names} names another one")
        time.sleep(0.2)


def _try_port(port: int, own: Hello) -> MasterPort | None:
    """Reserve a port and listen on it, with IPv6 and IPv4; None: another process uses it."""
    sockets: list[socket.socket] = []
    try:
        for listening in (False, True):
            sockets.append(bind_port(port, shared=True, listening=listening))
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno != errno.EADDRINUSE:
            raise PreflightError(f"{own.name}: port {port} cannot be listened on: {error.strerror}") from error
        return None
    return MasterPort(listener=sockets[1], holder=sockets[0])


def _unreached(seat: Seat, own: Hello, failure: NotFound | None, timeout_s: float) -> PreflightError:
    zero = f"{seat.noun} 0"
    where = " or ".join(seat.hosts[:4]) + (" or other addresses" if seat.hosts[4:] else "")
    port = f"port {seat.port}" if seat.port is not None else f"ports {seat.ports[0]} to {seat.ports[-1]}"
    hint = f"{zero} is not started, or that is another machine's address, or a firewall closes the port"
    found = "no attempt was made"
    if failure is not None:
        stranger = f"another program than {zero} answers there, or the run has started without this {seat.noun}"
        texts = {"closed": stranger, "stranger": stranger, "unproven": _NO_KEY.text}
        found = f"{failure.address}:{failure.port}: {texts.get(failure.loss.kind, failure.loss)}"
        if failure.loss.kind == "unproven":
            hint = f"{JOIN_KEY} has to have the same value for all {seat.noun}s, or be set for none"
    return PreflightError(
        f"{own.name} did not reach {zero} at {where} (from {seat.hosts_from}), {port} (from {seat.port_from}), "
        f"within {timeout_s:g} s; {found}",
        hint=hint,
    )


def _is_here(address: str) -> bool:
    """Return whether an address, or one that a name resolves to, is this host's."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False
