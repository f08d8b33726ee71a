"""What rank 0 reports: rows in metrics.jsonl, TensorBoard events, lines or a progress bar, and summary.json."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

from clusterddp.run.directory import RunDir
from clusterddp.run.fencing import refuse_if_stale
from clusterddp.run.record import log_event
from clusterddp.system.files import append_jsonl, write_json
from clusterddp.system.storage import retry_outage
from clusterddp.train.evaluate import Evaluation


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
        self._lost_rows = 0
        """Since the last row that was written."""

    def log(self, text: str) -> None:
        """Print one line for people."""
        if self._progress is not None:
            self._progress.log(text)

    def first_step(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Log the end of the first step, and for `status` how long each phase up to it took."""
        self.log(f"first step done {seconds:.1f} s after the start of the process")
        if self._progress is not None:
            log_event(self._run, "first_step", attempt=self._attempt, phases=phases)

    def open_events(self, *, step: int) -> None:
        """Begin TensorBoard events; those that an earlier attempt wrote for later steps than `step` are removed."""
        if self._progress is not None:
            self._events = EventWriter(str(self._run.tensorboard), purge_step=step + 1, report=self.log)

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
        row = {"kind": kind, "attempt": self._attempt, "epoch": epoch, "step": step, **values, **place}
        try:
            refuse_if_stale(self._run, self._attempt)
            append_jsonl(self._run.metrics, row | {"time": time.time()})
        except OSError as error:
            self._lose_row(error)
        else:
            self._report_lost_rows()
        if self._events is not None:
            self._events.write(step, {f"{kind}/{name}": value for name, value in flat_numbers(values)})

    def _lose_row(self, error: OSError) -> None:
        """Count a row that could not be written: training goes on."""
        self._lost_rows += 1
        if self._lost_rows == 1:
            self.log(f"warning: {self._run.metrics.name} cannot be written, training goes on: {error.strerror}")

    def _report_lost_rows(self) -> None:
        if self._lost_rows:
            self.log(f"warning: {self._run.metrics.name} has lost {self._lost_rows} rows; it can be written again")
            log_event(self._run, "rows_lost", attempt=self._attempt, rows=self._lost_rows)
            self._lost_rows = 0


def flat_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the numbers among `values`, those of a dict as `name_key`, as TensorBoard needs them."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat_numbers({f"{name}_{key}": each for key, each in value.items()})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


class EventWriter:
    """Writes TensorBoard events from a thread of its own: the first import of tensorboard takes up to a second."""

    def __init__(self, directory: str, *, purge_step: int, report: Callable[[str], None]) -> None:
        """`report` is called, from that thread, when there will be no events."""
        self._report = report
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(directory, purge_step), daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        self._rows.put((step, values))

    def close(self) -> None:
        self._rows.put(None)
        self._thread.join()

    def _work(self, directory: str, purge_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            self._report(f"note: no TensorBoard events ({error}); metrics.jsonl has the same numbers")
            return
        try:
            writer = SummaryWriter(directory, purge_step=purge_step)
            while (row := self._rows.get()) is not None:
                step, values = row
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
            writer.close()
        except OSError as error:
            self._report(f"warning: no more TensorBoard events ({error}); training goes on")


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
