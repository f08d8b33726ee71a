"""The spool: ends of attempts that could not be written to a run's own storage, in the user's state directory.

It keeps the reason of an end when the disk of the run is full, read-only or lost. A reader that finds no `end.json`
looks here. On a cluster it helps if home directories are shared and on other storage than the runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import AttemptDir
from clusterddp.run.outcome import AttemptEnd, parse_end, write_end
from clusterddp.system.files import read_json, write_json


def spool_end(token: str, attempt: int, end: AttemptEnd) -> bool:
    """Write the end of an attempt to the spool; False: it has one already, or cannot be written."""
    path = _path(token, attempt)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write_json(path, dataclasses.asdict(end), exclusive=True)
    except (ClusterddpError, OSError):
        return False


def read_spooled(token: str, attempt: int) -> AttemptEnd | None:
    """Read the end of an attempt from the spool; None if it has none."""
    path = _path(token, attempt)
    with contextlib.suppress(OSError):
        data = read_json(path)
        return None if data is None else parse_end(data, str(path))
    return None


def deliver_end(attempt: AttemptDir, token: str, end: AttemptEnd) -> None:
    """Move the end of an attempt from the spool to the run, if the run's storage takes it now."""
    path = _path(token, attempt.number)
    if path.exists():
        with contextlib.suppress(ClusterddpError, OSError):
            write_end(attempt, end)
            path.unlink(missing_ok=True)


def _path(token: str, attempt: int) -> Path:
    # The same path as platformdirs, which is not installed on every host of an SSH run.
    state = os.environ.get("XDG_STATE_HOME", "").strip() or "~/.local/state"
    # Hashed: a record that another user has written must not lead to another file.
    name = hashlib.sha256(f"{token} {attempt}".encode()).hexdigest()[:32]
    return Path(state).expanduser() / "clusterddp" / "ends" / f"{name}.json"
