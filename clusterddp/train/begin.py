"""Before the first step: what is settled once, the model and all that belongs to it, the checkpoint to resume from."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clusterddp.errors import ClusterddpError
from clusterddp.facts.torch import find_compile_obstacle
from clusterddp.spec.train import TrainSpec
from clusterddp.train.checkpoint import Store, Timer, Writer, read_newest_on_all
from clusterddp.train.data.dataset import Dataset
from clusterddp.train.evaluate import Ema
from clusterddp.train.exchange import build_exchange
from clusterddp.train.forward import (
    choose_precision,
    compile_now,
    is_compiled,
    lack_of_bf16,
    place_model,
    wrap_forward,
)
from clusterddp.train.group import Agreement, Group, gather_on_first, max_of_each, min_over_ranks
from clusterddp.train.host import ComputeSlot
from clusterddp.train.models.convolution import NATIVE, Conv, Ways, choose_ways, shapes_of, time_ways
from clusterddp.train.models.resnet import has_large_stem
from clusterddp.train.optim import Muon, Schedule, build_optimizer, plan_schedule
from clusterddp.train.report.figures import Meter
from clusterddp.train.report.reporter import Reporter
from clusterddp.train.state import TrainState, restore_state, spec_changes

_TIMING_S = 2.5  # of the ways to convolve; a trial that has begun is not cut off
_WORTH_TIMING = 100  # steps of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What does not change while training."""

    spec: TrainSpec
    dataset: Dataset
    group: Group
    schedule: Schedule
    store: Store
    writer: Writer
    timer: Timer
    reporter: Reporter
    agreement: Agreement
    slot: ComputeSlot


def prepare(
    spec: TrainSpec,
    dataset: Dataset,
    group: Group,
    *,
    store: Store,
    reporter: Reporter,
    slot: ComputeSlot | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    global_batch: int | None = None,
) -> Setting:
    """Settle everything about a training before it begins.

    `global_batch`: the images of a step as the plan has them; None: as these ranks make them.
    """
    if global_batch is not None and global_batch != spec.global_batch(group.world_size):
        spec = spec.fitted(group.world_size, global_batch)
        reporter.log(spec.describe_batch(group.world_size, global_batch))
    schedule = plan_schedule(spec, num_samples=len(dataset.train_labels), world_size=group.world_size)
    writer, timer = Writer(), Timer(spec.checkpoint_interval_s)
    return Setting(
        spec=spec,
        dataset=dataset,
        group=group,
        schedule=schedule,
        store=store,
        writer=writer,
        timer=timer,
        reporter=reporter,
        agreement=Agreement(
            group, stop_requested=stop_requested, save_due=lambda: timer.is_due() and not writer.is_busy
        ),
        slot=slot or ComputeSlot(),
    )


def begin(setting: Setting) -> TrainState:
    """Build the model and all that belongs to it, and restore the newest checkpoint, if there is one.

    What an earlier attempt measured and decided stands, so that the run resumes to the same bits.
    """
    spec, group, schedule = setting.spec, setting.group, setting.schedule
    file, saved = read_newest_on_all(setting.store, group, setting.reporter.log)
    model = place_model(spec, setting.dataset, group, is_restored=saved is not None)
    precision = settle_precision(saved, model, setting)
    kernels = settle_kernels(saved, model, precision, setting)
    optimizer = build_optimizer(model, spec, schedule, precision=precision, compiled=is_compiled(spec, group.device))
    exchange = build_exchange(spec.comm, model, group, optimizer=optimizer)
    exchange.settle(torch.zeros(1, *setting.dataset.image_shape, device=group.device))
    forward = wrap_forward(exchange.module, model, spec, group, precision=precision)
    state = TrainState(
        model=model,
        optimizer=optimizer,
        exchange=exchange,
        forward=forward,
        precision=precision,
        kernels=kernels,
        meter=Meter(model, group),
        ema=Ema(model, spec.ema) if spec.ema else None,
        resumed_from=file,
    )
    if saved is not None:
        _resume(state, saved, setting)
    if is_compiled(spec, group.device):
        compile_if_possible(state, setting)
    setting.slot.follow(model)
    setting.timer.saved(0)
    setting.reporter.open_events(step=state.step)
    return state


