"""Arguments of a program by their names: `entry.args.lr=0.2` sets the value of `--lr` in the list `entry.args`.

An option keeps the form that it has in the list (`--lr 0.1`, `--lr=0.1`, `lr=0.1`); `_` and `-` are the same in a name.
Where the list does not have it, it is appended. A number is a position in the list.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.layers import COMMAND_LINE, Override
from clusterddp.spec.tree import (
    ListNode,
    Mapping,
    Node,
    Place,
    Scalar,
    describe,
    is_null,
    merge,
    problem_at,
    show,
    spec_error,
)

_ARGS = ("entry", "args")
_NUMBER = re.compile(r"-\.?[0-9].*")
_ASSIGNMENT = re.compile(r"[+~]*[A-Za-z_][A-Za-z0-9_.]*=.*", re.DOTALL)
"""An argument as Hydra's programs take it."""
_SWITCH_WORDS = {"true", "false", "yes", "no", "on", "off", "0", "1"}
_END_OF_OPTIONS = "--"


def names_argument(path: tuple[str, ...]) -> bool:
    """Return whether a key is that of one argument: `entry.args.lr`, `entry.args.3`."""
    return path[:2] == _ARGS and len(path) > len(_ARGS)


def argument_position(path: tuple[str, ...]) -> int | None:
    """Return the position that the key of an argument has in place of a name."""
    return int(path[2]) if len(path) == len(_ARGS) + 1 and re.fullmatch("[0-9]{1,9}", path[2]) else None


def set_argument(tree: Mapping, override: Override, problems: list[Problem]) -> Mapping:
    """Return the tree with one argument set or reset; a problem with it is added to `problems`."""
    entry = tree.entries.get("entry")
    entries = entry.entries if isinstance(entry, Mapping) else {}
    args = entries.get("args")
    if not is_null(args) and not isinstance(args, ListNode):
        return tree  # the model reports that it is no list
    items = list(args.items) if isinstance(args, ListNode) else []
    try:
        changed = _changed(items, override, of_function=not is_null(entries.get("function")))
    except SpecError as error:
        problems += error.problems
        return tree
    node = ListNode(items=tuple(changed), place=override.place)
    return merge(tree, Override(path=_ARGS, node=node, place=override.place).as_tree())


def named_arguments(words: Sequence[str]) -> dict[str, str] | None:
    """Return each argument by the key that sets it, without `entry.args.`: `lr` -> `0.1`, `0` -> `data`.

    An option has all words up to the next one; a flag is `true`. None where an option is there several times.
    """
    end = words.index(_END_OF_OPTIONS) if _END_OF_OPTIONS in words else len(words)
    found: list[tuple[str, list[str]]] = []
    for position, word in enumerate(words[:end]):
        option, equals, value = word.partition("=")
        if _is_option(word) or _ASSIGNMENT.fullmatch(word):
            found.append((option.lstrip("-+~").replace("-", "_"), [value] if equals else []))
        elif found and not found[-1][0].isdecimal():
            found[-1][1].append(word)
        else:
            found.append((str(position), [word]))
    if words[end:]:
        found.append((_END_OF_OPTIONS, list(words[end + 1 :])))
    names = {name for name, _ in found}
    return {name: " ".join(values) or "true" for name, values in found} if len(names) == len(found) else None


def value_at(dumped: dict[str, Any], path: tuple[str, ...], node: Node) -> Any:
    """Return the value of a key in a spec as JSON; of an argument by name, the words of `node` that set it."""
    if not names_argument(path):
        return functools.reduce(operator.getitem, path, dumped)
    if (position := argument_position(path)) is not None:
        return dumped["entry"]["args"][position]
    if isinstance(node, ListNode):
        return [item.text for item in node.items if isinstance(item, Scalar)]
    return node.text if isinstance(node, Scalar) else None


def words_problem(words: Sequence[str]) -> Problem:
    """Make the problem of a program's arguments that stand on the command line as they are."""
    place = Place(source=f"{show(words[0])[1:-1]} ({COMMAND_LINE})", origin=COMMAND_LINE)
    keys, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if _is_option(word) and name:
            value = value if equals else rest.pop(0) if rest and not _is_option(rest[0]) else "true"
            keys.append(f"entry.args.{name}={value}")
    listed = f"entry.args='[{', '.join(words)}]'"
    hint = f"{' '.join(keys)} sets them, or {listed}" if keys else f"{listed} sets them"
    return problem_at(place, "expected key=value, found arguments of a program", hint)


