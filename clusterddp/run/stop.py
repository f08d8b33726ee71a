"""The stop contract: how a run is asked to checkpoint and end, and how its program confirms that.

SIGUSR2, SIGTERM, the file CLUSTERDDP_STOP_FILE and the time limit request a stop. Any rank may see the request first;
all ranks of the program agree on one step, write a checkpoint there and confirm, and every rank exits with code 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import ASKED, Assignment, RunDir, make_attempt_dirs
from clusterddp.system.files import is_file, read_json, read_regular, write_json
from clusterddp.wire import read_object

KILL_WAIT_S = 30.0
"""How long a process that is ended has between SIGTERM and SIGKILL: Slurm's default of KillWait."""
_EMPTY_STOP_FILE_S = 0.3
"""A stop file that is empty for longer was made by hand; until then it may be in the middle of a write."""
LOOK_EVERY_S = 0.25
"""How often a program that checks in every step looks for the file."""


def request_stop(stop_file: Path, reason: str, *, ordered: bool = False) -> None:
    """Request a stop; the first reason stays. `ordered`: the head itself writes the file, so it need not act on it.

    Safe in a signal handler: two system calls, no lock.
    """
    try:
        descriptor = os.open(stop_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    os.write(descriptor, json.dumps({"reason": reason, "time": time.time(), "ordered": ordered}).encode())
    os.close(descriptor)


@cache
def record_question(stop_file: Path) -> None:
    """Record, once a process, that this program asks whether to stop: it takes part in the stop contract."""
    with contextlib.suppress(OSError):
        os.close(os.open(stop_file.with_name(ASKED), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def stop_requested(stop_file: Path) -> bool:
    """Return whether a stop was requested (one stat call); False while the storage cannot be reached."""
    return is_file(stop_file)


def looking_at(
    stop_file: Path, *, every_s: float = LOOK_EVERY_S, clock: Callable[[], float] = time.monotonic
) -> Callable[[], bool]:
    """Return a function like `stop_requested` that looks for the file at most every `every_s`.

    A step may take 3 ms, and 300 calls per second and rank are a load on a shared file system.
    """
    looked_at = -math.inf
    found = False

    def requested() -> bool:
        nonlocal looked_at, found
        now = clock()
        if now - looked_at >= every_s:
            looked_at, found = now, stop_requested(stop_file)
        return found

    return requested


def read_stop(stop_file: Path) -> tuple[str, bool]:
    """Return why the stop was requested, and whether the head wrote the file, not a user or another process.

    For a file without a reason, such as one made by hand, that is its name.
    """
    try:
        data = read_object(read_regular(stop_file, 65536))
        return str(data["reason"]), data.get("ordered") is True
    except (OSError, ValueError, KeyError, ClusterddpError):
        return f"the file {stop_file.name}", False


def is_complete(stop_file: Path) -> bool:
    """Return whether the stop file is completely written; a user may have made an empty one."""
    try:
        found = stop_file.stat()
    except OSError:
        return False
    return found.st_size > 0 or time.time() - found.st_mtime > _EMPTY_STOP_FILE_S


def cancel_reason(run: RunDir) -> str:
    """Return `cancelled by` and the user that its CANCEL file names, or only `cancelled`."""
    try:
        by = (read_json(run.cancel_file) or {}).get("by")
    except (ClusterddpError, OSError, AttributeError):
        by = None
    return f"cancelled by {by}" if by else "cancelled"


def confirm_stop(assignment: Assignment, progress: dict[str, Any]) -> str:
    """Record that the program ended because of the stop, and return why that was requested.

    `progress`: the program's last step, `{"step": 120}`.
    """
    from clusterddp.system.storage import retry_outage  # a rank imports this module before its program

    attempt, stop_file = assignment.attempt, assignment.stop_file
    retry_outage(lambda: make_attempt_dirs(attempt))
    retry_outage(lambda: write_json(attempt.stopped, progress | {"time": time.time()}, exclusive=True))
    return read_stop(stop_file)[0] if stop_requested(stop_file) else "asked for on another host"
