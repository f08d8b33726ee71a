"""Bad nodes, as this user's runs have met them: why, and until when later runs leave them out.

`nodes.json` in the user's state directory has them. Whichever process learns how an attempt ended writes it, from the
run's records alone; it never judges a program: not its exceptions, its lack of memory, or a run that was cancelled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.attempts import AttemptEnd, read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import Start, read_events, read_run, read_start
from clusterddp.system.directories import state_directory
from clusterddp.system.files import read_record, write_json

_FAILED_S, _SLOW_S = 24 * 3600.0, 2 * 3600.0
"""How long a node is left out after a failure, and where it was slow, or the cause is not certain."""
_STRAGGLED_S = 900.0
"""A rank for which the others waited so long makes its node a slow one."""
_SICK_GPU = re.compile(r"uncorrectable ECC|ECC error|GPU is lost|fallen off the bus|NVLink error")
_KEPT_S = 24 * 3600.0
"""How long a mark that is over is kept: what it came from may be read again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One node that is, or was, left out."""

    node: str
    launcher: str
    """`slurm` or `ssh`."""
    cluster: str = ""
    """On Slurm with several clusters: which one."""
    why: str
    run: str
    since: float
    """Seconds since the epoch: when the run met the node."""
    until: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.launcher, self.cluster, self.node

    def spell(self) -> str:
        """Say why later runs leave the node out, and until when."""
        far = self.until - time.time() > 20 * 3600
        when = time.strftime("%Y-%m-%d %H:%M" if far else "%H:%M", time.localtime(self.until))
        return f"{self.node} left out until {when}: {self.why} (run {self.run})"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marks:
    nodes: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """What speaks against a node in one attempt, or, with no time to last, for it."""

    node: str
    why: str = ""
    at: float
    """Seconds since the epoch."""
    lasts_s: float = 0.0


def suspects(
    end: AttemptEnd | None, start: Start | None, events: Sequence[Mapping[str, Any]], *, now: float
) -> list[Suspicion]:
    """Return what follows from one attempt's records; `events`: its rows of the history.

    A node on which an attempt completes is cleared of what earlier ones hold against it.
    """
    at = end.ended if end is not None else now
    found = [
        Suspicion(
            node=str(row.get("host")),
            why=str(row.get("why")),
            at=float(row["time"]),
            lasts_s=_FAILED_S if row.get("failed") else _SLOW_S,
        )
        for row in events
        if row["event"] == "node_marked"
    ]
    found += _stragglers(events, at)
    cause = end.root_cause if end is not None and end.outcome == "FAILED" else None
    if cause is not None and (cause.of_node or _SICK_GPU.search(f"{cause.error}\n{cause.traceback}")):
        found.append(Suspicion(node=cause.host, why=cause.error, at=at, lasts_s=_FAILED_S))
    elif cause is not None and cause.signal == "SIGKILL" and cause.error.endswith("was killed by SIGKILL"):
        why = f"{cause.error}, nobody knows by whom"
        found.append(Suspicion(node=cause.host, why=why, at=at, lasts_s=_SLOW_S))
    elif end is not None and end.outcome == "COMPLETED" and start is not None:
        hosts = {node["host"] for node in start.get("nodes", ())} - {each.node for each in found}
        found += [Suspicion(node=host, at=start.get("started", at)) for host in sorted(hosts)]
    return found


def _stragglers(events: Sequence[Mapping[str, Any]], at: float) -> Iterator[Suspicion]:
    """Find ranks for which the others waited for long; rank 0 has more to do than the others, and does not count."""
    since: dict[int, tuple[float, str]] = {}
    for row in (*events, {"event": "", "time": at}):
        kind, when, rank = row["event"], float(row["time"]), int(row.get("rank") or 0)
        if kind == "straggler" and rank and row.get("host"):
            since[rank] = when, str(row["host"])
        over = {"straggler_over": since.keys() & {rank}, "": set(since)}.get(kind, set())
        for each in sorted(over):
            begun, host = since.pop(each)
            if when - begun >= _STRAGGLED_S:
                yield Suspicion(node=host, why=f"the others waited for its rank {each}", at=when, lasts_s=_SLOW_S)


def learn(run: RunDir, events: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Remember the nodes that the records of a run of one's own speak against, or for; `events`: its history, if read.

    It changes nothing that the records or the marks cannot be read or written.
    """
    with contextlib.suppress(ClusterddpError, OSError, ValueError, KeyError, TypeError):
        record = read_run(run)
        if record.launcher in ("local", "worker"):
            return
        events, marks = read_events(run) if events is None else events, list[Mark]()
        for attempt in run.attempts():
            rows = [row for row in events if row.get("attempt") == attempt.number]
            marks += [
                Mark(
                    node=each.node,
                    launcher=record.launcher,
                    cluster=record.cluster or "",
                    why=each.why,
                    run=run.name,
                    since=each.at,
                    until=each.at + each.lasts_s,
                )
                for each in suspects(read_end(attempt), read_start(attempt), rows, now=time.time())
            ]
        remember(marks)


def read_marks(launcher: str = "", cluster: str = "") -> list[Mark]:
    """Return the marks that hold now, the newest first; of one launcher, and one cluster, if they are named."""
    held = [mark for mark in _read() if mark.until > time.time()]
    of_it = [mark for mark in held if not launcher or (mark.launcher, mark.cluster) == (launcher, cluster)]
    return sorted(of_it, key=lambda mark: -mark.since)


def remember(marks: Iterable[Mark]) -> None:
    """Add marks; of one node the newest counts, and one that clears needs one to clear."""
    before = {mark.key: mark for mark in _read()}
    now, after = time.time(), dict(before)
    for mark in marks:
        known = after.get(mark.key)
        if mark.until + _KEPT_S > now and (mark.since > known.since if known else mark.until > mark.since):
            after[mark.key] = mark
    if after != before:
        _write([mark for mark in after.values() if mark.until + _KEPT_S > now])


def clear(nodes: Collection[str]) -> list[str]:
    """End the marks of these nodes, by default of all; return which had one."""
    now, held = time.time(), [mark for mark in read_marks() if not nodes or mark.node in nodes]
    remember(dataclasses.replace(mark, since=now, until=now) for mark in held)
    return [mark.node for mark in held]


def _read() -> tuple[Mark, ...]:
    try:
        found = read_record(_Marks, state_directory() / "nodes.json")
    except (ClusterddpError, OSError):
        return ()
    return found.nodes if found else ()


def _write(marks: Sequence[Mark]) -> None:
    path = state_directory() / "nodes.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(_Marks(nodes=tuple(marks))))
