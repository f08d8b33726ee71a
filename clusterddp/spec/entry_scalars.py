"""How the values of the `entry` section are read: commands, functions, and arguments of either."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterddp.spec.scalars import VARIABLE, matching, plain, read_filled_text, read_loose_text, read_text, refuse


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that a function takes: a value of whatever kind it was written as, and no word."""

    written: object


def read_argument(value: object) -> Any:
    """Read an argument: text for a program; for a function any value that JSON has."""
    return _data(value.written) if isinstance(value, Value) else read_loose_text(value)


def read_data(value: object) -> dict[str, Any]:
    """Read the named arguments of a function."""
    if not isinstance(value, dict):
        refuse(value, "a mapping")
    for name in value:
        if not str(name).isidentifier():
            refuse(name, "names of arguments")
    return {name: _data(item) for name, item in value.items()}


def read_command(value: object) -> str | tuple[str, ...]:
    """Read a command: its words, or text that is split as a shell would."""
    if isinstance(value, list | tuple):
        words = tuple(read_loose_text(item) for item in value)
        return words if words and words[0] else refuse(value, "a program and its arguments")
    text = read_filled_text(value)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        refuse(value, f"words as a shell has them ({str(error)[:1].lower()}{str(error)[1:]})")
    return text if words else refuse(value, "a program and its arguments")


def read_function(pattern: str) -> Callable[[object], str]:
    """Make the reader of a function's place, `package.module:function` or `path/file.py:function`."""
    read = matching(pattern, "package.module:function or path/file.py:function")

    def read_place(value: object) -> str:
        text = read_text(value)
        module, _, name = text.rpartition(".")
        dotted = ":" not in text and re.fullmatch(VARIABLE[:-1] + r"(\.[A-Za-z0-9_]+)*", module)
        if dotted:
            refuse(value, "package.module:function or path/file.py:function", f"write {module}:{name}")
        return read(value)

    return read_place


def _data(value: object) -> Any:
    """Return a value as YAML 1.2 has it; what JSON cannot say is refused."""
    found = plain(value)
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError):
        refuse(value, "text, a number, true or false, nothing, or lists and mappings of them")
    return found
