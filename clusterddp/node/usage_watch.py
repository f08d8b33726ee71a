"""What ranks use (cores, memory, GPU) and how fast they are.

The head (`UsageWatch`) asks all nodes, finds stragglers and writes the file. A node (`NodeUsage`) looks at its ranks,
and asks them for their steps and for when they entered their collectives. Nothing here blocks.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.network.rendezvous.connection import Message
from clusterddp.node.log import log, log_line
from clusterddp.node.processes import start_into_memory
from clusterddp.node.rank_probe import AskedRank, Question, children_of, find_memory, python_of
from clusterddp.node.stack_hook import PACE
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.rank_usage import RankUsage, Straggler, UsageReport, warn_of, write_usage
from clusterddp.system.processes import read_cpu_and_memory
from clusterddp.wire import build, read_object

_FIRST_S = 5.0
_EVERY_S = ((60.0, 10.0), (3600.0, 30.0), (float("inf"), 60.0))
"""Seconds since the attempt began, and between two looks until then."""
_PATIENCE_S = 3.0
"""How long a node takes at most; a rank that has not answered by then holds its GIL."""
_ANSWER_S = _PATIENCE_S + 4.0
_FEWEST_ENTERED, _MOST_ENTERED, _ENTERED_OF_ALL = 48, 200, 100_000
"""How many collectives are read: of each rank, and of all; 2,000 ranks cost the head 1 s for each look."""
_LATE = 0.2
"""A straggler is late by this part of a step, in two looks in a row."""
_LEAST_LATE_S = 0.002
_NODE = {"asked": float, "received": float, "sent": float, "ranks": dict[str, Any]}
_RANK = {
    "cpu": float | None,
    "memory": int | None,
    "gpu": float | None,
    "gpu_memory": int | None,
    "step": int | None,
    "own_step_s": float | None,
    "entered": list[tuple[int, int, int]] | None,
    "meets": bool | None,
}
Entered = Mapping[int, tuple[int, float]]
"""By the number of a collective: what it is, and when a rank entered it, in seconds of the head's clock."""
_FEWEST_STEPS = 3
_MUCH_LONGER = 3.0
_OUTLIERS = 2
_QUERY_GPUS = ("--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_QUERY_APPS = ("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
_GPUS_AGAIN_S = 600.0
_MAX_ENTERED = 3200
"""Collectives in one report, which has to fit into a message."""


@dataclass(kw_only=True, slots=True)
class _Answers(Question):
    """What nodes have answered to one question."""

    asked_at: float
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    entered: dict[int, Entered] = field(default_factory=dict)
    error_s: float = 0.0
    """By how much a node's clock may differ from what was found."""


class UsageWatch:
    """One attempt's."""

    def __init__(self, run: RunDir, gang: Gang, attempt: AttemptDir, send: Callable[[int, Message], None]) -> None:
        self._run = run
        self._gang = gang
        self._attempt = attempt
        self._send = send
        self._most = max(_FEWEST_ENTERED, min(_MOST_ENTERED, _ENTERED_OF_ALL // gang.num_ranks))
        """Of the newest collectives of each rank."""
        self._next_at: float | None = None
        self._collection: _Answers | None = None
        self._steps: dict[int, tuple[float, int]] = {}
        """Of each rank: a time, and the steps done by then."""
        self._late_before: frozenset[int] = frozenset()
        self._named: frozenset[int] = frozenset()
        self._last: UsageReport | None = None
        self.meets: bool | None = None
        """Whether a rank was seen in a collective; None: not all ranks have said so far."""

    def on_report(self, node_rank: int, report: Message, _now: float) -> None:
        """Take in the answer of a node; what is no answer leaves its ranks out."""
        collection, got = self._collection, time.time()
        if collection is None or report.get("asked") != collection.asked_at:
            return
        collection.awaited.discard(node_rank)
        own = {rank for node in self._gang.nodes if node.node_rank == node_rank for rank in node.ranks}
        try:
            node = build(_NODE, report)
            ranks = {int(rank): build(_RANK, each) for rank, each in node["ranks"].items()}
        except ValueError as error:
            log_line(f"node {node_rank} sends something other than the use of its ranks: {error}")
            return
        # The head asks, and answers for its own ranks, by one clock.
        there_s, here_s = node["received"] - node["asked"], node["sent"] - got
        is_head = node_rank == self._gang.nodes[0].node_rank
        ahead_s, error_s = (0.0, 0.0) if is_head else ((there_s + here_s) / 2, (there_s - here_s) / 2)
        collection.error_s = max(collection.error_s, error_s)
        for rank, each in ranks.items():
            if rank in own:
                entered, began = each.pop("entered") or (), node["received"] - ahead_s
                collection.ranks[rank] = each
                collection.entered[rank] = {number: (kind, began + at / 1e6) for number, kind, at in entered}

    def tick(self, nodes: Iterable[int], begun: float, now: float) -> None:
        """Ask when it is time to; write what was answered. `begun`: when the attempt began, by the clock of `now`."""
        collection = self._collection
        if collection is not None:
            if collection.is_over(nodes, now):
                self._collection = None
                self._take(collection)
            return
        if self._next_at is None:
            self._next_at = begun + _FIRST_S
        if now < self._next_at:
            return
        self._next_at = now + next(every_s for until_s, every_s in _EVERY_S if now - begun < until_s)
        self._collection = _Answers(asked_at=time.time(), due=now + _ANSWER_S, awaited=set(nodes))
        self._collection.send({"kind": "usage", "asked": self._collection.asked_at, "most": self._most}, self._send)

    def _take(self, collection: _Answers) -> None:
        """Write what the ranks use, and name stragglers."""
        if not collection.ranks:
            return
        meet = [each.pop("meets") for each in collection.ranks.values()]
        self.meets = (
            self.meets or any(meet) or (False if len(meet) == meet.count(False) == self._gang.num_ranks else None)
        )
        pace = self._pace(collection)
        named = self._find_stragglers(pace, collection.error_s)
        ranks = tuple(
            RankUsage(
                rank=rank,
                step_s=pace.step_s.get(rank, pace.period_s),
                late_s=pace.late_s.get(rank),
                **{key: value for key, value in each.items() if key != "own_step_s"},
            )
            for rank, each in sorted(collection.ranks.items())
        )
        for rank in sorted(set(named) - self._named):
            who = {"rank": rank, "host": named[rank].host}
            log(self._run, "straggler", attempt=self._attempt.number, **who, text=warn_of([named[rank]]))
        for rank in sorted(self._named - set(named)):
            log(self._run, "straggler_over", attempt=self._attempt.number, rank=rank)
        self._named = frozenset(named)
        self._last = UsageReport(
            time=collection.asked_at,
            ranks=ranks,
            period_s=pace.period_s,
            stragglers=tuple(named.values()),
        )
        try:
            write_usage(self._attempt, self._last)
        except ClusterddpError as error:
            log_line(f"the use of the ranks could not be written: {error}")

    def _pace(self, collection: _Answers) -> Pace:
        """Return the pace by what the program measures, by its collectives, or by the steps that it reports."""
        reported: list[float] = []
        """Seconds of a step since the last look, of ranks that report steps."""
        for rank, each in collection.ranks.items():
            if each["step"] is not None:
                at, before = self._steps.get(rank, (0.0, each["step"]))
                if each["step"] > before:
                    reported.append((collection.asked_at - at) / (each["step"] - before))
                self._steps[rank] = (collection.asked_at, each["step"])
        reported_s = statistics.median(reported) if reported else None
        own_s = {rank: each["own_step_s"] for rank, each in collection.ranks.items() if each["own_step_s"]}
        if len(collection.ranks) < self._gang.num_ranks:
            return Pace(period_s=reported_s)
        if len(own_s) == len(collection.ranks) > 1:
            return pace_of_own_steps(own_s, reported_s)
        return pace_of_collectives(collection.entered, reported_s)

    def _find_stragglers(self, pace: Pace, error_s: float) -> dict[int, Straggler]:
        """Return the ranks that were late in this look and in the one before."""
        if pace.period_s is None:
            return {}
        least_s = max(_LATE * pace.period_s, 2 * error_s, _LEAST_LATE_S)
        late = {rank: late_s for rank, late_s in pace.late_s.items() if late_s >= least_s}
        before, self._late_before = self._late_before, frozenset(late)
        return {
            rank: Straggler(rank=rank, host=self._gang.node_of(rank).host, late_s=late[rank], period_s=pace.period_s)
            for rank in sorted(before & set(late))
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The steps of all ranks; empty where too little is known."""

    period_s: float | None = None
    """Seconds of a step."""
    late_s: dict[int, float] = field(default_factory=dict)
    """By rank: how much later than the median of the others it enters collectives, where that is most."""
    step_s: dict[int, float] = field(default_factory=dict)
    """By rank: a step without its waiting for others."""


def pace_of_collectives(entered: Mapping[int, Entered], period_s: float | None) -> Pace:
    """Judge by the collectives that all ranks have entered; `period_s`: of a step, where that is known."""
    if len(entered) < 2:
        return Pace(period_s=period_s)
    first, *others = entered.values()
    numbers = sorted(n for n in first if all(n in each and each[n][0] == first[n][0] for each in others))
    places: dict[int, list[int]] = {}
    for number in numbers:
        places.setdefault(first[number][0], []).append(number)
    places = {kind: found for kind, found in places.items() if len(found) >= _FEWEST_STEPS}
    if not places:
        return Pace(period_s=period_s)
    if period_s is None:
        # The last rank to enter does not wait: its times have no pauses but between steps.
        times = {number: max(each[number][1] for each in entered.values()) for number in numbers}
        kinds = [[times[number] for number in found] for found in places.values()]
        period_s = _period_of_collectives(list(times.values()), kinds)
        if period_s is None:
            return Pace()
    late = dict.fromkeys(entered, 0.0)
    for found in places.values():
        for rank, late_s in _lateness([{rank: each[number][1] for rank, each in entered.items()} for number in found]):
            late[rank] = max(late[rank], late_s)
    late = {rank: min(late_s, period_s) for rank, late_s in late.items()}
    latest_s = max(late.values())
    step_s = {rank: max(0.0, period_s - latest_s + late_s) for rank, late_s in late.items()}
    return Pace(period_s=period_s, late_s=late, step_s=step_s)


def pace_of_own_steps(own_s: Mapping[int, float], period_s: float | None) -> Pace:
    """Judge by what the program measures itself: a step without waiting, of each rank."""
    ((_, slowest_s),) = sorted(own_s.items(), key=lambda each: each[1])[-1:]
    return Pace(period_s=max(slowest_s, period_s or 0.0), late_s=dict(_lateness([own_s])), step_s=dict(own_s))


def _period_of_collectives(times: Sequence[float], kinds: Sequence[Sequence[float]]) -> float | None:
    """Return the time from one step to the next; None: it is not known, as where a clock was set back.

    `times`: of all collectives; `kinds`: of those of each kind. Kinds that come equally often come once a step, such as
    buckets of gradients of different sizes. Otherwise steps are parted by long gaps. Where several numbers of steps are
    possible, as one of the kinds comes every so many steps, the gaps decide, too.
    """
    gaps = [after - before for before, after in itertools.pairwise(times)]
    long_s = _long_gap(gaps)
    begins = [after for gap, after in zip(gaps, times[1:], strict=True) if gap > long_s]
    by_gaps_s = max(0.0, _distance(begins)) if len(begins) >= _FEWEST_STEPS else 0.0
    alike: list[list[Sequence[float]]] = []
    for found in sorted(kinds, key=len):
        if alike and len(found) - len(alike[-1][0]) <= 1:  # one more or less at the ends of what is known
            alike[-1].append(found)
        else:
            alike.append([found])
    distances = [statistics.median(map(_distance, group)) for group in alike if len(group) > 1]
    periods = [period_s for period_s in distances if period_s > 0]  # not of kinds that come several times at once
    if not periods:
        return by_gaps_s or min((each for each in map(_distance, kinds) if each > 0), default=None)
    if not by_gaps_s:
        return periods[-1]
    return min(periods, key=lambda period_s: max(period_s / by_gaps_s, by_gaps_s / period_s))


def _distance(times: Sequence[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def _long_gap(gaps: Sequence[float]) -> float:
    """Return what parts gaps into short and long ones, where the long ones are much longer; infinite: they are alike.

    The two means differ most there (Otsu's method). The longest ones are left out: an evaluation, a checkpoint.
    """
    in_order = sorted(gaps)[:-_OUTLIERS]
    total, below, best, found = sum(in_order), 0.0, 0.0, float("inf")
    for count, gap in enumerate(in_order[:-1], start=1):
        below += gap
        short, long = below / count, (total - below) / (len(in_order) - count)
        apart = count * (len(in_order) - count) * (long - short) ** 2
        if apart > best:
            best, found = apart, gap if long >= _MUCH_LONGER * short else float("inf")
    return found


def _lateness(samples: Sequence[Mapping[int, float]]) -> list[tuple[int, float]]:
    """Return how much later, or longer, than the median of the others each rank is, in the median of the samples."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        in_order = sorted(sample.items(), key=lambda each: each[1])
        for place, (rank, value) in enumerate(in_order):
            found.setdefault(rank, []).append(value - _median_without(in_order, place))
    return [(rank, statistics.median(each)) for rank, each in found.items()]


def _median_without(in_order: Sequence[tuple[int, float]], place: int) -> float:
    """Return the median of sorted values but the one at `place`; there are two values at least."""
    count = len(in_order) - 1
    low, high = ((middle + (middle >= place)) for middle in ((count - 1) // 2, count // 2))
    return (in_order[low][1] + in_order[high][1]) / 2


class NodeUsage:
    """The ranks of one node in one attempt."""

    def __init__(self, report: Callable[[Message], None], *, on_cpu: bool) -> None:
        self._report = report
        self._on_cpu = on_cpu
        self._look: _Look | None = None
        self._cpu_s: dict[int, float] = {}
        """By pid: seconds of a core at the last look."""
        self._looked_at = math.nan
        self._gpus_at = 0.0
        """By the monotonic clock: until then nvidia-smi is not asked, for it did not answer."""

    @property
    def asking(self) -> bool:
        """True while ranks answer."""
        return self._look is not None

    def close(self) -> None:
        """Give up what is under way."""
        if self._look is not None:
            self._look.close()
            self._look = None

    def ask(self, asked_at: float, most: int, pids: Mapping[int, int]) -> None:
        """Begin to look at ranks (rank -> pid); `tick` reports them.

        `asked_at`: by the head's clock; `most`: of the newest collectives of each rank.
        """
        received = time.time()
        if self._look is None and pids:
            with_gpus = not self._on_cpu and time.monotonic() >= self._gpus_at
            self._look = _Look.begin(
                asked_at, received, pids, most=min(most, _MAX_ENTERED // len(pids)), with_gpus=with_gpus
            )

    def tick(self, pids: Mapping[int, int]) -> None:
        """Report what was asked for, once all ranks have answered or had their time."""
        look = self._look
        if look is None or not look.step():
            return
        self._look = None
        own = {rank: pid for rank, pid in look.pids.items() if pids.get(rank) == pid}
        children = children_of(set(own.values()))
        cores, memory = self._read_processes(own, children)
        if look.waits_for_gpus:
            self._gpus_at = time.monotonic() + _GPUS_AGAIN_S
        gpus = look.read_gpus(own, children)
        ranks = {
            str(rank): look.read_pace(rank)
            | {"cpu": cores.get(rank), "memory": memory[rank]}
            | dict(zip(("gpu", "gpu_memory"), gpus.get(rank, (None, None)), strict=True))
            for rank in own
        }
        clocks = {"asked": look.asked_at, "received": look.received, "sent": time.time()}
        self._report({"kind": "usage", **clocks, "ranks": ranks})

    def _read_processes(
        self, pids: Mapping[int, int], children: Mapping[int, list[int]]
    ) -> tuple[dict[int, float], dict[int, int]]:
        """Return the cores that each rank used since the last look, if there was one, and its memory."""
        now = time.monotonic()
        passed_s, self._looked_at = now - self._looked_at, now
        before, self._cpu_s = self._cpu_s, {}
        cores, memory = {}, {}
        for rank, pid in pids.items():
            used_s, memory[rank] = 0.0, 0
            for each in (pid, *children.get(pid, ())):
                seconds, resident, private = read_cpu_and_memory(each)
                self._cpu_s[each] = seconds
                used_s += max(0.0, seconds - before.get(each, 0.0))
                memory[rank] += resident if each == pid else private
            if pid in before:
                cores[rank] = round(used_s / passed_s, 2)
        return cores, memory


@dataclass(kw_only=True, slots=True)
class _Look:
    """One look at the ranks of a node."""

    asked_at: float
    """When the head asked, by its clock; seconds since the epoch."""
    received: float
    until: float
    """By the monotonic clock."""
    pids: dict[int, int]
    most: int
    asked: dict[int, AskedRank]
    gpus: int | None
    """Memory that gets the list of GPUs; None: there is no nvidia-smi, or no GPU is used."""
    apps: int | None
    """The same for the processes on them."""

    @classmethod
    def begin(cls, asked_at: float, received: float, pids: Mapping[int, int], *, most: int, with_gpus: bool) -> _Look:
        found = {rank: find_memory(python_of(pid)) for rank, pid in pids.items()}
        # The processes first: that they are there cannot be seen, since there may be none.
        apps = start_into_memory("nvidia-smi", *_QUERY_APPS) if with_gpus else None
        return cls(
            asked_at=asked_at,
            received=received,
            until=time.monotonic() + _PATIENCE_S,
            pids=dict(pids),
            most=most,
            asked={rank: AskedRank(memory[1], PACE) for rank, memory in found.items() if memory is not None},
            gpus=start_into_memory("nvidia-smi", *_QUERY_GPUS) if with_gpus else None,
            apps=apps,
        )

    @property
    def waits_for_gpus(self) -> bool:
        """True while nvidia-smi has printed nothing; it prints nothing of processes where there are none."""
        return self.gpus is not None and os.fstat(self.gpus).st_size == 0

    def step(self) -> bool:
        """Read what has arrived; True once that is all, or the time is up."""
        for asked in self.asked.values():
            asked.step()
        late = time.monotonic() >= self.until
        if late:
            self._close_connections()
        return late or not (self.waits_for_gpus or any(not asked.done for asked in self.asked.values()))

    def close(self) -> None:
        """Give up."""
        self._close_connections()
        for memory in (self.gpus, self.apps):
            _read_and_close(memory)

    def _close_connections(self) -> None:
        for asked in self.asked.values():
            asked.close()

    def read_pace(self, rank: int) -> dict[str, Any]:
        """Return how far a rank is, times as microseconds since the look began; empty: it did not answer."""
        asked = self.asked.get(rank)
        try:
            answer = read_object(asked.data) if asked is not None else {}
            newest = answer.get("entered", [])[-self.most :]
            entered = [[number, kind, round(at / 1e3 - self.received * 1e6)] for number, kind, at in newest]
            return {key: answer.get(key) for key in ("step", "own_step_s", "meets")} | {"entered": entered}
        except (ValueError, TypeError):
            return {}

    def read_gpus(
        self, pids: Mapping[int, int], children: Mapping[int, list[int]]
    ) -> dict[int, tuple[float | None, int | None]]:
        """Return how busy the GPU of each rank is, and the bytes in use on it.

        nvidia-smi knows processes by the host's pids. Where that leaves a rank without a GPU, and there are as many
        GPUs as ranks, each has the one of its place.
        """
        gpus = parse_gpus(_read_and_close(self.gpus))
        owners = {each: rank for rank, pid in pids.items() for each in (pid, *children.get(pid, ()))}
        found = {}
        for uuid, pid in parse_apps(_read_and_close(self.apps)):
            if pid in owners and uuid in gpus:
                found[owners[pid]] = gpus[uuid]
        if not found and len(gpus) == len(self.pids):
            found = dict(zip(sorted(self.pids), gpus.values(), strict=True))
        return found


def parse_gpus(text: str) -> dict[str, tuple[float | None, int | None]]:
    """Return by UUID how busy each GPU is (0..1), and the bytes in use on it; a MIG device does not say how busy."""
    found = {}
    for line in text.splitlines():
        uuid, _, rest = line.partition(",")
        busy, _, used = (part.strip() for part in rest.partition(","))
        percent, mebibytes = (int(part) if part.isascii() and part.isdigit() else None for part in (busy, used))
        if uuid:
            found[uuid] = (
                None if percent is None else percent / 100,
                None if mebibytes is None else mebibytes << 20,
            )
    return found


def parse_apps(text: str) -> list[tuple[str, int]]:
    """Return the UUID and the pid of each process on a GPU."""
    rows = (line.partition(",") for line in text.splitlines())
    return [(uuid, int(pid)) for uuid, _, pid in rows if pid.strip().isdigit()]


def _read_and_close(memory: int | None) -> str:
    if memory is None:
        return ""
    try:
        return os.pread(memory, 1 << 16, 0).decode("utf-8", errors="replace")
    finally:
        os.close(memory)
