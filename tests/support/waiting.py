"""How long tests wait for what must happen, on machines that others use too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

PATIENCE = 4
"""Tests give a quiet machine's time; waiting longer costs nothing where it happens, and a slow machine is no failure.

Where the time itself is promised (test_slurm_show.py, test_ssh_kills.py) it is not multiplied.
"""


class NotInTimeError(AssertionError):
    """What had to happen has not happened in time."""


def wait_until(
    condition: Callable[[], _T],
    within_s: float = 30.0,
    *,
    what: str | Callable[[], object] = "",
    patience: float = PATIENCE,
    interval_s: float = 0.05,
) -> _T:
    """Wait until `condition` gives something true, and return that; `what` is shown when it does not.

    A condition that takes long, as one that starts a command does, is asked at most a third of the time.

    Raises: NotInTimeError after `patience` times `within_s`.
    """
    limit_s = patience * within_s
    deadline = time.monotonic() + limit_s
    while True:
        asked = time.monotonic()
        result = condition()
        if result:
            return result
        now = time.monotonic()
        if now > deadline:
            raise NotInTimeError(f"not within {limit_s:g} s: {what() if callable(what) else what}")
        time.sleep(max(interval_s, min(2 * (now - asked), 1.0)))
