"""Data that is uploaded to a place of the user's choice: compared first, never deleted, other files never overwritten.

A record below the root keeps, for each place, the files that an upload has put there: the next comparison needs no
sums for them, and an upload may replace them by newer ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from clusterddp.agent.storage import find_place, refusing_disk, staging
from clusterddp.agent.types import Body, Host, Reply
from clusterddp.errors import ClusterddpError
from clusterddp.system.file_set import Entry, from_json, leads_out, read_entry, read_sum, show, to_json
from clusterddp.system.file_stream import receive_files
from clusterddp.system.files import write_bytes
from clusterddp.wire import read_object, read_value

Verdict = Literal["same", "absent", "unsure", "changed", "other"]
"""`unsure`: the sender's sum decides. `changed`: it is as an upload left it, and the sender has a newer one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """An entry at a place, as it was when it was recorded."""

    here: Entry
    sent_mtime_ns: int
    by_us: bool
    """An upload has put it there; otherwise it was found, with the same content."""


@dataclass(kw_only=True)
class Place:
    """A directory that data is uploaded to, and what is recorded of it."""

    path: Path
    record: Path
    known: dict[bytes, Known]
    folders: dict[bytes, bool] = field(default_factory=dict)
    """Directory -> whether it is a real one here: nothing is written through a link."""

    def judge(self, entry: Entry) -> Verdict:
        """Compare an entry here with that of the sender; record a file that is the same."""
        if not self._is_folder(posixpath.dirname(entry.name)):
            return "other"
        try:
            here = read_entry(os.fsencode(self.path), entry.name)
        except FileNotFoundError:
            return "absent"
        if here is not None and here.is_file and entry.is_file:
            return self._judge_file(here, entry)
        if here is not None and here.kind == entry.kind and here.link == entry.link:
            return "same"
        known = self._known(here, entry)
        replaceable = known is not None and known.by_us and "dir" not in (known.here.kind, entry.kind)
        return "changed" if replaceable else "other"

    def _judge_file(self, here: Entry, entry: Entry) -> Verdict:
        known = self._known(here, entry)
        by_us = known is not None and known.by_us
        difference: Verdict = "changed" if by_us else "other"
        if here.size != entry.size or (by_us and here.kind != entry.kind):
            return difference
        if known is not None and known.sent_mtime_ns == entry.mtime_ns:
            return "same"
        if not entry.sum:
            return "unsure"
        content = known.here.sum if known is not None else read_sum(self.path_of(entry))
        if content != entry.sum:
            return difference
        here = replace(here, sum=content)
        self.known[entry.name] = Known(here=here, sent_mtime_ns=entry.mtime_ns, by_us=by_us)
        return "same"

    def _known(self, here: Entry | None, entry: Entry) -> Known | None:
        """Return the record of an entry, if it has not been touched since."""
        known = self.known.get(entry.name)
        return known if known is not None and here is not None and _is_untouched(here, known.here) else None

    def path_of(self, entry: Entry) -> bytes:
        return os.path.join(os.fsencode(self.path), entry.name)

    def learn(self, entry: Entry) -> None:
        """Record that an upload has put this entry here."""
        here = read_entry(os.fsencode(self.path), entry.name)
        assert here is not None
        here = replace(here, sum=entry.sum)
        self.known[entry.name] = Known(here=here, sent_mtime_ns=entry.mtime_ns, by_us=True)

    def save(self) -> None:
        """Write the record; without it the next comparison only takes longer."""
        rows = [[*to_json([known.here])[0], known.sent_mtime_ns, known.by_us] for known in self.known.values()]
        self.record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes(self.record, json.dumps({"place": str(self.path), "known": rows}).encode("ascii"))

    def _is_folder(self, name: bytes) -> bool:
        """Return whether a directory is a real one here, or can be made."""
        if name not in self.folders:
            above = not name or self._is_folder(posixpath.dirname(name))
            path = os.path.join(os.fsencode(self.path), name) if name else os.fsencode(self.path)
            self.folders[name] = above and (not os.path.lexists(path) or _is_real_folder(path))
        return self.folders[name]


def compare(host: Host, request: dict[str, Any], body: Body) -> Reply:
    """Return which entries of a listing (JSON) are not here: their numbers, by verdict; and what is in their way."""
    place = open_place(host, request["target"])
    verdicts: dict[str, list[int]] = {"absent": [], "unsure": [], "changed": [], "other": []}
    ways: list[str] = []
    before = dict(place.known)
    names = set()
    with refusing_disk(place.path, 0):
        for number, entry in enumerate(from_json(read_value(body.read_all()))):
            names.add(entry.name)
            verdict = place.judge(entry)
            if verdict != "same":
                verdicts[verdict].append(number)
            if verdict == "other" and len(ways) < 3:
                ways.append(_describe(place, entry))
    if place.known != before:
        place.save()
    stale = sorted(show(name) for name, known in place.known.items() if known.by_us and name not in names)
    answer = json.dumps(verdicts).encode()
    facts = {"place": show(os.fsencode(place.path)), "in_the_way": ways, "stale": stale[:3], "stale_count": len(stale)}
    return Reply(facts=facts, chunks=[answer], size=len(answer))


