"""The image data sets by name: torchvision's classification sets, generated sets, and a folder of the user's.

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

_HALVES = ({"train": True}, {"train": False})
_SPLITS = ({"split": "train"}, {"split": "test"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet:
    """How torchvision reads a set: a class, called once for each half, and what it needs."""

    reader: str
    """The class in torchvision.datasets."""
    halves: tuple[dict[str, Any], dict[str, Any]] = _SPLITS
    """The class's arguments besides its root, for the training images and for the test images."""
    files: tuple[str, ...]
    """The files that have to be in the root; a download writes them."""
    side: int | None = None
    """Pixels along each side of every image; None: they differ, or are not square."""
    grey: bool = False
    """True: one channel. All other sets have three; a grey image of them is read as RGB."""
    packages: tuple[str, ...] = ()
    """The package that torchvision needs to read it."""
    by_hand: bool = False
    """True: torchvision does not download it."""


def _emnist(split: str) -> ImageSet:
    halves = ({"split": split, "train": True}, {"split": split, "train": False})
    return ImageSet(reader="EMNIST", halves=halves, files=("EMNIST",), side=28, grey=True)


IMAGE_SETS: Mapping[str, ImageSet] = {
    "cifar100": ImageSet(reader="CIFAR100", halves=_HALVES, files=("cifar-100-python",), side=32),
    "clevrclassification": ImageSet(
        reader="CLEVRClassification", halves=({"split": "train"}, {"split": "val"}), files=("clevr",)
    ),
    "country211": ImageSet(reader="Country211", files=("country211",)),
    "dtd": ImageSet(reader="DTD", files=("dtd",)),
    "emnist_balanced": _emnist("balanced"),
    "emnist_byclass": _emnist("byclass"),
    "emnist_bymerge": _emnist("bymerge"),
    "emnist_digits": _emnist("digits"),
    "emnist_letters": _emnist("letters"),
    "emnist_mnist": _emnist("mnist"),
    "fer2013": ImageSet(reader="FER2013", files=("fer2013",), side=48, grey=True, by_hand=True),
    "fgvcaircraft": ImageSet(
        reader="FGVCAircraft", halves=({"split": "trainval"}, {"split": "test"}), files=("fgvc-aircraft-2013b",)
    ),
    "flowers102": ImageSet(reader="Flowers102", files=("flowers-102",), packages=("scipy",)),
    "food101": ImageSet(reader="Food101", files=("food-101",)),
    "gtsrb": ImageSet(reader="GTSRB", files=("gtsrb",)),
    "imagenet": ImageSet(
        reader="ImageNet",
        halves=({"split": "train"}, {"split": "val"}),
        files=("meta.bin", "train", "val"),
        by_hand=True,
    ),
    "imagenette": ImageSet(reader="Imagenette", halves=({"split": "train"}, {"split": "val"}), files=("imagenette2",)),
    "kmnist": ImageSet(reader="KMNIST", halves=_HALVES, files=("KMNIST",), side=28, grey=True),
    "mnist": ImageSet(reader="MNIST", halves=_HALVES, files=("MNIST",), side=28, grey=True),
    "oxfordiiitpet": ImageSet(
        reader="OxfordIIITPet", halves=({"split": "trainval"}, {"split": "test"}), files=("oxford-iiit-pet",)
    ),
    "pcam": ImageSet(reader="PCAM", files=("pcam",), side=96, packages=("h5py",)),
    "places365": ImageSet(
        reader="Places365",
        halves=({"split": "train-standard", "small": True}, {"split": "val", "small": True}),
        files=(
            "categories_places365.txt",
            "places365_train_standard.txt",
            "places365_val.txt",
            "data_256_standard",
            "val_256",
        ),
        side=256,
    ),
    "qmnist": ImageSet(reader="QMNIST", halves=_HALVES, files=("QMNIST",), side=28, grey=True),
    "renderedsst2": ImageSet(reader="RenderedSST2", files=("rendered-sst2",), side=448),
    "stanfordcars": ImageSet(reader="StanfordCars", files=("stanford_cars",), packages=("scipy",), by_hand=True),
    "stl10": ImageSet(reader="STL10", files=("stl10_binary",), side=96),
    "svhn": ImageSet(reader="SVHN", files=("train_32x32.mat", "test_32x32.mat"), side=32, packages=("scipy",)),
    "usps": ImageSet(reader="USPS", halves=_HALVES, files=("usps.bz2", "usps.t.bz2"), side=16, grey=True),
}

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

_NO_HALVES = "torchvision has no test images apart from the training images of it"
_OTHER_CLASSES = "its test images show other classes than its training images"
_NO_CLASSES = "its images have no single class"

REFUSED: Mapping[str, str] = {
    "caltech101": _NO_HALVES,
    "caltech256": _NO_HALVES,
    "celeba": _NO_CLASSES,
    "emnist": "it is six sets: emnist_balanced, _byclass, _bymerge, _digits, _letters and _mnist",
    "eurosat": _NO_HALVES,
    "hmdb51": "it is of videos",
    "inaturalist": "its 2.7 million images do not fit on a device",
    "kinetics": "it is of videos",
    "lfwpairs": _NO_CLASSES,
    "lfwpeople": _OTHER_CLASSES,
    "lsun": "its 10 million images do not fit on a device",
    "movingmnist": "it is of videos, without classes",
    "omniglot": _OTHER_CLASSES,
    "semeion": _NO_HALVES,
    "sun397": _NO_HALVES,
    "ucf101": "it is of videos",
}
"""torchvision's sets that the trainer refuses by name, and why."""

NAMES = (*BUILT_IN, FOLDER, *IMAGE_SETS)


def is_there(name: str, data_dir: Path) -> bool:
    """Return whether the files of a set are in a directory, by their names; a generated set needs none."""
    if name in _ANY_OF:
        return any((data_dir / file).exists() for file in _ANY_OF[name])
    return name not in IMAGE_SETS or all((data_dir / file).exists() for file in IMAGE_SETS[name].files)


def can_download(name: str) -> bool:
    """Return whether torchvision downloads a set from the internet."""
    return name in {"cifar10", "fashion_mnist"} or (name in IMAGE_SETS and not IMAGE_SETS[name].by_hand)


def own_side(name: str) -> int | None:
    """Return the side in pixels that all images of a set have; None: it is not known before they are read."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    return IMAGE_SETS[name].side if name in IMAGE_SETS else None


def model_side(name: str, image_size: int | None) -> int | None:
    """Return the side in pixels of the images that the model sees; None: it is not known before they are read."""
    return image_size or own_side(name)


def kept_side(name: str, image_size: int | None) -> int | None:
    """Return the side in pixels at which images are stored; each batch is enlarged to the side that the model sees."""
    own = own_side(name)
    return own if own is not None and (image_size is None or own < image_size) else image_size


def fits_fastnet(side: int) -> bool:
    """Return whether fastnet accepts images of this side: after three halvings its last 3x3 pool needs one position."""
    return 25 <= side <= 48
