"""What a supervisor logs: its own log, `launcher/supervisor-<node>.log`, and the history of the run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from clusterddp.run.attempts import AttemptEnd
from clusterddp.run.directory import RunDir
from clusterddp.run.record import log_event
from clusterddp.run.supervisors import supervisor_log


def open_log(run: RunDir, node_rank: int) -> None:
    """Send standard error, tracebacks included, to the supervisor's log."""
    run.launcher_dir.mkdir(exist_ok=True, mode=0o700)
    descriptor = os.open(supervisor_log(run, node_rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)


def log_line(text: str) -> None:
    """Write a line with the time; a log that cannot be written does not end the run."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")
        sys.stderr.flush()


def log_end(run: RunDir, attempt: int, end: AttemptEnd, **noticed: Any) -> None:
    """Log the end of an attempt, and which rank failed first if one did; `noticed`: when that was noticed."""
    if end.root_cause is not None:
        log(run, "rank_failed", attempt=attempt, rank=end.root_cause.rank, error=end.root_cause.error, **noticed)
    facts: dict[str, Any] = {"outcome": end.outcome, "reason": end.reason, "will_restart": end.will_restart}
    log(run, "attempt_ended", attempt=attempt, **facts)


def log(run: RunDir, event: str, **facts: Any) -> None:
    """Log an event in the supervisor's log and in the run's history."""
    log_line(f"{event} {facts}")
    log_event(run, event, **facts)
