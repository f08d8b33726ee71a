"""Files as one stream of (head, name, content, sum).

Unlike tar, the format has no owners, devices, absolute names or hard links, so a sender cannot misuse them. The
receiver makes links last, so it never writes through one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.system.file_set import CHUNK_BYTES, KINDS, Entry, FileSet, is_safe_name, show

_HEAD = struct.Struct(">BIQq")  # kind, bytes of the name, bytes of the content, mtime_ns
_SUM_BYTES = 32
_END = len(KINDS)
_SPOILED = bytes(_SUM_BYTES)
"""Stands for a sum: the sender could not read the file as it was listed."""
_MAX_NAME_BYTES = 64 * 1024
Read = Callable[[int], bytes]


@dataclass(kw_only=True, slots=True)
class FileStream:
    """A set of files as one stream of bytes, for one receiver."""

    files: FileSet
    spoiled: list[str] = field(default_factory=list)
    """Why files could not be read as they were listed; the receiver then refuses the stream."""

    @property
    def size(self) -> int:
        """How many bytes `chunks` yields; it is sent first, and stays right even if files change."""
        heads = sum(_HEAD.size + len(entry.name) + len(_content(entry)) for entry in self.files.entries)
        files = sum(entry.size + _SUM_BYTES for entry in self.files.entries if entry.is_file)
        return heads + files + _HEAD.size

    def chunks(self) -> Iterator[bytes]:
        """Yield the stream in chunks of about `CHUNK_BYTES`."""
        gathered: list[bytes] = []
        weight = 0
        for piece in self._pieces():
            gathered.append(piece)
            weight += len(piece)
            if weight >= CHUNK_BYTES:
                yield b"".join(gathered)
                gathered, weight = [], 0
        yield b"".join(gathered)

    def _pieces(self) -> Iterator[bytes]:
        for entry in self.files.entries:
            size = entry.size if entry.is_file else len(_content(entry))
            yield _HEAD.pack(KINDS.index(entry.kind), len(entry.name), size, entry.mtime_ns) + entry.name
            if entry.is_file:
                yield from self._file(entry)
            else:
                yield _content(entry)
        yield _HEAD.pack(_END, 0, 0, 0)

    def _file(self, entry: Entry) -> Iterator[bytes]:
        """Yield exactly `entry.size` bytes, then their sum, or `_SPOILED` if the file has changed."""
        content, left, what = hashlib.sha256(), entry.size, None
        try:
            with open(self.files.path_of(entry), "rb", buffering=0) as file:
                while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                    content.update(chunk)
                    left -= len(chunk)
                    yield chunk
                status = os.fstat(file.fileno())
                if left or (status.st_size, status.st_mtime_ns) != (entry.size, entry.mtime_ns):
                    what = "changed while it was sent"
                elif entry.sum and content.digest() != entry.sum:
                    what = "changed while it was read"
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
        while left:
            left -= (pad := min(left, CHUNK_BYTES))
            yield bytes(pad)
        if what is not None:
            self.spoiled.append(f"{show(self.files.path_of(entry))}: {what}")
        yield content.digest() if what is None else _SPOILED


def receive_files(read: Read, target: Path, *, read_only: bool) -> tuple[Entry, ...]:
    """Write the files of a stream below `target`, an empty directory; return the entries with their sums.

    `read_only`: the files are not writable; otherwise the umask decides.
    Raises: ClusterddpError: the stream is invalid or incomplete. OSError: the disk refuses.
    """
    base, taken, made = os.fsencode(target), _exactly(read), {b""}
    entries: list[Entry] = []
    while (entry := _read_head(taken)) is not None:
        with _refusing(entry):
            _make_folder(base, posixpath.dirname(entry.name), made)
            if entry.kind == "dir":
                _make_folder(base, entry.name, made)
            elif entry.is_file:
                entry = _write_file(taken, os.path.join(base, entry.name), entry, read_only)
            entries.append(entry)
    for entry in entries:
        if entry.kind == "link":
            with _refusing(entry):
                os.symlink(entry.link, os.path.join(base, entry.name))  # noqa: PTH211  a Path would tidy it up
    return tuple(entries)


def _read_head(taken: Read) -> Entry | None:
    """Read the head of the next entry; None at the end."""
    kind, name_bytes, size, mtime_ns = _HEAD.unpack(taken(_HEAD.size))
    if kind == _END:
        return None
    if kind > _END or name_bytes > _MAX_NAME_BYTES:
        raise ClusterddpError("what arrived is not a stream of files")
    name = taken(name_bytes)
    if not is_safe_name(name):
        raise ClusterddpError(
            f"{show(name)!r}: a name that leads out of the directory or is too long; none of the files are kept"
        )
    if KINDS[kind] in ("file", "exec"):
        return Entry(name=name, kind=KINDS[kind], size=size, mtime_ns=mtime_ns)
    if size > _MAX_NAME_BYTES or (KINDS[kind] == "dir" and size):
        raise ClusterddpError("what arrived is not a stream of files")
    return Entry(name=name, kind=KINDS[kind], link=taken(size))


def _write_file(taken: Read, path: bytes, entry: Entry, read_only: bool) -> Entry:
    rights = (0o400 if read_only else 0o666) | ((0o100 if read_only else 0o111) if entry.kind == "exec" else 0)
    content, left = hashlib.sha256(), entry.size
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, rights)
    with open(descriptor, "wb", buffering=0) as file:
        while left:
            chunk = memoryview(taken(min(left, CHUNK_BYTES)))
            left -= len(chunk)
            content.update(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))
    announced = taken(_SUM_BYTES)
    if announced == _SPOILED:
        raise ClusterddpError(f"{show(entry.name)}: it changed on the sender's side, or could not be read there")
    if announced != content.digest():
        raise ClusterddpError(f"{show(entry.name)}: the sum (sha256) of the received content is wrong")
    return replace(entry, sum=announced)


def _make_folder(base: bytes, name: bytes, made: set[bytes]) -> None:
    if name not in made:
        _make_folder(base, posixpath.dirname(name), made)
        with contextlib.suppress(FileExistsError):
            Path(os.fsdecode(os.path.join(base, name))).mkdir()
        made.add(name)


def _exactly(read: Read) -> Read:
    """Return a function that reads exactly as many bytes as it is called for."""

    def taken(count: int) -> bytes:
        pieces: list[bytes] = []
        while count:
            piece = read(count)
            if not piece:
                raise ClusterddpError("the connection ended before the last file; none of the files are kept")
            pieces.append(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    return taken


@contextlib.contextmanager
def _refusing(entry: Entry) -> Iterator[None]:
    """Refuse a name that the stream has twice, or that lies below a file."""
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise ClusterddpError(
            f"{show(entry.name)}: the stream has it twice, or below a file; none of the files are kept"
        ) from error


def _content(entry: Entry) -> bytes:
    return entry.link if entry.kind == "link" else b""
