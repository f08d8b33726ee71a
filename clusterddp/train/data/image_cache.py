"""Decoded images, cached once per host: all images of a data set in one file of uint8, which the host's ranks map.

The cache's directory has `pixels`, the training images and after them the test images, [n, channel, height, width], and
`about.json` with everything else. A rename puts it in place when it is complete. Its name follows from the size of the
images and from every file's size and time, so changed files get another directory. `verified-HOST` notes that the sum
of this content was checked since the host has booted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clusterddp.errors import ClusterddpError
from clusterddp.facts.memory import free_bytes
from clusterddp.run.record import boot_id
from clusterddp.system.units import format_bytes
from clusterddp.train.data.download import default_data_dir, locked, log
from clusterddp.train.data.image_files import ImageSource, SplitImages

_FORMAT = 1
_BLOCK = 64  # images that a thread reads at a time
_CHUNK_BYTES = 1 << 24
_OTHER_PLACE = "make room, or set train.data_dir to a disk that has it, or lower train.image_size"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CachedImages:
    """A data set in its cache file, which is mapped: images that are not read take no memory."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_cached(
    source: ImageSource, *, side: int | None, device: torch.device, samples: int | None = None
) -> CachedImages:
    """Return the images of `source`, brought to `side` x `side` pixels; the first process of the host makes the file.

    `side` None: as they are, which is an error unless all are squares of one size. `device`: where they go later, of
    the training images `samples` of them (None: all).

    Raises: ClusterddpError: an image cannot be read, or has another size; there is no room; the file is damaged.
    """
    place = _choose_place(source.root)
    lock = place / f".{source.name}.lock"
    directory = place / f"{source.name}-{side or 'own'}-{_fingerprint(source)}"
    if not directory.is_dir():
        try:
            place.mkdir(parents=True, exist_ok=True)
            with locked(lock):
                if not directory.is_dir():
                    _make(source, directory, side, device, samples)
        except OSError as error:
            raise ClusterddpError(f"{place}: cannot be written: {error}", hint=_OTHER_PLACE) from error
    return _read(directory, lock)


def demand_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """Raise ClusterddpError, with both numbers, if `device` has less than `num_bytes` left for `what`."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
    if free is not None and num_bytes > free:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this host"
        raise ClusterddpError(
            f"{what} take {format_bytes(num_bytes)} as a whole set on the device, and {where} has "
            f"{format_bytes(free)} left",
            hint="lower train.image_size, or take fewer images",
        )


def _choose_place(root: Path) -> Path:
    """Return the directory beside the set's files; the user's own where that one cannot be written."""
    beside = root / ".clusterddp"
    writable = os.access(beside if beside.exists() else root, os.W_OK | os.X_OK)
    return beside if writable else default_data_dir() / ".clusterddp"


def _fingerprint(source: ImageSource) -> str:
    digest = hashlib.sha256(f"{_FORMAT}".encode())
    try:
        for name, stat in source.list_files():
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    except OSError as error:
        raise ClusterddpError(f"{source.title}: {error}") from error
    return digest.hexdigest()[:16]


def _make(source: ImageSource, directory: Path, side: int | None, device: torch.device, samples: int | None) -> None:
    splits = source.open(partial(_to_tensor, side=side, grey=source.grey))
    shape = _shape(source, splits)
    count = len(splits[0]) + len(splits[1])
    used = min(samples or count, len(splits[0])) + len(splits[1])
    demand_memory(f"{source.title}: {used:,} images of {shape[2]}x{shape[1]} pixels", used * shape.numel(), device)
    num_bytes = count * shape.numel()
    log.info("reading %s: %s images, once for this host, into %s", source.title, f"{count:,}", directory)
    part = directory.with_name(f".{directory.name}.{socket.gethostname()}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        part.mkdir()
        pixels = _allocate(part / "pixels", num_bytes).view(count, *shape)
        train, test = pixels[: len(splits[0])], pixels[len(splits[0]) :]
        about = {
            "shape": list(shape),
            "classes": len(getattr(splits[0], "classes", ())),
            "train": _read_images(splits[0], train),
            "test": _read_images(splits[1], test),
        }
        _write_about(part, about | _mean_and_std(train))
        part.rename(directory)
    except OSError as error:
        if directory.is_dir():  # another host was faster, where both share it without locks
            return
        raise ClusterddpError(
            f"{directory.parent}: {source.title} takes {format_bytes(num_bytes)} there, and cannot be written: {error}",
            hint=_OTHER_PLACE,
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _shape(source: ImageSource, splits: tuple[SplitImages, SplitImages]) -> torch.Size:
    """Return the shape that every image has to have, that of the first one: [channel, height, width]."""
    if not (len(splits[0]) and len(splits[1])):
        raise ClusterddpError(f"{source.title}: found {len(splits[0])} training and {len(splits[1])} test images")
    shape = _read_image(splits[0], 0)[0].shape
    if shape[1] != shape[2]:
        raise _other_size(splits[0], 0, shape, "expected a square")
    return shape


def _allocate(path: Path, num_bytes: int) -> Tensor:
    """Make a file of its full length, so that a full disk is an error now, and map it (uint8, [num_bytes])."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def _read_images(split: SplitImages, pixels: Tensor) -> list[int]:
    """Read all images into `pixels` [n, channel, height, width], on every core; return their labels."""

    def read(block: Sequence[int]) -> list[int]:
        labels = []
        for index in block:
            image, label = _read_image(split, index)
            if image.shape != pixels.shape[1:]:
                raise _other_size(split, index, image.shape, f"the first has {pixels.shape[3]}x{pixels.shape[2]}")
            pixels[index] = image
            labels.append(label)
        return labels

    blocks = [range(first, min(first + _BLOCK, len(pixels))) for first in range(0, len(pixels), _BLOCK)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:  # decoders and resizing let other threads run
        return [label for labels in pool.map(read, blocks) for label in labels]


def _read_image(split: SplitImages, index: int) -> tuple[Tensor, int]:
    """Return an image (uint8, [channel, height, width]) and its label."""
    try:
        image, label = split[index]
    except Exception as error:  # each decoder has its own
        raise ClusterddpError(
            f"{_name(split, index)}: cannot be read as an image: {type(error).__name__}: {error}",
            hint="replace the file, or remove it",
        ) from error
    if not hasattr(label, "__index__"):  # FER2013's test.csv has none
        raise ClusterddpError(f"{_name(split, index)}: its label is {label}, where the number of a class belongs")
    return image, operator.index(label)


def _to_tensor(image: Any, *, side: int | None, grey: bool) -> Tensor:
    """Make a tensor (uint8, [channel, height, width]) of a PIL image; with `side`, of the square in its middle."""
    from PIL import Image, ImageOps

    image = image.convert("L" if grey else "RGB")
    if side is not None and image.size != (side, side):
        image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, -1).permute(2, 0, 1)


