"""A supervisor's own log: `launcher/supervisor-<node>.log`."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from clusterddp.run.directory import RunDir


def open_log(run: RunDir, node_rank: int) -> None:
    """Send standard error, tracebacks included, to the supervisor's log.

    Raises: OSError: it cannot be opened.
    """
    run.launcher_dir.mkdir(exist_ok=True, mode=0o700)
    path = run.launcher_dir / f"supervisor-{node_rank}.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)


def log_line(text: str) -> None:
    """Write a line with the time; a log that cannot be written does not end the run."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")
        sys.stderr.flush()
