"""What rank 0 reports: rows in metrics.jsonl, TensorBoard events, lines or a progress bar, and summary.json."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir, refuse_if_stale
from clusterddp.run.metrics import MetricsFile
from clusterddp.run.record import log_event
from clusterddp.system.files import read_json, write_json
from clusterddp.system.storage import retry_outage
from clusterddp.train.evaluate import Evaluation
from clusterddp.train.report.events import EventWriter, flat_numbers, hparams_summary


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """The steps since the last report, over all ranks. `epoch` counts from 1; `accuracy` is a share, 0..1."""

    epoch: int
    step: int
    loss: float
    accuracy: float
    lr: float
    figures: dict[str, Any]
    """Speed, and what the time went on, from `figures_of`."""
    train_seconds: float
    """Seconds of steps so far."""
    epochs_total: int
    steps_total: int
    step_in_epoch: int
    steps_per_epoch: int
    eta_s: float
    """Seconds of steps that are left at this pace."""


class Reporter:
    """Writes a run's metrics, and logs for people; on other ranks than rank 0 it does nothing."""

    def __init__(self, run: RunDir, *, attempt: int, first: bool) -> None:
        self._run = run
        self._attempt = attempt
        self._progress: Progress | None = open_progress(sys.stderr) if first else None
        self._events: EventWriter | None = None
        self._metrics = MetricsFile(run, attempt=attempt, report=self.log)

    def log(self, text: str) -> None:
        """Print one line for people."""
        if self._progress is not None:
            self._progress.log(text)

    def first_step(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Log the end of the first step, and for `status` how long each phase up to it took."""
        self.log(f"first step done {seconds:.1f} s after the start of the process")
        if self._progress is not None:
            log_event(self._run, "first_step", attempt=self._attempt, phases=phases)

    def open_events(self, *, step: int, hparams: Mapping[str, str | float]) -> None:
        """Begin TensorBoard events; those that an earlier attempt wrote for later steps than `step` are removed.

        `hparams`: what TensorBoard's table of runs shows of this one, beside the accuracy.
        """
        if self._progress is not None:
            first = functools.partial(_table, self._run, dict(hparams))
            self._events = EventWriter(str(self._run.tensorboard), purge_step=step + 1, report=self.log, first=first)

    def train(self, report: TrainReport) -> None:
        """Report training steps."""
        if self._progress is None:
            return
        values = {"loss": report.loss, "accuracy": report.accuracy, **report.figures, "lr": report.lr}
        place = {
            "epochs_total": report.epochs_total,
            "steps_total": report.steps_total,
            "train_seconds": report.train_seconds,
        }
        self._row("train", report.epoch, report.step, values, place)
        self._progress.advance(report)

    def evaluation(
        self, result: Evaluation, *, epoch: int, epochs_total: int, steps_total: int, train_seconds: float
    ) -> None:
        """Report an evaluation of the whole test set."""
        if self._progress is None:
            return
        values = {"loss": result.loss, "accuracy": result.accuracy} | result.accuracies_apart
        place = {
            "samples": result.samples,
            "epochs_total": epochs_total,
            "steps_total": steps_total,
            "train_seconds": train_seconds,
        }
        self._row("eval", epoch, result.step, values, place)
        accuracy = f"{100 * result.accuracy:.2f} % ({result.correct:,} of {result.samples:,})"
        apart = "".join(f", {name} {100 * share:.2f} %" for name, share in result.accuracies_apart.items())
        self._progress.log(f"epoch {epoch}/{epochs_total} test accuracy {accuracy} loss {result.loss:.3f}{apart}")

    def summary(self, facts: Mapping[str, Any]) -> None:
        """Write summary.json; only a run that came to its end has one.

        Raises: ClusterddpError: a later attempt of the run has begun.
        """
        if self._progress is not None:
            retry_outage(lambda: refuse_if_stale(self._run, self._attempt))
            retry_outage(lambda: write_json(self._run.summary, dict(facts)))

    def close(self) -> None:
        """Write what is still queued."""
        if self._events is not None:
            self._events.close()
        if self._progress is not None:
            self._progress.close()

    def _row(self, kind: str, epoch: int, step: int, values: Mapping[str, Any], place: Mapping[str, float]) -> None:
        self._metrics.append({"kind": kind, "attempt": self._attempt, "epoch": epoch, "step": step, **values, **place})
        if self._events is not None:
            self._events.write(step, {f"{kind}/{name}": value for name, value in flat_numbers(values)})


def _table(run: RunDir, hparams: Mapping[str, str | float]) -> Any:
    try:
        record = read_json(run.record) or {}
    except (ClusterddpError, OSError):
        record = {}
    name = " ".join(str(record[key]) for key in ("name", "run") if record.get(key)) or run.name
    return hparams_summary(hparams, ["eval/accuracy"], group=name, started=time.time())


class Progress(Protocol):
    """How people watch a run."""

    def advance(self, report: TrainReport) -> None:
        """Show the progress."""

    def log(self, text: str) -> None:
        """Print one line that stays."""

    def close(self) -> None:
        """Restore the terminal."""


def open_progress(stream: TextIO) -> Progress:
    """Return a bar on a terminal, lines everywhere else."""
    return ProgressBar(stream) if stream.isatty() and find_spec("rich") else ProgressLines(stream)


class ProgressLines:
    """One line per report, written at once, for log files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def advance(self, report: TrainReport) -> None:
        place = f"epoch {report.epoch}/{report.epochs_total} step {report.step_in_epoch}/{report.steps_per_epoch}"
        figures = f"loss {report.loss:.3f} acc {100 * report.accuracy:.1f} % lr {report.lr:.3g}"
        self.log(f"{place} {figures} {report.figures['images_per_s']:,.0f} img/s eta {_duration(report.eta_s)}")

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk under the log ends no training
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Nothing is held open."""


class ProgressBar:
    """One bar over all steps of the run."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar: Any = Progress(*columns, console=Console(file=stream), expand=True)
        self._task = self._bar.add_task("starting", total=None)
        self._bar.start()

    def advance(self, report: TrainReport) -> None:
        figures = (
            f"loss {report.loss:.3f} acc {100 * report.accuracy:.1f} % {report.figures['images_per_s']:,.0f} img/s"
        )
        text = f"epoch {report.epoch}/{report.epochs_total} {figures}"
        self._bar.update(self._task, description=text, completed=report.step, total=report.steps_total)

    def log(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def describe_end(summary: Mapping[str, Any]) -> str:
    """Describe where the time of a finished run went."""
    times = [
        f"{_duration(summary[key])} of {word}"
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


def _duration(seconds: float) -> str:
    """Format a time in the unit that fits: 31 s, 12 min, 3 h 10 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
