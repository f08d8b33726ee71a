"""Sets of images that are files: read by torchvision from their real form, whole in memory, trained by ranks."""

from __future__ import annotations

import itertools
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import BUILT_IN, IMAGE_SETS, TrainSpec
from clusterddp.train.data.dataset import Dataset, load_dataset
from clusterddp.train.data.download import import_torchvision
from clusterddp.train.data.image_files import demand_memory
from clusterddp.train.group import Group
from clusterddp.train.loop import train
from clusterddp.train.models import build_model
from tests.support import picture_files as files
from tests.support.train_gang import Gang, make_run, metrics_rows, settle


def load(root: Path, **train: Any) -> Dataset:
    spec = TrainSpec(data_dir=str(root), download=False, **train)
    return load_dataset(spec)


@pytest.fixture(scope="module", autouse=True)
def published_sums() -> Iterator[None]:
    yield
    files.forget_expectations()


@pytest.fixture(scope="module")
def stl10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stl10")
    files.write_stl10(root)
    files.expect_these_files("STL10", root)
    return root


# -- names


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_torchvision_knows_both_halves_of_each_set(tmp_path: Path, name: str) -> None:
    """Without files all that it may say is that they are missing, or a package; not that it has no such half."""
    known = IMAGE_SETS[name]
    for half in known.halves:
        with pytest.raises((RuntimeError, FileNotFoundError, ModuleNotFoundError), match=r"(?i)not |no such|no module"):
            getattr(import_torchvision().datasets, known.reader)(str(tmp_path), **half)


# -- what is read


def test_stl10_is_kept_at_its_own_size_and_seen_at_224_pixels(stl10: Path) -> None:
    dataset = load(stl10, dataset="stl10", image_size=224)
    theirs = import_torchvision().datasets.STL10(str(stl10), split="train")
    assert torch.equal(dataset.train_images, torch.from_numpy(theirs.data))
    assert dataset.train_labels.tolist() == theirs.labels.tolist()
    assert (len(dataset.test_images), dataset.num_classes, dataset.image_shape) == (6, 10, (3, 224, 224))
    assert dataset.label == "STL10 (12 train, 6 test images)"
    pixels = dataset.train_images.double() / 255
    torch.testing.assert_close(torch.tensor(dataset.mean).double(), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(dataset.std).double(), pixels.std((0, 2, 3), correction=0))


@pytest.mark.parametrize(
    ("name", "write", "shape", "classes"),
    [
        ("cifar100", files.write_cifar100, (3, 32, 32), 100),
        ("mnist", files.write_mnist, (1, 28, 28), 5),
        ("fashion_mnist", partial(files.write_mnist, name="FashionMNIST"), (1, 32, 32), 5),
        ("gtsrb", files.write_gtsrb, (3, 30, 30), 2),
        ("svhn", files.write_svhn, (3, 32, 32), 5),
        ("flowers102", files.write_flowers102, (3, 30, 30), 102),
    ],
)
def test_a_set_by_name_is_what_torchvision_reads(
    tmp_path: Path, name: str, write: Callable[[Path], None], shape: tuple[int, int, int], classes: int
) -> None:
    write(tmp_path)
    known = IMAGE_SETS[name]
    if name in {"cifar100", "svhn", "flowers102"}:
        files.expect_these_files(known.reader, tmp_path)
    dataset = load(tmp_path, dataset=name, image_size=30 if known.side is None else None)
    halves = [getattr(import_torchvision().datasets, known.reader)(str(tmp_path), **half) for half in known.halves]
    assert (dataset.image_shape, dataset.num_classes) == (shape, max(classes, len(getattr(halves[0], "classes", ()))))
    assert dataset.train_labels.tolist() == [label for _, label in halves[0]]
    assert dataset.test_labels.tolist() == [label for _, label in halves[1]]
    if known.side is not None:
        third = ImageOps.expand(halves[1][2][0], known.padding)
        first = torch.tensor(list(third.tobytes()), dtype=torch.uint8)
        assert torch.equal(dataset.test_images[2].permute(1, 2, 0).flatten(), first)


