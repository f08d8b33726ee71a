"""Where ranks are, and whether they hang: stacks are collected when a command asks, or when the run shows no progress.

A node (`NodeStacks`) asks its ranks for their stacks when the head asks, and reports for how long they show no sign of
progress: new output, bytes read or written, a further collective. All of it is read from outside the ranks, so it holds
for scripts that know nothing of clusterddp; collectives are asked for while all else is silent. It also notes when the
logs of its ranks grow.

The head (`HangWatch`) collects stacks when no node sees progress and `metrics.jsonl` has no new row, and reports a hang
once no rank works. A rank that works alone for long is reported later: it may be an evaluation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.network.rendezvous.connection import Message
from clusterddp.node.log import log, log_line
from clusterddp.node.rank_probe import PATIENCE_S, AskedRank, Probes, Question, children_of, find_memory, python_of
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang, Node
from clusterddp.run.log_times import LogTimesWriter
from clusterddp.run.metrics import timed_steps
from clusterddp.run.record import RankEnd
from clusterddp.run.stacks import Folded, RankStack, StackReport, fold, take_request, unmoved_ranks, write_report
from clusterddp.system.files import read_last_jsonl
from clusterddp.system.processes import read_usage
from clusterddp.wire import build

MIN_HANG_S = 60.0
_STEPS = 20
_ROWS = 3
"""Rows of metrics may be so many of their usual distances apart."""
_WORKS_FACTOR = 5
"""A rank that works alone, or ranks that wait for nothing of ours, are reported after so many times `hang_after`."""
_LEAD_S = 12.0
"""So long before a hang is reported the first stacks are collected."""
_AGAIN_S, _WORKS_AGAIN_S = 5.0, 15.0
"""Between two looks at stacks, the second while ranks work and answer."""
_REQUEST_LOOK_S = 0.5
_ANSWER_S = PATIENCE_S + 4.0
"""How long the nodes may take to report their ranks."""
_TAIL_BYTES = 64 * 1024
_MAX_TEXT, _MAX_RAW = 600, 8_000
LOOK_EVERY_S = 2.5
SILENT_S = 10.0
"""A node reports its silence when it is longer, and again with each look."""
_CHILDREN_S = 5.0
"""After so long without a sign, what ranks have started is looked at, too: finding it reads the whole process table."""
_MIN_BYTES = 64 * 1024
"""What ranks move between two looks without a sign of progress: their stacks, a line of a log of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A run that shows no progress."""

    silent_s: float
    folded: Folded
    report: StackReport

    @property
    def text(self) -> str:
        """Say it in one line."""
        return f"no progress for {self.silent_s:.0f} s: {self.folded.text}"[:_MAX_TEXT]

    def facts(self) -> dict[str, Any]:
        """Return what the history of the run has of it."""
        return {
            "since": time.time() - self.silent_s,
            "text": self.folded.text[:_MAX_TEXT],
            "hint": self.folded.hint,
            "ranks": list(self.folded.suspects),
            "stacks": self.report.id,
        }


def failure_of_hang(hang: Hang, gang: Gang) -> RankEnd:
    """Return the hang as the end of the attempt; a rank that the others wait for is its cause."""
    rank = hang.folded.suspects[0] if hang.folded.suspects else min(each.rank for each in hang.report.ranks)
    raw = next((each.raw for each in hang.report.ranks if each.rank == rank), "")
    error = f"hang: {hang.text}" + (f" ({hang.folded.hint})" if hang.folded.hint else "")
    host = gang.node_of(rank).host
    return RankEnd(rank=rank, host=host, error=error, traceback=raw[-_MAX_RAW:] or None, restart="here")


@dataclass(kw_only=True, slots=True)
class _Stacks(Question):
    """Stacks that are being collected."""

    id: str
    ranks: list[RankStack] = field(default_factory=list)


class HangWatch:
    """One attempt's: what is asked of its nodes, and what they have answered."""

    def __init__(self, run: RunDir, gang: Gang, attempt: AttemptDir, send: Callable[[int, Message], None]) -> None:
        self._run = run
        self._gang = gang
        self._attempt = attempt
        self._send = send
        self._request_look_at = 0.0
        self._collection: _Stacks | None = None
        self._silence = Silence(gang, run)
        self._next_at = 0.0
        self._last: StackReport | None = None
        self._num_hangs = 0
        self._hang: Hang | None = None

    def on_report(self, node_rank: int, report: Message, now: float) -> None:
        """Note a node's silence, or the stacks of its ranks."""
        collection = self._collection
        if report["kind"] == "silent":
            self._silence.on_report(node_rank, float(report["silent_s"]), now)
        elif collection is not None and report.get("id") == collection.id:
            if report["kind"] == "stack":
                with contextlib.suppress(ValueError):  # the rank then counts as one that has ended
                    collection.ranks.append(build(RankStack, report.get("stack")))
            else:
                collection.awaited.discard(node_rank)

    def tick(self, nodes: Iterable[int], running: set[int], now: float, *, judges: bool) -> Hang | None:
        """Go on; return a hang that has just been found.

        `nodes`: those that can be asked; `running`: ranks; `judges`: False while only commands ask.
        """
        collection = self._collection
        if collection is not None:
            if not collection.is_over(nodes, now):
                return None
            self._collection = None
            return self._take(collection, running, now)
        if now >= self._request_look_at:
            self._request_look_at = now + _REQUEST_LOOK_S
            if (wanted := take_request(self._attempt)) is not None:
                log_line(f"stacks were asked for ({wanted})")
                self._collect(wanted, nodes, now)
                return None
        if not judges:
            return None
        silent_s, limit_s = self._silence.seconds(now), self._silence.limit_s(now)
        if silent_s < limit_s - _LEAD_S:
            if self._hang is not None:
                log(self._run, "hang_over", attempt=self._attempt.number)
            self._hang = self._last = None
        elif self._hang is None and now >= self._next_at:
            self._collect(f"hang-{self._num_hangs}", nodes, now)
        return None

    def _collect(self, report_id: str, nodes: Iterable[int], now: float) -> None:
        self._collection = _Stacks(id=report_id, due=now + _ANSWER_S, awaited=set(nodes))
        self._collection.send({"kind": "stacks", "id": report_id}, self._send)

    def _take(self, collection: _Stacks, running: set[int], now: float) -> Hang | None:
        """Write a report that a command asked for; judge one of our own, and write it if it is a hang."""
        report = self._report_of(collection, running)
        if not collection.id.startswith("hang-"):
            self._write(report)
            return None
        folded = fold(report, stuck=unmoved_ranks(self._last, report))
        self._last = report
        silent_s, limit_s = self._silence.seconds(now), self._silence.limit_s(now)
        if folded.verdict != "hang":
            limit_s *= _WORKS_FACTOR
        if silent_s < limit_s or not report.ranks:
            changing = folded.verdict == "hang" or any(each.answers is False for each in report.ranks)
            again_s = _AGAIN_S if changing else _WORKS_AGAIN_S
            self._next_at = now + max(0.0, min(again_s, limit_s - silent_s) if report.ranks else again_s)
            return None
        self._write(report)
        self._num_hangs += 1
        self._hang = Hang(silent_s=silent_s, folded=folded, report=report)
        log(self._run, "hang", attempt=self._attempt.number, **self._hang.facts())
        return self._hang

    def _report_of(self, collection: _Stacks, running: set[int]) -> StackReport:
        gang = self._gang
        silent = [gang.node(node_rank) for node_rank in sorted(collection.awaited)]
        seen = {each.rank for each in collection.ranks}
        left = [
            RankStack(rank=rank, host=node.host, pid=0, state="", missing="it has ended")
            for node in gang.nodes
            for rank in node.ranks
            if rank not in running and rank not in seen
        ]
        return StackReport(
            id=collection.id,
            attempt=self._attempt.number,
            time=time.time(),
            world_size=gang.world_size,
            ranks=tuple(sorted([*collection.ranks, *left], key=lambda each: each.rank)),
            missing=tuple(f"node {node.node_rank} on {node.host}" for node in silent),
        )

    def _write(self, report: StackReport) -> None:
        try:
            write_report(self._attempt, report)
        except (ClusterddpError, OSError) as error:
            log_line(f"the stacks could not be written: {error}")


