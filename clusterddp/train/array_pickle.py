"""Reads a pickle of plain values and integer arrays, and runs none of the code that a pickle can name.

A pickle is a program: it may call anything importable. The data sets of the field come as pickles all the same, so the
few names that numpy writes for an array are answered by stand-ins that only note what they are given, and every other
name is refused.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterddp.errors import ClusterddpError

_LARGEST_FILE_BYTES = 1 << 28
_INTEGER_DTYPE = re.compile(r"[iu][1248]")

# What a damaged stream can make pickle and the stand-ins raise.
_DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError,
    LookupError, ImportError, MemoryError, OverflowError,
)  # fmt: skip

IntegerArray = npt.NDArray[np.integer[Any]]


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

    def values(self) -> IntegerArray:
        """Return the array. Raises ValueError when the description does not fit together."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise ValueError("an array without content")
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _PickledDtype) or not isinstance(raw, (bytes, bytearray)):
            raise ValueError("an array that is not of integers")
        values = np.frombuffer(raw, dtype.resolve())
        return values.reshape(_checked_shape(shape, len(values)), order="F" if fortran else "C")


class _PickledDtype:
    def __init__(self, text: Any, *_flags: Any) -> None:
        self.text = _text(text)
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])

    def resolve(self) -> np.dtype[np.integer[Any]]:
        if not _INTEGER_DTYPE.fullmatch(self.text) or self.order not in ("<", ">", "=", "|"):
            raise ValueError(f"an array of dtype {self.order}{self.text}, where integers belong")
        return np.dtype(self.order + self.text)


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
    if int(np.prod(shape, dtype=object)) != count:
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
