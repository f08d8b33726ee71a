"""A spec as written, before the model types it: its text, and a tree of mappings, lists and scalars with their places.

A problem of a spec points at a place: it is shown with its line and a caret.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from clusterddp.errors import Problem, SpecError

NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL"})
MAX_SHOWN = 60
"""How many characters of a value a message repeats."""

# Numbers are shown without quotes: with quotes they look quoted in the spec.
_NUMBER_LIKE = re.compile(r"[-+.]{0,2}[0-9][0-9A-Za-z_.:+-]{0,39}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a value. `line` and `column` count from 1; None: it is not from a file."""

    source: str
    """The name in messages: the file, or the argument as given."""
    origin: str = ""
    """The name in plans: `command line`, `profile lab`; empty: source and line."""
    line: int | None = None
    column: int | None = None
    source_line: str | None = None

    @property
    def text(self) -> str:
        """The origin of the value, as text."""
        return self.origin or (self.source if self.line is None else f"{self.source}:{self.line}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """One value as text. `quoted`: written as `"8"`, not `8`; block scalars count as quoted."""

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


def is_null(node: Node | None) -> bool:
    """Return whether there is no value: no node, or an empty one."""
    return node is None or (isinstance(node, Scalar) and node.null)


def merge(lower: Mapping, upper: Mapping) -> Mapping:
    """Merge `upper` into `lower`: mappings key by key; a list or scalar of `upper` replaces the whole value.

    A key without a value (`resources:`) does not change a mapping; a written `null` removes it.
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
    """Return `tree` without the node at `path`."""
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
    """Convert a node for the model: to dicts, lists, None for nulls; scalars stay, and the model types them."""
    if isinstance(node, Mapping):
        return {key: to_data(child) for key, child in node.entries.items()}
    if isinstance(node, ListNode):
        return [to_data(item) for item in node.items]
    return None if node.null else node


def brief(node: Node) -> str:
    """Write a value for a list of values: the text of a scalar, of others their kind."""
    if isinstance(node, Scalar):
        return node.text
    return "[...]" if isinstance(node, ListNode) else "{...}"


def show(text: str, limit: int | None = MAX_SHOWN) -> str:
    """Quote text for a message: shortened, with control characters escaped."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 3] + "..."
    return escape(json.dumps(text, ensure_ascii=False))


def escape(text: str) -> str:
    """Escape unprintable characters, control and direction marks too, so that a file cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(ord(char)) for char in text)


def describe(value: object) -> str:
    """Describe a value, for `found ..., expected ...`."""
    if value is None or (isinstance(value, Scalar) and value.null):
        text = "an empty value"
    elif isinstance(value, Scalar):
        number = not value.quoted and _NUMBER_LIKE.fullmatch(value.text)
        text = f"the text {show(value.text)}" if value.quoted else value.text if number else show(value.text)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = show(value)
    elif isinstance(value, int | float):
        text = str(value) if isinstance(value, float) or abs(value) < 10**MAX_SHOWN else "a huge number"
    elif isinstance(value, dict | Mapping):
        text = "a mapping"
    else:
        text = "a list" if isinstance(value, list | tuple | ListNode) else f"a {type(value).__name__}"
    return text


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


MAX_PROBLEMS_SHOWN = 10
LINE_WINDOW = 100
"""How many characters of a source line are shown; of a longer line, those around the problem."""


def format_spec_error(error: SpecError) -> str:
    """Write the error for a terminal: each problem with its place, its line, a caret and a hint.

    Text from the file is escaped, so a file cannot control the terminal.
    """
    shown = error.problems[:MAX_PROBLEMS_SHOWN]
    one_source = len({problem.source for problem in error.problems}) == 1
    lines = [
        f"error: {escape(error.message)}"
        if one_source
        else f"error: the spec has {len(error.problems)} problems{error.result and ', '}{error.result}"
    ]
    for problem in shown:
        lines += _format_problem(problem)
    if len(error.problems) > len(shown):
        lines.append(f"  ... and {len(error.problems) - len(shown)} more")
    return "\n".join(lines)


