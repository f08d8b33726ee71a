"""What a forward pass calls: compiled, over several GPUs, batch norm over all ranks, or refused with the reason."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.errors import ClusterddpError
from clusterddp.facts.torch import find_compile_obstacle
from clusterddp.spec.train import TrainSpec
from clusterddp.train.begin import begin
from clusterddp.train.data.dataset import Dataset, load_dataset
from clusterddp.train.exchange import DdpExchange
from clusterddp.train.forward import (
    compile_now,
    is_compiled,
    place_model,
    wrap_forward,
)
from clusterddp.train.group import Group
from clusterddp.train.loop import train
from clusterddp.train.state import tensors_sha256
from tests.support.train_gang import TINY, Gang, make_run, one_rank, outcome, settle, train_once

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def spec(**train: Any) -> TrainSpec:
    return TrainSpec.from_json(TINY | {"samples": 40} | train)


def data(**train: Any) -> Dataset:
    return load_dataset(spec(**train))


@pytest.mark.parametrize(("compile_", "on_cpu", "on_gpu"), [("auto", 0, 1), ("always", 1, 1), ("never", 0, 0)])
def test_auto_compiles_on_gpus_only(compile_: str, on_cpu: bool, on_gpu: bool) -> None:
    assert is_compiled(spec(compile=compile_), CPU) == on_cpu
    assert is_compiled(spec(compile=compile_), GPU) == on_gpu


def test_data_parallel_is_not_compiled() -> None:
    assert not is_compiled(spec(strategy="dp"), GPU)


def test_the_pass_that_compiles_leaves_no_trace() -> None:
    wanted, dataset = spec(), data()
    model = place_model(wanted, dataset, one_rank())
    before = tensors_sha256(model.state_dict().items())
    random_state = torch.get_rng_state()
    assert compile_now(model, model, dataset, wanted, "bf16") > 0
    assert tensors_sha256(model.state_dict().items()) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def compiled_and_eager(group: Group) -> dict[str, Any]:
    """Take two steps of a small net, eager and compiled, with gradients exchanged."""
    random = torch.Generator().manual_seed(group.rank)
    images = torch.randn(4, 3, 8, 8, generator=random)
    weights = {}
    for compile_ in ("never", "always"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
        exchange = DdpExchange(model, group)
        forward = wrap_forward(exchange.module, model, spec(compile=compile_), group, precision="fp32")
        for micro in (0, 1):
            with exchange.scope(now=micro == 1):
                forward(images).square().mean().backward()
        weights[compile_] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
        names = list(model.state_dict())
    return weights | {"names": names}


@pytest.mark.slow
@needs_compiler
def test_compiled_ranks_have_the_gradients_of_eager_ones_but_for_rounding(gang: Gang) -> None:
    first, second = gang.run(2, compiled_and_eager)
    assert first["names"] == ["0.weight", "0.bias"]
    for result in (first, second):
        assert torch.allclose(result["always"], result["never"], atol=1e-6)
    assert torch.equal(first["always"], second["always"])


@pytest.mark.slow
@needs_compiler
def test_a_compiled_training_goes_where_the_eager_one_goes(tmp_path: Path) -> None:
    """Rounding may turn a max-pool's choice, and so a few gradients: what counts is the way that all weights went."""
    options: dict[str, Any] = {"max_steps": 3, "epochs": 1}
    settings = [settle(one_rank(), make_run(tmp_path / name), compile=name, **options) for name in ("never", "always")]
    start = torch.cat(
        [value.flatten() for value in place_model(settings[0].spec, settings[0].dataset, one_rank()).parameters()]
    )
    eager, compiled = (train(setting) for setting in settings)
    ends = [torch.cat([value.flatten() for value in state.model.parameters()]) for state in (eager, compiled)]
    assert compiled.compile_seconds > 0
    assert (ends[1] - ends[0]).norm() < 0.01 * (ends[0] - start).norm()


def test_a_compilation_that_was_asked_for_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nWhere is it?")

    monkeypatch.setattr(torch, "compile", lambda module: fail)
    setting = settle(one_rank(), make_run(tmp_path / "always"), compile="always")
    reason = r"^train\.compile always: RuntimeError: Failed to find C compiler\."
    with pytest.raises(ClusterddpError, match=reason) as error:
        begin(setting)
    assert error.value.hint is not None
    assert "compile: never" in error.value.hint


def test_what_compiling_needs_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compile_obstacle(os.environ) == "no C compiler: neither CC nor gcc nor clang"
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert find_compile_obstacle(os.environ) == f"no Python.h in {tmp_path}"
    (tmp_path / "Python.h").touch()
    assert find_compile_obstacle(os.environ) is None


def test_data_parallel_has_nothing_to_share_out_on_a_cpu() -> None:
    model = torch.nn.Linear(1, 1)
    assert wrap_forward(model, model, spec(strategy="dp"), one_rank(), precision="bf16") is model


@pytest.mark.parametrize("strategy", ["dp", "none"])
def test_one_process_trains_alike_by_each_strategy(tmp_path: Path, strategy: str) -> None:
    options: dict[str, Any] = {"max_steps": 3, "epochs": 1}
    ddp = train_once(one_rank(), make_run(tmp_path / "ddp"), **options)
    assert train_once(one_rank(), make_run(tmp_path / strategy), strategy=strategy, **options) == ddp


def placed(group: Group, train: dict[str, Any]) -> str:
    try:
        place_model(spec(**train), data(), group)
    except ClusterddpError as error:
        return error.message
    return "placed"


@pytest.mark.parametrize("strategy", ["dp", "none"])
def test_a_strategy_of_one_process_refuses_several_ranks(gang: Gang, strategy: str) -> None:
    answers = gang.run(2, placed, {"strategy": strategy})
    assert answers == [f"train.strategy {strategy} is one process, found 2 ranks"] * 2


def test_sync_bn_is_refused_on_the_cpu_with_the_reason(gang: Gang) -> None:
    answer = gang.run(2, placed, {"sync_bn": True, "model": "resnet18"})[1]
    assert answer == "train.sync_bn: torch's SyncBatchNorm works on GPUs only, and rank 1 is on the CPU"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_either_optimizer_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "cutout": 8, "translate": 4, "tta": "mirror"}
    whole = stopped_and_resumed(make_run(tmp_path / "whole"), [None], options)
    assert stopped_and_resumed(make_run(tmp_path / "cut"), [7, None], options) == whole


def stopped_and_resumed(path: Path, stops: list[int | None], options: dict[str, Any]) -> dict[str, Any]:
    for attempt, stop_after in enumerate(stops):
        (path / "attempts" / str(attempt)).mkdir(parents=True)
        setting = settle(one_rank(), path, attempt=attempt, stop_after=stop_after, **options)
        state = train(setting)
        setting.reporter.close()
    return outcome(state) | {"evaluation": state.evaluation}
