"""The state of a training: everything that a checkpoint holds, and how a run resumes from it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import DEFINING, TrainSpec
from clusterddp.train.evaluate import Ema, Evaluation
from clusterddp.train.exchange import Exchange
from clusterddp.train.group import Group, gather_on_first
from clusterddp.train.host_copy import copy_to_host, cut_apart
from clusterddp.train.models.convolution import Ways
from clusterddp.train.optim import Schedule
from clusterddp.train.report.figures import Meter, Totals, figures_of


@dataclass(kw_only=True, slots=True)
class TrainState:
    """What changes while training; `model` is the inner module, never one that is wrapped or compiled."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    exchange: Exchange
    forward: nn.Module
    """What a step calls for its forward pass: `model`, wrapped for the exchange."""
    precision: str
    """What the model computes in: fp32 or bf16."""
    kernels: dict[str, Ways] = field(default_factory=dict)
    """How convolutions are computed that are not all native, by the names of the layers."""
    meter: Meter
    ema: Ema | None = None
    epoch: int = 0
    """Epochs that are done, evaluation included."""
    samples_in_epoch: int = 0
    """Train samples seen by all ranks together in the epoch that is under way: where it goes on, with any ranks."""
    step: int = 0
    """Optimizer steps done in all."""
    samples: int = 0
    """Train samples seen by all ranks together."""
    train_seconds: float = 0.0
    """Time in steps, over all attempts; without start-up, evaluation and checkpoints."""
    compile_seconds: float = 0.0
    """Time that this attempt has spent in compiling the model, before its first step."""
    totals: Totals = field(default_factory=Totals)
    """What the meter has read in all attempts."""
    best_accuracy: float = 0.0
    evaluation: Evaluation | None = None
    """The newest one."""
    resumed_from: str | None = None
    """The file of the checkpoint that this attempt began with; known on rank 0."""

    def figures(self, totals: Totals, images_per_s: float) -> dict[str, Any]:
        """Return the figures of a window or of the run, with the conditions of its steps."""
        return figures_of(
            totals,
            images_per_s,
            world_size=self.meter.group.world_size,
            precision=self.precision,
            comm=self.exchange.label,
            exact=self.exchange.exact,
        )

    def steps_left(self, schedule: Schedule) -> int:
        """Return the steps from here to the end of the run."""
        return schedule.left(self.epoch, self.samples_in_epoch, self.step)

    def epoch_ends(self, schedule: Schedule) -> bool:
        """Return whether the epoch under way, or the run, has no step left."""
        return not (schedule.left_in_epoch(self.samples_in_epoch) and self.steps_left(schedule))

    def finished(self, schedule: Schedule) -> bool:
        """Return whether all steps are taken and the final weights are evaluated."""
        evaluated = self.evaluation is not None and self.evaluation.step == self.step
        return not self.steps_left(schedule) and evaluated


def gather_state(state: TrainState, *, spec: TrainSpec, num_samples: int, group: Group) -> dict[str, Any] | None:
    """Collect from all ranks what a checkpoint holds, on rank 0; None elsewhere.

    `model` is the mean over the ranks, for use elsewhere; `own` has what differs between ranks, so that the run resumes
    to the last bit. Everything in it is loadable with `torch.load(weights_only=True)`, and is a copy:
    later steps do not change it.
    """
    weights = _mean_model(state.model, state, group)
    average = None if state.ema is None else _mean_model(state.ema.model, state, group)
    shared: dict[str, Any] = {"model": weights, "ema": average}
    if group.is_first:
        shared |= {"optimizer": state.optimizer.state_dict(), "exchange": state.exchange.common_state()}
    own, shared = copy_to_host((_own_state(state, group), shared))
    gathered = gather_on_first(cut_apart(own), group)
    if gathered is None:
        return None
    return shared | {
        "epoch": state.epoch,
        "samples_in_epoch": state.samples_in_epoch,
        "step": state.step,
        "samples": state.samples,
        "train_seconds": state.train_seconds,
        "totals": asdict(state.totals),
        "best_accuracy": state.best_accuracy,
        "evaluation": None if state.evaluation is None else asdict(state.evaluation),
        "precision": state.precision,
        "kernels": state.kernels,
        "comm": state.exchange.label,
        "own": gathered,
        "spec": spec.to_json(),
        "world_size": group.world_size,
        "num_samples": num_samples,
    }


