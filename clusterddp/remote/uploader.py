"""Uploads files to several hosts at once, reports the progress, and finds out which hosts share their storage."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.ssh.fan import Fan
from clusterddp.ssh.session import Session, Upload
from clusterddp.ssh.sessions import ask_all, raise_for
from clusterddp.system.file_set import FileSet
from clusterddp.system.file_stream import FileStream

_AT_ONCE = 8
"""How many hosts are sent files at the same time."""
UPLOAD_TIMEOUT_S = 120.0
"""How long a host may take to compare its files, or to store what it has received."""
_STEP_BYTES = 1_000_000
_Result = TypeVar("_Result")
Groups = tuple[tuple[str, ...], ...]
"""Each group: hosts that share their storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of an upload."""

    sent_bytes: int
    total_bytes: int
    hosts: int
    """How many receive files; a group that shares its storage counts once."""

    def __str__(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"sending {self.total_bytes / 1e6:.1f} MB to {hosts}"


Watch = Callable[[Progress], object]


@dataclass(kw_only=True)
class Uploader:
    """Sends files to the hosts of some sessions, and counts the bytes."""

    sessions: Mapping[str, Session]
    watch: Watch | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    receivers: set[str] = field(default_factory=set)
    _reported_bytes: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def upload(self, files: Mapping[str, FileSet], facts: Mapping[str, Any]) -> None:
        """Send files to hosts, several at a time; `files`: host -> what it gets.

        Raises: ClusterddpError: what is to be sent changed, or cannot be read. SshError, PreflightError: of the hosts.
        """
        streams = {host: FileStream(files=each) for host, each in files.items()}
        with self._lock:
            self.total_bytes += sum(stream.size for stream in streams.values())
            self.receivers |= set(streams)

        def put(host: str) -> None:
            stream = streams[host]
            upload = Upload(size=stream.size, chunks=self._counted(stream))
            try:
                self.sessions[host].ask("store.put", facts, body=upload, timeout_s=UPLOAD_TIMEOUT_S)
            except SshError as error:
                if stream.spoiled:
                    raise ClusterddpError(
                        stream.spoiled[0], hint="submit again when no process writes to it"
                    ) from error
                raise

        self.at_all(streams, put)

    def at_all(self, hosts: Iterable[str], function: Callable[[str], _Result]) -> dict[str, _Result]:
        """Call a function for hosts, several at a time.

        The caller sends heartbeats to those that wait (launchers/ssh/sessions.py).
        Raises: ClusterddpError, SshError, PreflightError: of the hosts for which it failed.
        """
        left = set(hosts)

        def call(host: str) -> _Result | ClusterddpError:
            try:
                return function(host)
            except ClusterddpError as error:
                return error
            finally:
                left.discard(host)

        try:
            results = Fan(list(hosts), call).results(_AT_ONCE)
        except BaseException:
            for host in left:  # only closing its channel interrupts an upload; the host discards what it has received
                self.sessions[host].channel.close()
            raise
        return results_of(results)

    def _counted(self, stream: FileStream) -> Iterator[bytes]:
        for chunk in stream.chunks():
            yield chunk
            with self._lock:
                self.sent_bytes += len(chunk)
                done = self.sent_bytes >= self.total_bytes
                if self.watch is None or not (done or self.sent_bytes - self._reported_bytes >= _STEP_BYTES):
                    continue
                self._reported_bytes = self.sent_bytes
                self.watch(
                    Progress(sent_bytes=self.sent_bytes, total_bytes=self.total_bytes, hosts=len(self.receivers))
                )


def find_groups(sessions: Mapping[str, Session], target: str | None = None) -> Groups:
    """Find out which hosts share the storage of a target, or of clusterddp's own directory when there is none.

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
    """Return the results when no host has failed.

    Raises: ClusterddpError: one error for all hosts that failed.
    """
    errors = [result for result in results.values() if isinstance(result, ClusterddpError)]
    raise_for(errors, "cannot be sent what the run needs")
    return dict(results)


def _join(sees: Mapping[str, set[str]]) -> Groups:
    """Group the hosts that see each other's marks, in the order of the hosts."""
    groups: dict[str, list[str]] = {}
    leaders: dict[str, str] = {}
    for host in sees:
        first = next(other for other in sees if other == host or other in sees[host] or host in sees[other])
        leaders[host] = leaders.get(first, first)
        groups.setdefault(leaders[host], []).append(host)
    return tuple(map(tuple, groups.values()))
