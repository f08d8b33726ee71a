"""The stop contract: how a run is asked to checkpoint and end, and how its program says that it did.

USR2, SIGTERM, the file CLUSTERDDP_STOP_FILE, or the approaching time limit ask for a stop. Any rank may see it first;
the program agrees on one step over all ranks, writes a checkpoint there, confirms, and every rank exits with 0.
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
from clusterddp.run.directory import ASKED, AttemptDir, RunDir
from clusterddp.system.files import is_file, read_json, read_regular, write_json
from clusterddp.wire import read_object

_EMPTY_STOP_FILE_S = 0.3
"""A stop file without content is being written, or was made by hand; the first does not last."""
LOOK_EVERY_S = 0.25
"""How often a program that asks in every step looks for the file."""


def request_stop(stop_file: Path, reason: str, *, ordered: bool = False) -> None:
    """Ask for a stop; the first reason given stays. `ordered`: the head has decided it, so the file asks nothing new.

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
    """Say whether a stop was asked for (one stat call); storage that is away asks for none."""
    return is_file(stop_file)


def looking_at(
    stop_file: Path, *, every_s: float = LOOK_EVERY_S, clock: Callable[[], float] = time.monotonic
) -> Callable[[], bool]:
    """Return what tells whether a stop was asked for, and looks at the file no more often than `every_s`.

    Steps may take 3 ms, and every rank of a run that asks a shared file system 300 times a second is a load on it.
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


def stop_reason(stop_file: Path) -> str:
    """Return why the stop was asked for; a file that somebody made by hand has no reason of its own."""
    try:
        data = read_object(read_regular(stop_file, 65536))
        return str(data["reason"])
    except (OSError, ValueError, KeyError, ClusterddpError):
        return f"the file {stop_file.name}"


def is_complete(stop_file: Path) -> bool:
    """Return whether the stop file is there with its whole content; a user may have made it empty."""
    try:
        found = stop_file.stat()
    except OSError:
        return False
    return found.st_size > 0 or time.time() - found.st_mtime > _EMPTY_STOP_FILE_S


def cancel_reason(run: RunDir) -> str:
    """Return by whom the run was cancelled, as far as its CANCEL file names that."""
    try:
        by = (read_json(run.cancel_file) or {}).get("by")
    except (ClusterddpError, OSError, AttributeError):
        by = None
    return f"cancelled by {by}" if by else "cancelled"


def was_ordered(stop_file: Path) -> bool:
    """Return whether the head has ordered the stop that the file asks for, not a user or another process."""
    try:
        return read_object(read_regular(stop_file, 65536)).get("ordered") is True
    except (OSError, ValueError, ClusterddpError):
        return False


def confirm_stop(attempt: AttemptDir, progress: dict[str, Any]) -> None:
    """Record that the program ended because of the stop; `progress` says how far it came, e.g. `{"step": 120}`."""
    write_json(attempt.stopped, progress | {"time": time.time()}, exclusive=True)
