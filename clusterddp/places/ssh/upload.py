"""Uploads what a run needs on its hosts: its code, as one archive named by its digest, and the data that it names.

What a host has is not sent. Hosts may share their storage: one host is sent files first, then 2, 4 and 8 at a time, and
the others are asked again after each turn.
"""

from __future__ import annotations

import functools
import json
import os
import posixpath
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from clusterddp.errors import ClusterddpError, NonsenseError, SshError
from clusterddp.places.ssh.connections import call_each
from clusterddp.places.ssh.session import Session, Upload
from clusterddp.places.ssh.sessions import raise_for
from clusterddp.system.archive import Archive
from clusterddp.system.file_set import FileSet, choose_files, leads_out, list_files, show, to_json
from clusterddp.wire import build, read_object

_MOST_AT_ONCE = 8
"""How many hosts are sent files at the same time."""
UPLOAD_TIMEOUT_S = 120.0
"""How long a host may take to compare its files, or to store what it has received."""
_SLOW_BYTES_PER_S = 50e6
"""How fast a host reads its own files for checksums, at the least."""
_STEP_BYTES = 1_000_000
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of an upload."""

    sent_bytes: int
    total_bytes: int
    hosts: int
    """How many receive files, or may have to."""

    def __str__(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"sending {self.total_bytes / 1e6:.1f} MB to {hosts}"


Watch = Callable[[Progress], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploaded:
    """The result of `upload_run`."""

    sent_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A host's comparison of a file set with its own files: indices of the entries in each state."""

    place: str
    absent: frozenset[int]
    unsure: frozenset[int]
    changed: dict[str, str]
    """Index -> which file of an earlier upload is there."""
    other: dict[str, str]
    """Index -> which file of somebody else is there."""
    in_the_way: tuple[str, ...]
    stale: tuple[str, ...]
    stale_count: int

    @property
    def numbers(self) -> frozenset[int]:
        return self.absent | self.unsure | frozenset(map(int, (*self.changed, *self.other)))


def upload_run(
    sessions: Mapping[str, Session],
    *,
    code: Path | None,
    send: Iterable[tuple[str, str]],
    watch: Watch | None = None,
) -> Uploaded:
    """Upload what a run needs to every host; what a host has already is not sent.

    `code`: the snapshot, a directory named by its digest. `send`: (path here, path on the hosts) of data. `watch`
    receives the progress, in any thread.
    Raises: ClusterddpError: a file cannot be read here, or changes. SshError, PreflightError: hosts refuse it.
    """
    uploader = Uploader(sessions=sessions, watch=watch)
    if code is not None:
        digest = code.name

        @functools.cache
        def archive() -> Archive:
            return Archive(files=list_files(code))

        def is_missing(host: str) -> bool:
            reply = sessions[host].ask("store.compare", {"sum": digest}, timeout_s=UPLOAD_TIMEOUT_S)
            return bool(reply.facts["missing"])

        def lacking(hosts: Iterable[str]) -> dict[str, Archive]:
            needy = [host for host, missing in uploader.at_all(hosts, is_missing).items() if missing]
            return {host: archive() for host in needy}

        uploader.spread(lacking, {"sum": digest})
    notes = [note for source, target in send for note in upload_data(source, target, uploader)]
    return Uploaded(sent_bytes=uploader.sent_bytes, notes=tuple(notes))


def upload_data(path: str, target: str, uploader: Uploader) -> list[str]:
    """Upload a file or directory to `target` on every host; return notes for the user.

    Raises: ClusterddpError: it cannot be read. SshError, PreflightError: a host has something else there, or refuses.
    """
    target, files = read_data(Path(path), target)
    first: dict[str, Found] = {}
    archives: dict[frozenset[int], Archive] = {}

    def lacking(hosts: Iterable[str]) -> dict[str, Archive]:
        found = _compare_all(files, target, uploader, list(hosts))
        # A host with a directory of its own for clusterddp does not know what another host's upload has put into
        # storage that they share; the other one does.
        ours = {item for one in found.values() for item in one.changed.items()}
        for host, one in found.items():
            if others := [item for item in one.other.items() if item not in ours]:
                also = f", and {len(others) - 1} more" if len(others) > 1 else ""
                hint = "remove it there, or send to another place (ssh.send)"
                raise SshError(host, "ask", f"{one.in_the_way[0]}{also}; it is left as it is", hint=hint)
        for host in found:
            first.setdefault(host, found[host])
        ordered = sorted(found.items(), key=lambda item: len(item[1].other))  # who knows the files replaces them
        needed = {host: one.numbers for host, one in ordered if one.numbers}
        for numbers in needed.values():
            archives.setdefault(numbers, Archive(files=files.subset(numbers)))
        return {host: archives[numbers] for host, numbers in needed.items()}

    uploader.spread(lacking, {"target": target})
    return [*note_left_out(files), *(note for host, one in first.items() for note in _notes(host, one, files))]


