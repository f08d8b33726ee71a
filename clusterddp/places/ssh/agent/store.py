"""Uploads to this host: code by its digest, once; data to a place of the user's choice, which is compared first.

An upload is received in a hidden directory beside its place and appears by renaming, so nothing half is ever visible.
Of data nothing is deleted, and no file that an upload has not put there is overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import posixpath
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.agent.operations import Body, Host, Reply
from clusterddp.run.code import link_or_copy
from clusterddp.system.archive import unpack
from clusterddp.system.file_set import Entry, from_json, has_digest, leads_out, list_files, read_entry, read_sum, show
from clusterddp.system.file_set import to_json as rows_of
from clusterddp.system.files import write_bytes
from clusterddp.wire import read_object, read_value

_SUM = re.compile(r"[0-9a-f]{64}")
PREFIX = ".clusterddp-incoming-"
_MARK = ".clusterddp-mark-"
"""A file by which earlier versions recognised storage that hosts share."""
_ABANDONED_S = 1800.0
"""How long nothing is written by an upload whose agent is dead: an agent ends by itself earlier."""
Verdict = Literal["same", "absent", "unsure", "changed", "other"]
"""`unsure`: the sender's sum decides. `changed`: it is as an upload left it, and the sender has a newer one."""


def compare(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any] | Reply:
    """Return what is missing: whether code with a `sum`, or which entries of a listing of data for a `target`.

    Of a listing (JSON) it has the numbers of its entries by verdict; `changed` and `other` name what is there, too:
    hosts that share it name the same.
    """
    if request["sum"] is not None:
        missing, code = lacks_code(host, request["sum"]), str(find_code(host.root, request["sum"]))
        return {"missing": missing, "place": code, "in_the_way": [], "stale": [], "stale_count": 0}
    place = open_place(host, request["target"] or "")
    before = dict(place.known)
    numbers: dict[str, list[int]] = {"absent": [], "unsure": []}
    named: dict[str, dict[str, str]] = {"changed": {}, "other": {}}
    ways: list[str] = []
    names = set()
    with refusing_disk(place.path, 0):
        for number, entry in enumerate(from_json(read_value(body.read_all()))):
            names.add(entry.name)
            verdict = place.judge(entry)
            if verdict in numbers:
                numbers[verdict].append(number)
            elif verdict in named:
                named[verdict][str(number)] = _identify(place, entry)
            if verdict == "other" and len(ways) < 3:
                ways.append(_describe(place, entry))
    if place.known != before:
        place.save()
    stale = sorted(show(name) for name, known in place.known.items() if known.by_us and name not in names)
    answer = json.dumps(numbers | named).encode()
    facts = {
        "missing": bool(numbers["absent"]),
        "place": show(os.fsencode(place.path)),
        "in_the_way": ways,
        "stale": stale[:3],
        "stale_count": len(stale),
    }
    return Reply(facts=facts, chunks=[answer], size=len(answer))


def lacks_code(host: Host, digest: str) -> bool:
    """Return whether the code with this digest is missing or damaged here: it is read again to check that."""
    code = find_code(host.root, digest)
    os.listdir(code.parent)  # NFS may remember that it was missing, but asks when the directory is listed
    is_here = has_digest(code, digest)
    if is_here:
        with contextlib.suppress(OSError):
            os.utime(code)  # gc removes old ones, and must not remove this one before a run has its copy
    return not is_here


