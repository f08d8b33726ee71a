"""Ranks that share compute slots, and the data set that they share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.spec.train import TrainSpec
from clusterddp.train.group import Group
from clusterddp.train.host import ComputeSlot, agree_on_compute_slot, load_once
from clusterddp.train.loop import train
from clusterddp.train.state import tensors_sha256
from tests.support.picture_files import write_folder
from tests.support.train_gang import TINY, Gang, one_rank, outcome, settle


class RecordedSlot(ComputeSlot):
    """A slot that records when it is held."""

    def acquire(self) -> None:
        super().acquire()
        TIMES.append([time.monotonic(), 0.0])

    def release(self) -> None:
        TIMES[-1][1] = time.monotonic()
        super().release()


TIMES: list[list[float]] = []


def train_with_slots(group: Group, path: Path, at_once: int | None) -> dict[str, Any]:
    """Train; with `at_once`, so many ranks compute at a time."""
    slot = ComputeSlot()
    TIMES.clear()
    if at_once is not None:
        agreed = agree_on_compute_slot(group, cores=at_once)
        slot = RecordedSlot(agreed.lock, agreed.index, agreed.description)
    run = path / str(group.rank)
    run.mkdir(parents=True)
    state = train(settle(group, run, slot=slot, accumulate=2, epochs=1))
    return outcome(state) | {"times": list(TIMES), "description": slot.description}


@pytest.mark.parametrize("at_once", [1, 2])
def test_ranks_that_share_a_compute_slot_come_to_the_same_weights(
    either_gang: Gang, tmp_path: Path, at_once: int
) -> None:
    together = either_gang.run(4, train_with_slots, tmp_path / "together", None)
    in_slots = either_gang.run(4, train_with_slots, tmp_path / "slots", at_once)
    for name in ("params", "buffers", "momentum", "accuracy"):
        assert [each[name] for each in in_slots] == [each[name] for each in together]
    assert in_slots[0]["description"].startswith(f"4 ranks share {at_once} core")
    moments = sorted(moment for each in in_slots for begin, end in each["times"] for moment in ((begin, 1), (end, -1)))
    running = [sum(change for _, change in moments[: index + 1]) for index in range(len(moments))]
    assert max(running) <= at_once
    assert running[-1] == 0
    assert [len(each["times"]) for each in in_slots] == [5] * 4  # two steps of two micro-batches, one evaluation


def test_the_slot_of_a_rank_that_was_killed_is_free() -> None:
    lock = os.memfd_create("slots")
    path = f"/proc/{os.getpid()}/fd/{lock}"
    program = f"import fcntl, os, time; f = os.open({path!r}, os.O_RDWR); fcntl.lockf(f, fcntl.LOCK_EX, 1, 3)"
    program += "; print(1, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; os.close(1); time.sleep(600)"], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.read() == b"1\n"
        with pytest.raises(OSError, match="temporarily unavailable"):
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 3)
        holder.kill()
        with ComputeSlot(lock=lock, index=3).held():
            pass
    os.close(lock)


def load_and_hash(group: Group, train: dict[str, Any]) -> tuple[str, bool, str]:
    dataset = load_once(TrainSpec.from_json(TINY | train), group)
    tensors = {name: getattr(dataset, name) for name in ("train_images", "train_labels", "test_images", "test_labels")}
    shared = "clusterddp-dataset" in Path("/proc/self/maps").read_text()
    return tensors_sha256(tensors.items()), shared, repr((dataset.label, dataset.mean, dataset.warning))


@pytest.mark.parametrize("dataset", ["random", "folder"])
def test_the_ranks_of_a_host_see_one_copy_of_the_data_set(either_gang: Gang, tmp_path: Path, dataset: str) -> None:
    write_folder(tmp_path, sizes=[(50, 40)])
    train = {"dataset": dataset, "data_dir": str(tmp_path), "image_size": 32, "samples": 4}
    ((digest, shared, facts),) = either_gang.run(1, load_and_hash, train)
    assert not shared
    assert either_gang.run(3, load_and_hash, train) == [(digest, True, facts)] * 3


def test_a_rank_alone_shares_nothing() -> None:
    assert agree_on_compute_slot(one_rank(), cores=1) == ComputeSlot()


def slots_of_bound_ranks(group: Group) -> str:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(mine)[group.rank % len(mine)]})
    try:
        return agree_on_compute_slot(group).description
    finally:
        os.sched_setaffinity(0, mine)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_that_are_bound_to_cores_of_their_own_do_not_wait_for_each_other(either_gang: Gang) -> None:
    assert either_gang.run(2, slots_of_bound_ranks) == ["", ""]


def test_a_pass_without_gradients_holds_no_slot() -> None:
    """It never computes the last gradient, which releases the slot; evaluation holds the slot by `held`."""
    lock = os.memfd_create("slots")
    model = torch.nn.Linear(2, 2)
    ComputeSlot(lock=lock).follow(model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert Path("/proc/locks").read_text().count(f" {os.getpid()} ") == 0
    model(torch.ones(1, 2))
    assert Path("/proc/locks").read_text().count(f" {os.getpid()} ") == 1
    model(torch.ones(1, 2)).sum().backward()
    assert Path("/proc/locks").read_text().count(f" {os.getpid()} ") == 0
    os.close(lock)
