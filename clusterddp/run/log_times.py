"""When the lines of the ranks' logs were written: a node's supervisor notes how long each log is, every few seconds.

The logs themselves have no times, and ranks do nothing for them. A line was written between two notes, so its time is
exact to `NOTE_EVERY_S`; after the last note it is exact by the time of the last change of the file.
"""

from __future__ import annotations

import bisect
import math
import os
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.system.files import MAX_ROW_BYTES, append_jsonl, open_regular
from clusterddp.wire import read_object

NOTE_EVERY_S = 5.0


class LogTimesWriter:
    """The notes of a node in one attempt."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] | None = None
        self._next_at = -math.inf

    def note(self, path: Path, sizes: Mapping[str, int], now: float) -> None:
        """Note which logs have another size than at the last note; `now`: seconds of the monotonic clock.

        A note that the storage refuses is left out: its lines count for the next one.
        """
        if now < self._next_at:
            return
        known = self._sizes or {}
        changed = {name: size for name, size in sizes.items() if size != known.get(name, 0)}
        self._next_at = now + NOTE_EVERY_S
        if self._sizes is not None and not changed:
            return
        try:
            append_jsonl(path, {"time": round(time.time(), 1), "sizes": changed})
        except OSError:
            return
        self._sizes = known | changed


@dataclass(slots=True)
class LogMarks:
    """What is known of one log: its size at some times, both ascending."""

    times: array[float] = field(default_factory=lambda: array("d"))
    """Seconds since the epoch."""
    sizes: array[int] = field(default_factory=lambda: array("q"))

    def add(self, at: float, size: int) -> None:
        if self.sizes and size < self.sizes[-1]:  # the log was emptied
            self.times, self.sizes = array("d"), array("q")
        self.times.append(max(at, self.times[-1] if self.times else at))
        self.sizes.append(size)

    def time_of(self, end: int) -> float | None:
        """Return by when the line that ends at offset `end` was written; None: after the last mark."""
        index = bisect.bisect_left(self.sizes, end)
        return self.times[index] if index < len(self.times) else None

    def size_before(self, at: float) -> int:
        """Return how long the log was at least at the last mark before a time; 0: there is none."""
        index = bisect.bisect_left(self.times, at)
        return self.sizes[index - 1] if index else 0


class LogTimesReader:
    """The notes of a node, read as they are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._marks: dict[str, LogMarks] = {}

    @property
    def exists(self) -> bool:
        """True once a note was read."""
        return self._position > 0

    def marks(self, name: str) -> LogMarks:
        """Return what is known of a log by its name."""
        return self._marks.setdefault(name, LogMarks())

    def update(self) -> None:
        """Read the notes that were added."""
        try:
            if os.stat(self._path).st_size <= self._position:
                return
            with open_regular(self._path) as file:
                file.seek(self._position)
                # A line without an end is being written, or is far too long.
                while (line := file.readline(MAX_ROW_BYTES)).endswith(b"\n"):
                    self._position += len(line)
                    self._take(line)
        except (OSError, ClusterddpError):
            return

    def _take(self, line: bytes) -> None:
        """Take in one note; a host, or another user, may have written it."""
        try:
            row = read_object(line)
        except ValueError:
            return
        at, sizes = row.get("time"), row.get("sizes")
        if not isinstance(at, int | float) or not 0 < at < 1e11 or not isinstance(sizes, dict):
            return
        for name, size in sizes.items():
            if isinstance(size, int) and 0 <= size < 1 << 62:
                self.marks(name).add(float(at), size)
