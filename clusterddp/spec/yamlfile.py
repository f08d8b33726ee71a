"""Reading YAML strictly: bytes become a tree of mappings, lists and texts with their places, and nothing is guessed.

Only what a spec needs is let through: one document, no anchors, aliases, merge keys or tags, no key twice, at most
20 levels, 1 MB and 50,000 values. The pure-Python loader does the parsing: the C one crashes on deep nesting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.problems import problem_at
from clusterddp.spec.textfile import LINE_BREAK, whole_file_error
from clusterddp.spec.tree import ListNode, Mapping, Node, Place, Scalar, show

MAX_DEPTH = 20
MAX_VALUES = 50_000


@dataclass(kw_only=True)
class _Open:
    """A mapping or list whose end has not come yet."""

    place: Place
    is_list: bool
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Place] = field(default_factory=dict)
    key: str | None = None
    """The key that waits for its value."""


def parse(text: str, source: str, *, origin: str = "", may_be_empty: bool = False) -> Mapping:
    """Parse a YAML document whose top level is a mapping.

    Raises: SpecError: everything found wrong up to the first error that makes the rest unreadable.
    """
    place = Place(source=source, origin=origin)
    root = _TreeBuilder(text, place).build()
    if root is None or (isinstance(root, Scalar) and root.null):
        if may_be_empty:
            return Mapping(place=place)
        raise whole_file_error(source, "is empty, expected keys and values such as `name: my-run`")
    if not isinstance(root, Mapping):
        found = "a list" if isinstance(root, ListNode) else f"the text {show(root.text)}"
        message = f"found {found}, expected keys and values such as `name: my-run`"
        raise SpecError((problem_at(root.place, message, None),))
    return root


def parse_value(text: str, place: Place) -> Node | None:
    """Parse YAML that came from no file, such as `[1, 2]`; every node gets the one place. Raises: SpecError."""
    return _TreeBuilder(text, place, fixed=True).build()


class _TreeBuilder:
    """Builds the tree from the parser's events, without recursion, and collects what it refuses."""

    def __init__(self, text: str, place: Place, *, fixed: bool = False) -> None:
        self._text = text
        self._place = place
        self._fixed = fixed
        self._lines = LINE_BREAK.split(text)
        self._problems: list[Problem] = []
        self._stack: list[_Open] = []
        self._root: Node | None = None
        self._values = 0
        self._documents = 0

    def build(self) -> Node | None:
        reached: Any = None
        try:
            for event in yaml.parse(self._text, Loader=yaml.SafeLoader):
                self._take(event)
                reached = event.end_mark
        except _UnreadableError:
            pass
        except yaml.MarkedYAMLError as error:
            self._refuse_syntax(error)
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            # PyYAML lets some of these out of escapes such as "\UFFFFFFFF" and of %YAML lines.
            self._refuse(self._place_at(reached), f"not YAML: {show(str(error))}", None)
        if self._problems:
            raise SpecError(tuple(self._problems))
        return self._root

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                self._give_up(event, "a second document begins here, expected one", "one file holds one document")
        elif isinstance(event, yaml.AliasEvent):
            self._refuse(
                self._place_at(event.start_mark), f"aliases (*{show(str(event.anchor))[1:-1]}) are not allowed", _COPY
            )
            self._add(Scalar(text="", quoted=False, place=self._place_at(event.start_mark)))
        elif isinstance(event, yaml.ScalarEvent):
            self._check_node(event)
            self._take_scalar(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._check_node(event)
            self._open(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close()

    def _check_node(self, event: Any) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            self._give_up(event, f"more than {MAX_VALUES:,} values", None)
        if event.anchor is not None:
            self._refuse(
                self._place_at(event.start_mark), f"anchors (&{show(str(event.anchor))[1:-1]}) are not allowed", _COPY
            )
        if event.tag is not None:
            tag = show(str(event.tag))[1:-1].replace("tag:yaml.org,2002:", "!!")
            self._refuse(
                self._place_at(event.start_mark), f"tags ({tag}) are not allowed", "write the value without it"
            )

    def _take_scalar(self, event: yaml.ScalarEvent) -> None:
        place = self._place_at(event.start_mark)
        parent = self._stack[-1] if self._stack else None
        if parent is not None and not parent.is_list and parent.key is None:
            self._take_key(parent, event.value, place, quoted=bool(event.style))
        else:
            self._add(Scalar(text=event.value, quoted=bool(event.style), place=place))

    def _take_key(self, parent: _Open, key: str, place: Place, *, quoted: bool) -> None:
        parent.key = key
        if key == "<<" and not quoted:
            self._refuse(place, "merge keys (<<) are not allowed", _COPY)
        elif key in parent.keys:
            first = parent.keys[key]
            self._refuse(place, f"the key {show(key)} is here a second time", f"the first one is in line {first.line}")
        else:
            parent.keys[key] = place

    def _open(self, event: yaml.CollectionStartEvent) -> None:
        parent = self._stack[-1] if self._stack else None
        if parent is not None and not parent.is_list and parent.key is None:
            self._give_up(event, "found a list or a mapping as a key, expected a word", None)
        if len(self._stack) >= MAX_DEPTH:
            self._give_up(event, f"nested deeper than {MAX_DEPTH} levels", None)
        is_list = isinstance(event, yaml.SequenceStartEvent)
        self._stack.append(_Open(place=self._place_at(event.start_mark), is_list=is_list))

    def _close(self) -> None:
        done = self._stack.pop()
        if done.is_list:
            self._add(ListNode(items=tuple(done.items), place=done.place))
        else:
            self._add(Mapping(entries=done.entries, keys=done.keys, place=done.place))

    def _add(self, node: Node) -> None:
        if not self._stack:
            self._root = node
            return
        parent = self._stack[-1]
        if parent.is_list:
            parent.items.append(node)
        elif parent.key is None:  # an alias as a key, refused already
            parent.key = ""
        else:
            parent.entries.setdefault(parent.key, node)
            parent.key = None

    def _refuse_syntax(self, error: yaml.MarkedYAMLError) -> None:
        mark, opened = error.problem_mark or error.context_mark, error.context_mark
        message, hint = _syntax_words(str(error.problem or error.context or "unreadable"))
        place = self._place_at(mark)
        if message is _UNCLOSED_QUOTE:
            place = self._place_at(opened or mark)
        elif "never closed" in message and opened is not None and not self._fixed:
            hint = f"it is opened in line {opened.line + 1}"
        elif message is _SECOND_COLON and ": " not in (place.source_line or "")[: (place.column or 1) - 1]:
            message, hint = _MISFIT, "is a colon missing above, or a space too many before the key?"
        self._refuse(place, message, hint)

    def _give_up(self, event: yaml.Event, message: str, hint: str | None) -> None:
        self._refuse(self._place_at(event.start_mark), message, hint)
        raise _UnreadableError

    def _refuse(self, place: Place, message: str, hint: str | None) -> None:
        self._problems.append(problem_at(place, message, hint))

    def _place_at(self, mark: Any) -> Place:
        if self._fixed or mark is None:
            return self._place
        source_line = self._lines[mark.line] if mark.line < len(self._lines) else ""
        return replace(self._place, line=mark.line + 1, column=mark.column + 1, source_line=source_line)


class _UnreadableError(Exception):
    """The rest of the document is not worth reading; the reason is among the problems."""


_COPY = "write the values out where they belong"
_UNCLOSED_QUOTE = "a quote is opened and never closed"
_SECOND_COLON = "a second `: ` in one value"
_MISFIT = "the line does not fit the lines above"
_SYNTAX = (
    # what PyYAML says, our message, hint
    (r"found character '\\t'", "a tab cannot stand here", "indent with spaces"),
    (r"mapping values are not allowed", _SECOND_COLON, 'put quotes around a value that holds ": "'),
    (r"found unexpected (end of stream|document separator)", _UNCLOSED_QUOTE, None),
    (r"could not find expected ':'", "expected a key and a `:`", "a key, a colon, a space, the value"),
    (r"expected alphabetic or numeric character", "a text that begins with & or * needs quotes", None),
    (r"found unknown escape character", "an escape that YAML does not know", "in single quotes a \\ stands for itself"),
    (r"expected escape sequence of", "an escape with too few hexadecimal digits", None),
    (r"expected ',' or '\]'", "a list is opened with [ and never closed", None),
    (r"expected ',' or '}'", "a mapping is opened with { and never closed", None),
    (r"expected <block end>|(sequence entries|mapping keys) are not allowed", _MISFIT, "is the indentation wrong?"),
    (r"expected the node content", "expected a value here", None),
    (r"found character '[@`%]'", "a text that begins with @, ` or % needs quotes", None),
    (r"expected '<document start>'", "expected keys and values of one document", "each line is `key: value`"),
)


def _syntax_words(raw: str) -> tuple[str, str | None]:
    for pattern, message, hint in _SYNTAX:
        if re.search(pattern, raw):
            return message, hint
    return f"not YAML: {show(raw)[1:-1]}", None