@pytest.mark.parametrize("test", ["test", "val"])
def test_a_folder_is_brought_to_one_size_as_torchvision_would(tmp_path: Path, test: str) -> None:
    files.write_folder(tmp_path, sizes=[(60, 80), (120, 50)], test=test)
    files.write_image(tmp_path / "train" / "cat" / "grey.png", 70, 70, mode="L")
    dataset = load(tmp_path, dataset="folder", image_size=40)
    transforms = import_torchvision().transforms
    resize = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(40), transforms.PILToTensor()])
    theirs = import_torchvision().datasets.ImageFolder(str(tmp_path / "train"), transform=resize)
    assert dataset.train_labels.tolist() == theirs.targets == [0, 0, 0, 1, 1]
    assert dataset.label == f"folder {tmp_path} (5 train, 4 test images)"
    difference = dataset.train_images.int() - torch.stack([image for image, _ in theirs]).int()
    assert difference.abs().float().mean() < 2
    assert torch.equal(dataset.train_images[2, 0], dataset.train_images[2, 2])


def test_some_samples_of_a_folder_are_of_all_classes(tmp_path: Path) -> None:
    files.write_folder(tmp_path, sizes=[(32, 32)], per_class=4)
    dataset = load(tmp_path, dataset="folder", samples=4)
    assert dataset.train_labels.tolist() == [0, 0, 1, 1]
    assert dataset.label.endswith("(8 train, 8 test images), 4 train images")


# -- what is wrong


def break_jpeg(root: Path) -> None:
    path = root / "train" / "dog" / "1.jpg"
    path.write_bytes(path.read_bytes()[:200])


def empty_class(root: Path) -> None:
    (root / "train" / "fox").mkdir()


def one_more_class(root: Path) -> None:
    files.write_image(root / "train" / "fox" / "0.jpg", 32, 32)


def one_larger(root: Path) -> None:
    files.write_image(root / "test" / "dog" / "1.jpg", 40, 32)


def not_square(root: Path) -> None:
    files.write_image(root / "train" / "cat" / "0.jpg", 32, 33)


def no_test(root: Path) -> None:
    (root / "test").rename(root / "tests")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (break_jpeg, r"train/dog/1\.jpg: cannot be read as an image: OSError: .*[Tt]runcated"),
        (empty_class, "torchvision cannot read folder .*no valid file for the classes fox"),
        (one_more_class, "have other classes: only one of them has fox"),
        (one_larger, r"test/dog/1\.jpg: has 40x32 pixels, the first has 32x32"),
        (not_square, r"train/cat/0\.jpg: has 32x33 pixels, expected a square"),
        (no_test, "has no directory test"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, spoil: Callable[[Path], None], complaint: str) -> None:
    files.write_folder(tmp_path, sizes=[(32, 32)])
    spoil(tmp_path)
    with pytest.raises(ClusterddpError, match=complaint) as caught:
        load(tmp_path, dataset="folder")
    assert caught.value.hint


def test_files_that_are_not_those_published_are_refused(tmp_path: Path, stl10: Path) -> None:
    files.write_stl10(tmp_path, train=2)
    with pytest.raises(ClusterddpError, match=r"torchvision cannot read STL10: .*not found or corrupted"):
        load(tmp_path, dataset="stl10")


def test_a_set_is_downloaded_once_and_nothing_else_is_left(
    tmp_path: Path, stl10: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server of the test's own: torchvision receives its address and the sum of what lies there."""
    asked: list[str] = []
    with tarfile.open(tmp_path / "stl10_binary.tar.gz", "w:gz") as archive:
        archive.add(stl10 / "stl10_binary", "stl10_binary")
    with files.serving(tmp_path, asked) as address:
        monkeypatch.setattr(import_torchvision().datasets.STL10, "url", f"{address}/stl10_binary.tar.gz")
        monkeypatch.setattr(import_torchvision().datasets.STL10, "tgz_md5", files.md5(tmp_path / "stl10_binary.tar.gz"))
        spec = TrainSpec(dataset="stl10", data_dir=str(tmp_path / "data"))
        assert load_dataset(spec).label == "STL10 (12 train, 6 test images)"
        before = len(asked)
        load_dataset(spec)
    assert 0 < len(asked) == before
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [".STL10.lock", "stl10_binary"]


def test_a_set_that_is_not_there_says_what_belongs_where(tmp_path: Path) -> None:
    with pytest.raises(ClusterddpError, match="Food101 is not there: expected food-101") as caught:
        load(tmp_path, dataset="food101", image_size=64)
    assert "train.download=true" in str(caught.value.hint)
    with pytest.raises(ClusterddpError, match=r"SVHN is not there: expected train_32x32\.mat and test_32x32\.mat"):
        load(tmp_path, dataset="svhn")


def test_on_a_host_without_torchvision_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_folder(tmp_path, sizes=[(32, 32)])
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ClusterddpError, match=r"torchvision reads folder .* cannot be imported") as caught:
        load(tmp_path, dataset="folder")
    assert "pip install torchvision" in str(caught.value.hint)


