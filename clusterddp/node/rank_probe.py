"""Asks the ranks of this node where they are: the thread that answers, else the signal, and what /proc shows.

Nothing here blocks: the supervisor's loop goes on while ranks write their stacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.network.rendezvous.connection import Message
from clusterddp.node.stack_hook import MEMORY_PREFIX, ROOT, STACKS, peer_of, socket_name, stack_signal
from clusterddp.run.stacks import Answer, Frame, RankStack, parse_answer, parse_stacks
from clusterddp.system.files import read_regular
from clusterddp.system.processes import find_descendants, read_command, read_state

PATIENCE_S = 3.0
"""How long a rank may take to write its stacks and to answer."""
SIGNAL_AFTER_S = 1.0
"""A rank that has not answered by then gets the signal."""
_SETTLED_S = 0.06
"""A stack is complete when nothing was added for so long: faulthandler writes no end."""
_MAX_RAW_BYTES = 24_000
_MAX_ANSWER_BYTES = 1 << 20
_CHUNK = 65_536
_MAX_SOURCE_LINE = 100
_MAX_SOURCE_BYTES = 1 << 20
_MAX_CHILDREN, _MAX_GROUPS, _MAX_FRAMES, _MAX_NAME = 6, 64, 60, 300
_MAX_WRAPPERS = 4
"""So many programs may stand between a rank and its Python: `bash -c`, `numactl`, `apptainer exec`."""
_SOURCE_LINES = 12
"""Of so many frames the text of the line is read."""


@dataclass(kw_only=True, slots=True)
class Question:
    """A question of the head to all nodes; subclasses hold the answers."""

    due: float
    """When the head stops waiting."""
    awaited: set[int]
    """The nodes that have not answered, by rank."""

    def send(self, order: Message, send: Callable[[int, Message], None]) -> None:
        """Send it to all nodes."""
        for node_rank in sorted(self.awaited):
            send(node_rank, order)

    def is_over(self, nodes: Iterable[int], now: float) -> bool:
        """Return whether all nodes have answered, or the time is up; `nodes`: those that are not lost."""
        self.awaited &= set(nodes)
        return not self.awaited or now >= self.due


class AskedRank:
    """A question to one rank's thread that answers; no answer means that its Python does not run."""

    def __init__(self, key: str, question: bytes = STACKS) -> None:
        self.answer: Answer | None = None
        """To `STACKS`; None: nothing yet, or nonsense."""
        self.data = b""
        """The whole answer, once it is `done`."""
        self.done = False
        self._is_of_stacks = question == STACKS
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(socket_name(key))
            if peer_of(self._socket)[1] not in (ROOT, os.getuid()):  # the name was free: the rank has closed its socket
                raise PermissionError
            self._socket.send(question)
        except OSError:  # nothing of ours listens, or so many questions wait that the kernel refuses another one
            self.close()

    def step(self) -> None:
        """Read what has arrived."""
        while not self.done:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.data += data
            if not data or len(self.data) > _MAX_ANSWER_BYTES:
                self.answer = parse_answer(self.data) if self._is_of_stacks else None
                self.close()

    def close(self) -> None:
        self.done = True
        self._socket.close()


def python_of(pid: int) -> int:
    """Return the process of a rank that answers: itself, or the Python that a shell or a wrapper has started."""
    level = [pid]
    for _ in range(_MAX_WRAPPERS):
        for each in level:
            if find_memory(each) is not None:
                return each
        level = [int(child) for each in level for child in _read_children(each)]
    return pid


def _read_children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []


def find_memory(pid: int) -> tuple[str, str] | None:
    """Find the memory into which a rank writes its stacks: its path in /proc, and the key of the rank's socket.

    None: this process takes no signal, as long as it runs another program, too.
    """
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = str(Path(folder, name).readlink()).removeprefix("/memfd:")
                if target.startswith(MEMORY_PREFIX):
                    return f"{folder}/{name}", target.removeprefix(MEMORY_PREFIX).partition(" ")[0]
    except OSError:
        pass
    return None


