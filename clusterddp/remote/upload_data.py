"""Sends a file or a directory to the same place on all hosts: compares first, asks for sums only where it must."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.errors import ClusterddpError, NonsenseError, SshError
from clusterddp.remote.upload import Cargo, find_groups
from clusterddp.system.tree import Entry, leads_out, list_tree, read_entry, read_sum, show, to_json
from clusterddp.system.tree_stream import Sending, total_bytes
from clusterddp.wire import build, read_object

_COMPARE_TIMEOUT_S = 120.0
_SLOW_BYTES_PER_S = 50e6
"""At least so fast a host reads its own files to sum them up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is to be sent, as it is here."""

    path: Path
    target: str
    """The directory on the hosts; for a single file the one that it goes to."""
    entries: tuple[Entry, ...]
    single: bool
    notes: tuple[str, ...] = ()

    def sending(self, numbers: Iterable[int]) -> Sending:
        entries = tuple(self.entries[number] for number in sorted(numbers))
        return Sending(root=self.path, entries=entries, single=self.single)

    def summed(self, numbers: Iterable[int]) -> Source:
        """Return the same with the sums of some files.

        Raises: ClusterddpError: one cannot be read.
        """
        entries = list(self.entries)
        for number in numbers:
            path = self.sending([number]).path_of(entries[number])
            try:
                entries[number] = replace(entries[number], sum=read_sum(path))
            except OSError as error:
                raise ClusterddpError(f"{show(path)}: cannot be read: {error.strerror}") from error
        return replace(self, entries=tuple(entries))


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a host has of it: numbers of entries."""

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


def send_data(path: str, target: str, cargo: Cargo) -> list[str]:
    """Have a file or directory at `target` on every host; return what people should know.

    Raises: ClusterddpError: it cannot be read. SshError, PreflightError: a host has something else there, or refuses.
    """
    source = read_source(Path(path), target)
    found = _compare(source, cargo, list(cargo.sessions))
    if not all(one.complete for one in found.values()):
        leaders = _choose_leaders(find_groups(cargo.sessions, source.target), found)
        unsure = frozenset[int]().union(*(found[host].unsure for host in leaders))
        if unsure:
            source = source.summed(unsure)
            found |= _compare(source, cargo, [host for host in leaders if found[host].unsure])
        _refuse_other(found, leaders)
        needed = {host: found[host].absent | found[host].changed for host in leaders}
        sendings = {host: source.sending(numbers) for host, numbers in needed.items() if numbers}
        if sendings:
            cargo.send(sendings, {"kind": "data", "target": source.target})
    return [*source.notes, *(note for host in found for note in _notes(host, found[host], source))]


def read_source(path: Path, target: str) -> Source:
    """Look at what is to be sent.

    Raises: ClusterddpError: it cannot be read, or has links that would lead nowhere on a host.
    """
    path = path.resolve()
    if path.is_file():
        into, name = posixpath.split(target)
        entry = read_entry(os.fsencode(path.parent), os.fsencode(path.name))
        assert entry is not None
        entry = replace(entry, name=os.fsencode(name or path.name))
        source = Source(path=path, target=into or "/", entries=(entry,), single=True)
    elif path.is_dir():
        entries, strange = list_tree(path)
        notes = (f"{path}: not sent, being neither files nor links: {', '.join(strange[:3])}",) if strange else ()
        source = Source(path=path, target=target, entries=entries, single=False, notes=notes)
    else:
        raise ClusterddpError(f"{show(os.fsencode(path))}: no such file or directory, it was to be sent to the hosts")
    for number, entry in enumerate(source.entries):
        here = source.sending([number]).path_of(entry)
        if entry.kind == "link" and leads_out(entry):
            raise ClusterddpError(
                f"{show(here)}: a link to {show(entry.link)}, outside of what is sent: it would lead nowhere on a host",
                hint="send what it leads to by a line of its own in ssh.send, or put a copy in its place",
            )
        if entry.is_file and not os.access(here, os.R_OK):
            raise ClusterddpError(f"{show(here)}: you may not read it, it was to be sent to the hosts")
    return source


def _compare(source: Source, cargo: Cargo, hosts: list[str]) -> dict[str, Found]:
    listing = json.dumps(to_json(source.entries)).encode("ascii")
    known_bytes = total_bytes(entry for entry in source.entries if entry.sum)
    timeout_s = _COMPARE_TIMEOUT_S + known_bytes / _SLOW_BYTES_PER_S

    def compare(host: str) -> Found:
        session = cargo.sessions[host]
        reply = session.ask("store.compare", {"target": source.target}, body=listing, timeout_s=timeout_s)
        try:
            found: Found = build(Found, read_object(reply.data) | reply.facts, "answer")
        except ValueError as error:
            raise NonsenseError(host, str(error)) from error
        numbers = found.absent | found.unsure | found.changed | found.other
        if not numbers <= frozenset(range(len(source.entries))) or (found.other and not found.in_the_way):
            raise NonsenseError(host, "it tells of files that it was not asked about")
        return found

    return cargo.at_all(hosts, compare)


def _choose_leaders(groups: Iterable[tuple[str, ...]], found: Mapping[str, Found]) -> list[str]:
    """Of hosts that see the same files take the one that knows most about them; none where one says: all is there."""
    needy = [group for group in groups if not any(found[host].complete for host in group)]
    return [min(group, key=lambda host: (len(found[host].other), len(found[host].unsure))) for group in needy]


def _refuse_other(found: Mapping[str, Found], hosts: Iterable[str]) -> None:
    """Raise what is in the way, before anything is sent to anybody."""
    for host in hosts:
        if found[host].other:
            first, more = found[host].in_the_way[0], len(found[host].other) - 1
            also = f", and {more} more" if more else ""
            hint = "nothing was sent; remove it there, or send to another place (ssh.send)"
            raise SshError(host, "ask", f"{first}{also}; it is left as it is", hint=hint)


def _notes(host: str, found: Found, source: Source) -> list[str]:
    notes = []
    if found.changed:
        count = f"{len(found.changed)} file{'s' * (len(found.changed) != 1)}"
        notes.append(f"{host}:{found.place}: {count} sent earlier brought up to date")
    if found.stale_count and not source.single:
        names = ", ".join(found.stale) + (", ..." if found.stale_count > len(found.stale) else "")
        notes.append(f"{host}:{found.place}: sent earlier, no longer in {source.path}, left there: {names}")
    return notes
