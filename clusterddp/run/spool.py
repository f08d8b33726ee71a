"""The spool: ends of attempts that a run's own storage does not take, kept in the user's state directory.

A disk that is full or read-only, or storage that is away for good, must not hide why a run ended. Whoever finds no
`end.json` looks here. On a cluster this is of use where home directories are shared, and are not on the same storage.
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
    """Keep the end of an attempt here; False: one is kept already, or this storage does not take it, either."""
    path = _path(token, attempt)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write_json(path, dataclasses.asdict(end), exclusive=True)
    except (ClusterddpError, OSError):
        return False


def read_spooled(token: str, attempt: int) -> AttemptEnd | None:
    """Read the end of an attempt that the spool has; None where it has none."""
    path = _path(token, attempt)
    with contextlib.suppress(OSError):
        data = read_json(path)
        return None if data is None else parse_end(data, str(path))
    return None


def deliver_end(attempt: AttemptDir, token: str, end: AttemptEnd) -> None:
    """Move the end of an attempt from the spool to its place, if that storage takes it now."""
    path = _path(token, attempt.number)
    if path.exists():
        with contextlib.suppress(ClusterddpError, OSError):
            write_end(attempt, end)
            path.unlink(missing_ok=True)


def _path(token: str, attempt: int) -> Path:
    # As platformdirs has it, which a host of an SSH run need not have.
    state = os.environ.get("XDG_STATE_HOME", "").strip() or "~/.local/state"
    # Hashed, for a record that another user has written must name no other file.
    name = hashlib.sha256(f"{token} {attempt}".encode()).hexdigest()[:32]
    return Path(state).expanduser() / "clusterddp" / "ends" / f"{name}.json"
