"""The device that a rank takes, and the error where it cannot have it. torch.cuda is patched."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterddp.errors import ClusterddpError
from clusterddp.train.device import RankVariables
from clusterddp.train.group import join_group


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Have torch see so many GPUs, with a build for that CUDA, on a host with that driver."""

    def see(gpus: int, *, cuda: str | None = "13.0", driver: str | None = "580.65.06") -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130" if cuda else "2.13.0+cpu")
        if driver:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return see


def place(**changes: Any) -> RankVariables:
    return RankVariables(
        **({"rank": 0, "local_rank": 0, "world_size": 1, "backend": "nccl", "device": "cuda"} | changes)
    )


def refusal(**changes: Any) -> ClusterddpError:
    with pytest.raises(ClusterddpError) as error:
        join_group(place(**changes))
    return error.value


def test_each_rank_takes_the_gpu_of_its_local_rank(see: Any) -> None:
    see(8)
    assert join_group(place(rank=0, local_rank=5)).device == torch.device("cuda", 5)


def test_a_rank_that_sees_its_own_gpu_alone_takes_that(see: Any) -> None:
    see(1)
    assert join_group(place(local_rank=3, gpu=0)).device == torch.device("cuda", 0)


def test_more_ranks_than_gpus_are_refused(see: Any) -> None:
    see(2)
    error = refusal(rank=2, local_rank=2)
    assert error.message == "rank 2 is number 2 on its node, which shows it 2 GPUs"
    assert error.hint == "ask for at most one rank per GPU, or run on the CPU with --cpu"


def test_the_error_of_ranks_with_several_slices_says_that_cuda_shows_one(
    see: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert refusal(rank=1, local_rank=1).message == "rank 1 is number 1 on its node, which shows it 1 GPU"
    hint = refusal(rank=1, local_rank=1).hint
    assert hint is not None
    assert hint.startswith("CUDA shows a process one slice (MIG)")


def test_a_torch_for_the_cpu_is_said(see: Any) -> None:
    see(0, cuda=None)
    error = refusal(rank=3)
    assert error.message == "rank 3 is to compute on a GPU, and torch 2.13.0+cpu is built for the CPU"
    assert error.hint is not None
    assert "install torch with CUDA" in error.hint


def test_a_torch_that_is_newer_than_the_driver_is_said_with_versions(see: Any) -> None:
    see(0, driver="535.104.05")
    error = refusal()
    assert error.message == (
        "rank 0 is to compute on a GPU, and finds none: torch 2.13.0+cu130 is for CUDA 13.0, which needs NVIDIA's "
        "driver 580 or newer; this host has 535.104.05"
    )
    assert error.hint is not None
    assert "a torch for CUDA 12 or older" in error.hint


def test_an_environment_that_hides_all_gpus_is_said(see: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    see(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusal().message == "rank 0 is to compute on a GPU, and finds none: CUDA_VISIBLE_DEVICES is ''"


def test_a_host_without_a_driver_is_said(see: Any) -> None:
    see(0, driver=None)
    assert refusal().message == "rank 0 is to compute on a GPU, and finds none: nvidia-smi shows no driver on this host"


def test_a_rank_on_the_cpu_takes_no_gpu_of_those_that_it_sees(see: Any) -> None:
    see(8)
    assert join_group(place(backend="gloo", device="cpu")).device == torch.device("cpu")


def test_gloo_and_a_gpu_are_two_decisions(see: Any) -> None:
    see(2)
    assert join_group(place(backend="gloo", local_rank=1)).device == torch.device("cuda", 1)


@pytest.mark.parametrize(("backend", "minutes"), [("nccl", 10), ("gloo", 30)])
def test_a_hang_of_nccl_is_noticed_sooner_than_a_host_that_downloads(
    see: Any, monkeypatch: pytest.MonkeyPatch, backend: str, minutes: int
) -> None:
    see(2)
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.append(options))
    monkeypatch.setattr(dist, "new_group", lambda **options: given.append(options) or dist.group)
    monkeypatch.setattr(dist, "all_gather", lambda rows, own, group: None)
    join_group(place(backend=backend, world_size=2))
    gradients, control = given
    assert (gradients["timeout"], control["timeout"]) == (timedelta(minutes=minutes), timedelta(minutes=30))
    assert gradients["device_id"] == (torch.device("cuda", 0) if backend == "nccl" else None)


def test_the_error_of_two_ranks_on_slices_of_one_gpu_says_what_to_write(
    see: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **options: Any) -> None:
        raise dist.DistBackendError("NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000")

    see(1)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    error = refusal(rank=1, local_rank=1, gpu=0, world_size=2)
    assert error.message == "rank 1: NCCL takes no two ranks on one GPU, or on slices (MIG) of one"
    assert error.hint is not None
    assert "network.backend: gloo" in error.hint


@pytest.mark.parametrize(
    ("environ", "backend", "device"),
    [
        ({}, "gloo", None),
        ({"CLUSTERDDP_BACKEND": "gloo", "CLUSTERDDP_DEVICE": "cuda"}, "gloo", "cuda"),
        ({"CLUSTERDDP_BACKEND": "gloo", "CLUSTERDDP_DEVICE": "cpu"}, "gloo", "cpu"),
        ({"CLUSTERDDP_BACKEND": "nccl"}, "nccl", None),  # a run of an earlier version
    ],
)
def test_the_environment_says_backend_and_device(environ: dict[str, str], backend: str, device: str | None) -> None:
    found = RankVariables.from_environment(environ)
    assert (found.backend, found.device) == (backend, device)


def test_without_a_plan_a_rank_takes_a_gpu_where_there_is_one(see: Any) -> None:
    see(1)
    assert join_group(RankVariables.from_environment({})).device == torch.device("cuda", 0)


def test_without_a_plan_and_without_a_gpu_a_rank_takes_the_cpu(see: Any) -> None:
    see(0)
    assert join_group(RankVariables.from_environment({})).device == torch.device("cpu")