def put(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Receive an archive: of code, with its `sum`, or of data for a `target`."""
    if request["sum"] is None:
        return _put_data(open_place(host, request["target"] or ""), body)
    target = find_code(host.root, request["sum"])
    with refusing_disk(target.parent, body.size), staging(target.parent, body) as tree:
        unpack(body.read, tree, read_only=True)
        found = list_files(tree).digest()
        if found != request["sum"]:
            raise ClusterddpError(
                f"the snapshot of the code has the sum {found[:12]}, expected {request['sum'][:12]}",
                hint="it was changed since it was taken: submit again",
            )
        tree.chmod(0o700)
        if not has_digest(target, found):
            if os.path.lexists(target):  # its content does not match its name; runs have copies of their own
                with contextlib.suppress(FileNotFoundError):
                    target.rename(tree.with_name("damaged"))
            _rename_new(tree, target)
    return {}


def check_out(host: Host, digest: str, run: Path) -> None:
    """Give a run its code: a copy whose files are hard links to the store's; a run that has it keeps it."""
    source, code = find_code(host.root, digest), run / "code"
    with refusing_disk(run, 0):
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        if code.is_dir():
            return
        if not source.is_dir():
            raise ClusterddpError(f"{source}: the snapshot of the code is gone from this host", hint="submit again")
        with staging(run) as tree:
            shutil.copytree(source, tree, symlinks=True, copy_function=link_or_copy, dirs_exist_ok=True)
            tree.chmod(0o700)
            _rename_new(tree, code)


def find_code(root: Path, digest: str) -> Path:
    """Return the place of the code with this digest, whether it is there or not."""
    if not _SUM.fullmatch(digest):
        raise ValueError(f"not a sum: {digest!r}")
    return root / "code" / digest


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
        """Compare the entry here with that of the sender; record a file that is the same."""
        if not self._is_folder(posixpath.dirname(entry.name)):
            return "other"
        try:
            here = read_entry(os.fsencode(self.path), entry.name)
        except FileNotFoundError:
            return "absent"
        known = self.known.get(entry.name)
        if here is None or known is None or not _is_untouched(here, known.here):
            known = None
        if here is not None and here.is_file and entry.is_file:
            return self._judge_file(here, entry, known)
        if here is not None and here.kind == entry.kind and here.link == entry.link:
            return "same"
        replaceable = known is not None and known.by_us and "dir" not in (known.here.kind, entry.kind)
        return "changed" if replaceable else "other"

    def _judge_file(self, here: Entry, entry: Entry, known: Known | None) -> Verdict:
        by_us = known is not None and known.by_us
        difference: Verdict = "changed" if by_us else "other"
        if here.size != entry.size or (by_us and here.kind != entry.kind):
            return difference
        if entry.mtime_ns == (known.sent_mtime_ns if known else here.mtime_ns):
            return "same"
        if not entry.sum:
            return "unsure"
        if read_sum(self.path_of(entry)) != entry.sum:
            return difference
        self.known[entry.name] = Known(here=here, sent_mtime_ns=entry.mtime_ns, by_us=by_us)
        return "same"

    def path_of(self, entry: Entry) -> bytes:
        return os.path.join(os.fsencode(self.path), entry.name)

    def learn(self, entry: Entry) -> None:
        """Record that an upload has put this entry here."""
        here = read_entry(os.fsencode(self.path), entry.name)
        assert here is not None
        self.known[entry.name] = Known(here=here, sent_mtime_ns=entry.mtime_ns, by_us=True)

    def save(self) -> None:
        """Write the record; without it the next comparison only takes longer."""
        rows = [[*rows_of([known.here])[0], known.sent_mtime_ns, known.by_us] for known in self.known.values()]
        self.record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes(self.record, json.dumps({"place": str(self.path), "known": rows}).encode("ascii"))

    def _is_folder(self, name: bytes) -> bool:
        """Return whether a directory is a real one here, or can be made."""
        if name not in self.folders:
            above = not name or self._is_folder(posixpath.dirname(name))
            path = os.path.join(os.fsencode(self.path), name) if name else os.fsencode(self.path)
            is_real = not os.path.lexists(path) or stat.S_ISDIR(os.lstat(path).st_mode)
            self.folders[name] = above and is_real
        return self.folders[name]


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


def find_place(target: str) -> Path:
    """Return the directory of a target: `~` is the home, and a relative one begins there.

    Raises: ClusterddpError: it names the home of a user that is not known here.
    """
    try:
        return Path(os.path.realpath(Path.home() / Path(target).expanduser()))
    except (RuntimeError, ValueError) as error:
        raise ClusterddpError(f"{target}: names no place on this host: {error}") from error


@contextlib.contextmanager
def staging(beside: Path, body: Body | None = None) -> Iterator[Path]:
    """Make an empty directory on the file system of `beside`, and remove it with its content at the end.

    Its time is set while bytes of `body` arrive; the next upload removes that of a killed one by its age.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(beside):
            status = entry.stat(follow_symlinks=False)
            is_ours = entry.name.startswith((PREFIX, _MARK)) and status.st_uid == os.getuid()
            if is_ours and time.time() - status.st_mtime > _ABANDONED_S:
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
    place = beside / f"{PREFIX}{secrets.token_hex(8)}"
    place.mkdir(mode=0o700)
    try:
        tree = place / "tree"
        tree.mkdir()  # by the umask: it may become a directory that others read
        if body is not None:
            body.on_progress(lambda: os.utime(place))
        yield tree
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def refusing_disk(place: Path, needed_bytes: int) -> Iterator[None]:
    """Explain errors of the disk; check its free space before anything is written.

    Raises: ClusterddpError.
    """
    existing = place
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    try:
        disk = os.statvfs(existing)
        if needed_bytes > disk.f_bavail * disk.f_frsize and disk.f_blocks:  # some file systems do not report their size
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        raise _explain(error, place, existing, needed_bytes) from error


def _put_data(place: Place, body: Body) -> dict[str, Any]:
    """Receive files for a place; all are received and checked before the first appears there."""
    with refusing_disk(place.path, body.size):
        fresh = not os.path.lexists(place.path)
        beside = place.path.parent if fresh else place.path
        beside.mkdir(parents=True, exist_ok=True)
        with staging(beside, body) as tree:
            entries = unpack(body.read, tree, read_only=False)
            strays = [entry for entry in entries if entry.kind == "link" and leads_out(entry)]
            if strays:
                name = show(strays[0].name)
                raise ClusterddpError(f"{name}: a link that leads out of the directory; nothing is kept")
            if not (fresh and _rename_new(tree, place.path)):
                entries = _merge(place, tree, entries)
        for entry in entries:
            place.learn(entry)
        place.save()
    return {}


def _merge(place: Place, tree: Path, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Rename the received files, one by one, into a directory that exists; return those that were not there yet.

    Raises: ClusterddpError: another file is in the way; then nothing was touched.
    """
    verdicts = []
    for entry in entries:
        verdict = place.judge(entry)
        if verdict == "unsure":  # another upload has just put a file of its size there
            source = os.path.join(os.fsencode(tree), entry.name)
            verdict = "same" if read_sum(source) == read_sum(place.path_of(entry)) else "other"
        if verdict == "other":
            raise _refusal(place, entry)
        verdicts.append((entry, verdict))
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
        return f"{show(path)}: there is something that is not a directory"
    with contextlib.suppress(OSError):
        here = read_entry(os.fsencode(place.path), entry.name)
        if here is not None and here.is_file and entry.is_file:
            sizes = f"{here.size} bytes, {entry.size} are to come" if here.size != entry.size else f"{here.size} bytes"
            return f"{show(path)}: there is a file with other content ({sizes})"
        found = {"dir": "a directory", "link": "a link", "file": "a file", "exec": "a file"}
        return f"{show(path)}: there is {found[here.kind] if here else 'no file and no directory'} already"
    return f"{show(path)}: there is something else"


def _identify(place: Place, entry: Entry) -> str:
    """Name the file that is at the place of an entry, the same on all hosts that see it; empty: there is none."""
    try:
        status = os.lstat(place.path_of(entry))
    except OSError:
        return ""
    return f"{status.st_ino} {status.st_size} {status.st_ctime_ns}"


def _is_untouched(here: Entry, then: Entry) -> bool:
    return (here.kind, here.size, here.mtime_ns, here.link) == (then.kind, then.size, then.mtime_ns, then.link)


def _explain(error: OSError, place: Path, existing: Path, needed_bytes: int) -> ClusterddpError:
    where = show(os.fsencode(place))
    if error.errno == errno.ENOSPC:
        disk = os.statvfs(existing)
        free = disk.f_bavail * disk.f_frsize
        needed = f", {needed_bytes / 1e6:.1f} MB are needed" if needed_bytes else ""
        return ClusterddpError(
            f"{where}: the disk is full: {free / 1e6:.1f} MB are free{needed}",
            hint="clusterddp gc removes what old runs left on hosts; ssh.dir and ssh.send may name other places",
        )
    if error.errno == errno.EDQUOT:
        return ClusterddpError(f"{where}: your quota is used up", hint="`quota -s` there shows it")
    refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    hint = "another place, for example below ~, may be named in the spec: ssh.send, ssh.dir" if refused else None
    at = show(os.fsencode(error.filename)) if isinstance(error.filename, str | bytes) else where
    return ClusterddpError(f"{at}: {error.strerror or error}", hint=hint)


def _rename_new(tree: Path, target: Path) -> bool:
    """Rename a directory to a name that is free; False: another process has just made it."""
    try:
        tree.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and not os.path.lexists(target):
            raise
        return False
    return True
