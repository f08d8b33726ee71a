"""A data set of images in memory: torchvision opens it, all cores decode it; too large a set is refused."""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError
from clusterddp.facts.memory import free_bytes
from clusterddp.spec.train import FOLDER, IMAGE_SETS, TrainSpec, is_there, kept_side
from clusterddp.system.units import format_bytes
from clusterddp.train.data.download import download_once, import_torchvision, log, missing_error

Split = tuple[Tensor, Tensor]

_BLOCK = 64  # images that a thread reads at a time
_FOLDER_HINT = (
    "dataset folder reads the images in data_dir/train/CLASS/ and data_dir/test/CLASS/ (or val), for each class"
)


def read_images(spec: TrainSpec, data_dir: Path) -> tuple[Split, Split, str, int]:
    """Read a set into memory, brought to the size at which it is kept; of its training images `samples`, evenly spaced.

    Return the train split, the test split (uint8 [n, channel, side, side], int64 [n]), what to call figures got on
    them, and the number of classes.
    """
    title, reader, splits, hint = find_files(spec.dataset, data_dir, download=spec.download)
    known = IMAGE_SETS.get(spec.dataset)
    transform = partial(
        _to_tensor,
        side=kept_side(spec.dataset, spec.image_size),
        may_be_grey=known is not None and known.side is not None,
        padding=known.padding if known else 0,
    )
    try:
        kind = getattr(import_torchvision().datasets, reader)
        train, test = (kind(**{"root": str(data_dir)} | split, transform=transform) for split in splits)
    except ImportError as error:
        raise ClusterddpError(
            f"{socket.gethostname()}: torchvision reads {title}, and cannot be imported: {error}",
            hint="install torchvision beside torch, and the package that is named: pip install torchvision",
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ClusterddpError(f"{data_dir}: torchvision cannot read {title}: {cause}", hint=hint) from error
    names = [{str(name) for name in getattr(split, "classes", [])} for split in (train, test)]
    apart = sorted(names[0] ^ names[1])
    if all(names) and apart:  # a label means one class only if both have the same
        raise ClusterddpError(
            f"{title}: the training images and the test images have other classes: only one of them has "
            f"{', '.join(apart[:5])}{' and so on' if len(apart) > 5 else ''}",
            hint=_FOLDER_HINT,
        )
    count, there = spec.samples or len(train), len(train)
    label = f"{title} ({there:,} train, {len(test):,} test images)"
    demand_samples(count, there, label)
    if not (there and len(test)):
        raise ClusterddpError(f"{title}: found {there} training and {len(test)} test images")
    shape = _read_image(train, 0)[0].shape
    if shape[1] != shape[2]:
        raise _other_size(train, 0, shape, "expected a square")
    used = count + len(test)
    demand_memory(f"{title}: {used:,} images of {shape[2]}x{shape[1]} pixels", used * shape.numel())
    log.info("reading %s: %s images", title, f"{used:,}")
    # Files are often ordered by class.
    train_images = _read_split(train, [index * there // count for index in range(count)], shape)
    test_images = _read_split(test, range(len(test)), shape)
    num_classes = max(len(names[0]), 1 + int(torch.cat((train_images[1], test_images[1])).max()))
    return train_images, test_images, label if count == there else f"{label}, {count:,} train images", num_classes


def find_files(name: str, data_dir: Path, *, download: bool) -> tuple[str, str, Sequence[dict[str, Any]], str]:
    """Find the files of the set `name` in `data_dir`, after a download if need be.

    Return its name for messages, torchvision's class for it, that one's arguments for the training images and for the
    test images, and a hint for when it cannot read them.
    """
    if name == FOLDER:
        test = next((name for name in ("test", "val") if (data_dir / name).is_dir()), "test")
        for half in ("train", test):
            if not (data_dir / half).is_dir():
                raise ClusterddpError(f"{data_dir}: has no directory {half}", hint=_FOLDER_HINT)
        splits = [{"root": str(data_dir / half)} for half in ("train", test)]
        return f"folder {data_dir}", "ImageFolder", splits, _FOLDER_HINT
    if name not in IMAGE_SETS:
        raise ClusterddpError(f"train.dataset {name} was removed", hint="a script of your own reads it: docs/entry.md")
    known = IMAGE_SETS[name]

    def find(directory: Path) -> Path | None:
        return directory if is_there(name, directory) else None

    if find(data_dir) is None:
        if not download:
            raise missing_error(known.reader, data_dir, wanted=" and ".join(known.files))
        download_once(known.reader, known.reader, data_dir, find=find, results=known.files, halves=known.halves)
    hint = "complete the files, or remove them to have them downloaded again"
    return known.reader, known.reader, known.halves, hint


def demand_samples(count: int, there: int, label: str) -> None:
    """Raise ClusterddpError if there are fewer than `count` training images."""
    if count > there:
        raise ClusterddpError(
            f"train.samples is {count:,}, but {label} has {there:,} train images",
            hint="leave train.samples out to use all of them",
        )


def demand_memory(what: str, num_bytes: int, *, device: torch.device | None = None) -> None:
    """Raise ClusterddpError, with both numbers, if a GPU has less than `num_bytes` left, or this host less than twice.

    A host holds a set twice while its ranks take it over.
    """
    if device is None:
        free, where = free_bytes(), "this host"
        most = None if free is None else free // 2
        left = f"{format_bytes(most or 0)}, half of what it has left"
    else:
        most, where = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
        left = format_bytes(most)
    if most is not None and num_bytes > most:
        raise ClusterddpError(
            f"{what} take {format_bytes(num_bytes)} of memory as a whole set, and {where} has {left} for them",
            hint="lower train.image_size or train.samples; a script of your own reads a larger set in pieces: "
            "docs/entry.md",
        )


def mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of each channel's pixels, in 0..1, from how often each grey level is there."""
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for block in torch.split(images, 1000):
        counts += torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in block.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    level = torch.arange(256).double() / 255
    mean = share @ level
    variance = share @ level.square() - mean.square()
    variance = variance.clamp_min(1 / 255**2)  # one colour everywhere: nothing to scale
    return tuple(mean.tolist()), tuple(variance.sqrt().tolist())


def _read_split(split: Any, indices: Sequence[int], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Read images, on every core, and their labels."""
    pixels, labels = torch.empty(len(indices), *shape, dtype=torch.uint8), torch.empty(len(indices), dtype=torch.int64)

    def read(places: Sequence[int]) -> None:
        for place in places:
            image, label = _read_image(split, indices[place])
            if image.shape != shape:
                raise _other_size(split, indices[place], image.shape, f"the first has {shape[2]}x{shape[1]}")
            pixels[place], labels[place] = image, label

    blocks = [range(first, min(first + _BLOCK, len(indices))) for first in range(0, len(indices), _BLOCK)]
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:  # decoders and resizing let other threads run
        for _ in pool.map(read, blocks):
            pass
    return pixels, labels


def _read_image(split: Any, index: int) -> tuple[Tensor, int]:
    """Return an image (uint8, [channel, height, width]) and its label."""
    try:
        image, label = split[index]
    except Exception as error:  # each decoder has its own
        raise ClusterddpError(
            f"{_name(split, index)}: cannot be read as an image: {type(error).__name__}: {error}",
            hint="replace the file, or remove it",
        ) from error
    return image, operator.index(label)


def _to_tensor(image: Any, *, side: int | None, may_be_grey: bool, padding: int) -> Tensor:
    """Make a tensor (uint8, [channel, height, width]) of a PIL image; with `side`, of the square in its middle.

    `padding`: the width of a black border that is put around it first.
    """
    from PIL import Image, ImageOps

    image = image.convert("L" if may_be_grey and image.mode == "L" else "RGB")
    image = ImageOps.expand(image, padding) if padding else image
    if side is not None and image.size != (side, side):
        image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, -1).permute(2, 0, 1)


def _other_size(split: Any, index: int, shape: torch.Size, expected: str) -> ClusterddpError:
    return ClusterddpError(
        f"{_name(split, index)}: has {shape[2]}x{shape[1]} pixels, {expected}",
        hint="train.image_size=224 brings all images to 224x224",
    )


def _name(split: Any, index: int) -> str:
    """Name an image: its file, where torchvision has it."""
    samples = getattr(split, "samples", None)
    return str(samples[index][0]) if samples else f"image {index:,} of {type(split).__name__}"