def _other_size(split: SplitImages, index: int, shape: torch.Size, expected: str) -> ClusterddpError:
    return ClusterddpError(
        f"{_name(split, index)}: has {shape[2]}x{shape[1]} pixels, {expected}",
        hint="train.image_size=224 brings all images to 224x224",
    )


def _name(split: SplitImages, index: int) -> str:
    """Name an image: its file, where torchvision has it."""
    samples = getattr(split, "samples", None)
    return str(samples[index][0]) if samples else f"image {index:,} of {type(split).__name__}"


def _mean_and_std(images: Tensor) -> dict[str, list[float]]:
    """Return mean and std of each channel's pixels, in 0..1, from how often each grey level is there."""
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for block in torch.split(images, 1000):
        counts += torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in block.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    level = torch.arange(256).double() / 255
    mean = share @ level
    variance = share @ level.square() - mean.square()
    variance = variance.clamp_min(1 / 255**2)  # one colour everywhere: nothing to scale
    return {"mean": mean.tolist(), "std": variance.sqrt().tolist()}


def _write_about(directory: Path, about: dict[str, Any]) -> None:
    with (directory / "pixels").open("rb") as file:
        os.fsync(file.fileno())
    about["sha256"] = _sha256(directory / "pixels", about)
    (directory / "about.json").write_text(json.dumps(about), encoding="utf-8")
    with contextlib.suppress(OSError):  # the next process computes the sum once more
        _mark_of(directory).write_text(_describe_content(directory), encoding="utf-8")


def _mark_of(directory: Path) -> Path:
    """Name the file that says which content a process of this host has found to have its sum."""
    return directory / f"verified-{socket.gethostname()}"


def _sha256(pixels: Path, about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    with pixels.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read(directory: Path, lock: Path) -> CachedImages:
    """Read what `_make` has made; `lock`: what the processes of the host lock while one of them checks its sum."""
    try:
        about = json.loads((directory / "about.json").read_text(encoding="utf-8"))
        intact = _is_verified(directory, about.pop("sha256"), about, lock)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(directory, f"{type(error).__name__}: {error}") from error
    if not intact:
        raise _damaged(directory, "its sum is not the one that was noted")
    labels = [torch.tensor(about[split], dtype=torch.int64) for split in ("train", "test")]
    shape = (len(labels[0]) + len(labels[1]), *about["shape"])
    size = torch.Size(shape).numel()
    pixels = torch.from_file(str(directory / "pixels"), shared=False, size=size, dtype=torch.uint8).view(shape)
    return CachedImages(
        train_images=pixels[: len(labels[0])],
        train_labels=labels[0],
        test_images=pixels[len(labels[0]) :],
        test_labels=labels[1],
        num_classes=max(about["classes"], 1 + int(torch.cat(labels).max())),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
    )


def _is_verified(directory: Path, sha256: str, about: dict[str, Any], lock: Path) -> bool:
    """Return whether the content has its sum; one process of the host computes it, once until the host boots again."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where nothing can be written, each process computes the sum
            stack.enter_context(locked(lock))
        verified, content = _mark_of(directory), _describe_content(directory)
        with contextlib.suppress(OSError):
            if verified.read_text(encoding="utf-8") == content:
                return True
        intact = sha256 == _sha256(directory / "pixels", about)
        with contextlib.suppress(OSError):
            if intact:
                verified.write_text(content, encoding="utf-8")
    return intact


def _describe_content(directory: Path) -> str:
    """Describe both files so that any later write shows, and this boot of the host."""
    stats = [(directory / name).stat() for name in ("pixels", "about.json")]
    return " ".join([boot_id(), *(f"{at.st_ino}:{at.st_size}:{at.st_mtime_ns}:{at.st_ctime_ns}" for at in stats)])


def _damaged(directory: Path, why: str) -> ClusterddpError:
    return ClusterddpError(f"{directory}: damaged: {why}", hint="remove this directory: the next start makes it anew")