def settle_precision(saved: dict[str, Any] | None, model: nn.Module, setting: Setting) -> str:
    """Return what the model computes in: the spec's precision, or what auto chose, now or in an earlier attempt."""
    asked = setting.spec.precision
    lack = lack_of_bf16(setting.group) if asked == "bf16" else None
    if lack is not None:
        setting.reporter.log(f"warning: precision bf16: {lack}; torch emulates it, which is slower than fp32")
    if asked != "auto":
        return asked
    if saved is not None:
        chosen: str = saved["precision"]
        return chosen
    precision, why = choose_precision(setting.spec, model, setting.dataset, setting.group)
    setting.reporter.log(f"precision auto: {precision}, {why}")
    return precision


def settle_kernels(saved: dict[str, Any] | None, model: nn.Module, precision: str, setting: Setting) -> dict[str, Ways]:
    """Let each convolution of `model` compute its passes in the way that is fastest on the slowest host.

    One rank of each host times them, now or in an earlier attempt. Return the ways by the layers' names, where not
    all are native.
    """
    spec, group, dataset = setting.spec, setting.group, setting.dataset
    settled = {} if saved is None else {name: tuple(ways) for name, ways in saved.get("kernels", {}).items()}
    on_cpu = group.device.type == "cpu" and not is_compiled(spec, group.device)
    timed = on_cpu and not spec.deterministic and setting.schedule.total_steps >= _WORTH_TIMING
    if saved is None and spec.kernels == "auto" and timed:
        began = time.perf_counter()
        shapes = shapes_of(model, torch.zeros(spec.batch_size, *dataset.image_shape))
        distinct = list(dict.fromkeys(shapes.values()))
        is_timed = not group.host_ranks or group.host_index == 0
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        rows = torch.tensor(time_ways(distinct, dtype, seconds=_TIMING_S if is_timed else 0), dtype=torch.float64)
        rows = max_of_each(rows if is_timed else torch.zeros_like(rows), group)
        ways = dict(zip(distinct, map(choose_ways, rows.tolist()), strict=True))
        settled = {name: ways[shape] for name, shape in shapes.items() if ways[shape] != NATIVE}
        chosen = "; ".join(f"{name} {', '.join(each)}" for name, each in settled.items())
        seconds = time.perf_counter() - began
        setting.reporter.log(f"kernels auto ({seconds:.1f} s; output, input, weights): {chosen or 'all native'}")
    for name, ways_ in settled.items():
        conv = model.get_submodule(name)
        assert isinstance(conv, Conv)
        conv.ways = ways_
    return settled


def compile_if_possible(state: TrainState, setting: Setting) -> None:
    """Compile the forward pass and Muon; with `compile: auto`, if one rank cannot compile, all ranks run uncompiled.

    The ranks exchange nothing until all have the result: a rank that compiled would wait for one that failed.
    Raises: ClusterddpError: with `compile: always` it fails.
    """
    spec, group = setting.spec, setting.group
    muon = state.optimizer if isinstance(state.optimizer, Muon) else None

    def compile_() -> float:
        seconds = compile_now(state.forward, state.model, setting.dataset, spec, state.precision)
        return seconds + (muon.compile_now() if muon else 0.0)

    failure = ""
    state.model.train(not spec.sync_bn)  # else its batch norm exchanges
    try:
        with state.exchange.scope(now=False):
            state.compile_seconds = compile_()
    except Exception as error:  # whatever a compiler, Triton or the driver raises
        failure = _spell_failure(error)
        if spec.compile != "auto":
            raise ClusterddpError(
                f"train.compile {spec.compile}: {failure}",
                hint="compile: auto goes on uncompiled, compile: never does not try",
            ) from error
    state.model.train()
    if min_over_ranks(not failure, group):
        if spec.sync_bn:
            state.compile_seconds += compile_()
        return
    failures = gather_on_first([failure, socket.gethostname()], group) or []
    which = [f"rank {rank} on {host}: {reason}" for rank, (reason, host) in enumerate(failures) if reason]
    more = f" (and {len(which) - 1} more ranks)" if len(which) > 1 else ""
    if which:
        setting.reporter.log(f"warning: compile auto: {which[0]}{more}; all ranks go on uncompiled")
    state.forward, state.compile_seconds = state.exchange.module, 0.0
    if muon:
        muon.run_uncompiled()


