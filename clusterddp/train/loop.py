"""Training, from the first step to the last: plain steps, and between epochs an evaluation and a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from clusterddp.ranks.environment import spell_ranks
from clusterddp.train.begin import Setting, begin, log_setup
from clusterddp.train.checkpoint import write_checkpoint
from clusterddp.train.data.augment import Transforms, augment, draw_transforms
from clusterddp.train.data.dataset import batch_indices, epoch_order
from clusterddp.train.evaluate import evaluate
from clusterddp.train.forward import autocast
from clusterddp.train.group import max_over_ranks, ranks_apart
from clusterddp.train.optim import Schedule, optimizer_tensors, set_learning_rate
from clusterddp.train.report.figures import Window
from clusterddp.train.state import TrainState, gather_state


def train(setting: Setting, *, after_step: Callable[[], None] = lambda: None) -> TrainState:
    """Train to the end or until a stop is requested, from the newest checkpoint if there is one.

    Return the state; unless it is `finished`, a stop was requested and a checkpoint of the state is written.
    """
    state = begin(setting)
    log_setup(state, setting)
    with setting.writer:
        go_on = not setting.agreement.agreed_now()
        while go_on and not state.finished(setting.schedule):
            go_on = train_epoch(state, setting, after_step) and evaluate_if_due(state, setting)
            if go_on:
                end_epoch(state, setting)
        setting.agreement.settle()
        if not state.finished(setting.schedule):
            save(state, setting)
        await_checkpoint(state, setting)
    return state


def train_epoch(state: TrainState, setting: Setting, after_step: Callable[[], None]) -> bool:
    """Take the remaining steps of the epoch; False when all ranks agreed to stop before its end."""
    spec, schedule = setting.spec, setting.schedule
    order = epoch_order(len(setting.dataset.train_labels), spec.seed, state.epoch).to(setting.group.device)
    transforms = draw_transforms(
        len(order),
        mode=spec.augment,
        seed=spec.seed,
        epoch=state.epoch,
        side=setting.dataset.train_images.shape[-1],
        max_shift=spec.translate,
        cutout=spec.cutout,
        device=setting.group.device,
    )
    window = Window(min(spec.log_every, schedule.steps_per_epoch), setting.group.device)
    while not state.epoch_ends(schedule):
        if setting.agreement.agreed():
            break
        if setting.agreement.saving:
            if window.steps:
                report(window, state, setting)
            save(state, setting)
            window.reset()
        set_learning_rate(state.optimizer, rate_of(state, schedule))
        train_step(state, setting, order, transforms, window)
        after_step()
        setting.writer.raise_failure()
        if state.step % spec.log_every == 0:
            report(window, state, setting)
    if window.steps:
        report(window, state, setting)
    if state.epoch_ends(schedule):
        synchronise_ranks(state, setting)
    return not setting.agreement.stopping


def rate_of(state: TrainState, schedule: Schedule, *, before: int = 0) -> float:
    """Return the learning rate of the next step, or of the step `before` it."""
    step = schedule.total_steps - state.steps_left(schedule) - before
    return schedule.learning_rate(step, own_gradient=state.exchange.own_gradient)


def train_step(state: TrainState, setting: Setting, order: Tensor, transforms: Transforms, window: Window) -> None:
    """Take one optimizer step over `accumulate` micro-batches; nothing in it waits for the device."""
    spec, data, group, schedule = setting.spec, setting.dataset, setting.group, setting.schedule
    take = partial(batch_indices, world=group.world_size, rank=group.rank, batch_size=spec.batch_size)
    record = state.meter.clock.record
    record("step")
    state.optimizer.zero_grad(set_to_none=True)
    for micro in range(spec.accumulate):
        record("load_begin")
        indices = take(order, state.samples_in_epoch, micro=micro)
        images = data.train_images[indices]
        images = augment(
            images, indices, transforms, mean=data.mean, std=data.std, channels_last=True, size=data.image_size
        )
        labels = data.train_labels[indices]
        record("load_end")
        with state.exchange.scope(now=micro == spec.accumulate - 1):
            with autocast(state.precision, group.device):
                logits = state.forward(images)
            loss = cross_entropy(logits.float(), labels, label_smoothing=spec.label_smoothing) / spec.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
        window.add(loss.detach(), logits.detach(), labels)
    state.exchange.after_backward()
    record("wait_end")
    state.optimizer.step()
    window.steps += 1
    state.step += 1
    state.samples_in_epoch += schedule.global_batch
    state.samples += schedule.global_batch
    record("wait_begin")
    state.exchange.after_step(state.step, epoch_ends=state.epoch_ends(schedule))
    record("wait_end")
    if state.ema is not None:
        state.ema.update(step=state.step)
    record("step_end")


def synchronise_ranks(state: TrainState, setting: Setting) -> None:
    """Copy rank 0's state to all ranks at an epoch's end, all of it that must be equal, and log whose was not.

    That is the weights, what the optimizer keeps for each, their running mean, and the tensors that the exchange has in
    common. Each rank moves its own weights, from the same gradients. Matrix products (Muon) have other last
    bits on another kind of processor; a faulty processor may compute anything.
    """
    shared = [*state.model.parameters(), *optimizer_tensors(state.optimizer), *state.exchange.common_tensors()]
    if state.ema is not None and not state.exchange.drifts:
        shared += state.ema.model.parameters()
    apart = ranks_apart(shared, setting.group)
    if not apart:
        return
    for tensor in shared:
        dist.broadcast(tensor.detach(), src=0)
    setting.reporter.log(
        f"warning: the weights of {spell_ranks(apart)} were not those of rank 0, and are now. Processors of another "
        "kind round matrix products in another way; if all are alike, one of them computes wrong"
    )


def report(window: Window, state: TrainState, setting: Setting) -> None:
    """Report the window's steps and begin the next window."""
    schedule = setting.schedule
    found = state.meter.read(window, last_step=state.step, bytes_per_step=state.exchange.bytes_sent_per_step)
    state.train_seconds += found.seconds
    state.totals.add(found.totals)
    samples = window.steps * schedule.global_batch
    left = state.steps_left(schedule)
    setting.reporter.train(
        schedule,
        epoch=state.epoch + 1,
        step=state.step,
        steps_total=state.step + left,
        step_in_epoch=schedule.steps_per_epoch - schedule.left_in_epoch(state.samples_in_epoch),
        loss=found.loss,
        accuracy=found.hits / samples,
        lr=rate_of(state, schedule, before=1),
        figures=state.figures(found.totals, samples / found.seconds),
        train_seconds=state.train_seconds,
        checkpoint_seconds=state.totals.checkpoint_seconds,
        eta_s=left * found.seconds / window.steps,
    )
    window.reset()


