"""Whether another start of the job has taken the run over, while this one was cut off."""

from __future__ import annotations

import contextlib

from clusterddp.run.directory import RunDir

_LOOK_EVERY_S = 2.0


class Fence:
    """Looks for later attempts that a start of a job has claimed; restarts in place claim nothing."""

    def __init__(self, run: RunDir, first_attempt: int) -> None:
        self._run = run
        self._first_attempt = first_attempt
        self._look_at = 0.0
        self._seen = False

    def look(self, now: float) -> int | None:
        """Return the number of such an attempt, once."""
        if self._seen or now < self._look_at:
            return None
        self._look_at = now + _LOOK_EVERY_S
        with contextlib.suppress(OSError):
            for attempt in self._run.attempts():
                if attempt.number > self._first_attempt and attempt.is_claimed():
                    self._seen = True
                    return attempt.number
        return None
