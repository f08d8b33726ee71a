"""CIFAR-10 in its "python version": five pickled batches to train on and one to test on.

A pickle is a program that may call anything importable. Here the few names that numpy writes for an array map to
stand-ins, which only keep their arguments, and every other name is refused.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError
from clusterddp.train.data.download import download_once, missing_error

# Mean and deviation of the train pixels per channel, in 0..1.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

_FOLDER = "cifar-10-batches-py"
_PIXELS = 3 * 32 * 32
_OFFICIAL_COUNTS = (50_000, 10_000)
# Source: torchvision 0.28.0, datasets/cifar.py.
_OFFICIAL_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

_LARGEST_FILE_BYTES = 1 << 28
_FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"
_DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError,
    LookupError, ImportError, MemoryError, OverflowError,
)  # fmt: skip
"""What a damaged stream can make pickle and the stand-ins raise."""

Split = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """One file: images uint8 [n, 3072], labels 0..9, and whether it is the official file."""

    images: Tensor
    labels: list[int]
    official: bool


def read_cifar10(data_dir: Path, *, download: bool) -> tuple[Split, Split, str]:
    """Return the train split, the test split (uint8 [n, 3, 32, 32], int64 [n]) and what to call figures got on them.

    `data_dir` holds the folder cifar-10-batches-py or is it. Other files than the official ones are welcome (pictures
    encoded anew, a small subset); the label then names them so.

    Raises:
        ClusterddpError: a file is missing, damaged, unsafe, or holds something else.
    """
    folder = find_folder(data_dir)
    if folder is None and download:
        folder = download_once("CIFAR10", "CIFAR-10", data_dir, find=find_folder, results=[_FOLDER])
    if folder is None:
        raise missing_error("CIFAR-10", data_dir, wanted=f"the folder {_FOLDER}")
    batches = [_read_batch(folder / name, md5) for name, md5 in _OFFICIAL_MD5.items()]
    train, test = _join(batches[:-1]), _join(batches[-1:])
    counts = (len(train[0]), len(test[0]))
    return train, test, _label(counts, official=all(batch.official for batch in batches))


def find_folder(data_dir: Path) -> Path | None:
    """Return the folder with the batches under `data_dir`, or None when there is none.

    Raises:
        ClusterddpError: some of the batches are there and some are not.
    """
    for folder in (data_dir / _FOLDER, data_dir):
        missing = [name for name in _OFFICIAL_MD5 if not (folder / name).is_file()]
        if not missing:
            return folder
        if len(missing) < len(_OFFICIAL_MD5):
            raise ClusterddpError(f"{folder}: CIFAR-10 is incomplete: no file {', '.join(missing)}")
    return None


def _join(batches: list[_Batch]) -> Split:
    images = torch.cat([batch.images for batch in batches]).view(-1, 3, 32, 32)
    labels = [label for batch in batches for label in batch.labels]
    return images, torch.tensor(labels, dtype=torch.int64)


def _label(counts: tuple[int, int], *, official: bool) -> str:
    if official:
        return "CIFAR-10"
    if counts != _OFFICIAL_COUNTS:
        return f"CIFAR-10 (not the whole set: {counts[0]:,} train, {counts[1]:,} test images)"
    return "CIFAR-10 (other encoding: md5 differs from the official files)"


def _read_batch(path: Path, official_md5: str) -> _Batch:
    size = path.stat().st_size
    if size > _LARGEST_FILE_BYTES:
        raise ClusterddpError(f"{path}: {size:,} bytes are more than any file of this data set has")
    content = path.read_bytes()
    official = hashlib.md5(content, usedforsecurity=False).hexdigest() == official_md5
    batch = _unpickle(content, path)
    if not isinstance(batch, dict):
        raise ClusterddpError(f"{path}: a {type(batch).__name__}, where a batch of CIFAR-10 is a dict")
    images = _images(_entry(batch, "data", path), path)
    labels = _labels(_entry(batch, "labels", path), path)
    if len(images) != len(labels):
        raise ClusterddpError(f"{path}: {len(images):,} images but {len(labels):,} labels")
    return _Batch(images=images, labels=labels, official=official)


def _entry(batch: dict[Any, Any], name: str, path: Path) -> Any:
    for key in (name.encode(), name):
        if key in batch:
            return batch[key]
    raise ClusterddpError(f"{path}: no {name!r} in the batch, which has {sorted(map(str, batch))}")


def _images(data: Any, path: Path) -> Tensor:
    try:
        values = data.values() if isinstance(data, _Array) else None
    except ValueError as error:
        raise ClusterddpError(f"{path}: data is {error}") from error
    if values is None or values.dtype != torch.uint8 or values.ndim != 2 or values.shape[1] != _PIXELS:
        found = "no array" if values is None else f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
        raise ClusterddpError(f"{path}: data is {found}, expected uint8 [n, {_PIXELS}]")
    return values


def _labels(labels: Any, path: Path) -> list[int]:
    try:
        values = labels.values().tolist() if isinstance(labels, _Array) else labels
    except ValueError as error:
        raise ClusterddpError(f"{path}: labels are {error}") from error
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ClusterddpError(f"{path}: labels are not a list of integers")
    wrong = next((value for value in values if not 0 <= value <= 9), None)
    if wrong is not None:
        raise ClusterddpError(f"{path}: label {wrong} is not in 0..9")
    return values


def _unpickle(content: bytes, path: Path) -> Any:
    """Return what the pickle holds: plain values, texts as bytes or str, arrays as `_Array`.

    Raises:
        ClusterddpError: the pickle names something other than numpy's arrays, or is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
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