def evaluate_if_due(state: TrainState, setting: Setting) -> bool:
    """Evaluate after every `eval_every` epochs and at the end; False when all ranks agreed to stop meanwhile."""
    schedule = setting.schedule
    left = state.steps_left(schedule)
    is_last = not left
    if not is_last and (state.epoch + 1) % setting.spec.eval_every:
        return True
    began = time.perf_counter()
    evaluate_now = partial(
        evaluate,
        dataset=setting.dataset,
        group=setting.group,
        step=state.step,
        autocast=partial(autocast, state.precision, setting.group.device),
        stop=setting.agreement.agreed,
        slot=setting.slot.held,
        tta=setting.spec.tta if is_last else "none",
    )
    with state.exchange.averaged(state.model):
        result = evaluate_now(state.model)
    if result is not None and state.ema is not None:
        with state.exchange.averaged(state.ema.model):
            average = evaluate_now(state.ema.model)
        result = average and result.with_average(average)
    state.totals.eval_seconds += time.perf_counter() - began
    if result is None:
        return False
    state.evaluation = result
    state.totals.reach(result.accuracy, state.train_seconds)
    state.best_accuracy = max(state.best_accuracy, result.accuracy)
    epoch = min(state.epoch + 1, schedule.epochs)
    setting.reporter.evaluation(
        result, schedule, epoch=epoch, steps_total=state.step + left, train_seconds=state.train_seconds
    )
    return True


def end_epoch(state: TrainState, setting: Setting) -> None:
    """Count the epoch as done, and write a checkpoint after every `checkpoint_every` epochs and at the end.

    While rank 0 still writes the one before, it is put off, to a step of the next epoch: a slow disk slows no step.
    """
    if not setting.schedule.left_in_epoch(state.samples_in_epoch):
        state.epoch, state.samples_in_epoch = state.epoch + 1, 0
    is_last = not state.steps_left(setting.schedule)
    if not is_last and state.epoch % setting.spec.checkpoint_every:
        return
    setting.timer.is_owed = not is_last and max_over_ranks(setting.writer.is_busy, setting.group) > 0
    if not setting.timer.is_owed:
        save(state, setting)


def save(state: TrainState, setting: Setting) -> None:
    """Begin a checkpoint; every rank takes part, and a thread of rank 0 writes while training goes on."""
    await_checkpoint(state, setting)
    began = time.perf_counter()
    num_samples = len(setting.dataset.train_labels)
    saved = gather_state(state, spec=setting.spec, num_samples=num_samples, group=setting.group)
    if saved is not None:
        setting.writer.begin(partial(write_checkpoint, setting.store, saved))
    setting.agreement.saved()
    seconds = time.perf_counter() - began
    state.totals.checkpoint_seconds += seconds
    if why := setting.timer.saved(seconds):
        setting.reporter.log(why)


def await_checkpoint(state: TrainState, setting: Setting) -> None:
    """Wait until the checkpoint that is being written is on disk."""
    began = time.perf_counter()
    setting.writer.wait()
    state.totals.checkpoint_seconds += time.perf_counter() - began
