"""Reads what NCCL writes for the ranks of a node, until it has said what way their data takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from clusterddp.network.nccl_log import Transport, merge, read_transport

_FIRST_LOOK_S, _LAST_LOOK_S = 2.0, 300.0
"""After the ranks have begun: NCCL chooses when they first communicate, and opens links as it needs them."""
_MAX_BYTES = 1 << 20


class NcclWatch:
    """Looks at the logs ever more rarely; what it finds changes as links are opened."""

    def __init__(self, logs: Sequence[Path], now: float) -> None:
        self._logs = logs
        self._begun = now
        self._look_at = now + _FIRST_LOOK_S
        self._told: Transport | None = None

    def look(self, now: float) -> Transport | None:
        """Return what is new; mostly None."""
        if now < self._look_at or now > self._begun + _LAST_LOOK_S:
            return None
        self._look_at = now + max(_FIRST_LOOK_S, (now - self._begun) / 2)
        found = [transport for log in self._logs if (transport := read_transport(_read(log)))]
        if len(found) < len(self._logs) or (merged := merge(found)) == self._told:
            return None
        self._told = merged
        return merged


def _read(log: Path) -> str:
    with contextlib.suppress(OSError):
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    return ""
