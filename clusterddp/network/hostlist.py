"""Slurm's host lists: `rack[1-2]node[3-4],login1` is rack1node3, rack1node4, rack2node3, rack2node4, login1."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from clusterddp.errors import ClusterddpError

MAX_HOSTS = 65_536
"""More than Slurm itself expands; a typo such as `node[1-99999999999]` must not use up the memory."""
MAX_NAME = 255
"""Longer than any host name; it bounds what a long name with a range in it expands to."""
_SHOWN = 80

_Range = tuple[int, int, int]
"""First, last, and the width that zeros pad the numbers to."""
_Piece = str | list[_Range]


def expand(text: str, *, limit: int = MAX_HOSTS) -> tuple[str, ...]:
    """Name the hosts of a host list, in its order; a host that is named twice is there twice.

    Raises: ClusterddpError: it is no host list, or names more than `limit` hosts, with the column.
    """
    return tuple(name for pieces in _parse(text, limit) for name in _names(pieces))


def count(text: str, *, limit: int = MAX_HOSTS) -> int:
    """Count the hosts of a host list without naming them. Raises: ClusterddpError: as `expand`."""
    return sum(map(_size, _parse(text, limit)))


def compress(hosts: Sequence[str]) -> str:
    """Write a host list: `node1, node2, node4, login` is node[1-2,4],login."""
    parts: list[str] = []
    for (prefix, numbered), group in itertools.groupby(
        map(_split_number, hosts), key=lambda each: (each[0], len(each))
    ):
        numbers = [each[-1] for each in group]
        if numbered == 1:
            parts += numbers
            continue
        ranges: list[list[str]] = []
        for number in numbers:
            if ranges and len(ranges[-1][-1]) == len(number) and int(number) == int(ranges[-1][-1]) + 1:
                ranges[-1] = [ranges[-1][0], number]
            else:
                ranges.append([number])
        written = ",".join(map("-".join, ranges))
        parts.append(f"{prefix}[{written}]" if len(numbers) > 1 else prefix + written)
    return ",".join(parts)


def compress_counts(counts: Sequence[int]) -> str:
    """Write counts for nodes as Slurm does: 2, 2, 2, 1 is `2(x3),1`."""
    groups = [(count, len(list(group))) for count, group in itertools.groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)


def _split_number(host: str) -> tuple[str, ...]:
    match = re.fullmatch("(.*?)([0-9]+)", host)
    return (match[1], match[2]) if match else (host,)


def _parse(text: str, limit: int) -> list[list[_Piece]]:
    """Parse a host list; refuse an invalid or too large one before any name is made."""
    parts: list[list[_Piece]] = []
    column, total = 1, 0
    for part in _split(text) if text.strip() else ():
        pieces = _parse_part(text, part, column, limit - total, limit)
        total += _size(pieces)
        parts.append(pieces)
        column += len(part) + 1
    return parts


def _split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets."""
    parts, depth, begin = [], 0, 0
    for column, letter in enumerate(text, 1):
        if letter == "," and depth == 0:
            parts.append(text[begin : column - 1])
            begin = column
            continue
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _error(text, column, f"a {letter!r} too many")
    if depth:
        raise _error(text, len(text), "a ']' is missing")
    return [*parts, text[begin:]]


def _parse_part(text: str, part: str, column: int, room: int, limit: int) -> list[_Piece]:
    """Parse `rack[1-2]node[3-4]`, which begins at `column` of `text`."""
    if not part.strip():
        raise _error(text, column, "a host name is missing")
    pieces: list[_Piece] = []
    size, length, begin = 1, 0, column
    for index, written in enumerate(re.split(r"[\[\]]", part)):
        # Brackets are balanced and never nested: every second piece stands in them.
        if index % 2:
            ranges = _parse_ranges(text, written, column, room // size, limit)
            size *= _count(ranges)
            length += max(max(width, len(str(last))) for _, last, width in ranges)
            pieces.append(ranges)
        else:
            length += len(written)
            pieces.append(written)
        if length > MAX_NAME:
            raise _error(text, begin, f"a host name of more than {MAX_NAME} characters")
        column += len(written) + 1
    if size > room:
        raise _error(text, begin, _too_many(limit))
    return pieces


def _parse_ranges(text: str, inside: str, column: int, room: int, limit: int) -> list[_Range]:
    """Parse `1-3,007`; a number is padded with zeros to the width of the first of its range."""
    ranges: list[_Range] = []
    size = 0
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)):
            raise _error(text, column, f"a number or a range of numbers is expected, not {_shortened(item)}")
        if int(last) < int(first):
            raise _error(text, column, f"the range {item!r} runs backwards")
        size += int(last) - int(first) + 1
        if size > room:
            raise _error(text, column, _too_many(limit))
        ranges.append((int(first), int(last), len(first)))
        column += len(item) + 1
    return ranges


def _names(pieces: list[_Piece]) -> Iterator[str]:
    choices = [[piece] if isinstance(piece, str) else list(_numbers(piece)) for piece in pieces]
    return ("".join(choice).strip() for choice in itertools.product(*choices))


def _numbers(ranges: list[_Range]) -> Iterator[str]:
    return (str(number).zfill(width) for first, last, width in ranges for number in range(first, last + 1))


def _size(pieces: list[_Piece]) -> int:
    return math.prod(_count(piece) for piece in pieces if not isinstance(piece, str))


def _count(ranges: list[_Range]) -> int:
    return sum(last - first + 1 for first, last, _ in ranges)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _too_many(limit: int) -> str:
    return f"these are more than {limit:,} hosts"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")


def _error(text: str, column: int, what: str) -> ClusterddpError:
    return ClusterddpError(f"host list {_shortened(text)}, column {column}: {what}")
