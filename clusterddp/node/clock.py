"""The clock of a supervisor: the time that it has run, for the timeouts of other processes."""

from __future__ import annotations

import time

MAX_TURN_S = 1.0
"""What one turn of the loop adds at most: in the rest of a longer one this process could not receive."""


class Clock:
    """Seconds on the scale of `time.monotonic`, less the time in which this process was stopped, suspended or blocked.

    A timeout counts only time in which this process ran, so a gang that is suspended as a whole goes on afterwards.
    """

    def __init__(self) -> None:
        self.now = self._last = time.monotonic()

    def tick(self) -> float:
        """Return the time; called once in each turn of the loop."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, MAX_TURN_S)
        return self.now
