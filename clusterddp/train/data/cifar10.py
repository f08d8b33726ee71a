"""CIFAR-10 in its "python version": five pickled batches to train on and one to test on.

A pickle is a program that may call anything importable. Here the few names that numpy writes for an array map to
stand-ins, which only keep their arguments, and every other name is refused.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError
from clusterddp.train.data.download import download_once, missing_error

# Mean and deviation of the train pixels per channel, in 0..1.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

_READERS = 3
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
_DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError,
    LookupError, ImportError, MemoryError, OverflowError,
)  # fmt: skip
"""What a damaged stream can make pickle and the stand-ins raise."""

Split = tuple[Tensor, Tensor]


def read_cifar10(data_dir: Path, *, download: bool) -> tuple[Split, Split, str]:
    """Return the train split, the test split (uint8 [n, 3, 32, 32], int64 [n]) and what to call figures got on them.

    `data_dir` holds the folder cifar-10-batches-py or is it. Other files than the official ones are welcome (pictures
    encoded anew, a small subset); the label then names them so.
    """
    folder = find_folder(data_dir)
    if folder is None and download:
        folder = download_once("CIFAR10", "CIFAR-10", data_dir, find=find_folder, results=[_FOLDER])
    if folder is None:
        raise missing_error("CIFAR-10", data_dir, wanted=f"the folder {_FOLDER}")
    with ThreadPoolExecutor(_READERS) as pool:  # most of the time goes into the sums
        batches = list(pool.map(_read_batch, [folder / name for name in _OFFICIAL_MD5]))
    train, test = _join(batches[:-1]), _join(batches[-1:])
    counts = (len(train[0]), len(test[0]))
    if [md5 for _, _, md5 in batches] == list(_OFFICIAL_MD5.values()):
        return train, test, "CIFAR-10"
    if counts != _OFFICIAL_COUNTS:
        return train, test, f"CIFAR-10 (not the whole set: {counts[0]:,} train, {counts[1]:,} test images)"
    return train, test, "CIFAR-10 (other encoding: md5 differs from the official files)"


def find_folder(data_dir: Path) -> Path | None:
    """Return the folder with the batches under `data_dir`, or None when there is none."""
    for folder in (data_dir / _FOLDER, data_dir):
        missing = [name for name in _OFFICIAL_MD5 if not (folder / name).is_file()]
        if not missing:
            return folder
        if len(missing) < len(_OFFICIAL_MD5):
            raise ClusterddpError(f"{folder}: CIFAR-10 is incomplete: no file {', '.join(missing)}")
    return None


def _join(batches: list[tuple[Tensor, list[int], str]]) -> Split:
    images = torch.cat([images for images, _, _ in batches]).view(-1, 3, 32, 32)
    return images, torch.tensor([label for _, labels, _ in batches for label in labels], dtype=torch.int64)


def _read_batch(path: Path) -> tuple[Tensor, list[int], str]:
    """Return a file's images (uint8, [n, 3072]), their labels, 0..9, and its md5."""
    size = path.stat().st_size
    if size > _LARGEST_FILE_BYTES:
        raise ClusterddpError(f"{path}: {size:,} bytes are more than any file of this data set has")
    content = path.read_bytes()
    batch = _unpickle(content, path)
    if not isinstance(batch, dict):
        raise ClusterddpError(f"{path}: a {type(batch).__name__}, where a batch of CIFAR-10 is a dict")
    data, labels = (batch.get(name.encode(), batch.get(name)) for name in ("data", "labels"))
    if not isinstance(data, _Array):
        raise ClusterddpError(f"{path}: data is not an array, expected uint8 [n, {_PIXELS}]")
    try:
        images = data.pixels()
    except ValueError as error:
        raise ClusterddpError(f"{path}: data is {error}, expected uint8 [n, {_PIXELS}]") from error
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ClusterddpError(f"{path}: labels are not a list of integers")
    wrong = next((label for label in labels if not 0 <= label <= 9), None)
    if wrong is not None:
        raise ClusterddpError(f"{path}: label {wrong} is not in 0..9")
    if len(images) != len(labels):
        raise ClusterddpError(f"{path}: {len(images):,} images but {len(labels):,} labels")
    return images, labels, hashlib.md5(content, usedforsecurity=False).hexdigest()


def _unpickle(content: bytes, path: Path) -> Any:
    """Return what the pickle holds: plain values, texts as bytes or str, arrays as `_Array`."""
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
    """Stands for numpy.dtype: keeps its text, such as u1."""

    def __init__(self, text: Any, *_flags: Any) -> None:
        self.text = text.decode("ascii") if isinstance(text, bytes) else str(text)

    def __setstate__(self, state: Any) -> None:
        """Its byte order; a byte has none."""


class _Array:
    """Stands for a numpy array: keeps its description, of which `pixels` makes a tensor."""

    def __init__(self, *_description: Any) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keep (version, shape, dtype, is_fortran, bytes), as numpy's `ndarray.__reduce__` writes it."""
        self._state = state

    def pixels(self) -> Tensor:
        """Return the array, one image a row. Raises ValueError when it is something else or does not fit together."""
        whole = isinstance(self._state, tuple) and len(self._state) == 5
        _, shape, dtype, fortran, raw = self._state if whole else (None,) * 5
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray):
            raise ValueError("an array of objects")
        if dtype.text != "u1" or shape != (len(raw) // _PIXELS, _PIXELS) or len(raw) % _PIXELS:
            raise ValueError(f"an array of dtype {dtype.text} and shape {shape!r} with {len(raw):,} bytes")
        values = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return values.view(_PIXELS, -1).T if fortran else values.view(-1, _PIXELS)


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


_STAND_INS: dict[str, Any] = {
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
}
