"""Files as one tar archive without owners, devices and hard links; both ends of a connection use it.

The receiver checks every name, and makes links last, so it never writes through one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from clusterddp.errors import ClusterddpError
from clusterddp.system.file_set import CHUNK_BYTES, Entry, FileSet, Kind, as_bytes, as_text, is_safe_name, show

_END = bytes(2 * tarfile.BLOCKSIZE)
_TYPES = {"file": tarfile.REGTYPE, "exec": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "dir": tarfile.DIRTYPE}
_MODES = {"file": 0o644, "exec": 0o755, "link": 0o777, "dir": 0o755}
_S = 10**9
Read = Callable[[int], bytes]


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A set of files as an archive of known size; the files are read while it is sent."""

    files: FileSet

    @functools.cached_property
    def size(self) -> int:
        """How many bytes `chunks` yields."""
        return sum(len(_head(entry)) + _padded(entry.size) for entry in self.files.entries) + len(_END)

    def chunks(self) -> Iterator[bytes]:
        """Yield the archive in chunks of about `CHUNK_BYTES`.

        Raises: ClusterddpError: a file has changed since it was listed, or cannot be read.
        """
        gathered = bytearray()
        for piece in self._pieces():
            gathered += piece
            if len(gathered) >= CHUNK_BYTES:
                yield bytes(gathered)
                gathered.clear()
        yield bytes(gathered)

    def _pieces(self) -> Iterator[bytes]:
        for entry in self.files.entries:
            yield _head(entry)
            if entry.is_file:
                yield from self._content(entry)
        yield _END

    def _content(self, entry: Entry) -> Iterator[bytes]:
        path, left = self.files.path_of(entry), entry.size
        try:
            with open(path, "rb", buffering=0) as file:
                while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                    left -= len(chunk)
                    yield chunk
                status = os.fstat(file.fileno())
        except OSError as error:
            raise _changed(path, f"cannot be read: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (entry.size, entry.mtime_ns):
            raise _changed(path, "changed while it was sent")
        yield bytes(_padded(entry.size) - entry.size)


def unpack(read: Read, target: Path, *, read_only: bool) -> tuple[Entry, ...]:
    """Write the files of an archive below `target`, an empty directory; return their entries.

    `read` returns at most as many bytes as it is called for. `read_only`: the files are not writable; otherwise the
    umask decides.
    Raises: ClusterddpError: the archive is invalid or incomplete. OSError: the disk refuses.
    """
    base, made = os.fsencode(target), {b""}
    entries: list[Entry] = []
    stream: Any = SimpleNamespace(read=read)
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK_BYTES, encoding="utf-8") as archive:
            while (info := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else it keeps all of them
                entry = _entry(info)
                with _refusing(entry):
                    _make_folder(base, posixpath.dirname(entry.name), made)
                    if entry.kind == "dir":
                        _make_folder(base, entry.name, made)
                    elif entry.is_file:
                        content = archive.extractfile(info)
                        assert content is not None
                        _write_file(content, os.path.join(base, entry.name), entry, read_only)
                    entries.append(entry)
    except tarfile.TarError as error:
        raise ClusterddpError(f"what arrived is an incomplete archive ({error}); none of the files are kept") from error
    for entry in entries:
        if entry.kind == "link":
            with _refusing(entry):
                os.symlink(entry.link, os.path.join(base, entry.name))  # noqa: PTH211  a Path would tidy it up
    return tuple(entries)


def _head(entry: Entry) -> bytes:
    info = tarfile.TarInfo(as_text(entry.name))
    info.type, info.mode = _TYPES[entry.kind], _MODES[entry.kind]
    info.size, info.linkname = entry.size, as_text(entry.link)
    info.mtime = max(0, entry.mtime_ns // _S)
    info.pax_headers = {"mtime": f"{entry.mtime_ns // _S}.{entry.mtime_ns % _S:09}"}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _entry(info: tarfile.TarInfo) -> Entry:
    """Return the entry of an archive's member.

    Raises: ClusterddpError: it is neither file, link nor directory, or its name leads out.
    """
    kinds: dict[bytes, Kind] = {tarfile.SYMTYPE: "link", tarfile.DIRTYPE: "dir", tarfile.REGTYPE: "file"}
    kind = kinds.get(info.type)
    name = as_bytes(info.name)
    if kind is None:
        raise ClusterddpError(f"{show(name)!r}: neither a file nor a link nor a directory; none of the files are kept")
    if not is_safe_name(name):
        raise ClusterddpError(
            f"{show(name)!r}: a name that leads out of the directory or is too long; none of the files are kept"
        )
    if kind != "file":
        return Entry(name=name, kind=kind, link=as_bytes(info.linkname) if kind == "link" else b"")
    seconds, _, fraction = info.pax_headers.get("mtime", str(int(info.mtime))).partition(".")
    try:
        mtime_ns = int(seconds) * _S + int(fraction.ljust(9, "0")[:9])
    except ValueError as error:
        raise ClusterddpError(f"{show(name)}: an invalid time; none of the files are kept") from error
    entry = Entry(name=name, kind=kind, size=info.size, mtime_ns=mtime_ns)
    return replace(entry, kind="exec") if info.mode & 0o100 else entry


def _write_file(content: IO[bytes], path: bytes, entry: Entry, read_only: bool) -> None:
    rights = (0o400 if read_only else 0o666) | ((0o100 if read_only else 0o111) if entry.kind == "exec" else 0)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, rights)
    with open(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, CHUNK_BYTES)
        file.flush()
        os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))


def _make_folder(base: bytes, name: bytes, made: set[bytes]) -> None:
    if name not in made:
        _make_folder(base, posixpath.dirname(name), made)
        with contextlib.suppress(FileExistsError):
            Path(os.fsdecode(os.path.join(base, name))).mkdir()
        made.add(name)


@contextlib.contextmanager
def _refusing(entry: Entry) -> Iterator[None]:
    """Refuse a name that the archive has twice, or that lies below a file."""
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise ClusterddpError(
            f"{show(entry.name)}: the archive has it twice, or below a file; none of the files are kept"
        ) from error


def _changed(path: bytes, what: str) -> ClusterddpError:
    return ClusterddpError(f"{show(path)}: {what}", hint="submit again when no process writes to it")


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
