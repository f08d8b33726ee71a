"""Show many runs as a table, one a line, in the width of a terminal: the least important columns give way first."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clusterddp.cli.terminal import duration
from clusterddp.cli.text.columns import Column, lay_out
from clusterddp.cli.text.states import WITHOUT_REASON, state_text
from clusterddp.cli.text.status import short_progress
from clusterddp.look.printable import printable
from clusterddp.system.units import format_bytes

if TYPE_CHECKING:
    from clusterddp.look.status import RunSummary

_LEAST_NAME = 22
"""To so much a name is cut where nothing else gives way; commands take the beginning of a name."""
_RANK_OF_ERROR = re.compile(r"rank \d+ on \S+: ")


def list_lines(summaries: Sequence[RunSummary], *, now: float, columns: int | None, wide: bool = False) -> list[str]:
    """Lay out runs; no line is longer than `columns` when that is given, unless `wide`."""
    room = None if wide else columns
    names = wide or len({summary.name for summary in summaries}) > 1
    return lay_out(_columns(summaries, now, names=names, short=room is not None), room=room)


def _columns(summaries: Sequence[RunSummary], now: float, *, names: bool, short: bool) -> list[Column]:
    accuracies = [summary.progress.accuracy if summary.progress else None for summary in summaries]
    columns = [
        Column(title="RUN", cells=[printable(run.run) for run in summaries], least=_LEAST_NAME),
        Column(title="VARIANT", cells=[printable(run.variant) or "-" for run in summaries], gives_way=1, least=10),
        Column(title="NAME", cells=[printable(run.name) for run in summaries], gives_way=4, least=8),
        Column(title="STATE", cells=[run.state.value for run in summaries], paint=state_text),
        Column(title="LAUNCHER", cells=[printable(run.launcher) for run in summaries], gives_way=8),
        Column(title="PROGRESS", cells=[short_progress(run.progress) for run in summaries], gives_way=3),
        Column(title="ACCURACY", cells=["-" if each is None else f"{each:.1%}" for each in accuracies], gives_way=5),
        Column(title="SUBMITTED", cells=[_when(run.created, now) for run in summaries], gives_way=7),
        Column(title="TIME", cells=[_time(run) for run in summaries], gives_way=2),
        Column(title="SIZE", cells=[format_bytes(run.bytes or 0) for run in summaries]),
        Column(title="WHY", cells=[_reason(run, short=short) for run in summaries], gives_way=6, least=10),
    ]
    left_out = {"VARIANT"} if not any(run.variant for run in summaries) else set()
    left_out |= set() if names else {"NAME"}
    left_out |= {"SIZE"} if all(run.bytes is None for run in summaries) else set()
    return [column for column in columns if column.title not in left_out]


def _reason(summary: RunSummary, *, short: bool) -> str:
    """Write why a run is in its state; `short`: without the rank and host, which `status` has."""
    reason = "" if summary.state.value in WITHOUT_REASON else printable(summary.reason)
    return _RANK_OF_ERROR.sub("", reason, count=1) if short else reason


def _time(summary: RunSummary) -> str:
    """Write how long the ranks ran; of a run that waits for its first start, how long it waits."""
    times = summary.times
    if times.running_s:
        return duration(times.running_s)
    return f"waits {duration(times.queued_s).split()[0]}" if summary.state.value == "PENDING" else "-"


def _when(created: float, now: float) -> str:
    if now - created < 86400:
        return f"{duration(now - created)} ago"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
