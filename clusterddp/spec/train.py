"""The spec's `train` section, on the submitting side and on hosts: each key with its type, default and description.

Python only. The annotations are names of spec/fields.py, which a host never looks up; on the submitting side
spec/model.py has pydantic look them up, and check what people write. The image data sets are below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.wire import Written

if TYPE_CHECKING:
    from clusterddp.spec.fields import (
        BelowOne,
        Comm,
        Count,
        Fraction,
        ImageSetName,
        NotNegative,
        Pixels,
        Positive,
        Seed,
        Side,
        Switch,
        Text,
        Word,
    )


DEFINING = ("model", "width", "dataset", "image_size", "seed", "optimizer")
"""Keys without which a checkpoint makes no sense: the weights' shape, the samples and their order, what is kept for
each weight."""
_REMOVED = ("comm_allow",)
"""Keys that plans of earlier versions have."""


def key(default: Any, description: str) -> Any:
    """Return a field of the section, with the text that explains it in `clusterddp schema`."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec(Written):
    """The built-in trainer: an image classifier, on a set by its name or on images of your own."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    model: Annotated[Literal["resnet18", "fastnet"], Word] = key(
        "resnet18",
        "resnet18 (11.2 million parameters; it begins with a 3x3 convolution, for images above 64x64 with the 7x7 "
        "convolution and max-pool of ImageNet's) or fastnet (small, quick, for 32x32 images).",
    )
    dataset: ImageSetName = key(
        "shapes",
        "shapes (generated, learnable, needs no file), random (generated noise: its accuracy means nothing), cifar10, "
        "a classification set of torchvision by its class's name in small letters (stl10, cifar100, fashion_mnist, "
        "food101, ...), or folder: your own, data_dir/train/CLASS/*.jpg and data_dir/test (or val).",
    )
    image_size: Side | None = key(
        None,
        "Side in pixels, 8 to 1024, of the images that the model sees: others are made smaller or larger, and cut to "
        "the square in their middle. Default: the set's own size; sets with images of many sizes need it.",
    )
    data_dir: Text | None = key(None, "Directory of the data set on every node; default: the user's cache directory.")
    download: Switch = key(True, "Download the data set where it is missing, once per host.")
    samples: Count | None = key(
        None,
        "Training images that are used or generated; default: all, or 10000 where they are generated. Generated sets "
        "have a fifth of it as test images.",
    )
    epochs: Count = key(10, "Passes over the training images.")
    batch_size: Count = key(128, "Images per rank and step.")
    accumulate: Count = key(1, "Batches whose gradients are summed before one optimizer step.")
    max_steps: Count | None = key(None, "Optimizer steps in all, after which training ends; default: none.")
    precision: Annotated[Literal["auto", "fp32", "bf16"], Word] = key(
        "auto",
        "Arithmetic of the model; auto: bf16 where it is faster: GPUs that have it, CPUs on which two trial steps are "
        "faster.",
    )
    kernels: Annotated[Literal["auto", "native"], Word] = key(
        "auto",
        "How convolutions are computed on CPUs; auto: each pass of a layer as is fastest, timed for 3 s at the start "
        "of a run of 100 steps or more; native: by torch's own kernels.",
    )
    seed: Seed = key(0, "Seed of weights, order and augmentation, 0 to 2^32-1.")
    deterministic: Switch = key(False, "Bit-equal results from run to run; slower on GPUs.")
    lr: Positive = key(0.1, "Peak learning rate, meant for a global batch of lr_batch images.")
    lr_scaling: Annotated[Literal["auto", "linear", "none"], Word] = key(
        "auto",
        "linear: the learning rate grows with global batch / lr_batch; none: it is taken as it is; auto: linear for "
        "sgd and muon, over sqrt(ranks) with comm local:H; none for adam, whose steps do not grow with the batch.",
    )
    lr_batch: Count = key(128, "Global batch that lr is meant for.")
    warmup: Fraction = key(0.2, "Fraction of all steps over which the learning rate rises.")
    schedule: Annotated[Literal["onecycle", "triangle", "constant"], Word] = key(
        "onecycle", "Learning rate after the warm-up: down by a cosine, down by a straight line, or constant."
    )
    optimizer: Annotated[Literal["sgd", "muon", "adam"], Word] = key(
        "sgd",
        "muon uses Muon for convolutions and SGD for the rest; momentum and nesterov are for both.",
    )
    muon_lr: Positive = key(
        0.04,
        "Muon's peak learning rate, a share of the weights' length; it does not grow with the batch. "
        "Steps of 2000 images want more, such as 0.24 with momentum 0.6.",
    )
    momentum: BelowOne = key(0.9, "Momentum of SGD.")
    nesterov: Switch = key(True, "Nesterov's form of momentum.")
    weight_decay: NotNegative = key(5e-4, "Weight decay; biases and batch norm's parameters do not decay.")
    ema: BelowOne = key(
        0.0,
        "Share that a running mean of the weights keeps in each step, such as 0.999; it is evaluated beside the "
        "weights. 0: none.",
    )
    label_smoothing: BelowOne = key(0.1, "Share of each label that is spread over all classes.")
    augment: Annotated[Literal["none", "flip", "flip_translate"], Word] = key(
        "flip_translate", "Random changes to training images: none, mirrored, or mirrored and moved."
    )
    translate: Pixels = key(
        2,
        "Pixels by which flip_translate moves images at most, each way; they count before images are enlarged to "
        "image_size.",
    )
    cutout: Pixels = key(
        0,
        "Side in pixels of a square that is blanked in each training image, before it is enlarged to image_size; 0: "
        "none.",
    )
    tta: Annotated[Literal["none", "mirror", "mirror_translate"], Word] = key(
        "none", "Test-time augmentation: the mean over mirrored (and moved) copies, reported as accuracy_tta."
    )
    comm: Comm = key(
        "exact",
        "How ranks exchange: exact (the mean of all gradients, in full), bf16 (the same in half the bytes), or "
        "local:H (each rank takes steps of its own; each step averages another 1/H of the weights across ranks). All "
        "but exact change results.",
    )
    strategy: Annotated[Literal["ddp", "dp", "none"], Word] = key(
        "ddp",
        "ddp: a process for each rank. For comparison: dp, one process that drives all GPUs of its node by torch's "
        "DataParallel, and none, one process and one device.",
    )
    sync_bn: Switch = key(False, "Batch norm over the batches of all ranks (SyncBatchNorm); on GPUs only.")
    compile: Annotated[Literal["auto", "always", "never"], Word] = key(
        "auto", "torch.compile; auto: on GPUs, where it pays, unless a rank cannot compile."
    )
    width: Positive = key(1.0, "Multiplier of fastnet's channels.")
    eval_every: Count = key(1, "Epochs between evaluations on the test images.")
    checkpoint_every: Count = key(1, "Epochs between checkpoints.")
    checkpoint_minutes: NotNegative | None = key(
        None,
        "Minutes between checkpoints, at the longest; 0: only by epochs. Default: 1, or more, so that steps wait for "
        "them at most 1 % of the time.",
    )
    keep_checkpoints: Count = key(2, "Checkpoints that are kept; older ones are deleted.")
    log_every: Count = key(20, "Steps between lines of metrics.")

    @classmethod
    def from_json(cls, section: dict[str, Any]) -> TrainSpec:
        """Read the section of a plan, which was checked when it was made.

        An older version's plan may lack keys, which get their defaults, and have others.
        """
        section = {name: value for name, value in section.items() if name not in _REMOVED}
        unknown = sorted(section.keys() - {each.name for each in dataclasses.fields(cls)})
        if unknown:
            raise ClusterddpError(
                f"the plan has train.{', train.'.join(unknown)}, which this version does not know",
                hint="submit the run again, or resume it with the version that submitted it",
            )
        return cls(**section)

    @property
    def checkpoint_interval_s(self) -> float | None:
        """Seconds between checkpoints by time, infinite for none; None: by what they cost."""
        return None if self.checkpoint_minutes is None else 60 * self.checkpoint_minutes or math.inf

    def global_batch(self, world_size: int) -> int:
        """Return the images of one optimizer step over all ranks."""
        return world_size * self.batch_size * self.accumulate

    def fitted(self, world_size: int, global_batch: int) -> TrainSpec:
        """Return the training with the `accumulate` by which these ranks keep `global_batch`, or come nearest to it."""
        at_once = world_size * self.batch_size
        return dataclasses.replace(self, accumulate=max(1, -((at_once - 2 * global_batch) // (2 * at_once))))

    @property
    def lr_grows(self) -> bool:
        """Whether the learning rate grows with the global batch."""
        return self.lr_scaling == "linear" or (self.lr_scaling == "auto" and self.optimizer != "adam")

    def peak_lr(self, global_batch: int) -> float:
        """Return the highest learning rate for steps of so many images. Source: Goyal et al. 2017."""
        return self.lr * (global_batch / self.lr_batch if self.lr_grows else 1.0)

    def describe_batch(self, world_size: int, was: int) -> str:
        """Say what becomes of steps of `was` images when the training goes on with so many ranks."""
        now = self.global_batch(world_size)
        ranks = f"{world_size} rank{'' if world_size == 1 else 's'} x batch_size {self.batch_size}"
        size = f"{ranks} x accumulate {self.accumulate}: a step"
        by_ranks = self.comm.startswith("local:") and self.lr_grows and self.lr_scaling == "auto"
        also = f"; with comm {self.comm} the learning rate depends on the number of ranks, too" if by_ranks else ""
        if now == was:
            return f"{size} still has {now:,} images, so steps, learning rate and samples stay{also}"
        before, after = f"{self.peak_lr(was):.3g}", f"{self.peak_lr(now):.3g}"
        rate = f"stays {after}" if after == before else f"goes from {before} to {after}"
        return (
            f"{size} has {now:,} images instead of {was:,}, so {was / now:.2f} times as many steps are left, and the "
            f"peak learning rate {rate}{also}"
        )


FOLDER = "folder"
GENERATED = ("shapes", "random")
"""Sets that the trainer generates; they have no files."""
BUILT_IN: Mapping[str, int] = {"shapes": 32, "cifar10": 32, "random": 32}
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
    padding: int = 0
    """Pixels of black on each side that bring its images to `side`."""


IMAGE_SETS: Mapping[str, ImageSet] = {
    "cifar100": ImageSet("CIFAR100", ("cifar-100-python",), 32, _FLAG),
    "dtd": ImageSet("DTD", ("dtd",)),
    **{
        f"emnist_{split}": ImageSet(
            "EMNIST", ("EMNIST",), 28, ({"split": split, **_FLAG[0]}, {"split": split, **_FLAG[1]})
        )
        for split in ("balanced", "byclass", "bymerge", "digits", "letters", "mnist")
    },
    "fashion_mnist": ImageSet("FashionMNIST", ("FashionMNIST",), 32, _FLAG, padding=2),
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
