"""What a directory holds: names as the file system has them, kinds, sizes, sums; on both ends of a connection."""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.wire import build

Kind = Literal["file", "exec", "link", "dir"]
KINDS: tuple[Kind, ...] = ("file", "exec", "link", "dir")
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One thing below a directory."""

    name: bytes
    """Relative to the directory; never absolute, never with `..` in it."""
    kind: Kind
    """`exec`: a file that its owner may execute; `dir`: an empty directory, others follow from the names in them."""
    size: int = 0
    mtime_ns: int = 0
    link: bytes = b""
    """Where a link leads."""
    sum: bytes = b""
    """sha256 of a file's content; empty: not known."""

    @property
    def is_file(self) -> bool:
        return self.kind in ("file", "exec")


_MAX_PART = 255  # NAME_MAX of Linux's file systems


def list_tree(root: Path) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """List what is below a directory, sorted, and the names of what can not be copied: sockets, devices.

    Raises: ClusterddpError: a directory cannot be read.
    """
    entries: list[Entry] = []
    strange: list[str] = []
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
                    strange.append(show(name))
                elif entry.kind == "dir":
                    waiting.append(name)
                else:
                    entries.append(entry)
    except OSError as error:
        place = show(os.fsencode(error.filename or root))
        raise ClusterddpError(f"{place}: cannot be read: {error.strerror}") from error
    return tuple(sorted(entries, key=lambda entry: entry.name)), tuple(sorted(strange))


def read_entry(base: bytes, name: bytes) -> Entry | None:
    """Look at one thing below a directory; None for what is neither a file nor a directory nor a link."""
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
    """Sum up the content of a file."""
    content = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(4 * CHUNK_BYTES):
            content.update(chunk)
    return content.digest()


def is_safe_name(name: bytes) -> bool:
    """Say whether a name stays below the directory that it is relative to, and a file system can hold it."""
    parts = name.split(b"/")
    return b"\0" not in name and not any(part in (b"", b".", b"..") or len(part) > _MAX_PART for part in parts)


def leads_out(entry: Entry) -> bool:
    """Say whether a link leads out of the directory that it is sent with."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(entry.name), entry.link))
    return end.startswith(b"/") or end.split(b"/", 1)[0] == b".."


def to_json(entries: Iterable[Entry]) -> list[list[Any]]:
    """Give entries a form for JSON in ASCII: bytes that are no UTF-8 become lone surrogates."""
    return [
        [_text(entry.name), entry.kind, entry.size, entry.mtime_ns, _text(entry.link), entry.sum.hex()]
        for entry in entries
    ]


def from_json(rows: Any) -> Iterator[Entry]:
    """Read entries that `to_json` wrote.

    Raises: ValueError: somebody else wrote them.
    """
    for name, kind, size, mtime_ns, link, content in build(list[tuple[str, str, int, int, str, str]], rows, "rows"):
        raw = _raw(name)
        if kind not in KINDS or not is_safe_name(raw):
            raise ValueError(f"{name!r:.80} ({kind!r:.20}) has no place below a directory")
        sum_ = bytes.fromhex(content)
        yield Entry(name=raw, kind=kind, size=size, mtime_ns=mtime_ns, link=_raw(link), sum=sum_)


def show(name: bytes) -> str:
    """Write a name so that everybody can read it, whatever bytes it is made of."""
    text = name.decode("utf-8", "backslashreplace")
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
