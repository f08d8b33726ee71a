"""What rank 0 reports: rows in metrics.jsonl, TensorBoard events, lines for people, and summary.json."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from clusterddp.run.directory import RunDir, refuse_if_stale
from clusterddp.run.metrics import MetricsFile
from clusterddp.run.record import log_event
from clusterddp.system.files import write_json
from clusterddp.system.storage import retry_outage
from clusterddp.train.evaluate import Evaluation
from clusterddp.train.optim import Schedule
from clusterddp.train.report.events import EventWriter, flat_numbers


class Reporter:
    """Writes a run's metrics, and logs for people; on other ranks than rank 0 it does nothing."""

    def __init__(self, run: RunDir, *, attempt: int, first: bool) -> None:
        self._run = run
        self._attempt = attempt
        self._first = first
        self._events: EventWriter | None = None
        self._metrics = MetricsFile(run, attempt=attempt, report=self.log)

    def log(self, text: str) -> None:
        """Print one line for people."""
        if self._first:
            with contextlib.suppress(OSError):  # a full disk under the log ends no training
                print(text, file=sys.stderr, flush=True)

    def first_step(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Log the end of the first step, and for `status` how long each phase up to it took."""
        self.log(f"first step done {seconds:.1f} s after the start of the process")
        if self._first:
            log_event(self._run, "first_step", attempt=self._attempt, phases=phases)

    def open_events(self, *, step: int) -> None:
        """Begin TensorBoard events; those that an earlier attempt wrote for later steps than `step` are removed."""
        if self._first:
            self._events = EventWriter(str(self._run.tensorboard), purge_step=step + 1, report=self.log)

    def train(
        self,
        schedule: Schedule,
        *,
        epoch: int,
        step: int,
        steps_total: int,
        step_in_epoch: int,
        loss: float,
        accuracy: float,
        lr: float,
        figures: Mapping[str, Any],
        train_seconds: float,
        checkpoint_seconds: float,
        eta_s: float,
    ) -> None:
        """Report the steps since the last report, over all ranks.

        `epoch` counts from 1; `steps_total` are those of the run; `accuracy` is a share, 0..1; `figures` are those of
        `figures_of`; `train_seconds` are the seconds of steps so far, `checkpoint_seconds` those in which steps waited
        for checkpoints, `eta_s` those of the steps that are left at this pace.
        """
        values = {"loss": loss, "accuracy": accuracy, **figures, "lr": lr}
        place = {"epoch": epoch, "step": step, "train_seconds": train_seconds, "steps_total": steps_total}
        self._row("train", values, place | {"checkpoint_seconds": checkpoint_seconds}, schedule)
        self.log(
            f"epoch {epoch}/{schedule.epochs} step {step_in_epoch}/{schedule.steps_per_epoch} loss {loss:.3f} "
            f"acc {100 * accuracy:.1f} % lr {lr:.3g} {figures['images_per_s']:,.0f} img/s eta {spell_duration(eta_s)}"
        )

    def evaluation(
        self, result: Evaluation, schedule: Schedule, *, epoch: int, steps_total: int, train_seconds: float
    ) -> None:
        """Report an evaluation of the whole test set."""
        values = {"loss": result.loss, "accuracy": result.accuracy} | result.accuracies_apart
        place = {"epoch": epoch, "step": result.step, "samples": result.samples, "train_seconds": train_seconds}
        self._row("eval", values, place | {"steps_total": steps_total}, schedule)
        accuracy = f"{100 * result.accuracy:.2f} % ({result.correct:,} of {result.samples:,})"
        apart = "".join(f", {name} {100 * share:.2f} %" for name, share in result.accuracies_apart.items())
        self.log(f"epoch {epoch}/{schedule.epochs} test accuracy {accuracy} loss {result.loss:.3f}{apart}")

    def summary(self, facts: Mapping[str, Any]) -> None:
        """Write summary.json, and log where the time went; only a run that came to its end has one.

        Raises: ClusterddpError: a later attempt of the run has begun.
        """
        if self._first:
            retry_outage(lambda: refuse_if_stale(self._run, self._attempt))
            retry_outage(lambda: write_json(self._run.summary, dict(facts)))
            self.log(describe_end(facts))

    def close(self) -> None:
        """Write what is still queued."""
        if self._events is not None:
            self._events.close()

    def _row(self, kind: str, values: Mapping[str, Any], place: Mapping[str, float], schedule: Schedule) -> None:
        if not self._first:
            return
        row = {"kind": kind, "attempt": self._attempt, **place, "epochs_total": schedule.epochs, **values}
        self._metrics.append(row)
        if self._events is not None:
            self._events.write(int(place["step"]), {f"{kind}/{name}": each for name, each in flat_numbers(values)})


def describe_end(summary: Mapping[str, Any]) -> str:
    """Describe where the time of a finished run went."""
    times = [
        f"{spell_duration(summary[key])} of {word}"
        for key, word in (
            ("train_seconds", "training"),
            ("eval_seconds", "evaluation"),
            ("checkpoint_seconds", "checkpoints"),
            ("compile_seconds", "compiling"),
        )
        if key == "train_seconds" or summary[key] >= 1
    ]
    step = summary["step_ms"]
    waits = (
        f"{summary['data_wait_percent']:.1f} % of it for data, {summary['comm_exposed_percent']:.1f} % for other ranks"
    )
    pace = f"{summary['images_per_s']:,.0f} img/s, a step {step['p50']:,.1f} ms (p95 {step['p95']:,.1f}), {waits}"
    return f"done: {', '.join(times)}; {pace}"


def spell_duration(seconds: float) -> str:
    """Format a time in the unit that fits: 31 s, 12 min, 3 h 10 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