def put(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Receive files for a place; all are received and checked before the first appears there."""
    place = open_place(host, request["target"])
    with refusing_disk(place.path, body.size):
        fresh = not os.path.lexists(place.path)
        beside = place.path.parent if fresh else place.path
        beside.mkdir(parents=True, exist_ok=True)
        with staging(beside) as tree:
            entries = receive_files(body.read, tree, read_only=False)
            strays = [entry for entry in entries if entry.kind == "link" and leads_out(entry)]
            if strays:
                raise ClusterddpError(
                    f"{show(strays[0].name)}: a link that leads out of the directory; nothing is kept"
                )
            if not (fresh and _rename_all(tree, place.path)):
                entries = _merge(place, tree, entries)
        for entry in entries:
            place.learn(entry)
        place.save()
    return {"place": show(os.fsencode(place.path))}


def open_place(host: Host, target: str) -> Place:
    """Find a place, and read its record."""
    path = find_place(target)
    record = host.root / "data" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    known: dict[bytes, Known] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        for *row, sent_mtime_ns, by_us in read_object(record.read_bytes())["known"]:
            (here,) = from_json([row])
            known[here.name] = Known(here=here, sent_mtime_ns=int(sent_mtime_ns), by_us=bool(by_us))
    return Place(path=path, record=record, known=known)


def _merge(place: Place, tree: Path, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Rename the received files, one by one, into a directory that exists; return those that were not there yet.

    Raises: ClusterddpError: another file is in the way; then nothing was touched.
    """
    verdicts = [(entry, place.judge(entry)) for entry in entries]
    for entry, verdict in verdicts:
        if verdict == "other":
            raise _refusal(place, entry)
    fresh = tuple((entry, verdict) for entry, verdict in verdicts if verdict != "same")
    for entry, verdict in fresh:
        target = place.path_of(entry)
        source = os.path.join(os.fsencode(tree), entry.name)
        folder = target if entry.kind == "dir" else posixpath.dirname(target)
        Path(os.fsdecode(folder)).mkdir(parents=True, exist_ok=True)
        if verdict == "changed":
            os.replace(source, target)
        elif entry.kind != "dir":
            _name_new(place, entry, source, target)
    return tuple(entry for entry, _ in fresh)


def _name_new(place: Place, entry: Entry, source: bytes, target: bytes) -> None:
    """Give a file its name, unless another process has just made another file there."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        if place.judge(entry) != "same":
            raise _refusal(place, entry) from None
    except OSError:  # a file system without hard links
        os.replace(source, target)


def _rename_all(tree: Path, target: Path) -> bool:
    """Rename a new directory to its place; False: another process has just made one."""
    try:
        tree.rename(target)
    except OSError:
        if not os.path.lexists(target):
            raise
        return False
    return True


def _refusal(place: Place, entry: Entry) -> ClusterddpError:
    return ClusterddpError(
        f"{_describe(place, entry)}; it is left as it is", hint="remove it, or send to another place"
    )


def _describe(place: Place, entry: Entry) -> str:
    """Describe the file that is in the way of an entry."""
    path = place.path_of(entry)
    parents = [name for name, is_folder in place.folders.items() if not is_folder and entry.name.startswith(name)]
    if parents:
        path = os.path.join(os.fsencode(place.path), min(parents, key=len)).rstrip(b"/")
        return f"{show(path)}: there is something that is no directory"
    with contextlib.suppress(OSError):
        here = read_entry(os.fsencode(place.path), entry.name)
        if here is not None and here.is_file and entry.is_file:
            sizes = f"{here.size} bytes, {entry.size} are to come" if here.size != entry.size else f"{here.size} bytes"
            return f"{show(path)}: there is a file with other content ({sizes})"
        found = {"dir": "a directory", "link": "a link", "file": "a file", "exec": "a file"}
        return f"{show(path)}: there is {found[here.kind] if here else 'no file and no directory'} already"
    return f"{show(path)}: there is something else"


def _is_untouched(here: Entry, then: Entry) -> bool:
    return (here.kind, here.size, here.mtime_ns, here.link) == (then.kind, then.size, then.mtime_ns, then.link)


def _is_real_folder(path: bytes) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False