def problem_at(place: Place, message: str, hint: str | None = None, *, key: str = "") -> Problem:
    """Make a problem that points at `place`."""
    # A line of `secrets` is not shown: a user may have written a secret's value in place of its name. The address of
    # a webhook is a secret, too.
    source_line = None if key.split(".", maxsplit=1)[0] in {"secrets", "notify"} else place.source_line
    return Problem(
        source=place.source,
        message=message,
        key=key,
        line=place.line,
        column=place.column,
        source_line=source_line,
        hint=hint,
    )


def spec_error(place: Place, message: str, hint: str | None = None, *, key: str = "") -> SpecError:
    """Make the error of a single problem, which points at `place`."""
    return SpecError((problem_at(place, message, hint, key=key),))


def in_order(problems: Iterable[Problem], first_source: str) -> tuple[Problem, ...]:
    """Sort problems by their place, those of `first_source` first, and drop duplicates."""
    unique = list(dict.fromkeys(problems))
    sources = list(dict.fromkeys([first_source, *(problem.source for problem in unique)]))
    order = {source: index for index, source in enumerate(sources)}
    return tuple(sorted(unique, key=lambda problem: (order[problem.source], problem.line or 0, problem.column or 0)))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `. Did you mean "..."?` for the closest choice, or nothing."""
    match = closest(word, choices)
    return f'. Did you mean "{match}"?' if match else ""


def closest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice that is most similar to `word`; None when no choice is similar."""
    if len(word) > 64:
        return None
    word, choices = word.lower().replace("-", "_"), list(choices)
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=cutoff)
    if not matches and len(word) >= 3:
        matches = [choice for choice in choices if choice.startswith(word)]
    return matches[0] if len(matches) == 1 else None


def near_file(path: Path) -> str:
    """Return `. Did you mean "..."?` for a file that does not exist, where its directory has one with such a name."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_file() and not each.name.startswith(".")]
    except OSError:
        return ""
    by_spelling = {Path(name).stem: name for name in names} | dict(zip(names, names, strict=True))
    near = difflib.get_close_matches(path.name, by_spelling, n=1)
    return f'. Did you mean "{path.with_name(by_spelling[near[0]])}"?' if near else ""


def _format_problem(problem: Problem) -> list[str]:
    place = problem.source if problem.line is None else f"{problem.source}:{problem.line}:{problem.column}"
    key = f"{problem.key}: " if problem.key else ""
    lines = [escape(f"  --> {place}  {key}{problem.message}")]
    margin = 4
    if problem.source_line is not None and problem.line is not None and problem.column is not None:
        margin = max(4, len(str(problem.line)) + 1)
        text, width = _window(problem.source_line, problem.column - 1)
        lines += [f"{problem.line:>{margin}} | {text}", f"{'':>{margin}} | {' ' * width}^"]
    if problem.hint:
        lines.append(escape(f"{'':>{margin}}   hint: {problem.hint}"))
    return lines


def _window(line: str, index: int) -> tuple[str, int]:
    """Cut `line` around `index` and return it escaped, with the width in cells of the part before the index."""
    from rich.cells import cell_len  # where there is a problem to show

    start = max(0, index - LINE_WINDOW // 2) if len(line) > LINE_WINDOW else 0
    before, after = line[start:index], line[index : start + LINE_WINDOW]
    left = "..." if start else ""
    right = "..." if start + LINE_WINDOW < len(line) else ""
    shown_before = left + escape(before)
    return f"{shown_before}{escape(after)}{right}", cell_len(shown_before)


MAX_BYTES = 1_000_000

# PyYAML refuses most of these without a place, and reads U+0085, U+2028 and U+2029 as line breaks.
_REFUSED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
LINE_BREAK = re.compile("\r\n|\r|\n")


def read_bytes(
    path: Path, *, expected: str = "a YAML file", check: Callable[[os.stat_result], None] | None = None
) -> bytes:
    """Read a spec's file of at most 1 MB; refuse a device, a FIFO or a directory.

    `check`: raises an error when the owner or the mode of the open file is wrong.
    """
    try:
        # O_NONBLOCK: else opening a FIFO without a writer blocks.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no path can hold a NUL character"
        if isinstance(error, FileNotFoundError):
            reason = f"{reason}{near_file(path)}"
        raise spec_error(Place(source=str(path)), f"cannot be read: {reason}") from error
    try:
        found = os.fstat(descriptor)
        mode = found.st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
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
    """Decode UTF-8, with or without a byte order mark, and refuse characters that YAML does not allow."""
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
