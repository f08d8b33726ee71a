"""What a run reports: rows in metrics.jsonl, TensorBoard events, words to people, and the summary at its end.

Rank 0 reports; on the other ranks a `Reporter` does nothing.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from clusterddp.run.directory import RunDir
from clusterddp.run.fencing import refuse_if_stale
from clusterddp.run.record import log_event
from clusterddp.system.files import append_jsonl, write_json
from clusterddp.system.storage import retry_outage
from clusterddp.train.evaluate import Evaluation
from clusterddp.train.report.progress import Progress, open_progress
from clusterddp.train.report.window import TrainReport


class Reporter:
    """Writes a run's metrics and tells people about them."""

    def __init__(self, run: RunDir, *, attempt: int, first: bool) -> None:
        self._run = run
        self._attempt = attempt
        self._progress: Progress | None = open_progress(sys.stderr) if first else None
        self._events: EventWriter | None = None
        self._lost_rows = 0
        """Since storage took the last one."""

    def say(self, text: str) -> None:
        """Tell people one thing."""
        if self._progress is not None:
            self._progress.say(text)

    def first_step(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Tell that the first step has ended, and log how long each phase up to there took, for `status`."""
        self.say(f"first step done {seconds:.1f} s after the start of the process")
        if self._progress is not None:
            log_event(self._run, "first_step", attempt=self._attempt, phases=phases)

    def open_events(self, *, step: int) -> None:
        """Begin TensorBoard events; what an earlier attempt wrote for later steps than `step` is struck out."""
        if self._progress is not None:
            self._events = EventWriter(str(self._run.tensorboard), purge_step=step + 1, report=self.say)

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
        self._progress.say(f"epoch {epoch}/{epochs_total} test accuracy {accuracy} loss {result.loss:.3f}{apart}")

    def summary(self, facts: Mapping[str, Any]) -> None:
        """Write summary.json; only a run that came to its end has one.

        Raises: ClusterddpError: a later attempt of the run has begun.
        """
        if self._progress is not None:
            retry_outage(lambda: refuse_if_stale(self._run, self._attempt))
            retry_outage(lambda: write_json(self._run.summary, dict(facts)))

    def close(self) -> None:
        """Write out what is still on its way."""
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
        """Count a row that the storage does not take: training goes on."""
        self._lost_rows += 1
        if self._lost_rows == 1:
            self.say(f"warning: {self._run.metrics.name} cannot be written, training goes on: {error.strerror}")

    def _report_lost_rows(self) -> None:
        if self._lost_rows:
            self.say(f"warning: {self._run.metrics.name} has lost {self._lost_rows} rows; it can be written again")
            log_event(self._run, "rows_lost", attempt=self._attempt, rows=self._lost_rows)
            self._lost_rows = 0


def flat_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the numbers among `values`, those of a dict as `name_key`, for TensorBoard knows nothing else."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat_numbers({f"{name}_{key}": each for key, each in value.items()})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


class EventWriter:
    """Writes TensorBoard events from a thread of its own: the first import of tensorboard takes up to a second."""

    def __init__(self, directory: str, *, purge_step: int, report: Callable[[str], None]) -> None:
        """`report` is told, from that thread, when there will be no events."""
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
