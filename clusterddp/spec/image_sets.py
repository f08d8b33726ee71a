"""The image data sets by name: generated sets, those of torchvision that fit into memory, and a folder of the user's.

Facts that need neither files nor torchvision, for the submitting side and the ranks.
Source: torchvision 0.28.0, datasets/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "folder"
GENERATED = ("shapes", "random")
"""Sets that the trainer generates; they have no files."""
BUILT_IN: Mapping[str, int] = {"shapes": 32, "cifar10": 32, "fashion_mnist": 32, "random": 32}
"""The sets that the trainer reads or draws by itself, and the side of their images in pixels."""

_FLAG = ({"train": True}, {"train": False})
_SPLIT = ({"split": "train"}, {"split": "test"})


@dataclass(frozen=True, slots=True)
class ImageSet:
    """How torchvision reads a set: a class, called once for each half."""

    reader: str
    """The class in torchvision.datasets."""
    files: tuple[str, ...]
    """What has to be in the root; a download writes it."""
    side: int | None = None
    """Pixels along each side of every image; None: they differ, or are not square."""
    halves: tuple[dict[str, Any], dict[str, Any]] = _SPLIT
    """The class's arguments besides its root, for the training images and for the test images."""


IMAGE_SETS: Mapping[str, ImageSet] = {
    "cifar100": ImageSet("CIFAR100", ("cifar-100-python",), 32, _FLAG),
    "dtd": ImageSet("DTD", ("dtd",)),
    **{
        f"emnist_{split}": ImageSet(
            "EMNIST", ("EMNIST",), 28, ({"split": split, **_FLAG[0]}, {"split": split, **_FLAG[1]})
        )
        for split in ("balanced", "byclass", "bymerge", "digits", "letters", "mnist")
    },
    "fgvcaircraft": ImageSet(
        "FGVCAircraft", ("fgvc-aircraft-2013b",), halves=({"split": "trainval"}, {"split": "test"})
    ),
    "flowers102": ImageSet("Flowers102", ("flowers-102",)),
    "food101": ImageSet("Food101", ("food-101",)),
    "gtsrb": ImageSet("GTSRB", ("gtsrb",)),
    "imagenette": ImageSet("Imagenette", ("imagenette2",), halves=({"split": "train"}, {"split": "val"})),
    "kmnist": ImageSet("KMNIST", ("KMNIST",), 28, _FLAG),
    "mnist": ImageSet("MNIST", ("MNIST",), 28, _FLAG),
    "oxfordiiitpet": ImageSet("OxfordIIITPet", ("oxford-iiit-pet",), halves=({"split": "trainval"}, {"split": "test"})),
    "qmnist": ImageSet("QMNIST", ("QMNIST",), 28, _FLAG),
    "stl10": ImageSet("STL10", ("stl10_binary",), 96),
    "svhn": ImageSet("SVHN", ("train_32x32.mat", "test_32x32.mat"), 32),
    "usps": ImageSet("USPS", ("usps.bz2", "usps.t.bz2"), 16, _FLAG),
}
"""torchvision's sets of images with one class each, and test images apart, that fit into the memory of a machine."""

_ANY_OF: Mapping[str, tuple[str, ...]] = {
    "cifar10": ("cifar-10-batches-py/test_batch", "test_batch"),
    "fashion_mnist": tuple(
        f"{folder}t10k-labels-idx1-ubyte{suffix}"
        for folder in ("", "FashionMNIST/raw/", "/usr/share/datasets/fashion-mnist/")
        for suffix in ("", ".gz")
    ),
    FOLDER: ("train",),
}
"""Files of a set; one of them proves that it is in a directory."""

NAMES = (*BUILT_IN, FOLDER, *IMAGE_SETS)


def is_there(name: str, data_dir: Path) -> bool:
    """Return whether the files of a set are in a directory, by their names; a generated set needs none."""
    if name in IMAGE_SETS:
        return all((data_dir / file).exists() for file in IMAGE_SETS[name].files)
    return name in GENERATED or any((data_dir / file).exists() for file in _ANY_OF.get(name, ()))


def own_side(name: str) -> int | None:
    """Return the side in pixels that all images of a set have; None: it is not known before they are read."""
    return BUILT_IN.get(name) or (IMAGE_SETS[name].side if name in IMAGE_SETS else None)


def kept_side(name: str, image_size: int | None) -> int | None:
    """Return the side in pixels at which images are stored; each batch is enlarged to the side that the model sees."""
    own = own_side(name)
    return own if own is not None and (image_size is None or own < image_size) else image_size


def fits_fastnet(side: int) -> bool:
    """Return whether fastnet accepts images of this side: after three halvings its last 3x3 pool needs one position."""
    return 25 <= side <= 48
