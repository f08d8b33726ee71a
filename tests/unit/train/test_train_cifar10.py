from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.dataset import Dataset, load_dataset

CPU = torch.device("cpu")
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def load_cifar10(folder: Path, **train: Any) -> Dataset:
    spec = TrainSpec(dataset="cifar10", data_dir=str(folder), download=False, **train)
    return load_dataset(spec)


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes texts and bytes as Python 2 did, whose pickles the official files are."""

    dispatch = pickle._Pickler.dispatch.copy()  # type: ignore[attr-defined]

    def save_text(self, text: str | bytes) -> None:
        raw = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(text)

    dispatch[str] = save_text
    dispatch[bytes] = save_text


def dump_python2(batch: dict[bytes, Any], path: Path) -> None:
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(batch)
    path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def batch(number: int, *, count: int = 4) -> dict[bytes, Any]:
    random = np.random.default_rng(number)
    return {
        b"batch_label": f"batch {number}".encode(),
        b"labels": random.integers(0, 10, count).tolist(),
        b"data": random.integers(0, 256, (count, 3072), dtype=np.uint8),
        b"filenames": [f"{index}.png".encode() for index in range(count)],
    }


@pytest.fixture
def cifar10_dir(tmp_path: Path) -> Path:
    """A directory with a tiny CIFAR-10: four images in each batch."""
    (tmp_path / "cifar-10-batches-py").mkdir()
    for number, name in enumerate(BATCHES):
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch(number), protocol=3))
    return tmp_path


def spoil(folder: Path, name: str, **changes: Any) -> None:
    changed = batch(0) | {key.encode(): value for key, value in changes.items()}
    (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(changed, protocol=3))


def assert_holds_the_batches(dataset: Dataset) -> None:
    expected = np.concatenate([batch(number)[b"data"] for number in range(5)]).reshape(-1, 3, 32, 32)
    labels = [label for number in range(5) for label in batch(number)[b"labels"]]
    assert torch.equal(dataset.train_images, torch.from_numpy(expected))
    assert dataset.train_labels.tolist() == labels
    assert torch.equal(dataset.test_images, torch.from_numpy(batch(5)[b"data"]).view(-1, 3, 32, 32))
    assert dataset.test_labels.tolist() == batch(5)[b"labels"]
    assert (dataset.train_images.dtype, dataset.train_labels.dtype) == (torch.uint8, torch.int64)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_cifar10_is_read_in_every_protocol_that_python_3_writes(cifar10_dir: Path, protocol: int) -> None:
    for number, name in enumerate(BATCHES):
        path = cifar10_dir / "cifar-10-batches-py" / name
        path.write_bytes(pickle.dumps(batch(number), protocol=protocol))
    assert_holds_the_batches(load_cifar10(cifar10_dir))


def test_cifar10_is_read_as_python_2_wrote_it(cifar10_dir: Path) -> None:
    for number, name in enumerate(BATCHES):
        dump_python2(batch(number), cifar10_dir / "cifar-10-batches-py" / name)
    assert_holds_the_batches(load_cifar10(cifar10_dir))


def test_cifar10_is_read_with_text_keys(cifar10_dir: Path) -> None:
    for number, name in enumerate(BATCHES):
        texts = {key.decode(): value for key, value in batch(number).items()}
        (cifar10_dir / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(texts, protocol=4))
    assert_holds_the_batches(load_cifar10(cifar10_dir))


@pytest.mark.parametrize("protocol", [3, 5])
def test_images_that_lie_in_columns_are_read(cifar10_dir: Path, protocol: int) -> None:
    changed = batch(0) | {b"data": np.asfortranarray(batch(0)[b"data"])}
    (cifar10_dir / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(changed, protocol=protocol))
    assert_holds_the_batches(load_cifar10(cifar10_dir))


def test_cifar10_is_found_when_data_dir_is_the_folder_itself(cifar10_dir: Path) -> None:
    assert_holds_the_batches(load_cifar10(cifar10_dir / "cifar-10-batches-py"))


def test_a_subset_of_cifar10_says_so_in_its_label(cifar10_dir: Path) -> None:
    assert load_cifar10(cifar10_dir).label == "CIFAR-10 (not the whole set: 20 train, 4 test images)"


def test_samples_takes_the_first_images_and_the_label_says_so(cifar10_dir: Path) -> None:
    dataset = load_cifar10(cifar10_dir, samples=6)
    assert len(dataset.train_images) == len(dataset.train_labels) == 6
    assert len(dataset.test_images) == 4
    assert "first 6 train images" in dataset.label


def test_more_samples_than_there_are_is_an_error(cifar10_dir: Path) -> None:
    with pytest.raises(ClusterddpError, match=r"train.samples is 21, but .* has 20 train images"):
        load_cifar10(cifar10_dir, samples=21)


class Attack:
    """Unpickles to a call of `function`, the name of anything importable."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "posix.system"), (eval, "builtins.eval"), (np.load, "numpy.load")]
)
def test_a_pickle_that_calls_anything_is_refused_by_file_and_name(
    cifar10_dir: Path, tmp_path: Path, function: Any, name: str
) -> None:
    ran = tmp_path / "ran"
    command = f"touch {ran}" if function is os.system else f"open({str(ran)!r}, 'w')"
    spoil(cifar10_dir, "data_batch_3", labels=Attack(function, command))
    with pytest.raises(ClusterddpError, match=rf"data_batch_3: refused: the pickle names {name}"):
        load_cifar10(cifar10_dir)
    assert not ran.exists()


