"""`precision: auto` goes by the hardware and by trial steps, all ranks decide alike, and nothing is changed by it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.spec.train import TrainSpec
from clusterddp.train.begin import settle_precision
from clusterddp.train.data.augment import normalize
from clusterddp.train.data.dataset import Dataset, load_dataset
from clusterddp.train.forward import choose_precision, time_precisions
from clusterddp.train.group import Group
from clusterddp.train.models import build_model
from clusterddp.train.state import tensors_sha256
from tests.support.train_gang import TINY, Gang, make_run, metrics_rows, one_rank, settle, train_once


def auto(**train: Any) -> tuple[TrainSpec, Dataset, torch.nn.Module]:
    spec = TrainSpec.from_json(TINY | {"precision": "auto", "samples": 40} | train)
    dataset = load_dataset(spec)
    return spec, dataset, build_model(spec, dataset)


def chosen_where(group: Group, seconds: list[tuple[float, float]], able: list[bool]) -> tuple[str, str]:
    """Choose as if each rank had measured `seconds` (of fp32, of bf16), on a CPU that is `able` to do bf16."""
    spec, dataset, model = auto()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: able[group.rank])
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        apart = dataclasses.replace(group, host_ranks=())  # each rank has a processor of its own
        return choose_precision(spec, model, dataset, apart, time_trial=lambda *_: seconds[group.rank])


def test_bf16_that_pays_on_every_rank_is_taken(gang: Gang) -> None:
    assert (
        gang.run(2, chosen_where, [(3.0, 1.0), (2.5, 1.0)], [True, True])
        == [("bf16", "2.5 times as fast as fp32 on the host that gains least, in trial steps of 16 images")] * 2
    )


def test_bf16_that_does_not_pay_on_one_rank_is_taken_by_none(gang: Gang) -> None:
    answers = gang.run(2, chosen_where, [(3.0, 1.0), (1.1, 1.0)], [True, True])
    assert [chosen for chosen, _ in answers] == ["fp32", "fp32"]
    assert "1.1 times as fast" in answers[0][1]


def test_a_torch_without_its_private_names_for_bf16_units_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    spec, dataset, model = auto()
    assert choose_precision(spec, model, dataset, one_rank()) == ("fp32", "the CPU has neither avx512_bf16 nor AMX")


def test_a_cpu_without_bf16_units_makes_all_ranks_compute_in_fp32_untimed(gang: Gang) -> None:
    answers = gang.run(2, chosen_where, [], [True, False])
    assert answers == [("fp32", "a CPU of the run has neither avx512_bf16 nor AMX")] * 2


def test_a_gpu_without_bf16_units_computes_in_fp32_and_it_is_said_that_fp16_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    spec, dataset, model = auto()
    chosen, why = choose_precision(spec, model, dataset, Group(rank=0, world_size=1, device=torch.device("cuda", 0)))
    assert (chosen, why) == ("fp32", "the GPU has no bf16 units (before Ampere; its fp16 is not used)")


@pytest.mark.parametrize(("able", "warnings"), [(True, 0), (False, 1)])
def test_bf16_that_is_asked_for_and_only_emulated_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], able: bool, warnings: int
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: able)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    setting = settle(one_rank(), make_run(tmp_path / "run"), precision="bf16", samples=40)
    assert settle_precision(None, build_model(setting.spec, setting.dataset), setting) == "bf16"
    words = (
        "warning: precision bf16: the CPU has neither avx512_bf16 nor AMX; torch emulates it, which is slower than fp32"
    )
    assert capfd.readouterr().err.count(words) == warnings


def test_deterministic_goes_by_the_hardware_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    spec, dataset, model = auto(deterministic=True)
    chosen, why = choose_precision(spec, model, dataset, one_rank())
    assert (chosen, "not timed" in why) == ("bf16", True)


@pytest.mark.parametrize("model_name", ["fastnet", "resnet18"])
def test_trial_steps_leave_no_trace(model_name: str) -> None:
    _, dataset, model = auto(model=model_name)
    model.eval()
    before = tensors_sha256(model.state_dict().items())
    random_state = torch.get_rng_state()
    images = normalize(dataset.train_images[:4], mean=dataset.mean, std=dataset.std)
    assert min(time_precisions(model, images, dataset.train_labels[:4])) > 0
    assert tensors_sha256(model.state_dict().items()) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_resumed_run_keeps_the_precision_that_it_began_with(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    path, options = make_run(tmp_path / "run"), {"precision": "auto", "deterministic": True}
    train_once(one_rank(), path, stop_after=5, **options)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    checkpoint = settle(one_rank(), path, attempt=1, **options).store
    train_once(one_rank(), path, attempt=1, **options)
    newest = max(checkpoint.directory.glob("*-a1.pt"))
    assert torch.load(newest, weights_only=True)["precision"] == "fp32"
    assert metrics_rows(path, "eval")
