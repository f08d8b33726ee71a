"""How people watch a run: a bar on a terminal, a plain line per report everywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from clusterddp.train.report.window import TrainReport


class Progress(Protocol):
    """What `metrics` tells people through."""

    def advance(self, report: TrainReport) -> None:
        """Show how far training has come."""

    def say(self, text: str) -> None:
        """Tell one thing, on a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def open_progress(stream: TextIO) -> Progress:
    """Choose by whether somebody is looking."""
    return ProgressBar(stream) if stream.isatty() and find_spec("rich") else ProgressLines(stream)


class ProgressLines:
    """One line per report, written at once, for log files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def advance(self, report: TrainReport) -> None:
        place = f"epoch {report.epoch}/{report.epochs_total} step {report.step_in_epoch}/{report.steps_per_epoch}"
        figures = f"loss {report.loss:.3f} acc {100 * report.accuracy:.1f} % lr {report.lr:.3g}"
        self.say(f"{place} {figures} {report.figures['images_per_s']:,.0f} img/s eta {_duration(report.eta_s)}")

    def say(self, text: str) -> None:
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

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def last_words(summary: Mapping[str, Any]) -> str:
    """Say, of a run that came to its end, where its time went."""
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
    """Return a time in the unit that says most: 31 s, 12 min, 3 h 10 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
