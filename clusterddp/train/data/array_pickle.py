"""Reads a pickle of plain values and integer arrays, and runs none of the code that a pickle can name.

A pickle is a program: it may call anything importable. The data sets of the field come as pickles all the same, so the
few names that numpy writes for an array are answered by stand-ins that only note what they are given, and every other
name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError

_LARGEST_FILE_BYTES = 1 << 28
_INTEGER_DTYPES = {
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
}
_FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"

# What a damaged stream can make pickle and the stand-ins raise.
_DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError,
    LookupError, ImportError, MemoryError, OverflowError,
)  # fmt: skip


def read_array_pickle(content: bytes, path: Path) -> Any:
    """Return what the pickle `content` of the file `path` holds; its arrays are `PickledArray`, its texts bytes or str.

    Raises:
        ClusterddpError: the pickle names something other than numpy's arrays, or is damaged.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _RefusedNameError as error:
        raise ClusterddpError(
            f"{path}: refused: the pickle names {error}, where only numpy's arrays and plain values belong",
            hint="this file would run code when unpickled; get it again from a source that you trust",
        ) from None
    except _DAMAGE as error:
        raise ClusterddpError(
            f"{path}: cut short or damaged ({len(content):,} bytes): {type(error).__name__}: {error}",
            hint="get the file again",
        ) from error


def read_bounded(path: Path) -> bytes:
    """Return the file's content; a file too large to be one of a data set's is refused unread."""
    size = path.stat().st_size
    if size > _LARGEST_FILE_BYTES:
        raise ClusterddpError(f"{path}: {size:,} bytes are more than any file of this data set has")
    return path.read_bytes()


class PickledArray:
    """An array as the pickle describes it; `values()` makes it real."""

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keep (version, shape, dtype, is_fortran, bytes), as numpy's `ndarray.__reduce__` writes it."""
        self.state = state

    def values(self) -> Tensor:
        """Return the array. Raises ValueError when the description does not fit together."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise ValueError("an array without content")
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _PickledDtype) or not isinstance(raw, (bytes, bytearray)):
            raise ValueError("an array that is not of integers")
        values = dtype.read(raw)
        sizes = _checked_shape(shape, len(values))
        try:
            return values.view(sizes[::-1]).permute(*range(len(sizes))[::-1]) if fortran else values.view(sizes)
        except (RuntimeError, TypeError, OverflowError) as error:  # nothing, in a shape that no array can have
            raise ValueError(f"an array of shape {shape!r}") from error


class _PickledDtype:
    def __init__(self, text: Any, *_flags: Any) -> None:
        self.text = _text(text)
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])

    def read(self, raw: bytes | bytearray) -> Tensor:
        """Return the integers (one dimension) that an array's bytes are. Raises ValueError when they are none."""
        if self.text not in _INTEGER_DTYPES or self.order not in ("<", ">", "=", "|"):
            raise ValueError(f"an array of dtype {self.order}{self.text}, where integers belong")
        dtype, size = _INTEGER_DTYPES[self.text], int(self.text[1])
        if len(raw) % size:
            raise ValueError(f"an array of {len(raw):,} bytes, {size} each")
        if not raw:
            return torch.empty(0, dtype=dtype)
        octets = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if self.order == _FOREIGN_ORDER:
            octets = octets.view(-1, size).flip(1).reshape(-1)
        return octets.view(dtype)


class _RefusedNameError(Exception):
    """The pickle names something that it must not; the text says what."""


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        for numpy_module, numpy_name, stand_in in _STAND_INS:
            if name == numpy_name and module in (numpy_module, numpy_module.replace("._core.", ".core.")):
                return stand_in
        raise _RefusedNameError(f"{module}.{name}")


def _reconstruct(*_description: Any) -> PickledArray:
    return PickledArray()


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> PickledArray:
    array = PickledArray()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


def _scalar(dtype: Any, raw: Any) -> int:
    return int(_from_buffer(raw, dtype, (), "C").values())


def _array_type(*_arguments: Any) -> PickledArray:
    raise ValueError("an array built by hand")


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _checked_shape(shape: Any, count: int) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(isinstance(length, int) and length >= 0 for length in shape):
        raise ValueError(f"an array of shape {shape!r}")
    if math.prod(shape) != count:
        raise ValueError(f"an array of shape {shape!r} with {count:,} values")
    return shape


# numpy 2 writes numpy._core, numpy 1 and the official files of 2009 write numpy.core.
_STAND_INS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("numpy._core.multiarray", "_reconstruct", _reconstruct),
    ("numpy._core.multiarray", "scalar", _scalar),
    ("numpy._core.numeric", "_frombuffer", _from_buffer),
    ("numpy", "ndarray", _array_type),
    ("numpy", "dtype", _PickledDtype),
)