def test_an_array_of_objects_is_refused(cifar10_dir: Path) -> None:
    spoil(cifar10_dir, "data_batch_2", data=np.array([[1, "x"]], dtype=object))
    with pytest.raises(ClusterddpError, match=r"data_batch_2: data is an array of objects, expected uint8"):
        load_cifar10(cifar10_dir)


@pytest.mark.parametrize("kept", [0, 1, 100, 5000])
def test_a_file_cut_short_is_named(cifar10_dir: Path, kept: int) -> None:
    path = cifar10_dir / "cifar-10-batches-py" / "data_batch_4"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ClusterddpError, match=rf"data_batch_4: cut short or damaged \({kept:,} bytes\)"):
        load_cifar10(cifar10_dir)


def test_any_flipped_byte_is_read_or_named_but_never_crashes(cifar10_dir: Path) -> None:
    path = cifar10_dir / "cifar-10-batches-py" / "test_batch"
    content = path.read_bytes()
    structure = [*range(120), *range(len(content) - 120, len(content))]
    for place in structure:
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x15]) + content[place + 1 :])
        try:
            load_cifar10(cifar10_dir)
        except ClusterddpError as error:
            assert "test_batch" in error.message  # noqa: PT017 (reading on is right as well)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"labels": [0, 1, 10, 2]}, "label 10 is not in 0..9"),
        ({"labels": [0, -1, 1, 2]}, "label -1 is not in 0..9"),
        ({"labels": [0, 1]}, "4 images but 2 labels"),
        ({"labels": "cats"}, "labels are not a list of integers"),
        ({"labels": np.zeros(4, np.int64)}, "labels are not a list of integers"),
        ({"data": np.zeros((4, 3071), np.uint8)}, r"dtype u1 and shape \(4, 3071\) .*, expected uint8 \[n, 3072\]"),
        ({"data": np.zeros((4, 3072), np.int16)}, r"dtype i2 and shape \(4, 3072\)"),
        ({"data": [1, 2, 3]}, "data is not an array"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(cifar10_dir: Path, changes: dict[str, Any], complaint: str) -> None:
    spoil(cifar10_dir, "data_batch_1", **changes)
    with pytest.raises(ClusterddpError, match=rf"data_batch_1: .*{complaint}"):
        load_cifar10(cifar10_dir)


def test_a_pickle_that_is_no_batch_is_named(cifar10_dir: Path) -> None:
    (cifar10_dir / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ClusterddpError, match="test_batch: a list, where a batch of CIFAR-10 is a dict"):
        load_cifar10(cifar10_dir)


def test_missing_batches_are_named(cifar10_dir: Path) -> None:
    (cifar10_dir / "cifar-10-batches-py" / "data_batch_2").unlink()
    with pytest.raises(ClusterddpError, match="incomplete: no file data_batch_2"):
        load_cifar10(cifar10_dir)


def test_a_set_that_is_not_there_says_what_was_expected_where(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterddpError, match="CIFAR-10 is not there: expected the folder cifar-10-batches-py"
    ) as caught:
        load_cifar10(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "train.download=true" in str(caught.value.hint)


@pytest.mark.skipif("CLUSTERDDP_TEST_CIFAR" not in os.environ, reason="CLUSTERDDP_TEST_CIFAR names no full CIFAR-10")
def test_the_whole_of_cifar10_is_read_and_called_what_it_is() -> None:
    dataset = load_cifar10(Path(os.environ["CLUSTERDDP_TEST_CIFAR"]))
    pixels = dataset.train_images.float().div_(255)
    assert dataset.label in ("CIFAR-10", "CIFAR-10 (other encoding: md5 differs from the official files)")
    assert dataset.train_labels.bincount().tolist() == [5000] * 10
    assert dataset.test_labels.bincount().tolist() == [1000] * 10
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(dataset.mean), atol=1e-3, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(dataset.std), atol=3e-3, rtol=0)


def run_python(code: str, *arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


LOAD = """
import sys, torch
from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.dataset import load_dataset
spec = TrainSpec(dataset="cifar10", data_dir=sys.argv[1])
try:
    print("images", len(load_dataset(spec).train_images))
except ClusterddpError as error:
    print("error", error.message, "hint", error.hint)
"""


def fake_torchvision(folder: Path, body: str) -> Path:
    """Write a package torchvision whose CIFAR10(root, download=True) runs `body`; return its parent."""
    (folder / "torchvision").mkdir(parents=True)
    (folder / "torchvision" / "__init__.py").touch()
    (folder / "torchvision" / "datasets.py").write_text(f"def CIFAR10(root, download):\n    {body}\n")
    return folder


def test_the_processes_of_a_host_download_once_and_all_read(cifar10_dir: Path, tmp_path: Path) -> None:
    source, count = cifar10_dir / "cifar-10-batches-py", tmp_path / "count"
    body = (
        f"import shutil, time; open({str(count)!r}, 'a').write('x'); time.sleep(1); "
        f"shutil.copytree({str(source)!r}, root + '/cifar-10-batches-py')"
    )
    fake = fake_torchvision(tmp_path / "fake", body)
    target = tmp_path / "target"
    ranks = [run_python(LOAD, str(target), path=fake) for _ in range(3)]
    outputs = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert outputs == ["images 20"] * 3
    assert count.read_text() == "x"
    assert sorted(path.name for path in target.iterdir() if path.is_dir()) == ["cifar-10-batches-py"]


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    fake = fake_torchvision(tmp_path / "fake", "import urllib.error; raise urllib.error.URLError('no route to host')")
    output, _ = run_python(LOAD, str(tmp_path / "target"), path=fake).communicate(timeout=120)
    assert "error CIFAR-10 could not be downloaded" in output
    assert "no route to host" in output
    assert "set train.data_dir" in output
    assert [path for path in (tmp_path / "target").iterdir() if path.is_dir()] == []


def test_torchvisions_data_sets_can_be_imported_beside_any_torch() -> None:
    code = """
from clusterddp.train.data.download import import_torchvision
import_torchvision()
from torchvision.datasets import CIFAR10
print(CIFAR10.__name__)
"""
    output, _ = run_python(code).communicate(timeout=120)
    assert output.strip().splitlines()[-1] == "CIFAR10"
