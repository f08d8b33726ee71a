"""Values as JSON: written, and read, with a check of their types, from a socket, a pipe or another process's file."""

from __future__ import annotations

import dataclasses
import functools
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
    overload,
)

_T = TypeVar("_T")
_W = TypeVar("_W", bound="Written")
UNWRITTEN = {"written": False}
"""The metadata of a field that is not in the JSON of its dataclass."""
_ATOMS = frozenset({int, str, float, bool, type(None)})
_PLAIN: dict[Any, Any] = {float: (int, float), None: type(None)}
_MAX_NUMBER = 2**63
_MAX_DEPTH = 64
"""More than any message has, and far below Python's recursion limit."""
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 2, 60, 60


class Written:
    """A dataclass that is written as JSON; `build` reads it."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return what `json` takes: dataclasses within it as objects, paths as text.

        dataclasses.asdict copies every number, which is slow for the thousand plans of a sweep.
        """
        written: dict[str, Any] = _to_json(self)
        return written

    @classmethod
    def from_json(cls: type[_W], data: dict[str, Any]) -> _W:
        """Read what `to_json` wrote; see `build` for data that is none."""
        return build(cls, data, cls.__name__.lower())


@functools.cache
def _written_fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.metadata.get("written", True))


def _to_json(value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, list | tuple):
        return value if all(type(each) in _ATOMS for each in value) else [_to_json(each) for each in value]
    if isinstance(value, dict):
        return {key: _to_json(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        return {name: _to_json(getattr(value, name)) for name in _written_fields(kind)}
    return str(value) if isinstance(value, Path) else value


def read_object(data: bytes | str) -> dict[str, Any]:
    """Read one JSON object.

    Raises: ValueError: as `read_value`; or the value is no object.
    """
    value = read_value(data)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, where an object belongs")
    return value


def read_value(data: bytes | str) -> Any:
    """Read one JSON value.

    Raises: ValueError: it is no JSON, or nested deeper than `_MAX_DEPTH`.
    """
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inner for each in values]
        if not level:
            return value
    raise ValueError("nested too deep")


@overload
def build(kind: type[_T], value: Any, where: str = ...) -> _T: ...
@overload
def build(kind: Any, value: Any, where: str = ...) -> Any: ...
def build(kind: Any, value: Any, where: str = "") -> Any:
    """Build a value of an annotated type from JSON: dataclasses from objects, tuples from arrays; drop other keys.

    `kind`: a dataclass, TypedDict, list, tuple, frozenset, dict, Literal, union, Path, a type that `json` returns, or a
    mapping of keys to their types, whose missing keys become None.
    Raises: ValueError: the value has another type; the message has its path, `parts[0].length is 'x'`, after `where`.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _build_one_of(inner, value, where)
    if origin in (list, tuple, frozenset):
        return origin(_build_items(origin, inner, value, where))
    if isinstance(kind, Mapping) or origin is dict or dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return _build_object(kind, value, where)
    if origin is Literal:
        fits = any(value == each and type(value) is type(each) for each in inner)
    elif kind is Path:
        fits = isinstance(value, str)
    else:
        fits = kind is Any or _is_plain(kind, value)
    if not fits:
        raise _found(value, where)
    return Path(value) if kind is Path else value


def _build_one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in kinds:
        try:
            return build(kind, value, where)
        except ValueError as error:
            errors.append(error)
    whole = _found(value, where)
    raise next((error for error in errors if str(error) != str(whole)), whole)


def _build_items(origin: Any, kinds: tuple[Any, ...], value: Any, where: str) -> list[Any]:
    fixed = origin is tuple and kinds[-1] is not Ellipsis
    if not isinstance(value, list | tuple) or (fixed and len(value) != len(kinds)):
        raise _found(value, where)
    of_items = kinds if fixed else kinds[:1] * len(value)
    return [build(kind, each, f"{where}[{n}]") for n, (kind, each) in enumerate(zip(of_items, value, strict=True))]


def _build_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _found(value, where)
    if get_origin(kind) is dict:
        return {key: build(get_args(kind)[1], each, _inside(where, f"{key:.40}")) for key, each in value.items()}
    if isinstance(kind, Mapping):
        return {key: build(of_it, value.get(key), _inside(where, key)) for key, of_it in kind.items()}
    types, required = _keys_of(kind)
    for name in sorted(required - value.keys()):
        raise ValueError(f"{where or 'it'} has no {name}")
    known = {name: each for name, each in value.items() if name in types}
    return kind(**{name: build(types[name], each, _inside(where, name)) for name, each in known.items()})


def _is_plain(kind: Any, value: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if isinstance(value, int | float) and not abs(value) < _MAX_NUMBER:
        return False  # also for NaN, which is not below the limit
    return isinstance(value, _PLAIN.get(kind, kind))


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _found(value: Any, where: str) -> ValueError:
    return ValueError(f"{where or 'it'} is {_SHOWN.repr(value):.60}")


@functools.cache
def _keys_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of an object's keys, and the keys that it must have."""
    types = get_type_hints(kind)
    if is_typeddict(kind):
        return types, kind.__required_keys__
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return {field.name: types[field.name] for field in fields}, frozenset(
        field.name for field in fields if field.default is missing and field.default_factory is missing
    )
