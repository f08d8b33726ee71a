"""A set of files: names in bytes, kinds, sizes and sums; both ends of a connection use it."""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.wire import build

Kind = Literal["file", "exec", "link", "dir"]
KINDS: tuple[Kind, ...] = ("file", "exec", "link", "dir")
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file, link or empty directory below a directory."""

    name: bytes
    """Relative to the directory; never absolute and never with `..` in it."""
    kind: Kind
    """`exec`: a file that its owner may execute; `dir`: an empty directory; other directories follow from the names."""
    size: int = 0
    mtime_ns: int = 0
    link: bytes = b""
    """The target of a link."""
    sum: bytes = b""
    """sha256 of a file's content; empty: not computed."""

    @property
    def is_file(self) -> bool:
        return self.kind in ("file", "exec")


_MAX_PART = 255  # NAME_MAX of Linux's file systems


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSet:
    """The files of a directory at the time of the listing."""

    root: Path
    """The directory; with `single` the path of the only file, which the entry may rename."""
    entries: tuple[Entry, ...]
    single: bool = False
    left_out: tuple[str, ...] = ()
    """Names of sockets, devices and pipes, which are not copied."""

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries if entry.is_file)

    def path_of(self, entry: Entry) -> bytes:
        return os.fsencode(self.root) if self.single else os.path.join(os.fsencode(self.root), entry.name)

    def subset(self, numbers: Iterable[int]) -> FileSet:
        """Return the set with only these entries, by their indices."""
        return replace(self, entries=tuple(self.entries[number] for number in sorted(numbers)))

    def with_sums(self, numbers: Iterable[int]) -> FileSet:
        """Return the set with the sums of these entries, by their indices.

        Raises: ClusterddpError: a file cannot be read.
        """
        entries = list(self.entries)
        for number in numbers:
            path = self.path_of(entries[number])
            try:
                entries[number] = replace(entries[number], sum=read_sum(path))
            except OSError as error:
                raise ClusterddpError(f"{show(path)}: cannot be read: {error.strerror}") from error
        return replace(self, entries=tuple(entries))

    def digest(self) -> str:
        """Return the digest of the set: sha256 over the sorted names, kinds and contents, without empty directories.

        Raises: OSError: a file cannot be read.
        """
        total = hashlib.sha256()
        for entry in sorted(self.entries, key=lambda entry: os.fsdecode(entry.name)):
            if entry.kind != "dir":
                content = read_sum(self.path_of(entry)) if entry.is_file else hashlib.sha256(entry.link).digest()
                total.update(entry.name + f"\0{entry.kind}\0{content.hex()}\n".encode())
        for name in self.left_out:
            total.update(f"{name}\0other\n".encode())
        return total.hexdigest()


def list_files(root: Path) -> FileSet:
    """List the files, links and empty directories below a directory, sorted.

    Raises: ClusterddpError: a directory cannot be read.
    """
    entries: list[Entry] = []
    left_out: list[str] = []
    waiting = [b""]
    base = os.fsencode(root)
    try:
        while waiting:
            folder = waiting.pop()
            found = list(os.scandir(os.path.join(base, folder) if folder else base))
            if not found and folder:
                entries.append(Entry(name=folder, kind="dir"))
            for item in found:
                name = folder + b"/" + item.name if folder else item.name
                entry = read_entry(base, name)
                if entry is None:
                    left_out.append(show(name))
                elif entry.kind == "dir":
                    waiting.append(name)
                else:
                    entries.append(entry)
    except OSError as error:
        place = show(os.fsencode(error.filename or root))
        raise ClusterddpError(f"{place}: cannot be read: {error.strerror}") from error
    entries.sort(key=lambda entry: entry.name)
    return FileSet(root=root, entries=tuple(entries), left_out=tuple(sorted(left_out)))


def choose_files(root: Path, names: Iterable[str]) -> FileSet:
    """List the files of a directory with these names.

    Raises: OSError: one is gone, or cannot be read.
    """
    entries = (read_entry(os.fsencode(root), os.fsencode(name)) for name in sorted(names))
    return FileSet(root=root, entries=tuple(entry for entry in entries if entry is not None))


def has_digest(root: Path, digest: str) -> bool:
    """Return whether a directory exists and its files have this digest."""
    try:
        return stat.S_ISDIR(os.lstat(root).st_mode) and list_files(root).digest() == digest
    except (OSError, ClusterddpError):
        return False


def read_entry(base: bytes, name: bytes) -> Entry | None:
    """Read the entry of a path below a directory; None if it is neither a file nor a directory nor a link."""
    path = os.path.join(base, name)
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return Entry(name=name, kind="link", link=os.readlink(path))  # noqa: PTH115  a Path would tidy it up
    if stat.S_ISDIR(status.st_mode):
        return Entry(name=name, kind="dir")
    if not stat.S_ISREG(status.st_mode):
        return None
    kind: Kind = "exec" if status.st_mode & stat.S_IXUSR else "file"
    return Entry(name=name, kind=kind, size=status.st_size, mtime_ns=status.st_mtime_ns)


def read_sum(path: bytes) -> bytes:
    """Return the sha256 of a file's content."""
    content = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(4 * CHUNK_BYTES):
            content.update(chunk)
    return content.digest()


def is_safe_name(name: bytes) -> bool:
    """Return whether a relative name stays below its directory, and Linux file systems take it."""
    parts = name.split(b"/")
    return b"\0" not in name and not any(part in (b"", b".", b"..") or len(part) > _MAX_PART for part in parts)


def leads_out(entry: Entry) -> bool:
    """Return whether a link leads out of the directory that it is sent with."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(entry.name), entry.link))
    return end.startswith(b"/") or end.split(b"/", 1)[0] == b".."


def to_json(entries: Iterable[Entry]) -> list[list[Any]]:
    """Convert entries to JSON; bytes that are not UTF-8 become lone surrogates."""
    return [
        [as_text(entry.name), entry.kind, entry.size, entry.mtime_ns, as_text(entry.link), entry.sum.hex()]
        for entry in entries
    ]


def from_json(rows: Any) -> Iterator[Entry]:
    """Read entries that `to_json` wrote.

    Raises: ValueError: another program wrote them.
    """
    for name, kind, size, mtime_ns, link, content in build(list[tuple[str, str, int, int, str, str]], rows, "rows"):
        raw = as_bytes(name)
        if kind not in KINDS or not is_safe_name(raw):
            raise ValueError(f"{name!r:.80} ({kind!r:.20}) is not a valid entry")
        sum_ = bytes.fromhex(content)
        yield Entry(name=raw, kind=kind, size=size, mtime_ns=mtime_ns, link=as_bytes(link), sum=sum_)


def show(name: bytes) -> str:
    """Return a name as printable text, whatever bytes it has."""
    text = name.decode("utf-8", "backslashreplace")
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def as_text(name: bytes) -> str:
    """Return a name as text; bytes that are not UTF-8 become lone surrogates."""
    return name.decode("utf-8", "surrogateescape")


def as_bytes(name: str) -> bytes:
    """Return the name that `as_text` has made a text of."""
    return name.encode("utf-8", "surrogateescape")
