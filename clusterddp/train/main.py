"""The built-in trainer as a rank's program: join the group, build, train, leave.

Started once per rank with torchrun's variables and CLUSTERDDP_RUN_DIR, whose plan.json holds the spec; a single rank
needs only CLUSTERDDP_RUN_DIR.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import Assignment, RunDir
from clusterddp.run.stop import confirm_stop, looking_at
from clusterddp.spec.train import TrainSpec
from clusterddp.system.files import read_json
from clusterddp.system.processes import read_age_s
from clusterddp.system.storage import set_storage_timeout
from clusterddp.train.begin import Setting, prepare
from clusterddp.train.checkpoint import Store
from clusterddp.train.device import RankVariables, synchronize
from clusterddp.train.group import Group, join_group, leave_group
from clusterddp.train.host import agree_on_compute_slot, keep_memory_that_is_there, load_once, return_freed_memory
from clusterddp.train.loop import train
from clusterddp.train.report.reporter import Reporter
from clusterddp.train.state import TrainState, tensors_sha256


def main(environ: Mapping[str, str]) -> None:
    """Run this rank from its start to its end.

    Exceptions are not handled here: a rank that fails must end at once, without waiting for the others.
    """
    assignment, variables = Assignment.from_environment(environ), RankVariables.from_environment(environ)
    run, attempt = assignment.run, assignment.attempt.number
    start_up = StartUp()
    start_up.mark("import")
    plan = read_plan(run)
    spec = TrainSpec.from_json(plan["spec"].get("train") or {})
    set_storage_timeout((plan.get("gang") or {}).get("host_silence_s"))
    set_up_torch(spec, threads=environ.get("OMP_NUM_THREADS"))
    group = join_group(variables)
    start_up.mark("rendezvous")
    dataset = load_once(spec, group)
    start_up.mark("data")
    slot = agree_on_compute_slot(group)
    if group.device.type == "cpu":
        return_freed_memory()
    with closing(Reporter(run, attempt=attempt, first=group.is_first)) as reporter:
        setting = prepare(
            spec,
            dataset,
            group,
            store=Store(run=run, attempt=attempt, keep=spec.keep_checkpoints),
            reporter=reporter,
            slot=slot,
            stop_requested=looking_at(assignment.stop_file),
            # Rank 0's: hosts without shared storage may have plans of their own.
            global_batch=group.gather(plan.get("global_batch") or 0)[0] or None,
        )
        state = train(setting, after_step=partial(start_up.after_step, reporter, group))
        if not state.finished(setting.schedule):
            if group.is_first:
                step, total = state.step, state.step + state.steps_left(setting.schedule)
                why = confirm_stop(assignment, {"epoch": state.epoch, "step": step, "samples": state.samples})
                reporter.log(f"stopped at step {step} of {total}, checkpoint written: {why}")
        else:
            with state.exchange.averaged(state.model):
                summary = summarise(state, setting, start_up.seconds)
            reporter.summary(summary)
    leave_group(group)


def read_plan(run: RunDir) -> dict[str, Any]:
    """Read the run's plan."""
    plan = read_json(run.plan)
    if plan is None:
        raise ClusterddpError(f"{run.plan}: there is no plan")
    return dict(plan)


def set_up_torch(spec: TrainSpec, *, threads: str | None) -> None:
    """Set torch's globals: threads, seeds, deterministic algorithms."""
    if threads:
        torch.set_num_threads(int(threads))
    torch.manual_seed(spec.seed)
    random.seed(spec.seed)
    torch.backends.cudnn.benchmark = not spec.deterministic
    if spec.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)


class StartUp:
    """Measures the phases from the process's start to the end of its first step."""

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._until = 0.0
        self.seconds: float | None = None
        """From the process's start to the end of the first step, once that has ended."""

    def mark(self, phase: str) -> None:
        """Record the end of a phase: import, rendezvous, data, first_step."""
        age = read_age_s()
        self._phases[phase] = round(age - self._until, 3)
        self._until = age

    def after_step(self, reporter: Reporter, group: Group) -> None:
        """Report the end of the first step, which on a GPU is later than its launch; then keep its memory."""
        if self.seconds is None:
            keep_memory_that_is_there(group)
            synchronize(group.device)
            self.mark("first_step")
            self.seconds = self._until
            reporter.first_step(self.seconds, self._phases)


def summarise(state: TrainState, setting: Setting, start_up_seconds: float | None) -> dict[str, Any]:
    """Return the content of summary.json for a finished run."""
    evaluation, dataset, spec = state.evaluation, setting.dataset, setting.spec
    assert evaluation is not None, "a finished run has been evaluated"
    return {
        "accuracy": evaluation.accuracy,
        "best_accuracy": state.best_accuracy,
        "loss": evaluation.loss,
        **evaluation.accuracies_apart,
        "eval_samples": evaluation.samples,
        "epochs": state.epoch,
        "steps": state.step,
        "samples": state.samples,
        **state.figures(state.totals, state.samples / state.train_seconds),
        "time_to_accuracy": state.totals.time_to_accuracy,
        "train_seconds": state.train_seconds,
        "compile_seconds": state.compile_seconds,
        "eval_seconds": state.totals.eval_seconds,
        "checkpoint_seconds": state.totals.checkpoint_seconds,
        "start_up_seconds": start_up_seconds and start_up_seconds - state.compile_seconds,
        "attempt_seconds": read_age_s(),
        "world_size": setting.group.world_size,
        "device": setting.group.device.type,
        "model": spec.model,
        "dataset": dataset.label,
        "image_size": dataset.image_size,
        "warning": dataset.warning,
        "params_sha256": tensors_sha256(state.model.named_parameters()),
        "buffers_sha256": tensors_sha256(state.model.named_buffers()),
        "resumed_from": state.resumed_from,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main(os.environ)
