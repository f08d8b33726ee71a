"""The trainer's branches for GPUs, on GPUs that are not there (tests/sim_cuda): right, and without a needless wait."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sim_cuda.driver import find_obstacle
from tests.sim_cuda.trainings import ALONE, COUNTED, PAIR, PAIR_COUNTED, run_alone, run_pair, table
from tests.support.paths import GOLDEN, ROOT

TABLE = GOLDEN / "cuda_launches.txt"


@pytest.fixture(scope="session")
def sim_cuda() -> None:
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)


@pytest.fixture(scope="session")
def alone(sim_cuda: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the cases of a single rank."""
    return run_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def pair(sim_cuda: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of the cases of two ranks, by rank."""
    return run_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("name", ALONE)
def test_a_training_goes_on_from_a_checkpoint_to_the_same_bits(alone: dict[str, Any], name: str) -> None:
    case = alone["cases"][name]
    assert case["whole"]["finished"]
    assert case["whole"]["device"] == "cuda"
    assert case["cut"] == case["whole"]


# Muon multiplies matrices together on GPUs only: see test_train_optim.py.
@pytest.mark.parametrize("name", [name for name in ALONE if "fp32" in name and "muon" not in name])
def test_a_gpu_that_rounds_as_the_cpu_does_comes_to_the_same_bits(alone: dict[str, Any], name: str) -> None:
    case = alone["cases"][name]
    assert case["on the CPU"] == case["whole"] | {"device": "cpu"}


@pytest.mark.parametrize("name", PAIR)
def test_two_ranks_go_on_from_a_checkpoint_to_the_same_bits(pair: list[dict[str, Any]], name: str) -> None:
    first, second = (rank["cases"][name] for rank in pair)
    assert first["cut"] == first["whole"]
    assert second["cut"] == second["whole"]
    assert first["whole"]["params"] == second["whole"]["params"]


@pytest.mark.parametrize("name", [*ALONE, *PAIR])
def test_no_step_waits_for_the_gpu(alone: dict[str, Any], pair: list[dict[str, Any]], name: str) -> None:
    for answers in (alone, *pair):
        case = answers["cases"].get(name)
        assert case is None or case["waits of the last step"] == []


@pytest.mark.parametrize("name", [*COUNTED, *PAIR_COUNTED])
def test_a_report_waits_for_the_gpu_twice_and_a_checkpoint_once(
    alone: dict[str, Any], pair: list[dict[str, Any]], name: str
) -> None:
    found = (alone["counted"] | pair[0]["counted"])[name]
    assert found["a report"] <= 2
    assert found["a checkpoint"] <= 1


def test_a_step_launches_what_the_golden_table_says(alone: dict[str, Any], pair: list[dict[str, Any]]) -> None:
    """After a change that is meant: python -m tests.sim_cuda > tests/golden/cuda_launches.txt."""
    assert table(alone["counted"] | pair[0]["counted"]) == TABLE.read_text()


def test_a_rank_opens_no_gpu_but_its_own(pair: list[dict[str, Any]]) -> None:
    assert [rank["contexts"] for rank in pair] == [[0], [1]]


def test_gloo_carries_the_gradients_of_gpus(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["gloo"]["device"] == "cuda"
        assert rank["gloo"] == rank["one cannot compile"]["never"]


def test_where_one_rank_cannot_compile_all_go_on_uncompiled(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["one cannot compile"]["auto"] == rank["one cannot compile"]["never"]
    warnings = [line for line in pair[0]["one cannot compile"]["said"].splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "compile auto: rank 1 on " in warnings[0]
    assert "RuntimeError: Failed to find C compiler.; all ranks go on uncompiled" in warnings[0]
    assert "compiled in" not in pair[0]["one cannot compile"]["said"]


def test_the_emulation_refuses_and_counts_what_cuda_would(sim_cuda: None) -> None:
    program = """
from tests.sim_cuda import device
device.install(gpus=2)
import torch

def refused(action):
    try:
        action()
    except RuntimeError as error:
        return "same device" in str(error)
    return False

here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
assert refused(lambda: here + there) and refused(lambda: here + torch.ones(3)) and not refused(lambda: here + 1.0)
assert device.contexts == {0, 1}
before = device.counts.copy()
assert (here * 2).view(3, 1).sum().item() == 6.0
found = device.counts.since(before)
assert found.launches == {"mul": 1, "sum": 1} and found.waits == {"_local_scalar_dense": 1}, found
before = device.counts.copy()
pinned = torch.empty(3, pin_memory=True)
pinned.copy_(here, non_blocking=True)
here.to("cpu", non_blocking=True), here.copy_(pinned, non_blocking=True)
found = device.counts.since(before)
assert found.copies.total() == 3 and not found.waits and not found.launches, found
torch.empty(3).copy_(here, non_blocking=True), here.cpu(), here.copy_(torch.zeros(3)), torch.cuda.synchronize()
assert device.counts.since(before).waits.total() == 4
assert here[here > 5].shape == (0,) and device.counts.since(before).waits.total() == 5
here.requires_grad_().square().sum().backward()
assert here.grad.tolist() == [0.0] * 3 and here.grad.device == here.device
import os
os._exit(0)  # the thread that ran the backward pass may still be ending, which aborts an orderly exit
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_first_step_is_reported_when_the_gpu_has_done_it(sim_cuda: None) -> None:
    program = """
from tests.sim_cuda import device
device.install(gpus=1)
import torch
from clusterddp.train.group import Group
from clusterddp.train.main import StartUp

class Silent:
    def first_step(self, seconds, phases):
        print(phases)

start_up, waits = StartUp(), []
for _ in range(2):
    before = device.counts.copy()
    start_up.after_step(Silent(), Group(rank=0, world_size=1, device=torch.device("cuda", 0)))
    waits.append(device.counts.since(before).waits.total())
assert waits == [1, 0], waits
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_deep_check_measures_gpus(sim_cuda: None, tmp_path: Path) -> None:
    program = f"""
from tests.sim_cuda import device
device.install(gpus=2)
from pathlib import Path
from clusterddp.run.directory import RunDir
from clusterddp.train import deep_check
from clusterddp.train.group import join_group
from clusterddp.train.device import RankVariables
from clusterddp.run.directory import Assignment
from clusterddp.spec.train import TrainSpec

place = RankVariables(rank=0, local_rank=0, world_size=1, backend="nccl", device="cuda")
environment = deep_check.describe_environment(place, {{"NCCL_DEBUG": "INFO", "HOME": "/x"}})
assert (environment.gpus, environment.gpu, environment.capability) == (2, "NVIDIA H100 80GB HBM3", "9.0")
assert environment.variables == {{"NCCL_DEBUG": "INFO"}}
group = join_group(place)
assert deep_check.time_product(group.device).ms > 0
deep_check._STEPS["cuda"] = 2
run = RunDir(Path({str(tmp_path)!r}))
run.attempt(0).path.mkdir(parents=True)
assignment = Assignment(run=run, attempt=run.attempt(0), stop_file=run.path / "stop")
spec = TrainSpec(model="fastnet", width=0.25, dataset="random", samples=12, batch_size=2, compile="never", epochs=99)
found = deep_check.measure_training(spec, assignment, group)
assert found.step_ms > 0 and found.checkpoint_s > 0 and found.peak_bytes == 1 << 30 and found.precision == "bf16"
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