def test_a_model_for_small_images_refuses_large_ones(tmp_path: Path) -> None:
    files.write_folder(tmp_path, sizes=[(56, 56)])
    dataset = load(tmp_path, dataset="folder")
    with pytest.raises(ClusterddpError, match=r"fastnet is for images of 32x32 pixels .*these have 56x56"):
        build_model(TrainSpec(model="fastnet"), dataset)


# -- trained


def trained(group: Group, path: Path, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    if options["dataset"] == "stl10":
        files.expect_these_files("STL10", Path(options["data_dir"]))
    setting = settle(group, path, download=False, **options)
    state = train(setting)
    setting.reporter.close()
    assert state.evaluation is not None
    return dict(state.model.named_parameters()) | {"evaluated": torch.tensor(state.evaluation.samples)}


def test_two_ranks_train_stl10_at_224_pixels_as_one_that_accumulates(gang: Gang, tmp_path: Path, stl10: Path) -> None:
    options = {"model": "resnet18", "dataset": "stl10", "image_size": 224, "data_dir": str(stl10), "samples": None}
    options |= {"batch_size": 2, "max_steps": 2, "translate": 8, "cutout": 24}
    two = gang.run(2, trained, make_run(tmp_path / "two"), options)
    one = gang.run(1, trained, make_run(tmp_path / "one"), options | {"accumulate": 2})
    assert all(torch.equal(two[0][name], one[0][name]) for name in two[0])
    assert int(two[1]["evaluated"]) == 6
    assert tuple(two[0]["conv1.weight"].shape) == (64, 3, 7, 7)


def test_two_ranks_train_a_folder_of_images_of_many_sizes(gang: Gang, tmp_path: Path) -> None:
    files.write_folder(tmp_path, sizes=[(50, 40), (33, 90), (32, 32)], per_class=8)
    options = {"dataset": "folder", "image_size": 32, "data_dir": str(tmp_path), "samples": None, "batch_size": 4}
    first, second = gang.run(2, trained, make_run(tmp_path / "run"), options)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert int(first["evaluated"]) == 16
    assert [row["samples"] for row in metrics_rows(tmp_path / "run", "eval")] == [16, 16]


def test_a_set_of_the_trainers_own_is_enlarged_too() -> None:
    dataset = load_dataset(TrainSpec(dataset="shapes", samples=10, image_size=64))
    assert (tuple(dataset.train_images.shape), dataset.image_shape) == ((10, 3, 32, 32), (3, 64, 64))
    assert set(BUILT_IN.values()) == {32}


def test_a_set_that_does_not_fit_is_refused_with_both_numbers() -> None:
    demand_memory("few images", 1000)
    with pytest.raises(
        ClusterddpError, match=r"many images take 65536 GiB .* this host has [0-9.]+ GiB, half"
    ) as caught:
        demand_memory("many images", 1 << 46)
    assert "docs/entry.md" in str(caught.value.hint)


def test_images_of_one_colour_are_not_divided_by_nothing(tmp_path: Path) -> None:
    for half, name in itertools.product(("train", "test"), ("cat", "dog")):
        (tmp_path / half / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (128, 0, 255)).save(tmp_path / half / name / "0.png")
    dataset = load(tmp_path, dataset="folder")
    assert dataset.mean == pytest.approx((128 / 255, 0, 1))
    assert dataset.std == pytest.approx((1 / 255,) * 3)