def restore_state(
    state: TrainState,
    saved: dict[str, Any],
    *,
    spec: TrainSpec,
    schedule: Schedule,
    num_samples: int,
    group: Group,
) -> None:
    """Bring `state`, and this rank's random generators, to where `saved` (from `gather_state`) was.

    The number of ranks and the global batch may have changed: progress counts in samples, and each rank starts from the
    mean of what the ranks had. The same holds when the mode of exchange has changed.
    Raises: ClusterddpError: the checkpoint is of another training.
    """
    _check_same_training(saved, spec, num_samples)
    global_batch = saved["world_size"] * saved["spec"]["batch_size"] * saved["spec"]["accumulate"]
    same_exchange = saved["comm"] == state.exchange.label
    same_size = (saved["world_size"], global_batch) == (group.world_size, schedule.global_batch)
    same_ranks = same_exchange and same_size
    own = saved["own"][group.rank] if same_ranks else _mean(saved["own"])
    state.model.load_state_dict(saved["model"])
    state.model.load_state_dict(own["model"], strict=False)
    if state.ema is not None:  # without one in the checkpoint it begins at the weights
        state.ema.model.load_state_dict(saved.get("ema") or saved["model"])
        state.ema.model.load_state_dict(own["ema"], strict=False)
    _restore_optimizer(state.optimizer, own["optimizer"] or saved["optimizer"])
    state.exchange.load_state(*((own["exchange"], saved["exchange"]) if same_exchange else ({}, {})))
    if same_ranks:
        torch.set_rng_state(own["rng"]["torch"])
        if own["rng"]["cuda"] is not None and group.device.type == "cuda":
            torch.cuda.set_rng_state(own["rng"]["cuda"], group.device)
        random.setstate(own["rng"]["python"])
    state.epoch = saved["epoch"]
    state.samples_in_epoch, state.step, state.samples = saved["samples_in_epoch"], saved["step"], saved["samples"]
    state.train_seconds = saved["train_seconds"]
    known = {field.name for field in fields(Totals)}  # checkpoints of earlier versions have none, or more
    state.totals = Totals(**{key: value for key, value in saved.get("totals", {}).items() if key in known})
    state.best_accuracy = saved["best_accuracy"]
    state.evaluation = None if saved["evaluation"] is None else Evaluation(**saved["evaluation"])


def spec_changes(saved: dict[str, Any], spec: TrainSpec) -> list[str]:
    """List the keys of the spec that have changed since the checkpoint, with both values."""
    now = spec.to_json()
    return [
        f"train.{key} {saved['spec'].get(key)} -> {value}"
        for key, value in now.items()
        if saved["spec"].get(key) != value
    ]


def tensors_sha256(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash tensors in the order of their names: name, dtype, shape, and the bytes, little-endian and contiguous."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        content = bytearray(tensor.nbytes)
        if content:
            octets = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            torch.frombuffer(content, dtype=torch.uint8).copy_(octets)
        digest.update(content)
    return digest.hexdigest()


def _own_state(state: TrainState, group: Group) -> dict[str, Any]:
    """Return what may differ from rank to rank: buffers always, weights and optimizer state in some exchanges."""
    apart = state.exchange.diverged
    ema = None if state.ema is None else state.ema.model
    return {
        "model": _tensors(state.model, whole=apart),
        "ema": {} if ema is None else _tensors(ema, whole=state.exchange.drifts),
        "optimizer": state.optimizer.state_dict() if apart else None,
        "exchange": state.exchange.own_state(),
        "rng": {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(group.device) if group.device.type == "cuda" else None,
            "python": random.getstate(),
        },
    }


def _mean_model(model: nn.Module, state: TrainState, group: Group) -> dict[str, Tensor]:
    """Return the mean over the ranks of what differs from rank to rank, on rank 0; every rank takes part."""
    with state.exchange.averaged(model):
        tensors = _tensors(model, whole=True) if group.is_first else {}
        return {name: value.clone() for name, value in tensors.items()}


def _tensors(model: nn.Module, *, whole: bool) -> dict[str, Tensor]:
    """Return the model's tensors, or only its buffers."""
    return dict(model.state_dict() if whole else model.named_buffers())


def _mean(ranks: list[Any]) -> Any:
    """Average floating-point tensors over the ranks, at any depth; everything else is rank 0's."""
    first = ranks[0]
    if isinstance(first, dict):
        return {key: _mean([rank[key] for rank in ranks]) for key in first}
    if isinstance(first, list):
        return [_mean(list(each)) for each in zip(*ranks, strict=True)]
    if isinstance(first, Tensor) and first.is_floating_point():
        return (sum(rank.double() for rank in ranks) / len(ranks)).to(first.dtype)
    return first


def _check_same_training(saved: dict[str, Any], spec: TrainSpec, num_samples: int) -> None:
    now = spec.to_json()
    then = saved["spec"]
    wrong = [f"train.{key} was {then.get(key)}, is {now[key]}" for key in DEFINING if then.get(key) != now[key]]
    if saved["num_samples"] != num_samples:
        wrong.append(f"the train set had {saved['num_samples']:,} samples, has {num_samples:,}")
    if wrong:
        raise ClusterddpError(
            f"the newest checkpoint belongs to another training: {'; '.join(wrong)}",
            hint="submit a new run, or undo the change and resume",
        )


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore what is kept for each weight; momentum, decay and the like are the present spec's."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, now in zip(optimizer.param_groups, options, strict=True):
        group.update(now)