class Silence:
    """For how long no node has seen a sign of progress, and how long is too long."""

    def __init__(self, gang: Gang, run: RunDir) -> None:
        self._gang = gang
        self._run = run
        self._silent: dict[int, tuple[float, float]] = {}
        """By node: the seconds that it reported, and when."""
        self._look_at = 0.0
        self._metrics_size = -1
        self._row_at = -math.inf
        self._limit_s = MIN_HANG_S
        self._limit_of_size = -1

    def on_report(self, node_rank: int, silent_s: float, now: float) -> None:
        self._silent[node_rank] = (silent_s, now)

    def seconds(self, now: float) -> float:
        """Return for how long the run has shown no progress; 0 while a node sees some."""
        if len(self._silent) < len(self._gang.nodes):
            return 0.0
        self._look(now)
        of_nodes = min(seconds + now - at if seconds else 0.0 for seconds, at in self._silent.values())
        return max(0.0, min(of_nodes, now - self._row_at))

    def limit_s(self, now: float) -> float:
        """Return how long a silence may last: `hang_after`, or what the steps of the run suggest."""
        if self._gang.hang_after_s is not None:
            return self._gang.hang_after_s
        if self._limit_of_size != self._metrics_size:
            self._limit_of_size = self._metrics_size
            with contextlib.suppress(OSError, ClusterddpError):  # a program may have put anything there
                self._limit_s = limit_by_rows(read_last_jsonl(self._run.metrics, _TAIL_BYTES))
        return self._limit_s

    def _look(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        try:
            size = os.stat(self._run.metrics).st_size
        except OSError:
            return
        if size != self._metrics_size:
            self._row_at = now if self._metrics_size >= 0 else self._row_at
            self._metrics_size = size


def limit_by_rows(rows: Iterable[Mapping[str, object]]) -> float:
    """Return 60 s, 20 median steps, or 3 usual distances of rows, whichever is longest."""
    timed = timed_steps(rows)
    pairs = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(timed)]
    pairs = [(steps, seconds) for steps, seconds in pairs if steps > 0 and seconds > 0]
    if not pairs:
        return MIN_HANG_S
    step_s = statistics.median(seconds / steps for steps, seconds in pairs)
    row_s = statistics.median(seconds for _, seconds in pairs)
    return max(MIN_HANG_S, _STEPS * step_s, _ROWS * row_s)


