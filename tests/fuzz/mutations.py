"""What a fuzzer makes of valid data: other types, nesting, huge numbers, odd characters, paths, cuts, flips."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NASTY = (
    *("", " ", "\0", "\n", "\t", "\r", "\x1b[2J", "\x1b]0;x\x07", "\x9b31m"),
    *("\ud800", "\udcff", "\u202e", "\u2028", "\ufeff"),
    *("../../../escaped", "/escaped", "~root/escaped", "a/../../../escaped", ".", "..", "/", "//", "~"),
    *("x\0y", "-rf", "--", "@last"),
    *("%s%n", "%(x)s", "{0.__class__}", "$(touch escaped)", "`id`", "${HOME}", "*"),
    *("[a-", "[1-65000]", "n[0-9]x[0-9]", "(", "\\", "'", '"'),
    *("nan", "inf", "-inf", "1e999", "0x10", "-0", "007", "9" * 400, "9" * 5000, "\u0663", "\xb2"),
    *("\u2167", "1_000", "null", "true", "[]", "{}"),
    *("x" * 300, "x" * 70_000, "é" * 3000, "a:" * 2000, "=" * 500, "\n" * 5000, "a b " * 2000),
)  # fmt: skip
NUMBERS = (
    *(0, 1, -1, 2, 7, 1.5, -0.0, 255, 65_535, 65_536, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**64),
    *(10**18, 10**400),
    *(1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), True, False),
)  # fmt: skip
MOST_BYTES = 50_000
"""What repetition may come to: more takes a second of honest reading."""
TOKEN = "0123456789abcdef0123456789abcdef"
DEPTHS = (5, 60, 70, 900, 20_000, 100_000)


@dataclass(frozen=True, kw_only=True)
class Example:
    """Something that is valid: a value of JSON, text, or bytes; `what` says which it is."""

    value: Any
    what: Any = None

    @property
    def data(self) -> bytes:
        return _encode(self.value)


Reader = Callable[[Any, bytes, random.Random], object]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that is read."""

    name: str
    examples: list[Example]
    read: Reader
    """Gets what the example is, its data, and chance."""
    reads_examples: bool = True
    """Whether an example that nothing has mutated is read without an error."""
    is_any_place_allowed: bool = False


def mutate(rng: random.Random, example: Example) -> bytes:
    """Make of an example what no user would write by mistake."""
    value = example.value
    if not isinstance(value, str | bytes):
        value = copy.deepcopy(value)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            value = _mutate_value(rng, value)
        data = _encode(value, ascii_only=rng.random() < 0.7)
        return data if rng.random() < 0.8 else _mutate_bytes(rng, data)
    data = _encode(value)
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        data = _mutate_bytes(rng, data)
    return data


def _encode(value: Any, *, ascii_only: bool = True) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, list) and value and isinstance(value[0], _Row):
        return b"".join(
            _encode(dict(row), ascii_only=ascii_only) + b"\n" if isinstance(row, dict) else b"?\n" for row in value
        )
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=ascii_only)
    return text.encode("utf-8", "surrogatepass")


class _Row(dict[str, Any]):
    """One of the rows of a file of rows."""


def rows(*each: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the value of a file with a JSON object a line."""
    return [_Row(row) for row in each]


def _mutate_value(rng: random.Random, value: Any) -> Any:
    """Change one place in a tree of JSON."""
    places = list(_places(value))
    if not places:
        return _other(rng, value)
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        most = 1 + MOST_BYTES // len(json.dumps(holder[key]))
        copies = min(rng.choice((2, 3, 300, 20_000)), most)
        # Each its own: what the next mutation does to one of them, it does not do to all.
        holder[key : key + 1] = [copy.deepcopy(holder[key]) for _ in range(copies)]
    elif kind == 1:
        holder[rng.choice(NASTY)[:100]] = holder[key]
    elif kind == 2:
        holder[key] = _nested(rng, holder[key])
    elif kind == 3:
        other_holder, other_key = rng.choice(places)
        holder[key] = copy.deepcopy(other_holder[other_key]) if (other_holder, other_key) != (holder, key) else None
    else:
        holder[key] = _other(rng, holder[key])
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where the parts of a tree are: what holds each, and by which key or number."""
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _other(rng: random.Random, value: Any) -> Any:
    """Return something else in a value's place: often of its type, as often of another."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice((None, [], {}, [None], {"": 0}, [[]], "", 0, True))
    if kind <= 2 and isinstance(value, str):
        return _mutate_text(rng, value)
    return rng.choice(NASTY) if kind <= 3 else rng.choice(NUMBERS)


def _nested(rng: random.Random, value: Any) -> Any:
    for _ in range(rng.choice(DEPTHS[:3])):
        value = [value] if rng.random() < 0.5 else {"x": value}
    return value


def _mutate_text(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text) + 1)
    length = min(rng.choice((0, 1, 5, 40)), len(text) - place)
    return text[:place] + rng.choice(NASTY) + text[place + length :]


def _mutate_bytes(rng: random.Random, data: bytes) -> bytes:  # noqa: PLR0911  one return for each kind
    place = rng.randrange(len(data) + 1)
    end = min(len(data), place + rng.choice((1, 2, 8, 60, 400)))
    kind = rng.randrange(9)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + data[end:]
    if kind == 2:
        return (
            data[:end]
            + data[place:end] * min(rng.choice((1, 2, 50, 5000)), 1 + MOST_BYTES // (end - place + 1))
            + data[end:]
        )
    if kind == 3:
        return data[:place] + bytes((rng.randrange(256),)) + data[place + 1 :]
    if kind == 4:
        opening = rng.choice((b"[", b"{", b'{"x":', b"(", b"- ", b"$(", b"${a:-", b"&a [*a,"))
        return data[:place] + opening * min(rng.choice(DEPTHS), MOST_BYTES // len(opening)) + data[end:]
    if kind == 5:
        lines = data.split(b"\n")
        first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[first], lines[second] = lines[second], lines[first]
        return b"\n".join(lines)
    if kind == 6:
        digits = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
        place = rng.choice(digits) if digits else place
        return (
            data[:place]
            + (b"9" * 4400 if rng.random() < 0.1 else json.dumps(rng.choice(NUMBERS[:-8])).encode())
            + data[place + 1 :]
        )
    return data[:place] + rng.choice(NASTY).encode("utf-8", "surrogatepass") + data[end if kind == 7 else place :]
