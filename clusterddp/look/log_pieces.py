"""Which lines of logs a command shows, and how it writes each of them."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from clusterddp.errors import UsageError
from clusterddp.look.printable import printable
from clusterddp.ranks.spelling import spell_ranks
from clusterddp.system.units import UNIT_S

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_NO_TIME = "-".ljust(19)


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A line of one rank with its end, or part of a line that is too long or not finished."""

    rank: int
    host: str
    data: bytes
    written: float | None = None
    """Seconds since the epoch, as far as it was asked for and is known."""
    others: tuple[int, ...] = ()
    """Further ranks that wrote the same line."""


@dataclass(frozen=True, slots=True)
class NewAttempt:
    """The pieces after it belong to another attempt."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogQuery:
    """Which lines of a run's logs are wanted."""

    attempt: int | None = None
    """None: the newest one; when the logs are followed, it and all later ones."""
    tail_lines: int | None = None
    """The last lines of each file."""
    since: float | None = None
    """Lines that were written at this time or later; seconds since the epoch."""
    matches: Callable[[bytes], bool] | None = None
    """Of the lines that are left, those for which this is true."""
    timestamps: bool = False
    """Each piece has the time when it was written."""
    folds: bool = False
    """Equal lines of several ranks are one piece."""


def parse_since(text: str, *, now: float) -> float:
    """Read `--since`: `90s`, `10m`, `2h`, `1d` before now, or a time in ISO form, local where it names no zone.

    Raises: UsageError.
    """
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return now - float(ago[1]) * UNIT_S[ago[2]]
    try:
        # Python 3.10 does not read Z.
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip())).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {printable(text)}: is no time", hint="write 90s, 10m, 2h or 1d, or 2026-01-31T14:30"
        ) from None


def parse_pattern(text: str) -> Callable[[bytes], bool]:
    """Compile `--grep` to a test of lines.

    Raises: UsageError: it is no regular expression; the message says where.
    """
    try:
        pattern = re.compile(text)
        if text.isascii():
            search = re.compile(text.encode()).search
            return lambda line: search(line.rstrip(b"\r\n")) is not None
    except (re.error, OverflowError, RecursionError) as error:
        where = getattr(error, "pos", None)
        what = getattr(error, "msg", None) or str(error)
        at = "" if where is None else f' at character {where + 1}, before "{printable(text[where : where + 20])}"'
        raise UsageError(
            f"--grep {printable(text)}: is no regular expression: {what}{at}",
            hint="write \\ before a character that is meant as itself: \\(",
        ) from None
    return lambda line: pattern.search(line.rstrip(b"\r\n").decode(errors="replace")) is not None


def format_piece(piece: LogPiece, *, prefix: bool, escape: bool, timestamps: bool = False) -> bytes:
    """Return what to write for a piece: `[r3 host] ` before it, and its control characters escaped.

    With `timestamps` the time is before both. Without any, the bytes are exactly those of the file.
    """
    if not (prefix or escape or timestamps):
        return piece.data
    body = piece.data.rstrip(b"\r\n")
    ending = piece.data[len(body) :]
    if not body and ending == b"\r":
        return b""  # how progress bars begin a line
    text = printable(body).encode() if escape else body
    head = f"{_time_text(piece.written)} " if timestamps else ""
    if prefix:
        whose = f"r{piece.rank} {printable(piece.host)}"
        head += f"[{spell_ranks([piece.rank, *piece.others]) if piece.others else whose}] "
    return head.encode() + text + (b"\n" if ending or head else b"")


def json_piece(piece: LogPiece) -> dict[str, object]:
    """Return a piece as `logs -o json` writes it; `ends` is false where the rest of the line follows."""
    return {
        "schema": 1,
        "ranks": sorted([piece.rank, *piece.others]),
        "host": piece.host,
        "time": piece.written,
        "text": piece.data.rstrip(b"\r\n").decode(errors="replace"),
        "ends": piece.data.endswith((b"\n", b"\r")),
    }


def _time_text(moment: float | None) -> str:
    if moment is None:
        return _NO_TIME
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment))
