"""Ranks that share compute slots, the memory that is planned for them, and the data set that they share."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.facts.memory import free_bytes
from clusterddp.facts.training_memory import TrainingMemory, can_keep_steps, plan_turns, split_batch, training_memory
from clusterddp.planning.job_values import fit_memory
from clusterddp.planning.placement import Placement
from clusterddp.run.gang import Node
from clusterddp.train import compute_slots
from clusterddp.train.compute_slots import ComputeSlot, agree_on_compute_slot
from clusterddp.train.group import Group
from clusterddp.train.host import find_host, load_once
from clusterddp.train.loop import train
from clusterddp.train.spec import TrainSpec
from clusterddp.train.state import tensors_sha256
from tests.support.paths import ROOT
from tests.support.train_gang import TINY, Gang, one_rank, outcome, settle

GB = 10**9
RESNET = TrainSpec(dataset="cifar10").to_json()


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
        spec = TrainSpec.from_json(TINY)
        agreed = agree_on_compute_slot(spec, find_host(group), image_size=32, cores=at_once)
        slot = RecordedSlot(agreed.lock, agreed.index, agreed.is_first, agreed.returns_memory, agreed.description)
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
    dataset = load_once(TrainSpec.from_json(TINY | train), group, find_host(group))
    tensors = {name: getattr(dataset, name) for name in ("train_images", "train_labels", "test_images", "test_labels")}
    shared = "clusterddp-dataset" in Path("/proc/self/maps").read_text()
    return tensors_sha256(tensors.items()), shared, repr((dataset.label, dataset.mean, dataset.warning))


def test_the_ranks_of_a_host_see_one_copy_of_the_data_set(either_gang: Gang) -> None:
    ((digest, shared, facts),) = either_gang.run(1, load_and_hash, {"dataset": "random"})
    assert not shared
    assert either_gang.run(3, load_and_hash, {"dataset": "random"}) == [(digest, True, facts)] * 3


def test_a_rank_alone_shares_nothing() -> None:
    host = find_host(one_rank())
    assert host is not None
    assert agree_on_compute_slot(TrainSpec(), host, image_size=32, cores=1) == ComputeSlot()


def slots_of_bound_ranks(group: Group) -> str:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(mine)[group.rank % len(mine)]})
    try:
        return agree_on_compute_slot(TrainSpec.from_json(TINY), find_host(group), image_size=32).description
    finally:
        os.sched_setaffinity(0, mine)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_that_are_bound_to_cores_of_their_own_do_not_wait_for_each_other(either_gang: Gang) -> None:
    assert either_gang.run(2, slots_of_bound_ranks) == ["", ""]


@pytest.mark.parametrize(
    ("num_ranks", "threads", "cores", "free", "at_once"),
    [
        (16, 1, 2, 100, 2),
        (16, 1, 64, 100, 16),
        (16, 4, 64, 100, 16),
        (16, 8, 64, 100, 8),
        (16, 8, 4, 100, 1),
        (16, 1, 64, 7.0, 4),
        (16, 1, 64, 4.0, 1),
        (16, 1, 2, 0, 2),
    ],
)
def test_as_many_ranks_compute_as_cores_and_memory_hold(
    num_ranks: int, threads: int, cores: int, free: float, at_once: int
) -> None:
    need = TrainingMemory(resident=GB // 6, step=GB * 4 // 5)
    assert plan_turns(num_ranks, threads=threads, cores=cores, need=need, free=int(free * GB)) == at_once


@pytest.mark.parametrize(
    ("num_ranks", "turns", "free", "kept"),
    [
        (16, True, 57, True),
        (16, True, 56, False),
        (1, False, 2.1, True),
        (1, False, 2.0, False),
        (16, True, 0, False),
        (16, False, 0, True),
    ],
)
def test_the_memory_of_a_step_is_kept_where_all_ranks_can(num_ranks: int, turns: bool, free: float, kept: bool) -> None:
    need = TrainingMemory(resident=GB // 6, step=GB * 4 // 5)
    assert can_keep_steps(num_ranks, turns=turns, need=need, free=int(free * GB)) is kept


def returns_memory(group: Group, cores: int, free: int) -> tuple[bool, bool]:
    spec = TrainSpec.from_json(TINY | {"model": "resnet18", "width": 1.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute_slots, "free_bytes", lambda: free)
        slot = agree_on_compute_slot(spec, find_host(group), image_size=32, cores=cores)
    return slot.lock is not None, slot.returns_memory


def test_ranks_return_the_memory_of_a_step_where_it_would_not_do_for_all(either_gang: Gang) -> None:
    assert either_gang.run(2, returns_memory, 1, 100 * GB) == [(True, False)] * 2
    assert either_gang.run(2, returns_memory, 1, 3 * GB // 2) == [(True, True)] * 2
    # Each computes when it likes: the memory holds two steps, but not the heaps that would keep them.
    assert either_gang.run(2, returns_memory, 2, 4 * GB) == [(False, False)] * 2
    assert either_gang.run(2, returns_memory, 2, 3 * GB // 2) == [(False, True)] * 2


def test_too_little_memory_for_one_rank_at_a_time_is_reported_with_the_numbers() -> None:
    need = training_memory(RESNET, image_size=32)
    with pytest.raises(ClusterddpError, match=r"16 ranks on this host: [0-9]+ MiB each.*3\.0 GiB of memory are free"):
        plan_turns(16, threads=1, cores=2, need=need, free=3 * 2**30)


@pytest.mark.parametrize(("free", "parts"), [(8.0, 1), (5.0, 1), (4.0, 2)])
def test_a_batch_is_split_only_where_a_step_of_one_rank_would_not_fit(free: float, parts: int) -> None:
    assert split_batch(RESNET, image_size=32, num_ranks=16, free=int(free * 2**30)) == parts


def place(num_ranks: int, *, on_cpu: bool = True) -> Placement:
    nodes = (Node(node_rank=0, host="here", ranks=tuple(range(num_ranks))),)
    return Placement(nodes=nodes, threads_per_rank=1, backend="gloo", on_cpu=on_cpu, interface=None, notes=("first",))


def test_the_plan_says_that_it_splits_batches_and_leaves_the_step_as_it_was() -> None:
    spec, placement = fit_memory("job", {"train": RESNET | {"accumulate": 3}}, place(16), free=4 * 2**30)
    assert (spec["train"]["batch_size"], spec["train"]["accumulate"]) == (64, 6)
    assert placement.notes[0] == "first"
    assert "2.9 GiB of memory for 16 ranks" in placement.notes[1]
    assert "2 micro-batches of 64 (train.accumulate 6)" in placement.notes[2]


def test_a_plan_for_ranks_that_fit_changes_nothing() -> None:
    spec, placement = fit_memory("job", {"train": RESNET}, place(2), free=64 * 2**30)
    assert (spec, len(placement.notes)) == ({"train": RESNET}, 2)


def test_a_plan_that_cannot_fit_is_refused_with_what_to_write() -> None:
    with pytest.raises(PreflightError, match=r"job: 64 ranks on this host.*4\.0 GiB of memory are free") as error:
        fit_memory("job", {"train": RESNET}, place(64), free=4 * 2**30)
    assert "fewer ranks" in str(error.value.hint)


@pytest.mark.parametrize(
    ("spec", "placement"),
    [
        ({"train": None}, place(64)),
        ({"train": RESNET}, place(64, on_cpu=False)),
        ({"train": RESNET | {"dataset": "folder"}}, place(64)),
    ],
    ids=["a script", "on GPUs", "images of unknown size"],
)
def test_what_cannot_be_estimated_is_left_alone(spec: dict[str, Any], placement: Placement) -> None:
    assert fit_memory("job", spec, placement, free=2**30) == (spec, placement)


def test_the_table_is_not_below_what_a_step_takes() -> None:
    script = ROOT / "benchmarks" / "training_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), "resnet18", "16", "fp32"], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    need = training_memory(RESNET | {"batch_size": 16, "precision": "fp32"}, image_size=32)
    assert need is not None
    assert max(measured["step"], measured["evaluation"]) < 1.15 * need.step
    assert need.step < 2 * max(measured["step"], measured["evaluation"])


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/user/job\n", {}, 3000 * 1024),
        ("0::/user/job\n", {"user/job/memory.max": "max", "user/job/memory.current": "9"}, 3000 * 1024),
        (
            "0::/user/job\n",
            {
                "user/memory.max": "1000000",
                "user/memory.current": "900000",
                "user/memory.stat": "anon 500000\nactive_file 1000\ninactive_file 300000\n",
                "user/job/memory.max": "2000000",
                "user/job/memory.current": "100000",
            },
            1000000 - 900000 + 301000,
        ),
        (
            "4:memory:/job\n3:cpu:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "800000",
                "memory/job/memory.usage_in_bytes": "500000",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 200000\ntotal_active_file 5\n",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "7",
            },
            800000 - 500000 + 200005,
        ),
    ],
    ids=["no group", "no limit", "version two", "version one"],
)
def test_free_memory_is_what_the_machine_and_all_its_control_groups_leave(
    tmp_path: Path, own: str, files: dict[str, str], expected: int
) -> None:
    (tmp_path / "own").write_text(own)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_bytes(tmp_path / "meminfo", tmp_path / "own", tmp_path / "cgroup") == expected


def test_free_memory_is_known_on_this_machine() -> None:
    free = free_bytes()
    assert free is not None
    assert 0 < free < 2**50


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
