"""Where the ranks of a run are: the request for stacks, a rank's stack, the report of all, and what follows from it.

A command creates `attempts/N/STACKS`; the head removes it, asks every node, and writes `attempts/N/stacks/ID.json`. The
report is folded by pure functions: who waits for whom, which ranks differ, and whether that is a hang.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.system.files import read_record, read_regular, write_json
from clusterddp.wire import Written, build, read_object

_ID = re.compile(r"[A-Za-z0-9-]{1,40}")
_MAX_REQUEST_BYTES = 4096
_STALE_S = 30.0
"""A request that is older was not seen by any supervisor; it no longer holds up a new one."""
_FRAME = re.compile(r'  File "(.*)", line ([0-9]{1,9}) in (.*)')
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
class StackReport(Written):
    """Where the ranks of an attempt are at one moment."""

    id: str
    attempt: int
    time: float
    """Seconds since the epoch."""
    world_size: int
    ranks: tuple[RankStack, ...]
    missing: tuple[str, ...] = ()
    """The nodes that did not answer, in words."""


def report_file(attempt: AttemptDir, report_id: str) -> Path:
    """Return the file of a report."""
    return attempt.stacks / f"{report_id}.json"


def new_report_id() -> str:
    """Return an id for a report."""
    return f"{int(time.time())}-{os.urandom(3).hex()}"


def request_stacks(attempt: AttemptDir, report_id: str | None = None) -> str:
    """Ask for a report; return its id, which is another process's where that has asked already."""
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
    """Write a report durably."""
    path = report_file(attempt, report.id)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_json(path, report.to_json())


def read_report(attempt: AttemptDir, report_id: str) -> StackReport | None:
    """Read a report; None: it is not there (yet)."""
    return read_record(StackReport, report_file(attempt, report_id))


def newest_report(run: RunDir) -> StackReport | None:
    """Read the newest report of a run; None: it has none."""
    files = [*run.path.glob("attempts/*/stacks/*.json"), *run.path.glob("attempts/*/steps/*/stacks/*.json")]
    files.sort(key=lambda path: path.stat().st_mtime)
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


