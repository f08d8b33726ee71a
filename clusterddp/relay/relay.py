"""Relays of runs: one call copies what is new of each to the tracker, once or until all of them have ended."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence

from clusterddp.launchers.state import read_state
from clusterddp.relay.copy import Copy, TrackerError
from clusterddp.relay.facts import read_facts
from clusterddp.relay.memory import MemoryFile
from clusterddp.relay.tracker import open_tracker
from clusterddp.results.sync import Synchroniser
from clusterddp.run.attempts import Report
from clusterddp.run.directory import RunDir

_INTERVAL_S = 2.0
_PAUSE_S = 30.0
"""How long a relay that follows waits after the tracker has failed."""


@contextlib.contextmanager
def open_relay(
    runs: Sequence[RunDir], tracker: str, *, project: str | None, environ: Mapping[str, str]
) -> Iterator[list[Copy]]:
    """Hold the memories of runs for one tracker.

    Raises: PreflightError: its library is not installed. UsageError: another process relays a run to it.
    """
    with contextlib.ExitStack() as stack:
        copies = []
        for run in runs:
            facts = read_facts(run)
            wanted = project or facts.name

            load = functools.partial(open_tracker, tracker, project=wanted, environ=environ)
            file = MemoryFile(run, facts, f"{tracker} {load().address} {wanted}")
            stack.enter_context(file.held())
            copies.append(Copy(run, facts, file, load))
        yield copies


def relay_once(copies: Sequence[Copy], sync: Synchroniser) -> None:
    """Copy what is new of runs, and the end of those that have ended.

    Raises: TrackerError: the tracker does not take it.
    """
    _copy_new(copies, sync)
    _close(copies)


def relay_until_ended(copies: Sequence[Copy], sync: Synchroniser, report: Report) -> None:
    """Copy runs until all have ended; while the tracker fails, it is tried again twice a minute.

    An interrupt stores what was sent.
    """
    failed = ""
    try:
        while True:
            try:
                if _copy_new(copies, sync):
                    return
                failed = ""
            except TrackerError as error:
                if error.message != failed:
                    report(f"{error.message}; tried again every {_PAUSE_S:.0f} s")
                failed = error.message
            time.sleep(_PAUSE_S if failed else _INTERVAL_S)
    except KeyboardInterrupt:
        _close(copies)
        raise


def _copy_new(copies: Sequence[Copy], sync: Synchroniser) -> bool:
    """Send what is new, and the end of each run that has ended; return whether all have."""
    sync.update()
    # The states are read before the metrics: a run that has ended by then writes no more rows.
    views = [read_state(copy.run) for copy in copies]
    all_ended = all(view.finished for view in views)
    if all_ended:
        sync.download()
    for copy, view in zip(copies, views, strict=True):
        copy.update()
        if view.finished:
            copy.close(view)
    return all_ended


def _close(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.close(None)
