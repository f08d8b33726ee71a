"""How a rank comes to the muster: it knocks where rank 0 should be until it is let in, refused, or out of time."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.ranks.launched import Launched
from clusterddp.rendezvous.muster_words import COMMAND, MAX_LINE, Hello, refusal
from clusterddp.rendezvous.signed import JOIN_KEY, Signer, UnprovenError

NO_KEY = f"what answers there does not know the same {JOIN_KEY}"
CONNECT_S = 3.0
WELCOME_S = 5.0
"""How long whoever answers may take to say that it is rank 0."""
RELEASE_S = 300.0
"""How long rank 0 may take to make the run's directory, once all have come."""
VERDICT_S = 5.0
"""How long rank 0's verdict may take that is due when our time is up."""
_PAUSE_S = 0.2


@dataclass
class Visit:
    """An open connection to whoever listens where rank 0 should be."""

    sock: socket.socket
    signer: Signer
    buffer: bytes = b""

    def meet(self, deadline: float) -> bool:
        """Exchange nonces; False: whoever is there hung up, or is a stranger.

        Raises: TimeoutError.
        """
        self.sock.sendall(self.signer.greeting(COMMAND))
        try:
            self.signer.meet(self._read_line(deadline), COMMAND)
        except ValueError:
            return False
        return True

    def read(self, deadline: float) -> dict[str, Any] | None:
        """Read the next words; None: whoever is there hung up, or is a stranger.

        Raises: TimeoutError. UnprovenError: it does not know the key.
        """
        try:
            return self.signer.read(self._read_line(deadline))
        except UnprovenError:
            raise
        except ValueError:
            return None

    def _read_line(self, deadline: float) -> bytes:
        """Read the next line.

        Raises: TimeoutError. ValueError: there is none.
        """
        while b"\n" not in self.buffer:
            self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            data = self.sock.recv(65536)
            if not data or len(self.buffer) > MAX_LINE:
                raise ValueError("no line")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line


def attend(
    launched: Launched, own: Hello, ports: Sequence[int], *, deadline: float, timeout_s: float, key: str
) -> dict[str, Any]:
    """Come to the muster; return what rank 0 has decided.

    Raises: PreflightError: rank 0 refuses, or cannot be reached in time.
    """
    found = "nothing was tried"
    while True:
        for port in ports:
            for address in launched.master_addrs:
                answer = knock(address, port, own, deadline, key)
                if not isinstance(answer, str):
                    return answer
                if port == ports[0] or "refused" not in answer:
                    found = f"{address}:{port}: {answer}"
                if answer == NO_KEY and len(ports) == 1:
                    raise _unreached(launched, own, ports, found, timeout_s)
        if time.monotonic() + _PAUSE_S >= deadline:
            raise _unreached(launched, own, ports, found, timeout_s)
        time.sleep(_PAUSE_S)


def knock(address: str, port: int, own: Hello, deadline: float, key: str) -> dict[str, Any] | str:
    """Knock at one door; return what rank 0 has decided in the end, or in words why nobody let us in.

    Raises: PreflightError: rank 0 refuses the gang.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return "there was no time left"
    try:
        with socket.create_connection((address, port), timeout=min(CONNECT_S, left_s)) as sock:
            return _introduce(Visit(sock, Signer(key, "member")), own, left_s, deadline)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)


def _introduce(visit: Visit, own: Hello, left_s: float, deadline: float) -> dict[str, Any] | str:
    """Say who we are once the other end has proven that it knows the key; return what `knock` does."""
    until = min(deadline, time.monotonic() + WELCOME_S)
    try:
        if not visit.meet(until) or visit.read(until) is None:
            return "something else than rank 0 answers there, or the gang has started without this rank"
        visit.sock.sendall(visit.signer.sign({**_as_json(own), "left_s": left_s}))
        return _stay(visit, visit.read(until), deadline)
    except UnprovenError:
        with contextlib.suppress(OSError):  # so that rank 0 can say that somebody came
            visit.sock.sendall(visit.signer.sign({"unproven": True}))
        return NO_KEY


def _stay(visit: Visit, words: dict[str, Any] | None, deadline: float) -> dict[str, Any] | str:
    """Stay until rank 0 has seen everybody."""
    while words is not None:
        if "refused" in words:
            hint = words.get("hint")
            why = str(words["refused"]) or "rank 0 refuses, and says no reason"
            raise refusal(why, None if hint is None else str(hint))
        if "decided" in words:
            return (
                words["decided"] if isinstance(words["decided"], dict) else "something else than rank 0 answers there"
            )
        if "other" in words:
            return "the ranks of another job meet there"
        if "complete" in words:
            deadline = time.monotonic() + RELEASE_S
        words = visit.read(deadline + VERDICT_S)
    return "rank 0 was there and has left without a word"


def _as_json(own: Hello) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(own)


def _unreached(launched: Launched, own: Hello, ports: Sequence[int], found: str, timeout_s: float) -> Exception:
    told = launched.told
    address = f"{told['MASTER_ADDR'].origin}" if "MASTER_ADDR" in told else "the launcher"
    port = told["MASTER_PORT"].origin if "MASTER_PORT" in told and not launched.port_is_taken else "the job's name"
    few = launched.master_addrs[:4]
    where = " or ".join(few) + (" or elsewhere" if launched.master_addrs[4:] else "")
    many = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    return refusal(
        f"{own.name} did not reach rank 0 at {where} (from {address}), {many} (from {port}), "
        f"within {timeout_s:g} s; {found}",
        f"{JOIN_KEY} has to have the same value for all ranks, or be set for none"
        if found.endswith(NO_KEY)
        else "rank 0 is not started, or that is another machine's address, or a firewall closes the port",
    )
