"""The entry of a spec for a Python function: its name and its arguments, never a pickle.

Ranks import the function, so it must have a name in a file; its arguments must be data.
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
    """A key of a dictionary that is not a string."""

    key: object


def describe_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, working_dir: Path, python_path: str
) -> dict[str, Any]:
    """Return the `entry` section that calls `function` with these arguments; those of a functools.partial come first.

    `working_dir`, `python_path`: where ranks look for modules.
    Raises: UsageError: ranks cannot import the function, it does not accept these arguments, or they are no data.
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
    """Return the function's name as the name of a job, without characters that a job's name must not have."""
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
            f"{name} was defined in a notebook or at a prompt: no file has it, so ranks cannot import it",
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
            f"{module}:{name} is in {root}, where ranks do not look for modules",
            hint=f"submit from there, or set PYTHONPATH={root}",
        )
    return f"{module}:{name}"


def _is_found(root: Path, working_dir: Path, python_path: str) -> bool:
    """Say whether ranks find modules in a directory; they start in the working directory with the same Python."""
    known = [working_dir, *(working_dir / path for path in python_path.split(os.pathsep) if path)]
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    editable = [Path(path) for path in sys.path if path and _from_pth(Path(path), installed)]
    return any(root == path.resolve() for path in [*known, *installed, *editable])


def _from_pth(path: Path, installed: Sequence[Path]) -> bool:
    """Say whether a .pth file, as of an editable install, puts a directory on `sys.path`."""
    return any(str(path) in file.read_text(errors="replace") for site in installed[:2] for file in site.glob("*.pth"))


def _check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a built-in function without a signature
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
    """Yield all values within lists and dictionaries, and keys that are not strings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (key,) if isinstance(key, str) else (_Key(key),)
            yield from _values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner)
    else:
        yield value
