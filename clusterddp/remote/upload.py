"""Uploads what a run needs on its hosts: its code, once for each content and disk, and the data that it names.

Data is compared first, by size and time; sums are read only where these do not decide.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.errors import ClusterddpError, NonsenseError, SshError
from clusterddp.remote.uploader import UPLOAD_TIMEOUT_S, Groups, Uploader, Watch, find_groups, results_of
from clusterddp.ssh.session import Session
from clusterddp.ssh.sessions import ask_all
from clusterddp.system.file_set import FileSet, choose_files, leads_out, list_files, show, to_json
from clusterddp.wire import build, read_object

_COMPARE_TIMEOUT_S = 120.0
_SLOW_BYTES_PER_S = 50e6
"""How fast a host reads its own files for checksums, at the least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploaded:
    """The result of `upload_run`."""

    groups: Groups
    """Hosts that share clusterddp's own directory."""
    sent_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A host's comparison of a file set with its own files: indices of the entries in each state."""

    place: str
    absent: frozenset[int]
    unsure: frozenset[int]
    changed: frozenset[int]
    other: frozenset[int]
    in_the_way: tuple[str, ...]
    stale: tuple[str, ...]
    stale_count: int

    @property
    def complete(self) -> bool:
        return not (self.absent or self.unsure or self.changed or self.other)


def upload_run(
    sessions: Mapping[str, Session],
    *,
    code: Path | None,
    run_name: str,
    send: Iterable[tuple[str, str]],
    watch: Watch | None = None,
) -> Uploaded:
    """Upload what a run needs to every host; what a host has already is not sent.

    `code`: the snapshot, a directory named by its digest; on the hosts the directory `run_name` then has a copy of it.
    `send`: (path here, path on the hosts) of data. `watch` receives the progress, in any thread.
    Raises: ClusterddpError: a file cannot be read here, or changes. SshError, PreflightError: hosts refuse it.
    """
    uploader = Uploader(sessions=sessions, watch=watch)
    groups = find_groups(sessions)
    if code is not None:
        first = {group[0]: sessions[group[0]] for group in groups}
        upload_code(uploader, code.name, lambda: list_files(code), list(first))
        facts = {"sum": code.name, "name": run_name}
        results_of(ask_all(first, "store.checkout", facts, timeout_s=UPLOAD_TIMEOUT_S))
    notes = [note for source, target in send for note in upload_data(source, target, uploader)]
    return Uploaded(groups=groups, sent_bytes=uploader.sent_bytes, notes=tuple(notes))


def upload_code(uploader: Uploader, digest: str, list_code: Callable[[], FileSet], hosts: Iterable[str]) -> None:
    """Upload a snapshot to the stores of the hosts that lack it; `list_code` lists its files then.

    Raises: ClusterddpError: it cannot be read, or changes. SshError, PreflightError: of the hosts.
    """
    asked = {host: uploader.sessions[host] for host in hosts}
    replies = results_of(ask_all(asked, "store.missing", {"sums": [digest]}, timeout_s=UPLOAD_TIMEOUT_S))
    missing = [host for host, reply in replies.items() if reply.facts["missing"]]
    if missing:
        uploader.upload(dict.fromkeys(missing, list_code()), {"kind": "code", "sum": digest})


def upload_data(path: str, target: str, uploader: Uploader) -> list[str]:
    """Upload a file or directory to `target` on every host; return notes for the user.

    Raises: ClusterddpError: it cannot be read. SshError, PreflightError: a host has something else there, or refuses.
    """
    target, files = read_data(Path(path), target)
    found = _compare(files, target, uploader, list(uploader.sessions))
    if not all(one.complete for one in found.values()):
        leaders = _choose_leaders(find_groups(uploader.sessions, target), found)
        unsure = frozenset[int]().union(*(found[host].unsure for host in leaders))
        if unsure:
            files = files.with_sums(unsure)
            found |= _compare(files, target, uploader, [host for host in leaders if found[host].unsure])
        _refuse_other(found, leaders)
        needed = {host: found[host].absent | found[host].changed for host in leaders}
        chosen = {host: files.subset(numbers) for host, numbers in needed.items() if numbers}
        if chosen:
            uploader.upload(chosen, {"kind": "data", "target": target})
    return [*note_left_out(files), *(note for host in found for note in _notes(host, found[host], files))]


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


def _compare(files: FileSet, target: str, uploader: Uploader, hosts: list[str]) -> dict[str, Found]:
    listing = json.dumps(to_json(files.entries)).encode("ascii")
    known_bytes = sum(entry.size for entry in files.entries if entry.sum)
    timeout_s = _COMPARE_TIMEOUT_S + known_bytes / _SLOW_BYTES_PER_S

    def compare(host: str) -> Found:
        session = uploader.sessions[host]
        reply = session.ask("store.compare", {"target": target}, body=listing, timeout_s=timeout_s)
        try:
            found: Found = build(Found, read_object(reply.data) | reply.facts, "answer")
        except ValueError as error:
            raise NonsenseError(host, str(error)) from error
        numbers = found.absent | found.unsure | found.changed | found.other
        if not numbers <= frozenset(range(len(files.entries))) or (found.other and not found.in_the_way):
            raise NonsenseError(host, "entries that are not in the list")
        return found

    return uploader.at_all(hosts, compare)


def _choose_leaders(groups: Iterable[tuple[str, ...]], found: Mapping[str, Found]) -> list[str]:
    """Choose one host of each group that shares its storage: the one with the fewest open questions.

    A group is left out when one of its hosts reports that the files are complete.
    """
    needy = [group for group in groups if not any(found[host].complete for host in group)]
    return [min(group, key=lambda host: (len(found[host].other), len(found[host].unsure))) for group in needy]


def _refuse_other(found: Mapping[str, Found], hosts: Iterable[str]) -> None:
    """Raise for what is in the way, before a file is sent to any host."""
    for host in hosts:
        if found[host].other:
            first, more = found[host].in_the_way[0], len(found[host].other) - 1
            also = f", and {more} more" if more else ""
            hint = "nothing was sent; remove it there, or send to another place (ssh.send)"
            raise SshError(host, "ask", f"{first}{also}; it is left as it is", hint=hint)


def note_left_out(files: FileSet) -> list[str]:
    if not files.left_out:
        return []
    return [f"{files.root}: not sent, being neither files nor links: {', '.join(files.left_out[:3])}"]


def _notes(host: str, found: Found, files: FileSet) -> list[str]:
    notes = []
    if found.changed:
        count = f"{len(found.changed)} file{'s' * (len(found.changed) != 1)}"
        notes.append(f"{host}:{found.place}: {count} sent earlier brought up to date")
    if found.stale_count and not files.single:
        names = ", ".join(found.stale) + (", ..." if found.stale_count > len(found.stale) else "")
        notes.append(f"{host}:{found.place}: sent earlier, no longer in {files.root}, left there: {names}")
    return notes