@dataclass(kw_only=True)
class Uploader:
    """Sends files to the hosts of some sessions, and counts the bytes."""

    sessions: Mapping[str, Session]
    watch: Watch | None = None
    sent_bytes: int = 0
    _total_bytes: int = 0
    _receivers: set[str] = field(default_factory=set)
    _reported_bytes: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spread(self, lacking: Callable[[Iterable[str]], dict[str, Archive]], facts: Mapping[str, Any]) -> None:
        """Send hosts what they lack, until they lack nothing.

        Raises: ClusterddpError: what is to be sent changed, or cannot be read. SshError, PreflightError: of the hosts.
        """
        left = lacking(self.sessions)
        at_once = 1
        while left:
            turn = list(left)[:at_once]
            announced = turn if at_once == 1 else list(left)  # the others may share the storage of the first
            self._total_bytes = self.sent_bytes + sum(left[host].size for host in announced)
            self._receivers |= set(announced)
            self._put({host: left[host] for host in turn}, facts)
            rest = [host for host in left if host not in turn]
            left = lacking(rest) if rest else {}
            at_once = min(2 * at_once, _MOST_AT_ONCE)

    def at_all(self, hosts: Iterable[str], function: Callable[[str], _Result]) -> dict[str, _Result]:
        """Call a function for hosts, many at a time.

        The caller sends heartbeats to those that wait (places/ssh/sessions.py).
        Raises: ClusterddpError, SshError, PreflightError: of the hosts for which it failed.
        """
        asked = list(hosts)
        left = set(asked)

        def call(host: str) -> _Result | ClusterddpError:
            try:
                return function(host)
            except ClusterddpError as error:
                return error
            finally:
                left.discard(host)

        try:
            results = call_each(call, asked)
        except BaseException:
            for host in left:  # only closing its channel interrupts an upload; the host discards what it has received
                self.sessions[host].break_off()
            raise
        raise_for([one for one in results.values() if isinstance(one, ClusterddpError)], "cannot be sent what it needs")
        return {host: one for host, one in results.items() if not isinstance(one, ClusterddpError)}

    def _put(self, archives: Mapping[str, Archive], facts: Mapping[str, Any]) -> None:
        def put(host: str) -> None:
            upload = Upload(size=archives[host].size, chunks=self._counted(archives[host]))
            self.sessions[host].ask("store.put", facts, body=upload, timeout_s=UPLOAD_TIMEOUT_S)

        self.at_all(archives, put)

    def _counted(self, archive: Archive) -> Iterator[bytes]:
        for chunk in archive.chunks():
            yield chunk
            with self._lock:
                self.sent_bytes += len(chunk)
                done = self.sent_bytes >= self._total_bytes
                if self.watch is None or not (done or self.sent_bytes - self._reported_bytes >= _STEP_BYTES):
                    continue
                self._reported_bytes = self.sent_bytes
                total_bytes, hosts = self._total_bytes, len(self._receivers)
                self.watch(Progress(sent_bytes=self.sent_bytes, total_bytes=total_bytes, hosts=hosts))


def read_data(path: Path, target: str) -> tuple[str, FileSet]:
    """List data to send; return the directory on the hosts that it goes into, and the files.

    Raises: ClusterddpError: it cannot be read, or has links that would point nowhere on a host.
    """
    path = path.resolve()
    if path.is_file():
        target, name = posixpath.split(target)
        files = choose_files(path.parent, [path.name])
        renamed = replace(files.entries[0], name=os.fsencode(name or path.name))
        files = FileSet(root=path, entries=(renamed,), single=True)
    elif path.is_dir():
        files = list_files(path)
    else:
        raise ClusterddpError(f"{show(os.fsencode(path))}: no such file or directory, it was to be sent to the hosts")
    for entry in files.entries:
        here = files.path_of(entry)
        if entry.kind == "link" and leads_out(entry):
            raise ClusterddpError(
                f"{show(here)}: a link to {show(entry.link)}, outside of what is sent: it would lead nowhere on a host",
                hint="send what it leads to by a line of its own in ssh.send, or put a copy in its place",
            )
        if entry.is_file and not os.access(here, os.R_OK):
            raise ClusterddpError(f"{show(here)}: you may not read it, it was to be sent to the hosts")
    return target or "/", files


def note_left_out(files: FileSet) -> list[str]:
    if not files.left_out:
        return []
    return [f"{files.root}: not sent, being neither files nor links: {', '.join(files.left_out[:3])}"]


def _compare_all(files: FileSet, target: str, uploader: Uploader, hosts: list[str]) -> dict[str, Found]:
    """Compare files with those of hosts; where size and time do not decide, sums do: on one host first, which records
    that they are the same, then on those that do not share its storage.
    """
    found = _compare(files, target, uploader, hosts)
    for last in (1, None):
        unsure = [host for host in found if found[host].unsure][:last]
        if unsure:
            with_sums = files.with_sums(frozenset[int]().union(*(found[host].unsure for host in unsure)))
            found |= _compare(with_sums, target, uploader, unsure)
            others = [host for host in found if found[host].unsure]
            found |= _compare(files, target, uploader, others) if others and last else {}
    return found


def _compare(files: FileSet, target: str, uploader: Uploader, hosts: Iterable[str]) -> dict[str, Found]:
    listing = json.dumps(to_json(files.entries)).encode("ascii")
    known_bytes = sum(entry.size for entry in files.entries if entry.sum)
    timeout_s = UPLOAD_TIMEOUT_S + known_bytes / _SLOW_BYTES_PER_S

    def compare(host: str) -> Found:
        reply = uploader.sessions[host].ask("store.compare", {"target": target}, body=listing, timeout_s=timeout_s)
        try:
            found: Found = build(Found, read_object(reply.data) | reply.facts, "answer")
            if not found.numbers <= frozenset(range(len(files.entries))) or (found.other and not found.in_the_way):
                raise ValueError("entries that are not in the list")
        except ValueError as error:
            raise NonsenseError(host, str(error)) from error
        return found

    return uploader.at_all(hosts, compare)


def _notes(host: str, found: Found, files: FileSet) -> list[str]:
    notes = []
    if found.changed:
        count = f"{len(found.changed)} file{'s' * (len(found.changed) != 1)}"
        notes.append(f"{host}:{found.place}: {count} sent earlier brought up to date")
    if found.stale_count and not files.single:
        names = ", ".join(found.stale) + (", ..." if found.stale_count > len(found.stale) else "")
        notes.append(f"{host}:{found.place}: sent earlier, no longer in {files.root}, left there: {names}")
    return notes
