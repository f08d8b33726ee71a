"""Ranks that a signal has stopped: they hold up the whole gang, and no error ever says so."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from clusterddp.run.record import RankRecord
from clusterddp.system.processes import is_stopped

LOOK_EVERY_S = 5.0
"""A rank that is stopped at two looks is reported: those of a suspended job may be resumed a moment after us."""


class StoppedRanks:
    """Looks at the ranks of one attempt on one node."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._seen: frozenset[int] = frozenset()

    def look(self, records: Sequence[RankRecord], now: float) -> list[RankRecord]:
        """Return the records that change, of these ranks that run: they are stopped, or are no longer."""
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_EVERY_S
        changed = []
        seen = {record.rank for record in records if is_stopped(record.pid)}
        for record in records:
            if record.rank in seen & self._seen and record.stopped is None:
                changed.append(dataclasses.replace(record, stopped=time.time()))
            elif record.rank not in seen and record.stopped is not None:
                changed.append(dataclasses.replace(record, stopped=None))
        self._seen = frozenset(seen)
        return changed