class _RefusedNameError(Exception):
    """The pickle names something that is not allowed; the text is the name."""


class _Dtype:
    """Stands for numpy.dtype: its text, such as u1, then a state whose second value is the byte order."""

    def __init__(self, text: Any, *_flags: Any) -> None:
        self.text, self.order = _text(text), "="

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])


class _Array:
    """Stands for a numpy array: keeps its description, of which `values` makes a tensor."""

    def __init__(self, *_description: Any) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keep (version, shape, dtype, is_fortran, bytes), as numpy's `ndarray.__reduce__` writes it."""
        self._state = state

    def values(self) -> Tensor:
        """Return the array. Raises ValueError when it is not one of integers or does not fit together."""
        whole = isinstance(self._state, tuple) and len(self._state) == 5
        _, shape, dtype, fortran, raw = self._state if whole else (None,) * 5
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray):
            raise ValueError("an array that is not of integers")
        if not re.fullmatch("[iu][1248]", dtype.text) or dtype.order not in ("<", ">", "=", "|"):
            raise ValueError(f"an array of dtype {dtype.order}{dtype.text}, where integers belong")
        size = int(dtype.text[1])
        if not _is_shape(shape) or math.prod(shape) * size != len(raw):
            raise ValueError(f"an array of shape {shape!r} with {len(raw):,} bytes")
        octets = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        if dtype.order == _FOREIGN_ORDER:
            octets = octets.view(-1, size).flip(1).reshape(-1)
        values = octets.view(getattr(torch, f"{'u' if dtype.text[0] == 'u' else ''}int{8 * size}"))
        try:
            return values.view(shape[::-1]).permute(*range(len(shape))[::-1]) if fortran else values.view(shape)
        except (RuntimeError, TypeError, OverflowError) as error:  # no values, in a shape that no array can have
            raise ValueError(f"an array of shape {shape!r}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # numpy 2 writes numpy._core, numpy 1 and the official files of 2009 write numpy.core.
        known = f"{module.replace('numpy.core.', 'numpy._core.')}.{name}"
        if known not in _STAND_INS:
            raise _RefusedNameError(f"{module}.{name}")
        return _STAND_INS[known]


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


def _scalar(dtype: Any, raw: Any) -> int:
    return int(_from_buffer(raw, dtype, (), "C").values())


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _is_shape(shape: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(shape, tuple) and all(isinstance(length, int) and length >= 0 for length in shape)


_STAND_INS: dict[str, Any] = {
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
}