def takes_signal(pid: int) -> bool:
    """Say whether a process has a handler for the signal: one that has none would be killed by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    except (OSError, ValueError, IndexError):
        return False
    return bool(caught >> (stack_signal() - 1) & 1)


@dataclass(slots=True)
class _Probe:
    """One rank that is being asked."""

    pid: int
    state: str
    key: str = ""
    """Names the memory into which it writes when it gets the signal."""
    memory: int | None = None
    """A descriptor of it, once it has the signal."""
    asked: AskedRank | None = None
    signalled: bool = False
    missing: str = ""
    size: int = 0
    changed_at: float = 0.0
    raw: str = ""

    @property
    def answer(self) -> Answer | None:
        return self.asked.answer if self.asked is not None else None

    @property
    def done(self) -> bool:
        return self.asked is None or (self.answer is not None and self.memory is None)


@dataclass(slots=True)
class Probes:
    """The ranks of a node that are being asked for their stacks."""

    begun: float
    """Seconds of the monotonic clock."""
    id: str
    probes: dict[int, _Probe] = field(default_factory=dict)

    @classmethod
    def begin(cls, report_id: str, pids: Mapping[int, int]) -> Probes:
        """Ask ranks (rank -> pid), none of which was reaped."""
        now = time.monotonic()
        return cls(begun=now, id=report_id, probes={rank: _begin(pid, now) for rank, pid in pids.items()})

    def step(self) -> bool:
        """Read what has arrived; True once all ranks have answered, or had their time."""
        now = time.monotonic()
        late = now - self.begun >= PATIENCE_S
        for probe in self.probes.values():
            if probe.asked is None:
                continue
            probe.asked.step()
            if not (probe.signalled or probe.answer) and now - self.begun >= SIGNAL_AFTER_S:
                _signal(probe, now)
            if probe.answer is not None:
                _close(probe)
            elif probe.memory is not None:
                _read_memory(probe, now, late=late)
        return late or all(probe.done for probe in self.probes.values())

    def results(self, host: str, cpus: Mapping[int, float]) -> list[RankStack]:
        """Return what is known of each rank; `cpus`: the cores that it used lately."""
        children = children_of({probe.pid for probe in self.probes.values()})
        found = [
            _result(rank, probe, host, cpus.get(rank), children.get(probe.pid, []))
            for rank, probe in self.probes.items()
        ]
        for probe in self.probes.values():
            _close(probe)
            if probe.asked is not None:
                probe.asked.close()
        return found


def _begin(pid: int, now: float) -> _Probe:
    pid = python_of(pid)
    probe = _Probe(pid=pid, state=read_state(pid), changed_at=now)
    found = find_memory(pid)
    if probe.state == "T":
        probe.missing = "it is stopped by a signal"
    elif probe.state in {"", "Z", "X"}:
        probe.missing = "it has ended"
    elif found is None:
        probe.missing = "it is no Python that clusterddp has started, or it has just begun"
    else:
        probe.key, probe.asked = found[1], AskedRank(found[1])
    return probe


def _signal(probe: _Probe, now: float) -> None:
    """Have a rank that does not answer write its main thread's stack; one that has no handler is not signalled."""
    probe.signalled = True
    found = find_memory(probe.pid)
    if found is None or found[1] != probe.key:  # the pid may be another process's by now
        probe.missing = "it has ended"
        return
    if not takes_signal(probe.pid):
        probe.missing = "it does not answer, and takes no signal"
        return
    try:
        probe.memory = os.open(found[0], os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(probe.memory, 0)
        os.kill(probe.pid, stack_signal())
    except OSError as error:
        probe.missing = f"it cannot be asked: {error.strerror}"
        _close(probe)
    probe.size, probe.changed_at = 0, now


def _read_memory(probe: _Probe, now: float, *, late: bool) -> None:
    assert probe.memory is not None
    size = os.fstat(probe.memory).st_size
    if size != probe.size:
        probe.size, probe.changed_at = size, now
    if not late and (size == 0 or now - probe.changed_at < _SETTLED_S):
        return
    probe.raw = os.pread(probe.memory, _MAX_RAW_BYTES, 0).decode("utf-8", errors="replace")
    if not probe.raw:
        probe.missing = "it does not answer, and has not taken the signal"
    _close(probe)


def _close(probe: _Probe) -> None:
    if probe.memory is not None:
        os.close(probe.memory)
        probe.memory = None


def children_of(pids: set[int]) -> dict[int, list[int]]:
    """Find what each rank has started, and what that has started: pid of the rank -> pids."""
    found = find_descendants(pids)
    children: dict[int, list[int]] = {}
    for pid in sorted(found):
        above = found[pid].parent
        while above not in pids and above in found:
            above = found[above].parent
        children.setdefault(above, []).append(pid)
    return children


def _result(rank: int, probe: _Probe, host: str, cpu: float | None, children: Sequence[int]) -> RankStack:
    answer = probe.answer
    raw = "\n\n".join(thread.text for thread in answer.threads)[:_MAX_RAW_BYTES] if answer else probe.raw
    frames = answer.frames if answer else parse_stacks(probe.raw)
    return RankStack(
        rank=rank,
        host=host,
        pid=probe.pid,
        state=read_state(probe.pid) or probe.state,
        cpu=None if cpu is None else round(cpu, 2),
        frames=with_sources(frames),
        missing="" if answer else probe.missing,
        answers=None if probe.asked is None else answer is not None,
        collectives=dict(list(answer.collectives.items())[:_MAX_GROUPS]) if answer else {},
        children=tuple(
            f"pid {pid} ({read_state(pid) or 'ended'}): {' '.join(read_command(pid))[:120]}"
            for pid in children[:_MAX_CHILDREN]
        ),
        raw=raw,
    )


def with_sources(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Add the text of the line to the first frames; cut names that fill a message between supervisors."""
    return tuple(
        dataclasses.replace(
            frame,
            file=frame.file[-_MAX_NAME:],
            function=frame.function[:_MAX_NAME],
            source=_source_line(frame) if place < _SOURCE_LINES else "",
        )
        for place, frame in enumerate(frames[:_MAX_FRAMES])
    )


def _source_line(frame: Frame) -> str:
    if frame.file.startswith("<"):
        return ""
    try:
        data = read_regular(Path(frame.file), _MAX_SOURCE_BYTES, follow=True)
    except (OSError, ClusterddpError):
        return ""
    lines = data.decode("utf-8", errors="replace").splitlines()
    line = lines[frame.line - 1].strip().partition("  # ")[0] if 0 < frame.line <= len(lines) else ""
    return line if len(line) <= _MAX_SOURCE_LINE else f"{line[: _MAX_SOURCE_LINE - 3]}..."