Doing = Literal["waits", "starts", "stopped", "idle", "works", "stuck", "ended"]
"""waits: in a collective. starts: in init_process_group. stopped: by a signal. idle: it uses no core, and is in no
collective. works: it computes, or waits for a disk. stuck: it computes, and its C code holds the GIL."""
Verdict = Literal["hang", "idle", "works"]
"""hang: no rank works, and one waits for others or is stopped. idle: no rank works, and none waits for others."""
_IDLE_CORES = 0.1
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3[.\d]*t?/|^<")
_OWN = re.compile(r"/clusterddp/node/\w+\.py$|/runpy\.py$|^<frozen (?:runpy|importlib)")
_TRAINER = "/clusterddp/train/"
_WRAPPERS = frozenset(
    {"wrapper", "wrapped", "inner", "_fn", "decorate_context", "_wrapped_call_impl", "_call_impl", "<lambda>"}
)
_STARTS = frozenset({"init_process_group", "rendezvous", "_create_c10d_store", "_new_process_group_helper"})
_BACKWARD = "_engine_run_backward"
_EXCHANGE = re.compile(r"/clusterddp/train/(?:exchange|group)\.py$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that do the same at the same place."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    doing: Doing
    place: str
    """Where they are, in words that follow "rank 3 on gpu02"."""
    suspect: bool
    """True for ranks that the others seem to wait for."""

    @property
    def text(self) -> str:
        """Say in one sentence which ranks are where."""
        if self.suspect and len(self.ranks) == 1:
            return f"rank {self.ranks[0]} on {self.hosts[0]} {self.place}"
        if self.suspect:
            return f"{spell_ranks(self.ranks)} {_plural(self.place)}"
        count = len(self.ranks)
        return f"1 rank {self.place}" if count == 1 else f"{count} ranks {_plural(self.place)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Folded:
    """All ranks of a report, those first that the others seem to wait for."""

    groups: tuple[Group, ...]
    verdict: Verdict
    hint: str = ""

    @property
    def suspects(self) -> tuple[int, ...]:
        return tuple(rank for group in self.groups if group.suspect for rank in group.ranks)

    @property
    def text(self) -> str:
        """Say in one line where the ranks are."""
        return "; ".join(group.text for group in self.groups)


def fold(report: StackReport, *, stuck: Iterable[int] = ()) -> Folded:
    """Fold a report; `stuck`: ranks that are known not to have moved since an earlier one."""
    unmoved = set(stuck)
    doing = {each.rank: _doing(each, moved=each.rank not in unmoved) for each in report.ranks}
    suspects = _suspects(report.ranks, doing)
    groups: dict[tuple[bool, Doing, str], list[RankStack]] = {}
    for each in sorted(report.ranks, key=lambda each: each.rank):
        place = _place(each, doing[each.rank], report.ranks if each.rank in suspects else ())
        groups.setdefault((each.rank in suspects, doing[each.rank], place), []).append(each)
    folded = [
        Group(
            ranks=tuple(each.rank for each in members),
            hosts=tuple(dict.fromkeys(each.host for each in members)),
            doing=kind,
            place=place,
            suspect=suspect,
        )
        for (suspect, kind, place), members in groups.items()
    ]
    folded.sort(key=lambda group: (not group.suspect, -len(group.ranks), group.ranks))
    found, hint = set(doing.values()), ""
    if "starts" in found:
        hint = (
            "init_process_group returns once as many ranks have come as its world_size says. Usual reasons: its "
            f"world_size is not {report.world_size}, the number of ranks of the run; two processes use one rank; "
            "init_method names a file of an earlier run"
        )
    verdict: Verdict = "hang" if found & {"waits", "starts", "stopped", "stuck"} else "idle"
    return Folded(groups=tuple(folded), verdict="works" if "works" in found else verdict, hint=hint)


def unmoved_ranks(before: StackReport | None, now: StackReport) -> set[int]:
    """Return the ranks whose main thread is where it was in an earlier report."""
    if before is None:
        return set()
    earlier = {each.rank: each.frames for each in before.ranks}
    return {each.rank for each in now.ranks if each.frames and earlier.get(each.rank) == each.frames}


def _doing(each: RankStack, *, moved: bool) -> Doing:
    if each.state == "T":
        return "stopped"
    if each.state in {"", "Z", "X"}:
        return "ended"
    busy = each.cpu is not None and each.cpu >= _IDLE_CORES
    functions = {_name(frame) for frame in each.frames}
    library = any("/torch/distributed/" in frame.file for frame in each.frames)
    if functions & _STARTS and library:
        return "starts"
    # A backward pass waits for gradients, the trainer for other ranks in shared memory.
    in_exchange = _BACKWARD in functions or any(_EXCHANGE.search(frame.file) for frame in each.frames[:3])
    if each.pending or ((library or in_exchange) and not busy):
        return "waits"
    if busy and each.answers is False and not moved:
        return "stuck"
    return "works" if busy or each.state == "D" else "idle"


def _suspects(ranks: Sequence[RankStack], doing: dict[int, Doing]) -> set[int]:
    """Choose the ranks that the others seem to wait for; none where all are alike."""
    stopped = {rank for rank, each in doing.items() if each == "stopped"}
    if stopped:
        return stopped
    waiting = {rank for rank, each in doing.items() if each in {"waits", "starts"}}
    others = set(doing) - waiting
    if waiting and others:
        return others
    behind = _behind(ranks)
    if behind and len(behind) < len(ranks):
        return behind
    places: dict[str, set[int]] = {}
    for each in ranks:
        places.setdefault(_place(each, doing[each.rank], ()), set()).add(each.rank)
    by_size = sorted(places.values(), key=len)
    if len(by_size) > 1 and len(by_size[-1]) > len(ranks) / 2:
        return set().union(*by_size[:-1])
    return set()


def _behind(ranks: Sequence[RankStack]) -> set[int]:
    """Return the ranks that have not entered a collective of a process group that others of it have entered."""
    behind: set[int] = set()
    for group in {group for each in ranks for group in each.collectives}:
        entered = {each.rank: each.collectives[group].enqueued for each in ranks if group in each.collectives}
        behind |= {rank for rank, number in entered.items() if number < max(entered.values())}
    return behind


def _place(each: RankStack, doing: Doing, others: Sequence[RankStack]) -> str:
    """Say where a rank is; `others`: all ranks, to name the collective that this one has not entered."""
    missed = _missed(each, others)
    if doing == "stopped":
        return f"is stopped by a signal{missed}"
    if doing == "ended":
        return "has ended"
    if not each.frames:
        return f"shows no stack{': ' if each.missing else ''}{each.missing}{missed}"
    if each.children and not any(_is_users(frame) for frame in each.frames):
        return f"runs {each.children[-1]}{missed}"
    call, caller = _call_of(each.frames)
    where = f"{PurePath(caller.file).name}:{caller.line}"
    where += f" {caller.function}" if caller.function != "<module>" else ""
    verb = {"waits": "waits in", "starts": "waits in", "stuck": "holds the GIL in", "works": "computes in"}.get(doing)
    if call is None:
        source = f": {caller.source}" if caller.source else ""
        return f"{verb or 'is in'} {caller.function} ({PurePath(caller.file).name}:{caller.line}{source}){missed}"
    pending = [group.enqueued for group in each.collectives.values() if group.enqueued > max(0, group.completed)]
    number = f" #{pending[0]}" if pending and doing == "waits" else ""
    return f"{verb or 'is in'} {call}{number} (called from {where}){missed}"


def _missed(each: RankStack, others: Sequence[RankStack]) -> str:
    """Name the newest collective that others have entered and this rank has not."""
    for group, own in each.collectives.items():
        ahead = [other.collectives[group] for other in others if group in other.collectives]
        first = max(ahead, key=lambda found: found.enqueued, default=own)
        if first.enqueued > own.enqueued:
            return f", and has not entered {first.name or 'the collective'} #{first.enqueued}"
    return ""


def _call_of(frames: Sequence[Frame]) -> tuple[str | None, Frame]:
    """Return what the user's innermost frame calls, and that frame; None: nothing that has a Python frame."""
    place = next((at for at, frame in enumerate(frames) if _is_users(frame)), None)
    if place is None:
        place = next((at for at, frame in enumerate(frames) if _TRAINER in frame.file), None)
    if place is None:
        others = [at for at, frame in enumerate(frames) if not _OWN.search(frame.file)]
        place = others[-1] if others else len(frames) - 1
    for frame in reversed(frames[:place]):
        if _name(frame) not in _WRAPPERS:
            return _call_name(frame), frames[place]
    return None, frames[place]


def _is_users(frame: Frame) -> bool:
    return not (_LIBRARY.search(frame.file) or _OWN.search(frame.file) or _TRAINER in frame.file)


def _name(frame: Frame) -> str:
    """Return the name of a function without those of what it is defined in, which Python 3.11 has."""
    return frame.function.rpartition(".")[2]


def _call_name(frame: Frame) -> str:
    name = _name(frame)
    if frame.function != name and "<locals>" not in frame.function:
        return frame.function
    if "/torch/distributed/" in frame.file or not name.startswith("_"):
        return name
    return f"{PurePath(frame.file).stem}.{name}"


def _plural(place: str) -> str:
    """Turn "waits in x" into "wait in x"."""
    singular = {"waits": "wait", "is": "are", "has": "have", "holds": "hold", "computes": "compute", "runs": "run"}
    word, space, rest = place.partition(" ")
    return f"{singular.get(word, word)}{space}{rest}".replace(", and has not", ", and have not")
