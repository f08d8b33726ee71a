"""Escape text of other programs, so that it cannot control the terminal that shows it."""

from __future__ import annotations

import re

UNSAFE = re.compile(
    "["
    "\x00-\x08\x0a-\x1f\x7f-\x9f"  # control characters but the tab: escape sequences, C1, bells
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the reading direction
    "\u2028\u2029"  # line separators other than newline
    "\ud800-\udfff"  # lone surrogates
    "]"
)


def printable(text: bytes | str) -> str:
    r"""Return one line with everything but printable characters and tabs escaped: `\x1b[31m`, `\xff`.

    Bytes are read as UTF-8; an invalid byte is escaped.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="backslashreplace")
    return UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
