"""From a Python function to the entry of a spec: by its name and its arguments, never as a pickle.

Ranks import the function where they run, so it has to lie in a file, under a name; its arguments are data.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import UsageError


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of a dictionary that is no text."""

    key: object


def describe_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, working_dir: Path, python_path: str
) -> dict[str, Any]:
    """Return the `entry` section that calls `function` with these arguments; those of a functools.partial come first.

    `working_dir`, `python_path`: where ranks will look for modules.
    Raises: UsageError: it has no name that ranks could import it by, it does not take these arguments, or they are no
    data.
    """
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    place = _place_of(function, working_dir, python_path)
    _check_call(function, args, kwargs)
    for name, value in [*((f"argument {index}", value) for index, value in enumerate(args, 1)), *kwargs.items()]:
        _check_data(name, value)
    return {"function": place, "args": list(args), "kwargs": dict(kwargs)}


def function_name(function: Callable[..., Any]) -> str:
    """Return the function's own name as the name of a job: without what that must not have."""
    while isinstance(function, functools.partial):
        function = function.func
    return re.sub(r"[^A-Za-z0-9._-]", "", getattr(function, "__name__", "")).lstrip("._-")[:64] or "function"


def _place_of(function: Callable[..., Any], working_dir: Path, python_path: str) -> str:
    """Return `module:function` or `file.py:function`."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if not name or not module or not inspect.isroutine(function):
        kind = type(function).__name__
        raise UsageError(
            f"found a {kind}, expected a function", hint="def train(...): ... in a file, and its name here"
        )
    if "<" in name:
        why = "a lambda" if "<lambda>" in name else "defined within another function"
        raise UsageError(
            f"{name.rpartition('.')[2]} is {why}: ranks cannot import it by its name",
            hint="define it at the top of a module; what it closes over becomes its arguments",
        )
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        raise UsageError(
            f"{name} was defined in a notebook or at a prompt: no file has it that ranks could import",
            hint=f"write it to a file (in a notebook: %%writefile {name.lower()}_job.py as the cell's first line), "
            "import it from there and submit that",
        )
    path = Path(file).resolve()
    if module == "__main__" or ("." not in module and not _is_found(path.parent, working_dir, python_path)):
        if path.suffix != ".py":
            raise UsageError(f"{name}: {path} is no Python file")
        return f"{path}:{name}"
    package, depth = path, module.count(".") + (path.name == "__init__.py")
    root = package.parents[depth]
    if not _is_found(root, working_dir, python_path):
        raise UsageError(
            f"{module}:{name} lies in {root}, where ranks would not look",
            hint=f"submit from there, or PYTHONPATH={root}",
        )
    return f"{module}:{name}"


def _is_found(root: Path, working_dir: Path, python_path: str) -> bool:
    """Say whether ranks find modules in a directory: they start in the working directory, with the same Python."""
    known = [working_dir, *(working_dir / path for path in python_path.split(os.pathsep) if path)]
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    editable = [Path(path) for path in sys.path if path and _from_pth(Path(path), installed)]
    return any(root == path.resolve() for path in [*known, *installed, *editable])


def _from_pth(path: Path, installed: Sequence[Path]) -> bool:
    """Say whether a directory is on `sys.path` because of a .pth file, as an editable install has it."""
    return any(str(path) in file.read_text(errors="replace") for site in installed[:2] for file in site.glob("*.pth"))


def _check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a built-in one that does not say
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{getattr(function, '__name__', '')}{signature}: {error}") from error


def _check_data(name: str, value: Any) -> None:
    for inner in _values(value):
        if isinstance(inner, _Key):
            raise UsageError(f"{name} has the key {inner.key!r}, expected text")
        if not isinstance(inner, str | int | float | bool | None):
            hint = "str(path) is data" if isinstance(inner, os.PathLike) else None
            raise UsageError(
                f"{name} has a {type(inner).__name__}, expected data: text, numbers, true, false, None, or lists and "
                "dictionaries of them",
                hint=hint or "make it in the function, of data",
            )
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise UsageError(f"{name}: {error}", hint="JSON has neither NaN nor infinity") from error


def _values(value: Any) -> Iterator[Any]:
    """List what lies within lists and dictionaries, the keys of these included."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (key,) if isinstance(key, str) else (_Key(key),)
            yield from _values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner)
    else:
        yield value