def _changed(items: list[Node], override: Override, *, of_function: bool) -> list[Node]:
    """Return the items with one argument set or reset."""
    if (position := argument_position(override.path)) is not None:
        if position >= len(items):
            message = f"entry.args has no position {position}: its length is {len(items)}"
            _refuse(override, message, "entry.args.lr=0.1 sets --lr")
        return [*items[:position], *([] if override.node is None else [override.node]), *items[position + 1 :]]
    name = ".".join(override.path[len(_ARGS) :])
    if of_function:
        bare = name.lstrip("-")
        _refuse(override, f"a function has no option --{bare}", f"entry.kwargs.{bare}=... sets its {bare}")
    words = [item.text if isinstance(item, Scalar) else "" for item in items]
    end = words.index(_END_OF_OPTIONS) if _END_OF_OPTIONS in words else len(words)
    bare_name = name.lstrip("-").replace("_", "-")
    options = [word.partition("=")[0].lstrip("-+~").replace("_", "-") for word in words[:end]]
    named = [at for at, option in enumerate(options) if option == bare_name]
    found = [at for at in named if _is_option(words[at])] or [at for at in named if _ASSIGNMENT.fullmatch(words[at])]
    if len(found) > 1:
        option = words[found[0]].partition("=")[0]
        _refuse(override, f"{option} is there {len(found)} times", "entry.args='[...]' sets the whole list")
    values = _read_values(override, name)
    is_list, switch = isinstance(override.node, ListNode), _switch(override.node)
    at, replaced = found[0] if found else end, 0
    if not found:
        option = name if name.startswith("-") else f"-{name}" if len(name) == 1 else f"--{name}"
        joined = bool(words) and all(_ASSIGNMENT.fullmatch(word) for word in words) and not name.startswith("-")
        if joined:
            option = name
        is_flag = switch is False or (switch is True and not joined)
    else:
        option, equals, _ = words[at].partition("=")
        following = list(itertools.takewhile(lambda word: not _is_option(word), words[at + 1 : end]))
        joined = bool(equals)
        is_flag = switch is not None and not joined and not (following and following[0].lower() in _SWITCH_WORDS)
        replaced = 1 if joined or is_flag else 1 + len(following if is_list else following[:1])
    new = ([option] if switch else []) if is_flag else _spelled(option, values, is_list=is_list, joined=joined)
    scalars = [Scalar(text=word, quoted=True, place=override.place) for word in new]
    return [*items[:at], *scalars, *items[at + replaced :]]


def _spelled(option: str, values: Sequence[str], *, is_list: bool, joined: bool) -> list[str]:
    """Return the words of an option and its values, none for a reset; `joined`: the option is written with `=`."""
    if not values:
        return []
    if joined and is_list and not option.startswith("-"):
        return [f"{option}=[{','.join(values)}]"]
    if not is_list and (joined or _is_option(values[0])):
        return [f"{option}={values[0]}"]
    return [option, *values]


def _read_values(override: Override, name: str) -> list[str]:
    """Return the words that an override sets; refuse a value that is empty, or is no word."""
    node = override.node
    if isinstance(node, Scalar) and not node.quoted and not node.text:
        _refuse(override, "the value is empty", f"~entry.args.{name} removes the option; {show('')!r} is an empty text")
    words = []
    for each in () if node is None else node.items if isinstance(node, ListNode) else (node,):
        if not isinstance(each, Scalar):
            _refuse(override, f"found {describe(each)}, expected one value, or a list of words")
        words.append(each.text)
    return words


def _switch(node: Node | None) -> bool | None:
    """Return true and false without quotes, which may be about a flag; None for other values."""
    text = node.text.lower() if isinstance(node, Scalar) and not node.quoted else ""
    return text == "true" if text in ("true", "false") else None


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word)


def _refuse(override: Override, message: str, hint: str | None = None) -> NoReturn:
    raise spec_error(override.place, message, hint, key=".".join(override.path))
