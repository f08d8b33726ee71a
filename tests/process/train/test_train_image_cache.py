"""The cache of a data set's images on a host: made and checked once, shared by its ranks, refused when damaged."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from clusterddp.errors import ClusterddpError
from clusterddp.facts.memory import free_bytes
from clusterddp.train.data.dataset import Dataset, load_dataset
from clusterddp.train.data.image_cache import demand_memory
from clusterddp.train.spec import TrainSpec
from tests.support import picture_files as files

CPU = torch.device("cpu")
LOAD = """
import resource, sys, torch
opened = []
sys.addaudithook(lambda event, about: opened.append(str(about[0])) if event == "open" else None)
from clusterddp.errors import ClusterddpError
from clusterddp.train.spec import TrainSpec
from clusterddp.train.data.dataset import load_dataset
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
spec = TrainSpec(dataset="folder", data_dir=sys.argv[1], image_size=32)
try:
    dataset = load_dataset(spec, device=torch.device("cpu"), prepare=True)
    hashed = any(path.endswith("/pixels") for path in opened)
    print(int(dataset.train_images.long().sum()), "torchvision" in sys.modules, hashed)
except ClusterddpError as error:
    print("error", error.message, "hint", error.hint)
"""


def load(root: Path, **train: Any) -> Dataset:
    return load_dataset(TrainSpec(dataset="folder", data_dir=str(root), **train), device=CPU, prepare=True)


def start_loading(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOAD, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_processes_of_a_host_read_the_images_once_and_share_the_file(tmp_path: Path) -> None:
    files.write_folder(tmp_path, sizes=[(50, 40)])
    ranks = [start_loading(tmp_path) for _ in range(3)]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert len({total for total, _, _ in said}) == 1
    assert sorted(with_torchvision for _, with_torchvision, _ in said) == ["False", "False", "True"]
    assert sorted(hashed for _, _, hashed in said) == ["False", "False", "True"]
    (cache,) = tmp_path.glob(".clusterddp/folder-32-*")
    assert sorted(path.name for path in cache.iterdir()) == ["about.json", "pixels", f"verified-{socket.gethostname()}"]

    os.utime(tmp_path / "test" / "cat" / "0.jpg", (0, 0))
    load(tmp_path, image_size=32)
    assert len(list(tmp_path.glob(".clusterddp/folder-32-*"))) == 2

    content = (cache / "pixels").read_bytes()
    for other in tmp_path.glob(".clusterddp/folder-32-*"):
        (other / "pixels").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ClusterddpError, match=r"folder-32-.*damaged: its sum is not the one") as caught:
        load(tmp_path, image_size=32)
    assert "remove this directory" in str(caught.value.hint)


def test_the_sum_is_computed_again_after_a_write_and_after_a_boot(tmp_path: Path) -> None:
    files.write_folder(tmp_path, sizes=[(50, 40)])

    def hashes() -> bool:
        return start_loading(tmp_path).communicate(timeout=120)[0].split()[2] == "True"

    assert [hashes(), hashes()] == [True, False]
    (verified,) = tmp_path.glob(".clusterddp/*/verified-*")
    boot, *rest = verified.read_text().split()
    verified.write_text(" ".join([boot[::-1], *rest]))
    assert [hashes(), hashes()] == [True, False]
    os.utime(verified.parent / "pixels")
    assert [hashes(), hashes()] == [True, False]


def test_a_full_disk_is_reported_before_anything_is_read_and_leaves_nothing(tmp_path: Path) -> None:
    files.write_folder(tmp_path, sizes=[(50, 40)])
    output, _ = start_loading(tmp_path, 4096).communicate(timeout=120)
    assert re.match(rf"error {tmp_path}/.clusterddp: folder {tmp_path} takes [0-9.]+ KiB there, and cannot be", output)
    assert [path.name for path in (tmp_path / ".clusterddp").iterdir()] == [".folder.lock"]


def test_a_set_that_does_not_fit_is_refused_with_both_numbers() -> None:
    free = free_bytes()
    assert free is not None
    demand_memory("few images", 1000, CPU)
    with pytest.raises(ClusterddpError, match=r"many images take 65536 GiB .* this host has [0-9.]+ GiB left"):
        demand_memory("many images", 1 << 46, CPU)


def test_images_of_one_colour_are_not_divided_by_nothing(tmp_path: Path) -> None:
    for half, name in itertools.product(("train", "test"), ("cat", "dog")):
        (tmp_path / half / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (128, 0, 255)).save(tmp_path / half / name / "0.png")
    dataset = load(tmp_path)
    assert dataset.mean == pytest.approx((128 / 255, 0, 1))
    assert dataset.std == pytest.approx((1 / 255,) * 3)
