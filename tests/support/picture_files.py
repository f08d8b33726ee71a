"""Small sets of images on disk, each in the form that its publishers gave it, for torchvision to read."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import pickle
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clusterddp.train.data.download import import_torchvision


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(count: int) -> list[int]:
    return [index % 10 for index in range(count)]


def write_stl10(root: Path, *, train: int = 12, test: int = 6) -> None:
    """Columns before rows, labels from 1 on."""
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("test", test), ("unlabeled", 1)):
        (folder / f"{name}_X.bin").write_bytes(noise(count, 3, 96, 96, seed=count).tobytes())
        (folder / f"{name}_y.bin").write_bytes(bytes(label + 1 for label in labels(count)))
    (folder / "unlabeled_y.bin").unlink()
    (folder / "class_names.txt").write_text("\n".join(f"class{index}" for index in range(10)))


def write_cifar100(root: Path) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, count in (("train", 5), ("test", 3)):
        batch = {"data": noise(count, 3072, seed=count), "fine_labels": [99 - index for index in range(count)]}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"class{index}" for index in range(100)]}))


def write_mnist(root: Path, *, name: str = "MNIST") -> None:
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    for half, count in (("train", 5), ("t10k", 3)):
        for kind, values in (("images-idx3", noise(count, 28, 28)), ("labels-idx1", np.array(labels(count), np.uint8))):
            head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
            (folder / f"{half}-{kind}-ubyte").write_bytes(head + values.tobytes())


def write_gtsrb(root: Path) -> None:
    """Images of many sizes, the training images by folders, the labels of the test images in a table."""
    training, test = root / "gtsrb" / "GTSRB" / "Training", root / "gtsrb" / "GTSRB" / "Final_Test" / "Images"
    for label, sizes in enumerate([(30, 29), (41, 45)]):
        for index, size in enumerate(sizes):
            write_image(training / f"{label:05d}" / f"{index}.ppm", size, size + 3)
    write_image(test / "00000.ppm", 53, 54)
    with (root / "gtsrb" / "GT-final_test.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([["Filename", "ClassId"], ["00000.ppm", 1]])


def write_svhn(root: Path) -> None:
    """Images last, the digit 0 as 10."""
    from scipy.io import savemat

    for name, count in (("train", 5), ("test", 3)):
        digits = np.array([[label or 10] for label in labels(count)], np.uint8)
        savemat(root / f"{name}_32x32.mat", {"X": noise(32, 32, 3, count, seed=count), "y": digits})


def write_flowers102(root: Path) -> None:
    """Images by number, from 1 on, with their labels and halves in tables."""
    from scipy.io import savemat

    folder = root / "flowers-102"
    for number in range(1, 8):
        write_image(folder / "jpg" / f"image_{number:05d}.jpg", 30 + number, 40)
    savemat(folder / "imagelabels.mat", {"labels": [[102, 1, 2, 3, 4, 5, 102]]})
    savemat(folder / "setid.mat", {"trnid": [[7, 2]], "valid": [[3, 4]], "tstid": [[1, 5, 6]]})


def write_folder(root: Path, *, sizes: Sequence[tuple[int, int]], test: str = "test", per_class: int = 2) -> None:
    """Two classes of smooth JPEGs; the sizes (width, height) take turns."""
    for half in ("train", test):
        for name in ("cat", "dog"):
            for index in range(per_class):
                write_image(root / half / name / f"{index}.jpg", *sizes[index % len(sizes)])


def write_image(path: Path, width: int, height: int, *, mode: str = "RGB") -> None:
    """Write an image that is smooth, so that two ways to make it smaller differ little."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = int.from_bytes(hashlib.sha256(str(path.name).encode() + path.parent.name.encode()).digest()[:4], "big")
    coarse = Image.fromarray(noise(4, 4, 3, seed=seed))
    coarse.resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(path)


def expect_these_files(reader: str, root: Path) -> None:
    """Have torchvision's own check of a set's md5 sums expect those of the small files in `root`."""
    kind: Any = getattr(import_torchvision().datasets, reader)
    if reader == "SVHN":
        kind.split_list = {half: [url, name, _md5_of(root / name)] for half, (url, name, _) in kind.split_list.items()}
        return
    if reader == "Flowers102":
        folder = root / "flowers-102"
        kind._file_dict = {key: (name, _md5_of(folder / name)) for key, (name, _) in kind._file_dict.items()}
        return
    folder = root / kind.base_folder
    for files in (kind.train_list, kind.test_list):
        files[:] = [[name, md5(folder / name)] for name, _ in files]
    if hasattr(kind, "meta"):
        kind.meta = kind.meta | {"md5": md5(folder / kind.meta["filename"])}


@contextlib.contextmanager
def serving(directory: Path, asked: list[str]) -> Iterator[str]:
    """Serve the files of a directory on this machine; yield the address, and note what was asked for."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            asked.append(self.command)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(directory))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def forget_expectations() -> None:
    """Bring torchvision's own sums back."""
    datasets = import_torchvision().datasets
    for module in (datasets.cifar, datasets.flowers102, datasets.stl10, datasets.svhn, datasets):
        importlib.reload(module)


def _md5_of(path: Path) -> str:
    return md5(path) if path.exists() else ""


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def write_cifar10(folder: Path, *, count: int = 64) -> None:
    """Write a small set in CIFAR-10's python layout: `count` random images in each of its six files."""
    directory = folder / "cifar-10-batches-py"
    directory.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        random = np.random.default_rng(number)
        batch = {
            b"labels": random.integers(0, 10, count).tolist(),
            b"data": random.integers(0, 256, (count, 3072), dtype=np.uint8),
        }
        (directory / name).write_bytes(pickle.dumps(batch, protocol=4))
