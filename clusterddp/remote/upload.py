"""Files on their way to several hosts at once: who gets them, how far they are, who shares them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.ssh.fan import Fan
from clusterddp.ssh.session import Session, Upload, ask_all, raise_for
from clusterddp.system.tree_stream import Sending

_AT_ONCE = 8
"""To so many hosts files go at the same time."""
_BEAT_S = 60.0
SEND_TIMEOUT_S = 120.0
"""How long a host may take to look at what it has, or to put away what it got."""
_STEP_BYTES = 1_000_000
_Result = TypeVar("_Result")
Groups = tuple[tuple[str, ...], ...]
"""Hosts that see the same files, together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the sending is."""

    sent_bytes: int
    total_bytes: int
    hosts: int
    """How many something is sent to; hosts that share their files count once."""

    def __str__(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"sending {self.total_bytes / 1e6:.1f} MB to {hosts}"


Watch = Callable[[Progress], object]


@dataclass(kw_only=True)
class Cargo:
    """What is sent to whom; counts the bytes as they go."""

    sessions: Mapping[str, Session]
    watch: Watch | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    receivers: set[str] = field(default_factory=set)
    _told: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, sendings: Mapping[str, Sending], facts: Mapping[str, Any]) -> None:
        """Send files to hosts, several at a time.

        Raises: ClusterddpError: what is to be sent changed, or cannot be read. SshError, PreflightError: of the hosts.
        """
        with self._lock:
            self.total_bytes += sum(sending.size for sending in sendings.values())
            self.receivers |= set(sendings)

        def put(host: str) -> None:
            sending = sendings[host]
            upload = Upload(size=sending.size, chunks=self._counted(sending))
            try:
                self.sessions[host].ask("store.put", facts, body=upload, timeout_s=SEND_TIMEOUT_S)
            except SshError as error:
                if sending.spoiled:
                    raise ClusterddpError(sending.spoiled[0], hint="submit again when nobody writes to it") from error
                raise

        self.at_all(sendings, put)

    def at_all(
        self, hosts: Sequence[str] | Mapping[str, Any], function: Callable[[str], _Result]
    ) -> dict[str, _Result]:
        """Call a function for hosts, several at a time, and keep the agents of those that wait from leaving.

        Raises: ClusterddpError, SshError, PreflightError: of the hosts for which it failed.
        """
        slots = threading.Semaphore(_AT_ONCE)
        finished = threading.Event()
        left = set(hosts)

        def call(host: str) -> _Result | ClusterddpError:
            try:
                while not slots.acquire(timeout=_BEAT_S):
                    self.sessions[host].ask("beat")
                try:
                    result = function(host)
                finally:
                    slots.release()
                    left.discard(host)
                    if not left:
                        finished.set()
                while not finished.wait(_BEAT_S):
                    self.sessions[host].ask("beat")
                return result
            except ClusterddpError as error:
                return error

        try:
            results = Fan(hosts, call, lambda result: None).results(max(1, len(hosts)))
        except BaseException:
            for host in left:  # a put in its middle ends only with its connection; the host then forgets what it has
                self.sessions[host].channel.close()
            raise
        return results_of(results)

    def _counted(self, sending: Sending) -> Iterator[bytes]:
        for chunk in sending.chunks():
            yield chunk
            with self._lock:
                self.sent_bytes += len(chunk)
                done = self.sent_bytes >= self.total_bytes
                if self.watch is None or not (done or self.sent_bytes - self._told >= _STEP_BYTES):
                    continue
                self._told = self.sent_bytes
                self.watch(
                    Progress(sent_bytes=self.sent_bytes, total_bytes=self.total_bytes, hosts=len(self.receivers))
                )


def find_groups(sessions: Mapping[str, Session], target: str | None = None) -> Groups:
    """Find out which hosts see the same files where a target is or will be; without one: where everything of ours is.

    Raises: SshError, PreflightError: a host does not answer.
    """
    if len(sessions) == 1:
        return (tuple(sessions),)
    nonces = {host: secrets.token_hex(16) for host in sessions}
    try:
        results_of(ask_all(sessions, "store.mark", lambda host: {"target": target, "nonce": nonces[host]}))
        replies = results_of(ask_all(sessions, "store.seen", {"target": target, "nonces": list(nonces.values())}))
    finally:
        ask_all(sessions, "store.unmark")
    owner = {nonce: host for host, nonce in nonces.items()}
    return _join({host: {owner[nonce] for nonce in reply.facts["seen"]} for host, reply in replies.items()})


def results_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of hosts, if they are all there.

    Raises: ClusterddpError: one error for all of them.
    """
    errors = [result for result in results.values() if isinstance(result, ClusterddpError)]
    raise_for(errors, "cannot be sent what the run needs")
    return dict(results)


def _join(sees: Mapping[str, set[str]]) -> Groups:
    """Put together who sees whom, in the order of the hosts."""
    leader = {host: host for host in sees}

    def find(host: str) -> str:
        while leader[host] != host:
            host = leader[host]
        return host

    order = {host: number for number, host in enumerate(sees)}
    for host, others in sees.items():
        for other in others:
            first, second = sorted((find(host), find(other)), key=order.__getitem__)
            leader[second] = first
    heads = dict.fromkeys(find(host) for host in sees)
    return tuple(tuple(host for host in sees if find(host) == head) for head in heads)
