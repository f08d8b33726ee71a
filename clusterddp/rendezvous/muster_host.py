"""How rank 0 holds the muster: it listens, looks at each rank that comes, and tells all of them how it ends."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.network.interface import is_loopback, plain_address
from clusterddp.ranks.launched import Launched
from clusterddp.ranks.spelling import spell_ranks
from clusterddp.rendezvous.acceptor import Acceptor
from clusterddp.rendezvous.muster_door import Door
from clusterddp.rendezvous.muster_guest import knock
from clusterddp.rendezvous.muster_words import COMMAND, Decide, Hello, Seen, find_mismatch, find_twin, refusal
from clusterddp.rendezvous.signed import JOIN_KEY, Signer, UnprovenError

LINGER_S = 10.0
"""How long rank 0 stays to tell latecomers what is wrong."""
_MAX_HELLO = 10_000
_MAX_STRANGERS = 64
"""How many may be connected and not have introduced themselves; or twice as many as there are ranks."""


@dataclass
class Guest:
    """A connection, and who came over it."""

    sock: socket.socket
    signer: Signer
    buffer: bytes = b""
    hello: Hello | None = None


def hold_muster(
    door: Door, launched: Launched, own: Hello, decide: Decide, *, deadline: float, timeout_s: float, key: str
) -> dict[str, Any]:
    """See all ranks, decide, and tell them; return what was decided.

    Raises: PreflightError: the gang does not come together. ClusterddpError: what `decide` raises.
    """
    with _Muster(door, launched, own, deadline, key) as here:
        try:
            here.await_all(timeout_s)
            here.tell({"complete": True})
            decided = decide(here.seen())
        except ClusterddpError as error:
            here.refuse_all(error)
            raise
        here.tell({"decided": decided})
    return decided


class _Muster:
    """The ranks that have come."""

    def __init__(self, door: Door, launched: Launched, own: Hello, deadline: float, key: str) -> None:
        self._key = key
        self._unproven: Counter[str] = Counter()
        """From which addresses ranks have come that do not know the key."""
        self._strangers: list[Guest] = []
        """Who has not introduced himself yet, the first one first."""
        self._door = door
        self._launched = launched
        self._own = own
        self._deadline = deadline
        self._guests: dict[int, Guest] = {}
        """By rank."""
        self._left: dict[int, Hello] = {}
        """Ranks that came and have gone again."""
        self._reached: Counter[str] = Counter()
        """At which address ranks of other hosts have come here."""
        self._reached_at_home: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(door.listener, self._selector)
        self._scout = _Scout(launched, own, door.port, deadline, key)

    def __enter__(self) -> _Muster:
        return self

    def __exit__(self, *exc: object) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Guest):
                key.data.sock.close()
        self._selector.close()

    def await_all(self, timeout_s: float) -> None:
        """Wait until every rank is here."""
        while len(self._guests) + 1 < self._launched.world_size:
            if self._scout.error:
                raise self._scout.error
            if time.monotonic() >= self._deadline:
                raise self._absence(timeout_s)
            self._look(strict=True)

    def seen(self) -> Seen:
        hellos = {0: self._own} | {rank: guest.hello for rank, guest in self._guests.items() if guest.hello}
        reached = self._reached or Counter(self._reached_at_home)
        return Seen(
            hellos=tuple(hellos[rank] for rank in sorted(hellos)),
            reached=reached.most_common(1)[0][0],
            port=self._door.port,
        )

    def tell(self, words: dict[str, Any], guests: Iterable[Guest] | None = None) -> None:
        for guest in list(self._guests.values() if guests is None else guests):
            with contextlib.suppress(OSError):
                guest.sock.settimeout(5.0)
                guest.sock.sendall(guest.signer.sign(words))

    def refuse_all(self, error: ClusterddpError) -> None:
        """Tell everybody, and for a moment also those who come too late, why there is no gang."""
        words = {"refused": error.message, "hint": error.hint}
        told = set(self._guests)
        self.tell(words)
        until = time.monotonic() + LINGER_S
        while len(told) + 1 < self._launched.world_size and time.monotonic() < until:
            guests = self._look(strict=False)
            self.tell(words, guests)
            told |= {guest.hello.rank for guest in guests if guest.hello}

    def _look(self, *, strict: bool) -> list[Guest]:
        """Take in what has happened; return who has just introduced itself. `strict`: one that is wrong ends it."""
        new = []
        ready = [key.data for key, _ in self._selector.select(timeout=0.2) if key.data is not None]
        for sock, _ in self._acceptor.accept(time.monotonic()):
            self._greet(Guest(sock, Signer(self._key, "head")))
        for guest in ready:
            if guest.sock.fileno() >= 0 and self._read(guest) and guest.hello is not None:
                new.append(guest)
                if strict:
                    self._admit(guest)
        return new

    def _greet(self, guest: Guest) -> None:
        if len(self._strangers) >= max(_MAX_STRANGERS, 2 * self._launched.world_size):
            self._drop(self._strangers[0])
        guest.sock.setblocking(False)
        self._strangers.append(guest)
        self._selector.register(guest.sock, selectors.EVENT_READ, guest)
        with contextlib.suppress(OSError):  # it is gone, which is heard next
            guest.sock.send(guest.signer.greeting(COMMAND))

    def _read(self, guest: Guest) -> bool:
        """Read what came; True when it was the guest's introduction."""
        try:
            data = guest.sock.recv(65536)
        except OSError:
            data = b""
        guest.buffer += data
        if not data or len(guest.buffer) > _MAX_HELLO:
            self._drop(guest)
            return False
        while guest.hello is None and b"\n" in guest.buffer:
            line, _, guest.buffer = guest.buffer.partition(b"\n")
            try:
                self._take_line(guest, line)
            except (ValueError, OSError):
                self._drop(guest)  # a stranger: a port scanner, a browser
                return False
            if guest.hello is not None:
                self._strangers.remove(guest)
                return self._concerns_us(guest, guest.hello)
        return False

    def _take_line(self, guest: Guest, line: bytes) -> None:
        """Exchange nonces, and prove that we know the key; then take the guest's introduction.

        Raises: ValueError: it is a stranger.
        """
        if not guest.signer.met:
            guest.signer.meet(line, COMMAND)
            guest.sock.sendall(guest.signer.sign({"rank": 0}))
            return
        try:
            guest.hello = Hello.from_json(guest.signer.read(line))
        except UnprovenError:
            with contextlib.suppress(OSError):
                self._unproven[plain_address(str(guest.sock.getpeername()[0]))] += 1
            raise

    def _concerns_us(self, guest: Guest, hello: Hello) -> bool:
        if hello.identity != self._own.identity:
            self.tell({"other": True}, [guest])
            self._drop(guest)
            return False
        if hello.nonce == self._own.nonce:  # a name that is no address of this host leads here all the same
            self._scout.found = ""
            return False
        return True

    def _admit(self, guest: Guest) -> None:
        """Let a rank in.

        Raises: PreflightError: there can be no gang with it.
        """
        hello = guest.hello
        assert hello is not None
        error = find_mismatch(self._own, hello)
        for other in [self._own, *(each.hello for each in self._guests.values() if each.hello)]:
            error = error or find_twin(other, hello)
        if error:
            self.tell({"refused": error.message, "hint": error.hint}, [guest])
            raise error
        self._guests[hello.rank] = guest
        self._left.pop(hello.rank, None)
        address = plain_address(str(guest.sock.getsockname()[0]))
        if hello.place == self._own.place:
            self._reached_at_home.append(address)
        elif not is_loopback(address):
            self._reached[address] += 1
        self._deadline = min(self._deadline, time.monotonic() + max(0.0, float(hello.left_s)))
        self.tell({"welcome": True}, [guest])

    def _drop(self, guest: Guest) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.sock)
        with contextlib.suppress(ValueError):
            self._strangers.remove(guest)
        guest.sock.close()
        hello = guest.hello
        if hello is not None and self._guests.get(hello.rank) is guest:
            self._left[hello.rank] = self._guests.pop(hello.rank).hello or hello

    def _absence(self, timeout_s: float) -> PreflightError:
        """Say who is missing, and who is here, so that the missing machine can be told."""
        size = self._launched.world_size
        missing = [rank for rank in range(1, size) if rank not in self._guests]
        hosts: dict[str, list[int]] = {self._own.host: [0]}
        for rank, guest in sorted(self._guests.items()):
            hosts.setdefault(guest.hello.host if guest.hello else "?", []).append(rank)
        here = "; ".join(f"{spell_ranks(ranks)} on {host}" for host, ranks in hosts.items())
        gone = "".join(f"; {hello.name} came and left again" for hello in self._left.values())
        if self._unproven:
            address, count = self._unproven.most_common(1)[0]
            gone += f"; {count} connections from {address} did not know the same {JOIN_KEY}"
        astray = self._scout.found
        return refusal(
            f"{spell_ranks(missing)} of {size} did not come to {self._own.host}, port {self._door.port}, "
            f"within {timeout_s:g} s (here: {here}{gone})" + (f"; {astray}" if astray else ""),
            "see what became of those; network.start_timeout waits longer",
        )


class _Scout:
    """Looks where MASTER_ADDR leads when that is not here: there may be another rank 0, or nobody."""

    def __init__(self, launched: Launched, own: Hello, port: int, deadline: float, key: str) -> None:
        self._key = key
        self.error: PreflightError | None = None
        self.found = ""
        self._own = own
        elsewhere = [address for address in launched.master_addrs if not _is_here(address)]
        if elsewhere and len(elsewhere) == len(launched.master_addrs):
            origin = launched.told["MASTER_ADDR"].origin if "MASTER_ADDR" in launched.told else "the launcher"
            self.found = f"{elsewhere[0]} (from {origin}) is no address of {own.host}, where rank 0 is"
            threading.Thread(target=self._knock, args=(elsewhere[0], port, deadline), daemon=True).start()

    def _knock(self, address: str, port: int, deadline: float) -> None:
        while time.monotonic() < deadline and self.error is None:
            try:
                knock(address, port, self._own, deadline, self._key)
            except PreflightError as error:
                self.error = error
            time.sleep(1.0)


def _is_here(address: str) -> bool:
    """Say whether this host has an address, or the one that a name means."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False
