"""Where the ranks of a run are: the request for stacks, a rank's stack, and the report of all of them.

A command creates `attempts/N/STACKS`; the head removes it, asks every node, and writes `attempts/N/stacks/ID.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.system.files import read_record, read_regular, write_json
from clusterddp.wire import build, read_object

_ID = re.compile(r"[A-Za-z0-9-]{1,40}")
_MAX_REQUEST_BYTES = 4096
_STALE_S = 30.0
"""A request that is older was not seen by any supervisor; it no longer holds up a new one."""
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_MAX_FRAMES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A frame of a Python stack."""

    file: str
    line: int
    function: str
    source: str = ""
    """The text of the line, where the rank's host could read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """How far a rank is in one process group, by the sequence numbers of torch's Flight Recorder."""

    enqueued: int
    completed: int
    name: str = ""
    """Of the one that was enqueued last, such as all_reduce."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """Where a thread of a rank is."""

    main: bool
    name: str
    frames: tuple[tuple[str, int, str], ...]
    """File, line and function, innermost first."""

    @property
    def text(self) -> str:
        """Write it as faulthandler does."""
        lines = [f'  File "{file}", line {line} in {function}' for file, line, function in self.frames]
        return "\n".join([f"{'Main thread' if self.main else f'Thread {self.name}'} (most recent call first):", *lines])


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a rank's own thread answers."""

    threads: tuple[Thread, ...]
    collectives: dict[str, Collectives]

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return the main thread's."""
        found = next((thread.frames for thread in self.threads if thread.main), ())
        return tuple(Frame(file=file, line=line, function=function) for file, line, function in found)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStack:
    """Where one rank is."""

    rank: int
    host: str
    pid: int
    state: str
    """As /proc has it: R runs, S sleeps, D waits for a disk, T is stopped by a signal; empty: it is gone."""
    cpu: float | None = None
    """Cores that it and its children used lately, or waited for; None: not known."""
    frames: tuple[Frame, ...] = ()
    """Of the main thread, innermost first."""
    missing: str = ""
    """Why there are no frames."""
    answers: bool | None = None
    """Whether its Python could run a thread within the wait; False: the GIL is held. None: it was not asked."""
    collectives: dict[str, Collectives] = field(default_factory=dict)
    """By process group."""
    children: tuple[str, ...] = ()
    """The processes that it has started, in words."""
    raw: str = ""
    """The stacks of all threads; only of the main thread, where the GIL is held."""

    @property
    def pending(self) -> bool:
        """True when it has entered a collective that is not complete."""
        return any(each.enqueued > max(0, each.completed) for each in self.collectives.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class StackReport:
    """Where the ranks of an attempt are at one moment."""

    id: str
    attempt: int
    time: float
    """Seconds since the epoch."""
    world_size: int
    ranks: tuple[RankStack, ...]
    missing: tuple[str, ...] = ()
    """The nodes that did not answer, in words."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def report_file(attempt: AttemptDir, report_id: str) -> Path:
    """Return the file of a report."""
    return attempt.stacks / f"{report_id}.json"


def new_report_id() -> str:
    """Return an id for a report."""
    return f"{int(time.time())}-{os.urandom(3).hex()}"


def request_stacks(attempt: AttemptDir, report_id: str | None = None) -> str:
    """Ask for a report; return its id, which is another process's where that has asked already.

    Raises: ClusterddpError: the file system refuses.
    """
    path = attempt.stacks_request
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _STALE_S:
            path.unlink()
    wanted = report_id if report_id and _ID.fullmatch(report_id) else new_report_id()
    if write_json(path, {"id": wanted, "time": time.time()}, exclusive=True):
        return wanted
    return _read_id(path) or wanted


def take_request(attempt: AttemptDir) -> str | None:
    """Remove the request for a report, and return its id; None: there is none.

    It lists the directory: NFS may answer for one file from its cache.
    """
    path = attempt.stacks_request
    try:
        if path.name not in os.listdir(attempt.path):
            return None
        found = _read_id(path)
        path.unlink()
    except OSError:
        return None
    return found


def write_report(attempt: AttemptDir, report: StackReport) -> None:
    """Write a report durably.

    Raises: ClusterddpError, OSError: the file system refuses.
    """
    path = report_file(attempt, report.id)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_json(path, report.to_json())


def read_report(attempt: AttemptDir, report_id: str) -> StackReport | None:
    """Read a report; None: it is not there (yet).

    Raises: ClusterddpError: what is there is none.
    """
    return read_record(StackReport, report_file(attempt, report_id))


def newest_report(run: RunDir) -> StackReport | None:
    """Read the newest report of a run; None: it has none."""
    files = sorted(run.path.glob("attempts/*/stacks/*.json"), key=lambda path: path.stat().st_mtime)
    return read_record(StackReport, files[-1]) if files else None


def parse_stacks(text: str) -> tuple[Frame, ...]:
    """Return the frames, innermost first, that faulthandler has written of one thread."""
    found = [_FRAME.fullmatch(line) for line in text.splitlines()[: _MAX_FRAMES + 2]]
    return tuple(Frame(file=each[1], line=int(each[2]), function=each[3]) for each in found if each)


def parse_answer(data: bytes) -> Answer | None:
    """Read what a rank's thread has answered; None: it is no answer."""
    try:
        return build(Answer, read_object(data))
    except ValueError:
        return None


def _read_id(path: Path) -> str | None:
    try:
        found = read_object(read_regular(path, _MAX_REQUEST_BYTES)).get("id")
    except (OSError, ValueError, ClusterddpError):
        return None
    return found if isinstance(found, str) and _ID.fullmatch(found) else None
