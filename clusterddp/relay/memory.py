"""What a relay remembers between its calls: how far it has copied a run to one target, in a file of the run.

The file lies in the run's directory, or in the caller's state directory where that is another user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.relay.facts import RunFacts
from clusterddp.relay.rows import Place
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_record, write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """How far a run was copied to one target."""

    target: str
    """The tracker, its address and the project, for people."""
    stored: Place = field(default_factory=Place)
    """The tracker has every row before it."""
    sending: Place = field(default_factory=Place)
    """Rows from `stored` to here may have been sent, by a call that runs or was killed."""
    ended: str = ""
    """Which end the tracker knows: `1 COMPLETED` is the first resumed attempt; empty: none."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the tracker's part needs to continue."""


class MemoryFile:
    """The memory of one run and target; one process at a time may have it."""

    def __init__(self, run: RunDir, facts: RunFacts, target: str) -> None:
        self._target = target
        name = f"{target.partition(' ')[0]}-{hashlib.sha256(target.encode()).hexdigest()[:8]}.json"
        self.path = _folder(run, facts) / name

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the memory.

        Raises: UsageError: another process copies the run to this target. ClusterddpError: it cannot be written.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ClusterddpError(f"{error.filename}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UsageError(f"another process relays this run to {self._target}") from None
        try:
            yield
        finally:
            os.close(lock)  # which releases the lock

    def read(self) -> Memory:
        """Read the memory; an empty one where nothing was copied yet.

        Raises: ClusterddpError: it cannot be read.
        """
        return read_record(Memory, self.path) or Memory(target=self._target)

    def write(self, memory: Memory) -> None:
        """Raises: ClusterddpError: it cannot be written."""
        write_json(self.path, dataclasses.asdict(memory))


def _folder(run: RunDir, facts: RunFacts) -> Path:
    if os.stat(run.path).st_uid == os.geteuid():
        return run.relay
    return platformdirs.user_state_path("clusterddp") / "relay" / facts.id
