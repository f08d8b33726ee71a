"""Reads a spec as text: at most 1 MB of a regular file or of standard input, UTF-8, no control characters."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from clusterddp.spec.tree import Place, spec_error

MAX_BYTES = 1_000_000

# PyYAML refuses most of these without a place, and reads U+0085, U+2028 and U+2029 as line breaks.
_REFUSED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
LINE_BREAK = re.compile("\r\n|\r|\n")


def read_bytes(
    path: Path, *, expected: str = "a YAML file", check: Callable[[os.stat_result], None] | None = None
) -> bytes:
    """Read a spec's file of at most 1 MB; refuse a device, a FIFO or a directory.

    `check`: raises an error when the owner or the mode of the open file is wrong.
    Raises: SpecError: it is no regular file, cannot be read, or is too large.
    """
    try:
        # O_NONBLOCK: else opening a FIFO without a writer blocks.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no path can hold a NUL character"
        raise spec_error(Place(source=str(path)), f"cannot be read: {reason}") from error
    try:
        found = os.fstat(descriptor)
        mode = found.st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            hint = None if stat.S_ISDIR(mode) else "- reads it from the standard input"
            raise spec_error(Place(source=str(path)), f"is {kind}, expected {expected}", hint)
        if check is not None:
            check(found)
        with open(descriptor, "rb", closefd=False) as file:
            return _limited(file.read(MAX_BYTES + 1), str(path), expected)
    except OSError as error:
        raise spec_error(Place(source=str(path)), f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def read_stdin() -> bytes:
    """Read a spec from the standard input, up to 1 MB."""
    return _limited(sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>")


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8, with or without a byte order mark, and refuse characters that YAML does not allow.

    Raises: SpecError: with the place of the first byte or character that is wrong.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        hint = "save the file as UTF-8"
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise spec_error(Place(source=source), "is UTF-16, expected UTF-8", hint) from error
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise spec_error(_place_of(source, before, len(before)), message, hint) from error
    match = _REFUSED.search(text)
    if match:
        code = f"U+{ord(match.group()):04X}"
        hint = f'in a text, write it as "\\u{ord(match.group()):04X}" in double quotes'
        message = f"character {code} is not allowed here"
        place = _place_of(source, text, match.start())
        raise spec_error(place, message, hint if ord(match.group()) else "is this a binary file?")
    return text


def _limited(data: bytes, source: str, expected: str = "a spec") -> bytes:
    if len(data) > MAX_BYTES:
        raise spec_error(Place(source=source), f"is larger than {MAX_BYTES // 1_000_000} MB, expected {expected}")
    return data


def _place_of(source: str, text: str, index: int) -> Place:
    before = LINE_BREAK.split(text[:index])
    rest = LINE_BREAK.split(text[index:], maxsplit=1)[0]
    line = before[-1] + rest
    return Place(source=source, line=len(before), column=len(before[-1]) + 1, source_line=line)
