"""Reads YAML strictly, as a tree whose scalars stay untyped, and writes a spec as YAML that reads back equal.

Only what a spec needs is let through: one document, no anchors, aliases, merge keys or tags, no key twice, at most
20 levels, 1 MB and 50,000 values. The pure-Python loader does the parsing: the C one crashes on deep nesting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping as Map
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.tree import (
    LINE_BREAK,
    NULL_WORDS,
    ListNode,
    Mapping,
    Node,
    Place,
    Scalar,
    is_null,
    problem_at,
    show,
    spec_error,
)

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec

MAX_DEPTH = 20
MAX_VALUES = 50_000


def parse(text: str, source: str, *, origin: str = "", may_be_empty: bool = False) -> Mapping:
    """Parse a YAML document whose top level is a mapping.

    Raises: SpecError: everything found wrong up to the first error that makes the rest unreadable.
    """
    place = Place(source=source, origin=origin)
    root = _Reader(text, place).read()
    if root is None or is_null(root):
        if may_be_empty:
            return Mapping(place=place)
        raise spec_error(place, "is empty, expected keys and values such as `name: my-run`")
    if not isinstance(root, Mapping):
        found = "a list" if isinstance(root, ListNode) else f"the text {show(root.text)}"
        message = f"found {found}, expected keys and values such as `name: my-run`"
        if isinstance(root, Scalar) and not root.quoted and _GLUED.match(root.text):
            message = _NO_SPACE
        raise spec_error(root.place, message)
    return root


def parse_value(text: str, place: Place) -> Node | None:
    """Parse YAML that came from no file, such as `[1, 2]`; every node gets the one place. Raises: SpecError."""
    return _Reader(text, place, fixed=True).read()


class _Reader:
    """Builds the tree from the parser's events, and collects the problems."""

    def __init__(self, text: str, place: Place, *, fixed: bool = False) -> None:
        self._events = yaml.parse(text, Loader=yaml.SafeLoader)
        self._place = place
        self._fixed = fixed
        self._lines = LINE_BREAK.split(text)
        self._problems: list[Problem] = []
        self._values = 0
        self._reached: Any = None

    def read(self) -> Node | None:
        root: Node | None = None
        try:
            root = self._document()
        except _UnreadableError:
            pass
        except yaml.MarkedYAMLError as error:
            self._refuse_syntax(error)
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            # PyYAML raises some of these for escapes such as "\UFFFFFFFF" and for %YAML lines.
            self._refuse(self._reached, f"not YAML: {show(str(error))}", None)
        if self._problems:
            raise SpecError(tuple(self._problems))
        return root

    def _document(self) -> Node | None:
        self._next()  # the stream's start
        root: Node | None = None
        documents = 0
        while isinstance(event := self._next(), yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                self._give_up(event, "a second document begins here, expected one", "one file holds one document")
            root = self._node(self._next(), depth=0)
            self._next()  # the document's end
        return root

    def _next(self) -> Any:
        event: Any = next(self._events)
        self._reached = event.end_mark
        return event

    def _node(self, event: Any, depth: int) -> Node:
        self._check(event)
        if isinstance(event, yaml.AliasEvent):
            return Scalar(text=f"*{event.anchor}", quoted=False, place=self._place_at(event.start_mark))
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(text=event.value, quoted=bool(event.style), place=self._place_at(event.start_mark))
        if depth >= MAX_DEPTH:
            self._give_up(event, f"nested deeper than {MAX_DEPTH} levels", None)
        place = self._place_at(event.start_mark)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(place, depth)
        items: list[Node] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return ListNode(items=tuple(items), place=place)

    def _mapping(self, place: Place, depth: int) -> Mapping:
        entries: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                self._check(event)
                self._give_up(event, "found a list or a mapping as a key, expected a word", None)
            key = self._node(event, depth)
            assert isinstance(key, Scalar)
            if key.text == "<<" and not key.quoted:
                self._refuse(event.start_mark, "merge keys (<<) are not allowed", _COPY)
            elif key.text in keys:
                first = f"the first one is in line {keys[key.text].line}"
                self._refuse(event.start_mark, f"duplicate key {show(key.text)}", first)
            keys.setdefault(key.text, key.place)
            entries.setdefault(key.text, self._node(self._next(), depth + 1))
        return Mapping(entries=entries, keys=keys, place=place)

    def _check(self, event: Any) -> None:
        """Count the value, and refuse YAML features that a spec does not allow."""
        if isinstance(event, yaml.AliasEvent):
            self._refuse(event.start_mark, f"aliases (*{show(str(event.anchor))[1:-1]}) are not allowed", _COPY)
            return
        self._values += 1
        if self._values > MAX_VALUES:
            self._give_up(event, f"more than {MAX_VALUES:,} values", None)
        if event.anchor is not None:
            self._refuse(event.start_mark, f"anchors (&{show(event.anchor)[1:-1]}) are not allowed", _COPY)
        if event.tag is not None:
            tag = show(event.tag)[1:-1].replace("tag:yaml.org,2002:", "!!")
            self._refuse(event.start_mark, f"tags ({tag}) are not allowed", "write the value without it")

    def _refuse_syntax(self, error: yaml.MarkedYAMLError) -> None:
        mark, opened = error.problem_mark or error.context_mark, error.context_mark
        message, hint = _syntax_words(str(error.problem or error.context or "unreadable"))
        place = self._place_at(mark)
        nodelist = _nodelist_at(place) if "never closed" in message else None
        if nodelist:
            self._problems.append(nodelist)
            return
        if message in (_MISFIT, _SECOND_COLON, _ONE_DOCUMENT) and (glued := self._find_glued(mark)):
            self._problems.append(problem_at(glued, _NO_SPACE))
            return
        if message is _UNCLOSED_QUOTE:
            mark = opened or mark
        elif "never closed" in message and opened is not None and not self._fixed:
            hint = f"it is opened in line {opened.line + 1}"
        elif message is _SECOND_COLON and ": " not in (place.source_line or "")[: (place.column or 1) - 1]:
            message, hint = _MISFIT, "is a colon missing above, or a space too many before the key?"
        self._refuse(mark, message, hint)

    def _find_glued(self, mark: Any) -> Place | None:
        """Find a line shortly before an error that has a key and a value without a space between them."""
        if self._fixed or mark is None:
            return None
        first = max(0, mark.line - _LINES_BEFORE)
        for number, line in enumerate(self._lines[first : mark.line + 1], start=first + 1):
            if found := _GLUED.match(line):
                return replace(self._place, line=number, column=found.start("key") + 1, source_line=line)
        return None

    def _give_up(self, event: yaml.Event, message: str, hint: str | None) -> NoReturn:
        self._refuse(event.start_mark, message, hint)
        raise _UnreadableError

    def _refuse(self, mark: Any, message: str, hint: str | None) -> None:
        self._problems.append(problem_at(self._place_at(mark), message, hint))

    def _place_at(self, mark: Any) -> Place:
        if self._fixed or mark is None:
            return self._place
        source_line = self._lines[mark.line] if mark.line < len(self._lines) else ""
        return replace(self._place, line=mark.line + 1, column=mark.column + 1, source_line=source_line)


class _UnreadableError(Exception):
    """The rest of the document is not read; the problems have the reason."""


def _nodelist_at(place: Place) -> Problem | None:
    """Return the problem of a nodelist without quotes, where the bracket of one is at this place."""
    column = (place.column or 1) - 1
    for found in _NODELIST.finditer(place.source_line or ""):
        if found.start() <= column <= found.end():
            closed = found["close"] == "]"
            message = f"a nodelist needs quotes{'' if closed else ', and a ]'}{_IN_FLOW}"
            hint = f'write "{found.group()}{"" if closed else "]"}"'
            return problem_at(replace(place, column=found.start() + 1), message, hint)
    return None


_COPY = "write the values out where they belong"
_GLUED = re.compile(r"\s*(?P<key>[A-Za-z_][\w.-]*):[^\s:/]")
"""A key and its value without a space between them, which YAML reads as one text."""
_LINES_BEFORE = 5
_NO_SPACE = "a space is missing after the colon"
_NODELIST = re.compile(r"(?<![\w.-])[\w.-]*\w\[\d[\d,-]*(?P<close>\]?)")
_IN_FLOW = " in a list or a mapping in one line"
_ONE_DOCUMENT = "expected keys and values of one document"
_UNCLOSED_QUOTE = "a quote is opened and never closed"
_SECOND_COLON = "a second `: ` in one value"
_MISFIT = "the line does not fit the lines above"
_SYNTAX = (
    # PyYAML's message, clusterddp's message, hint
    (r"found character '\\t'", "tabs are not allowed in indentation", "indent with spaces"),
    (r"mapping values are not allowed", _SECOND_COLON, 'put quotes around a value that holds ": "'),
    (r"found unexpected (end of stream|document separator)", _UNCLOSED_QUOTE, None),
    (r"could not find expected ':'", "expected a key and a `:`", "add a space after the colon: key: value"),
    (r"expected alphabetic or numeric character", "a text that begins with & or * needs quotes", None),
    (r"found unknown escape character", "an escape that YAML does not know", "in single quotes a \\ stands for itself"),
    (r"expected escape sequence of", "an escape with too few hexadecimal digits", None),
    (r"expected ',' or '\]'", "a list is opened with [ and never closed", None),
    (r"expected ',' or '}'", "a mapping is opened with { and never closed", None),
    (r"expected <block end>|(sequence entries|mapping keys) are not allowed", _MISFIT, "is the indentation wrong?"),
    (r"expected the node content", "expected a value here", None),
    (r"found character '[@`%]'", "a text that begins with @, ` or % needs quotes", None),
    (r"expected '<document start>'", _ONE_DOCUMENT, "each line is `key: value`"),
)


def _syntax_words(raw: str) -> tuple[str, str | None]:
    for pattern, message, hint in _SYNTAX:
        if re.search(pattern, raw):
            return message, hint
    return f"not YAML: {show(raw)[1:-1]}", None


# Text that every YAML reader reads as text, so it needs no quotes.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_LONG_KEY = 120
"""YAML readers search at most 128 characters for the colon of a key."""
_NEXT_LINE = "\n  "
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n"})
# Characters that JSON does not escape, and that YAML or the strict reader refuses.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def resolved_yaml(job: JobSpec) -> str:
    """Write every value of `job`, defaults too."""
    return spec_yaml(job.model_dump(mode="json"))


def spec_yaml(values: Map[str, Any]) -> str:
    """Write values as a spec, sections as mappings; leave out those that are None."""
    lines: list[str] = []
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, dict) and value:
            lines.append(f"{key}:")
            lines += [f"  {_pair(name, inner, after_key=_NEXT_LINE)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {flow_yaml(value)}")
    return "\n".join(lines) + "\n"


def flow_yaml(value: Any) -> str:
    """Write data in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(_pair(key, inner) for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow_yaml, value)) + "]"
    return _scalar(value)


def _pair(key: str, value: Any, after_key: str = " ") -> str:
    """Write a key and its value; a long key needs `? ` before it and, outside of braces, a line of its own."""
    text = _scalar(key)
    return f"{text}: {flow_yaml(value)}" if len(text) < _LONG_KEY else f"? {text}{after_key}: {flow_yaml(value)}"


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED and value not in NULL_WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
