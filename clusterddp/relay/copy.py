"""Copies one run to one tracker: what is new of its metrics, then its end; it remembers how far it came.

A row counts as stored when the tracker has it for good. A call that is killed leaves rows that were sent and are not
known to be stored: the next call sends them again, and each tracker's part leaves out those that the tracker has.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.relay.facts import RunFacts, read_ending
from clusterddp.relay.memory import MemoryFile
from clusterddp.relay.rows import Place, read_points
from clusterddp.relay.tracker import Tracker
from clusterddp.run.directory import RunDir
from clusterddp.run.view import RunView


class TrackerError(ClusterddpError):
    """The tracker has not taken what was sent; the next call sends it again."""


class Copy:
    """One run on its way to one tracker, for a process that holds the memory file."""

    def __init__(self, run: RunDir, facts: RunFacts, file: MemoryFile, load: Callable[[], Tracker]) -> None:
        """`load` makes the tracker, as often as it fails; it is opened when there is something to send.

        Raises: ClusterddpError: the memory cannot be read.
        """
        self.run, self.facts = run, facts
        self.points = 0
        """How many points this process has sent."""
        self.where = ""
        """Where the tracker shows the run; empty: nothing was sent."""
        self._file, self._load = file, load
        self._tracker: Tracker | None = None
        self._memory = file.read()
        self._read = self._memory.stored
        self._uncertain_rows = self._memory.sending.rows

    def update(self) -> None:
        """Send the rows that are new.

        Raises: TrackerError: the tracker does not take them. ClusterddpError, OSError: the metrics cannot be read, or
        the memory not written.
        """
        for points, place in read_points(self.run.metrics, self._read):
            if points:
                tracker = self._opened()
                self._remember(sending=max(place, self._memory.sending, key=_offset))
                again = [point for point in points if point.number < self._uncertain_rows]
                with self._reporting():
                    if again:
                        tracker.send(again, again=True)
                    if len(again) < len(points):
                        tracker.send(points[len(again) :], again=False)
                    facts = tracker.commit()
                self.points += len(points)
                if facts is not None:
                    self._remember(stored=place, facts=dict(facts))
            self._read = place

    def close(self, view: RunView | None) -> None:
        """Store what was sent, and the end of the run; `view` None: it has not ended.

        Raises: as `update`.
        """
        end = read_ending(self.run, view) if view else None
        spelled = "" if end is None else f"{end.attempt} {end.state.value}"
        if self._tracker is None and spelled in ("", self._memory.ended):
            return
        tracker = self._opened()
        with self._reporting():
            facts = tracker.close(end)
        self._tracker = None
        self._remember(stored=self._read, sending=self._read, ended=spelled, facts=dict(facts))

    def _opened(self) -> Tracker:
        if self._tracker is None:
            tracker = self._load()
            with self._reporting():
                tracker.open(self.facts, self._memory.facts)
                self.where = tracker.view()
            self._tracker = tracker
        return self._tracker

    def _remember(self, **changed: Any) -> None:
        self._memory = dataclasses.replace(self._memory, **changed)
        self._file.write(self._memory)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Raise what a tracker's library raises as a TrackerError, and begin again with what is stored."""
        try:
            yield
        except ClusterddpError:
            raise
        except Exception as error:
            self._tracker = None
            self._read, self._uncertain_rows = self._memory.stored, self._memory.sending.rows
            text = " ".join(str(error).split())[:300] or "no message"
            raise TrackerError(
                f"{self._memory.target}: {type(error).__name__}: {text}",
                hint="nothing is lost: the next call sends what the tracker does not have",
            ) from error


def _offset(place: Place) -> int:
    return place.offset
