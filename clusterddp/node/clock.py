"""The clock of a supervisor: the time that it has run, by which it judges others."""

from __future__ import annotations

import time

MAX_TURN_S = 1.0
"""How much one turn of the loop adds at most: in the rest of a longer one this process could not listen."""


class Clock:
    """Seconds on the scale of `time.monotonic`, less the time in which this process was stopped, suspended or blocked.

    A peer is silent only for as long as somebody listened, so a gang that is suspended as a whole goes on afterwards.
    """

    def __init__(self) -> None:
        self.now = self._last = time.monotonic()

    def tick(self) -> float:
        """Return the time; called once in each turn of the loop."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, MAX_TURN_S)
        return self.now
