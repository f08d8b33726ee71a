"""A data set of image files: where it is, and how torchvision opens its training and its test images."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from clusterddp.errors import ClusterddpError
from clusterddp.spec.image_sets import FOLDER, IMAGE_SETS, ImageSet
from clusterddp.train.data.download import download_once, import_datasets, missing_error

_FOLDER_HINT = (
    "dataset folder reads the images in data_dir/train/CLASS/ and data_dir/test/CLASS/ (or val), for each class"
)


class SplitImages(Protocol):
    """The training images of a data set, or its test images: an instance of one of torchvision's data sets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return an image, as the transform left it, and its label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSource:
    """The files of a data set, and the arguments with which torchvision opens each split."""

    name: str
    title: str
    """Its name in messages and beside figures."""
    root: Path
    files: tuple[str, ...]
    """The files and folders of the data set, in `root`."""
    reader: str
    """The class in torchvision.datasets."""
    splits: tuple[dict[str, Any], dict[str, Any]]
    """The arguments of the reader, besides its root: for the training images, for the test images."""
    grey: bool = False

    def open(self, transform: Callable[[Any], Any]) -> tuple[SplitImages, SplitImages]:
        """Open the training and the test images; `transform` is given each PIL image.

        Raises: ClusterddpError: torchvision cannot, or the two splits have different classes.
        """
        try:
            reader = getattr(import_datasets(), self.reader)
            train, test = (reader(**{"root": str(self.root)} | split, transform=transform) for split in self.splits)
        except ImportError as error:
            raise ClusterddpError(
                f"{socket.gethostname()}: torchvision reads {self.title}, and cannot be imported: {error}",
                hint="install torchvision beside torch: pip install torchvision",
            ) from error
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ClusterddpError(
                f"{self.root}: torchvision cannot read {self.title}: {_in_one_line(error)}",
                hint=_FOLDER_HINT
                if self.name == FOLDER
                else "complete the files, or remove them to have them got again",
            ) from error
        _check_classes(self.title, getattr(train, "classes", []), getattr(test, "classes", []))
        return train, test

    def list_files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the path below `root`, and size and time, of every file of the set, always in the same order."""
        for name in self.files:
            if (self.root / name).is_file():
                yield name, (self.root / name).stat()
            for folder, folders, files in os.walk(self.root / name, followlinks=True):
                folders.sort()
                for path in (Path(folder, file) for file in sorted(files)):
                    yield str(path.relative_to(self.root)), path.stat()


def find_source(name: str, data_dir: Path, *, download: bool) -> ImageSource:
    """Find the files of the set `name` in `data_dir`, after a download if need be.

    Raises: ClusterddpError: they are not there and cannot be got, or a package that reads them is missing.
    """
    if name == FOLDER:
        return _own_folder(data_dir)
    known = IMAGE_SETS[name]
    for package in known.packages:
        if importlib.util.find_spec(package) is None:
            raise ClusterddpError(
                f"{socket.gethostname()}: torchvision needs the package {package} to read {known.reader}",
                hint=f"install it beside torchvision: pip install {package}",
            )
    find = partial(_find_files, files=known.files)
    if find(data_dir) is None:
        if known.by_hand or not download:
            raise _missing(known, data_dir)
        download_once(known.reader, known.reader, data_dir, find=find, results=known.files, halves=known.halves)
    return ImageSource(
        name=name,
        title=known.reader,
        root=data_dir,
        files=known.files,
        reader=known.reader,
        splits=known.halves,
        grey=known.grey,
    )


def _own_folder(data_dir: Path) -> ImageSource:
    names = "train", next((name for name in ("test", "val") if (data_dir / name).is_dir()), "test")
    for name in names:
        if not (data_dir / name).is_dir():
            raise ClusterddpError(
                f"{data_dir}: has no directory {name}",
                hint=_FOLDER_HINT,
            )
    return ImageSource(
        name=FOLDER,
        title=f"folder {data_dir}",
        root=data_dir,
        files=names,
        reader="ImageFolder",
        splits=({"root": str(data_dir / names[0])}, {"root": str(data_dir / names[1])}),
    )


def _find_files(data_dir: Path, files: tuple[str, ...]) -> Path | None:
    return data_dir if all((data_dir / name).exists() for name in files) else None


def _missing(known: ImageSet, data_dir: Path) -> ClusterddpError:
    absent = [name for name in known.files if not (data_dir / name).exists()]
    error = missing_error(known.reader, data_dir, wanted=" and ".join(absent))
    if known.by_hand:
        hint = f"torchvision does not download {known.reader}: its documentation lists the files"
        return ClusterddpError(error.message, hint=hint)
    return error


def _check_classes(title: str, train: list[Any], test: list[Any]) -> None:
    """Compare the classes of both splits: a label means one class only if they are the same."""
    apart = sorted({str(name) for name in train} ^ {str(name) for name in test})
    if train and test and apart:
        raise ClusterddpError(
            f"{title}: the training images and the test images have other classes: only one of them has "
            f"{', '.join(apart[:5])}{' and so on' if len(apart) > 5 else ''}",
            hint=_FOLDER_HINT,
        )


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