class NodeStacks:
    """The ranks of one node in one attempt: their stacks, and their signs of progress."""

    def __init__(self, node: Node, attempt: AttemptDir, report: Callable[[Message], None]) -> None:
        self._node = node
        self._attempt = attempt
        self._report = report
        self._probes: Probes | None = None
        self._cpus: dict[int, float] = {}
        """The cores that each rank, and what it started, used between the last two looks."""
        self._look_at = 0.0
        self._looked_at = -math.inf
        self._sign_at = math.nan
        self._sizes: dict[str, int] = {}
        """Of the logs, by name."""
        self._log_times = LogTimesWriter()
        self._used: dict[int, tuple[float, int]] = {}
        """By pid."""
        self._collectives: dict[int, int] = {}
        self._asked: dict[int, AskedRank] = {}
        self._keys: dict[int, str] = {}
        """By pid: of the socket at which a rank answers."""
        self._reported = False

    @property
    def asking(self) -> bool:
        """True while ranks write their stacks."""
        return self._probes is not None

    def ask(self, report_id: str, pids: Mapping[int, int]) -> None:
        """Ask ranks (rank -> pid) for their stacks; `tick` reports them."""
        self._probes = Probes.begin(report_id, pids)

    def tick(self, pids: Mapping[int, int], now: float) -> None:
        """Report stacks that are complete; look for signs of progress if it is time to."""
        if self._probes is not None and self._probes.step():
            probes, self._probes = self._probes, None
            for each in probes.results(self._node.host, self._cpus):
                self._report({"kind": "stack", "id": probes.id, "stack": dataclasses.asdict(each)})
            self._report({"kind": "stacks_done", "id": probes.id})
        if self._read_collectives():
            self._sign_at = now
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._look(pids, now)

    def _look(self, pids: Mapping[int, int], now: float) -> None:
        """Look for signs of progress; report the seconds without one, and 0 when there was one after a report."""
        logs = (path for rank in pids for path in (self._attempt.stdout(rank), self._attempt.stderr(rank)))
        sizes = {path.name: _size(path) for path in logs}
        self._log_times.note(self._attempt.log_times(self._node.node_rank), sizes, now)
        moved = self._read_usage(pids, now)
        if math.isnan(self._sign_at) or sizes != self._sizes or moved >= _MIN_BYTES:
            self._sign_at = now
        self._sizes = sizes
        silent_s = now - self._sign_at
        if silent_s > 0:
            self._ask_for_collectives(pids)
        if silent_s >= SILENT_S or self._reported:
            self._reported = silent_s >= SILENT_S
            self._report({"kind": "silent", "silent_s": silent_s if self._reported else 0.0})

    def _read_usage(self, pids: Mapping[int, int], now: float) -> int:
        """Note the cores that ranks use; return the bytes that they have moved since the last look."""
        passed_s, self._looked_at = now - self._looked_at, now
        owners = {pid: rank for rank, pid in pids.items()}
        if now - self._sign_at >= _CHILDREN_S:
            for pid, children in children_of(set(owners)).items():
                owners |= dict.fromkeys(children, owners[pid])
        used = {pid: read_usage(pid) for pid in owners}
        self._cpus = dict.fromkeys(pids, 0.0)
        moved = 0
        for pid, (seconds, moved_bytes) in used.items():
            before_s, bytes_before = self._used.get(pid, (seconds, moved_bytes))
            self._cpus[owners[pid]] += max(0.0, seconds - before_s) / passed_s
            moved += max(0, moved_bytes - bytes_before)
        self._used = used
        return moved

    def _ask_for_collectives(self, pids: Mapping[int, int]) -> None:
        for asked in self._asked.values():
            asked.close()
        self._asked.clear()
        for rank, pid in pids.items():
            if pid not in self._keys and (found := find_memory(python_of(pid))) is not None:
                self._keys[pid] = found[1]
            if pid in self._keys:
                self._asked[rank] = AskedRank(self._keys[pid])

    def _read_collectives(self) -> bool:
        """Read what ranks have answered; True when one of them has come further."""
        advanced = False
        for rank, asked in list(self._asked.items()):
            asked.step()
            if not asked.done:
                continue
            if asked.answer is not None:
                total = sum(each.enqueued + each.completed for each in asked.answer.collectives.values())
                advanced |= total != self._collectives.get(rank, 0)
                self._collectives[rank] = total
            del self._asked[rank]
        return advanced


def _size(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
