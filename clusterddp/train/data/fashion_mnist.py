"""Fashion-MNIST from IDX files, as they are published or unzipped; the images are padded from 28x28 to 32x32."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from clusterddp.errors import ClusterddpError
from clusterddp.train.data.download import download_once, missing_error

# Mean and deviation of the padded train pixels, in 0..1.
MEAN = (0.2190,)
STD = (0.3318,)

_DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts the files
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_LARGEST_COUNT = 1 << 20  # images; a header that claims more is not believed

Split = tuple[Tensor, Tensor]


def read_fashion_mnist(data_dir: Path, *, download: bool) -> tuple[Split, Split, str]:
    """Return the train split, the test split (uint8 [n, 1, 32, 32], int64 [n]) and what to call figures got on them.

    Raises:
        ClusterddpError: a file is missing, damaged, or holds something else.
    """
    folder = find_folder(data_dir) or find_folder(_DEBIAN)
    if folder is None and download:
        folder = download_once("FashionMNIST", "Fashion-MNIST", data_dir, find=find_folder, results=["FashionMNIST"])
    if folder is None:
        raise missing_error("Fashion-MNIST", data_dir, wanted=f"the files {_FILES[0]}[.gz] and so on")
    train = _read_split(folder, _FILES[0], _FILES[1])
    test = _read_split(folder, _FILES[2], _FILES[3])
    counts = (len(train[0]), len(test[0]))
    whole = counts == (60_000, 10_000)
    label = "Fashion-MNIST" if whole else f"Fashion-MNIST (not the whole set: {counts[0]:,} train, {counts[1]:,} test)"
    return train, test, label


def find_folder(data_dir: Path) -> Path | None:
    """Return the folder with all four files, `data_dir` or its FashionMNIST/raw, or None."""
    for folder in (data_dir, data_dir / "FashionMNIST" / "raw"):
        if all(_find_file(folder, name) for name in _FILES):
            return folder
    return None


def _find_file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_split(folder: Path, images_name: str, labels_name: str) -> Split:
    images = _read_idx(folder, images_name, dimensions=3)
    labels = _read_idx(folder, labels_name, dimensions=1)
    if tuple(images.shape[1:]) != (28, 28):
        raise ClusterddpError(f"{folder / images_name}: images of {list(images.shape[1:])}, expected 28x28")
    if len(images) != len(labels):
        raise ClusterddpError(f"{folder / labels_name}: {len(labels):,} labels for {len(images):,} images")
    if len(labels) and int(labels.max()) > 9:
        raise ClusterddpError(f"{folder / labels_name}: label {int(labels.max())} is not in 0..9")
    return functional.pad(images[:, None], (2, 2, 2, 2)), labels.long()


def _read_idx(folder: Path, name: str, *, dimensions: int) -> Tensor:
    """Read an IDX file of bytes: 0, 0, 8 (unsigned byte), the number of dimensions, their sizes, the values."""
    path = _find_file(folder, name)
    assert path is not None, f"{folder / name} was found a moment ago"
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, 8, dimensions)):
                raise ClusterddpError(
                    f"{path}: begins with {header[:4].hex(' ') or 'nothing'}, "
                    f"expected 00 00 08 {dimensions:02x} (IDX, bytes, {dimensions} dimensions)"
                )
            sizes = struct.unpack(f">{dimensions}I", header[4:])
            wanted = math.prod(sizes)
            if sizes[0] > _LARGEST_COUNT or wanted > _LARGEST_COUNT * 28 * 28:
                raise ClusterddpError(f"{path}: the header claims {sizes[0]:,} entries of {list(sizes[1:])} bytes")
            content = file.read(wanted + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ClusterddpError(f"{path}: cut short or damaged: {error}", hint="get the file again") from error
    if len(content) != wanted:
        found = "more" if len(content) > wanted else f"{len(content):,}"
        raise ClusterddpError(f"{path}: {found} bytes of values, the header has {wanted:,}", hint="get the file again")
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return values.view(sizes)
