"""Files that several processes share: written atomically, read with a size limit, and only regular files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from clusterddp.errors import ClusterddpError
from clusterddp.system.exclusive import name_new
from clusterddp.wire import build, read_object, read_value

MAX_RECORD_BYTES = 1 << 26
"""The largest record that is read; the plan of a thousand nodes has one MiB."""
MAX_ROW_BYTES = 1 << 20
_T = TypeVar("_T")
_HALVES = re.compile("[\ud800-\udfff]")
_TAIL_BYTES = 8_192


def write_bytes(path: Path, data: bytes | memoryview, *, exclusive: bool = False, durable: bool = True) -> bool:
    """Write `data` to `path` atomically: temporary file, fsync, rename, fsync of the directory.

    With `exclusive`, an existing file stays and False is returned: of several writers the first one wins. Without
    `durable` there is no fsync: a crash of the machine may leave an empty file. Files are created with mode 0600.
    Raises: ClusterddpError: the file system refuses (full, read-only, quota); nothing is left behind.
    """
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if exclusive:
            if not name_new(temporary, path):
                return False
        else:
            os.replace(temporary, path)
            temporary = None
        if durable:
            sync_directory(path.parent)
        return True
    except OSError as error:
        raise ClusterddpError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def write_text(path: Path, text: str, *, exclusive: bool = False) -> bool:
    """Write `text` as UTF-8; see `write_bytes`."""
    return write_bytes(path, text.encode("utf-8"), exclusive=exclusive)


def write_json(path: Path, value: Any, *, exclusive: bool = False) -> bool:
    """Write `value` as JSON; see `write_text`."""
    return write_text(path, _dump(value, indent=1) + "\n", exclusive=exclusive)


def read_json(path: Path, *, follow: bool = False) -> Any | None:
    """Read a JSON file; None if it does not exist. `follow` as for `open_regular`.

    Raises: ClusterddpError: it is not JSON, is `null`, is no regular file, or is larger than `MAX_RECORD_BYTES`.
    """
    try:
        value = read_value(read_regular(path, MAX_RECORD_BYTES, follow=follow))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ClusterddpError(f"{path}: not JSON: {error}") from error
    if value is None:
        raise ClusterddpError(f"{path}: contains null, which is not a record")
    return value


def read_record(kind: type[_T], path: Path) -> _T | None:
    """Read a record; None if it does not exist.

    Raises: ClusterddpError: the file is invalid; see `read_json` and `build`.
    """
    value = read_json(path)
    return None if value is None else build_record(kind, value, str(path))


def build_record(kind: type[_T], value: Any, where: str) -> _T:
    """Build a record from JSON.

    Raises: ClusterddpError: the data is invalid; the message begins with `where`.
    """
    try:
        return build(kind, value)
    except ValueError as error:
        what = str(error).removeprefix("it.")
        raise ClusterddpError(f"{where}: not a {kind.__name__}: {what}") from error


def open_regular(path: Path | bytes, *, follow: bool = False) -> BinaryIO:
    """Open a file that another user may have made; it never waits for a pipe or reads a device.

    `follow`: a link to a file will do.
    Raises: ClusterddpError: it is no regular file, or a link. OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            raise
        raise ClusterddpError(f"{os.fsdecode(path)}: is not a regular file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ClusterddpError(f"{os.fsdecode(path)}: is not a regular file")
    return open(descriptor, "rb")


def read_regular(path: Path | bytes, max_bytes: int, *, follow: bool = False) -> bytes:
    """Read the whole of a file that another user may have made; `follow` as for `open_regular`.

    Raises: ClusterddpError: it is no regular file, or has more than `max_bytes`. OSError: it cannot be opened.
    """
    with open_regular(path, follow=follow) as file:
        data = file.read(max_bytes + 1) if os.fstat(file.fileno()).st_size <= max_bytes else None
    if data is None or len(data) > max_bytes:
        raise ClusterddpError(f"{os.fsdecode(path)}: has more than {max_bytes:,} bytes")
    return data


def open_log(path: Path) -> BinaryIO:
    """Open a log, of this user alone, to append to it; no link is followed.

    Raises: OSError: it cannot be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return open(os.open(path, flags, 0o600), "ab", buffering=0)


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append one row in a single write, so rows of several writers never mix.

    A full disk may take a part of the row; the next row begins on a new line.
    Raises: OSError: the row was not written, or only in part; or the path is a link.
    """
    line = (_dump(row) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Read rows; an incomplete line, which is being written or was cut by a crash, is left out.

    Raises: ClusterddpError: it is no regular file.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_RECORD_BYTES):
            with contextlib.suppress(ValueError):
                yield read_object(line)


def read_last_lines(path: Path, tail_bytes: int) -> list[bytes]:
    """Read the whole lines in the last `tail_bytes` of a file; none when there is no file.

    Raises: ClusterddpError: it is no regular file.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail_bytes))
            lines = file.read(tail_bytes).split(b"\n")
    except FileNotFoundError:
        return []
    return lines[1:] if size > tail_bytes else lines  # the beginning of the first one was cut off


def read_last_jsonl(path: Path, tail_bytes: int) -> list[dict[str, Any]]:
    """Read the whole rows in the last `tail_bytes` of a JSON-lines file; none when there is no file.

    A line of more than `MAX_ROW_BYTES` is no row.
    """
    rows = []
    for line in read_last_lines(path, tail_bytes):
        if len(line) <= MAX_ROW_BYTES:
            with contextlib.suppress(ValueError):
                rows.append(read_object(line))
    return rows


def read_last_bytes(path: Path, max_bytes: int = _TAIL_BYTES, *, start: int = 0) -> bytes:
    """Read the end of a log, from `start` on at most; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - max_bytes))
            return file.read(max_bytes)
    except (OSError, ClusterddpError):
        return b""


def read_tail(path: Path) -> str:
    """Read the end of a log without trailing blank lines; empty if it cannot be read."""
    return read_last_bytes(path).decode("utf-8", errors="replace").rstrip()


def is_file(path: Path) -> bool:
    """Return whether a file exists; False while its storage cannot be reached."""
    try:
        return path.is_file()
    except OSError:
        return False


def sync_directory(path: Path) -> None:
    """Make a rename in `path` survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dump(value: Any, *, indent: int | None = None) -> str:
    """Convert to JSON; lone surrogates, which a host may send and UTF-8 cannot encode, are escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _HALVES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