def log_setup(state: TrainState, setting: Setting) -> None:
    """Log what is going to be trained, on what."""
    spec, schedule, dataset, group = setting.spec, setting.schedule, setting.dataset, setting.group
    ranks = "1 rank" if group.world_size == 1 else f"{group.world_size} ranks"
    setting.reporter.log(
        f"{spec.model} on {dataset.label}: {ranks} on {group.device.type}, {state.precision}, "
        f"{state.steps_left(schedule):,} steps of {schedule.global_batch:,} samples, "
        f"peak lr {schedule.peak(own_gradient=state.exchange.own_gradient):.3g}"
    )
    if setting.slot.description:
        setting.reporter.log(setting.slot.description)
    kept, size = dataset.train_images.shape[2], dataset.image_size
    enlarged = f", enlarged to {size}x{size} in each batch" if kept < size else ""
    stem = "as for ImageNet, 7x7 and max-pool" if has_large_stem(size) else "3x3"
    begins = f"; resnet18 begins {stem}" if spec.model == "resnet18" else ""
    setting.reporter.log(f"images of {kept}x{kept} pixels{enlarged}{begins}")
    if state.compile_seconds:
        setting.reporter.log(f"compiled in {state.compile_seconds:.1f} s")
    if spec.strategy == "dp":
        gpus = torch.cuda.device_count() if group.device.type == "cuda" else 0
        idle = f"one {group.device.type} device, so there is nothing to share out"
        setting.reporter.log(f"strategy dp: {f'DataParallel over {gpus} GPUs' if gpus > 1 else idle}")
    if state.exchange.transport:
        setting.reporter.log(f"gradients go through {state.exchange.transport}")
    if not state.exchange.exact:
        setting.reporter.log(f"ranks exchange by {state.exchange.label}: results are not those of comm: exact")
    if state.exchange.own_gradient and schedule.own_gradient_share != 1:
        setting.reporter.log(
            f"each steps with its own batch alone, at {schedule.own_gradient_share:.2f} of exact's rate"
        )
    if dataset.warning:
        setting.reporter.log(f"warning: {dataset.warning}")


def _spell_failure(error: Exception) -> str:
    """Describe a failed compilation in one line, with what this host lacks for it."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    obstacle = find_compile_obstacle(os.environ)
    return f"{type(error).__name__}: {line}" + (f" ({obstacle})" if obstacle else "")


def _resume(state: TrainState, saved: dict[str, Any], setting: Setting) -> None:
    spec, schedule, group, log = setting.spec, setting.schedule, setting.group, setting.reporter.log
    num_samples = len(setting.dataset.train_labels)
    restore_state(state, saved, spec=spec, schedule=schedule, num_samples=num_samples, group=group)
    for change in spec_changes(saved, spec):
        log(f"changed since the checkpoint: {change}")
    if saved["comm"] != state.exchange.label and (saved["exchange"] or saved["own"][0]["exchange"]):
        log(f"what {saved['comm']} kept between steps is of no use to {state.exchange.label} and is dropped")
    if saved["world_size"] != group.world_size:
        log(f"{saved['world_size']} ranks have become {group.world_size}: each starts from the mean of what they kept")
    log(f"resumed from {state.resumed_from}: step {state.step} of {state.step + state.steps_left(schedule)}")
