"""Slurm's host lists: `rack[1-2]node[3-4],login1` is rack1node3, rack1node4, rack2node3, rack2node4, login1."""

from __future__ import annotations

import itertools

from clusterddp.errors import ClusterddpError

MAX_HOSTS = 65_536
"""More than Slurm itself expands; a slip such as `node[1-99999999999]` must not eat the memory."""
_MAX_NAME, _MAX_SHOWN = 255, 400


def expand(text: str) -> tuple[str, ...]:
    """Name the hosts of a host list, in its order; a host that is named twice is there twice.

    Raises: ClusterddpError: it is no host list, with the column where it stops being one.
    """
    hosts: list[str] = []
    if not text.strip():
        return ()
    column = 1
    for part in _split(text):
        hosts += _expand_part(text, part, column, MAX_HOSTS - len(hosts))
        column += len(part) + 1
    return tuple(hosts)


def _split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets."""
    parts, depth, start = [], 0, 0
    for column, letter in enumerate(text, 1):
        if letter == "," and depth == 0:
            parts.append(text[start : column - 1])
            start = column
            continue
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _error(text, column, f"a {letter!r} too many")
    if depth:
        raise _error(text, len(text), "a ']' is missing")
    return [*parts, text[start:]]


def _expand_part(text: str, part: str, column: int, room: int) -> list[str]:
    """Expand `rack[1-2]node[3-4]`, which begins at `column` of `text`."""
    if not part.strip():
        raise _error(text, column, "a host name is missing")
    pieces: list[list[str]] = []
    size, length = 1, 0
    rest = part
    while rest:
        plain, bracket, rest = rest.partition("[")
        length += len(plain)
        if length > _MAX_NAME:
            raise _error(text, column, f"a host name has at most {_MAX_NAME} characters")
        pieces.append([plain])
        column += len(plain) + 1
        if bracket:
            inside, _, rest = rest.partition("]")
            numbers = _expand_ranges(text, inside, column, room // size)
            size *= len(numbers)
            length += len(numbers[-1])
            pieces.append(numbers)
            column += len(inside) + 1
    return ["".join(choice).strip() for choice in itertools.product(*pieces)]


def _expand_ranges(text: str, inside: str, column: int, room: int) -> list[str]:
    """Expand `1-3,007`; a number is padded with zeros to the width of the first of its range."""
    numbers: list[str] = []
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)):
            raise _error(text, column, f"a number or a range of numbers is expected, not {item!r}")
        if int(last) < int(first):
            raise _error(text, column, f"the range {item!r} runs backwards")
        if len(numbers) + int(last) - int(first) >= room:
            raise _error(text, column, f"these are more than {MAX_HOSTS:,} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        column += len(item) + 1
    return numbers


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _error(text: str, column: int, what: str) -> ClusterddpError:
    return ClusterddpError(f"host list {text[:_MAX_SHOWN]!r}, column {column}: {what}")
