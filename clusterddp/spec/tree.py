"""What was written, before any schema typed it: mappings, lists and scalars, each with its place and its origin."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL"})
MAX_SHOWN = 60
"""Characters of a value that a message repeats."""

# Shown without quotes, which would look as if the number had been quoted.
_NUMBER_LIKE = re.compile(r"[-+.]{0,2}[0-9][0-9A-Za-z_.:+-]{0,39}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where something was written. `line` and `column` count from 1; None: it came from no file."""

    source: str
    """What a message names: the file, or the argument as given."""
    origin: str = ""
    """What the plan names: `command line`, `profile lab`; empty: source and line."""
    line: int | None = None
    column: int | None = None
    source_line: str | None = None

    @property
    def words(self) -> str:
        """Return where the value came from, in a few words."""
        return self.origin or (self.source if self.line is None else f"{self.source}:{self.line}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """One value as text. `quoted`: `"8"`, not `8`; block scalars count as quoted."""

    text: str
    quoted: bool
    place: Place

    @property
    def null(self) -> bool:
        return not self.quoted and self.text in NULL_WORDS


@dataclass(frozen=True, kw_only=True, slots=True)
class ListNode:
    """A list."""

    items: tuple[Node, ...]
    place: Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapping:
    """Keys and values. `keys` holds the place of each key, `place` that of the mapping itself."""

    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Place] = field(default_factory=dict)
    place: Place


Node: TypeAlias = "Scalar | ListNode | Mapping"


def merge(lower: Mapping, upper: Mapping) -> Mapping:
    """Lay `upper` over `lower`: mappings are merged key by key, everything else is replaced whole.

    A key with nothing behind it (`resources:`) over a mapping changes nothing; a written `null` removes the mapping.
    """
    entries, keys = dict(lower.entries), dict(lower.keys)
    for key, node in upper.entries.items():
        below = entries.get(key)
        if isinstance(below, Mapping) and isinstance(node, Scalar) and node.null and not node.text:
            continue
        entries[key] = merge(below, node) if isinstance(below, Mapping) and isinstance(node, Mapping) else node
        keys[key] = upper.keys[key]
    return Mapping(entries=entries, keys=keys, place=upper.place)


def without(tree: Mapping, path: tuple[str, ...]) -> Mapping:
    """Return `tree` without what lies at `path`."""
    child = tree.entries.get(path[0])
    if child is None or (len(path) > 1 and not isinstance(child, Mapping)):
        return tree
    entries, keys = dict(tree.entries), dict(tree.keys)
    if len(path) > 1 and isinstance(child, Mapping):
        entries[path[0]] = without(child, path[1:])
    else:
        del entries[path[0]], keys[path[0]]
    return Mapping(entries=entries, keys=keys, place=tree.place)


def to_data(node: Node) -> Any:
    """Turn a node into what the model validates: dicts, lists, None for nulls, and scalars that it types itself."""
    if isinstance(node, Mapping):
        return {key: to_data(child) for key, child in node.entries.items()}
    if isinstance(node, ListNode):
        return [to_data(item) for item in node.items]
    return None if node.null else node


def show(text: str, limit: int | None = MAX_SHOWN) -> str:
    """Quote text for a message: shortened, and with every character escaped that would move or hide others."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 3] + "..."
    return escape(json.dumps(text, ensure_ascii=False))


def escape(text: str) -> str:
    """Escape what cannot be seen, control and direction marks among it, so that a file cannot steer the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(ord(char)) for char in text)


def describe(value: object) -> str:
    """Return what was found, for `found ..., expected ...`."""
    if value is None or (isinstance(value, Scalar) and value.null):
        words = "nothing"
    elif isinstance(value, Scalar):
        number = not value.quoted and _NUMBER_LIKE.fullmatch(value.text)
        words = f"the text {show(value.text)}" if value.quoted else value.text if number else show(value.text)
    elif isinstance(value, bool):
        words = "true" if value else "false"
    elif isinstance(value, str):
        words = show(value)
    elif isinstance(value, int | float):
        words = str(value) if isinstance(value, float) or abs(value) < 10**MAX_SHOWN else "a huge number"
    elif isinstance(value, dict | Mapping):
        words = "a mapping"
    else:
        words = "a list" if isinstance(value, list | tuple | ListNode) else f"a {type(value).__name__}"
    return words


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
