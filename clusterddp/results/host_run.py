"""A run on one host: which of its files are downloaded, how, and to which local path."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.run.attempts import Report, no_report
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.host_reports import start_of
from clusterddp.run.host_state import is_foreign
from clusterddp.run.record import RunRecord, read_run

if TYPE_CHECKING:
    from clusterddp.planning.ssh.plan import SshNode, SshPlan
    from clusterddp.ssh.session import HostAccess

Kind = Literal["grows", "whole", "end", "events", "large"]
"""How a file is downloaded. grows: new bytes are appended. whole: small, replaced at once. end: small, never replaced.
events: its rows are added to the local ones. large: under a temporary name first, and checked."""

_ATTEMPT_FACTS = re.compile(r"attempts/\d+/((start|stopped|usage|stacks/[A-Za-z0-9-]{1,40})\.json|ASKED)")
_OF_ATTEMPT = re.compile(r"attempts/\d+/")
_END = re.compile(r"attempts/\d+/end\.json")
_RANK = re.compile(
    r"attempts/(?P<attempt>\d+)/(ranks/(?P<record>\d+)(\.error)?\.json|logs/rank-(?P<log>\d+)\.(out|err|nccl))"
)
_LOG_TIMES = re.compile(r"attempts/(?P<attempt>\d+)/logs/node-(?P<node>\d+)\.times")
_NODE_LOG = re.compile(r"launcher/supervisor-(\d+)\.log")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wants:
    """What is downloaded besides the records, which always are."""

    logs: frozenset[int] = frozenset()
    """Ranks whose logs are wanted while the run goes on."""
    first_attempt: int | None = None
    """The first attempt whose logs are wanted; None: the newest one."""
    results: bool = False
    """True when the run has ended: everything that `ssh.fetch` of its spec names."""
    while_supervised: bool = False
    """With `results`: ask again while a supervisor or guard of the run lives, which may write more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRun:
    """A run on one host."""

    run: RunDir
    name: str
    """The name of its directory on the host."""
    token: str
    host: str
    nodes: frozenset[int]
    ranks: frozenset[int]
    is_head: bool
    fetch: tuple[str, ...]
    wants: Wants = Wants()
    start: str = ""
    """Which start of the run the host is asked about (`start_of`)."""

    def wanting(self, wants: Wants) -> HostRun:
        """Return it with these wants and the current start of the run."""
        # The start is read before the host is asked: an answer never counts for a later start.
        return dataclasses.replace(self, wants=wants, start=start_of(read_run(self.run)))

    def wanting_from(self, newest: int) -> HostRun:
        """Return it with the first attempt whose logs are wanted filled in; `newest`: the newest attempt."""
        if self.wants.first_attempt is not None:
            return self
        return dataclasses.replace(self, wants=dataclasses.replace(self.wants, first_attempt=newest))

    def fetches(self, what: str) -> bool:
        return self.wants.results and what in self.fetch

    def place_of(self, path: str) -> Path:
        """Return the local path of a file of the host."""
        return self.run.launcher_dir / "head-events.jsonl" if path == "events.jsonl" else self.run.path / path

    def kind_of(self, path: str) -> Kind | None:
        """Return how a file is downloaded; None if it is not.

        A host may list any name; only names below the run's directory, and none below its code, get a kind.
        """
        rank = _RANK.fullmatch(path)
        if rank:
            return self._kind_of_rank_file(rank)
        times = _LOG_TIMES.fullmatch(path)
        if times and int(times["node"]) in self.nodes:
            return "grows" if self._wants_logs(self.ranks, int(times["attempt"])) else None
        log = _NODE_LOG.fullmatch(path)
        if log:
            return "grows" if int(log[1]) in self.nodes and self.fetches("logs") else None
        return self._kind_of_head_file(path) if self.is_head else None

    def _kind_of_rank_file(self, match: re.Match[str]) -> Kind | None:
        if int(match["record"] or match["log"]) not in self.ranks:
            return None
        if match["record"]:
            return "whole"
        return "grows" if self._wants_logs({int(match["log"])}, int(match["attempt"])) else None

    def _wants_logs(self, ranks: Set[int], attempt: int) -> bool:
        """Return whether a log of one of these ranks is wanted of an attempt."""
        is_wanted = bool(ranks & self.wants.logs) and attempt >= (self.wants.first_attempt or 0)
        return is_wanted or self.fetches("logs")

    def _kind_of_head_file(self, path: str) -> Kind | None:
        if _END.fullmatch(path):
            return "end"
        if path == "summary.json" or _ATTEMPT_FACTS.fullmatch(path):
            return "whole"
        if path in {"metrics.jsonl", "events.jsonl"}:
            return "grows" if path == "metrics.jsonl" else "events"
        if path.startswith("tb/") and _is_safe(path):
            return "grows" if self.fetches("metrics") else None
        if path.startswith(("checkpoints/", "output/")) and _is_safe(path):
            return "large" if self.fetches("checkpoints") else None
        return None


def find_host_runs(run: RunDir, report: Report = no_report) -> list[tuple[HostAccess, HostRun]]:
    """Return the hosts of a run; none if it is not on SSH hosts, or its record is damaged.

    `report` receives the reason why the hosts of another user's run are not asked.
    """
    try:
        record = read_run(run)
        if record.launcher != "ssh" or is_foreign(run):
            return []
        from clusterddp.planning.plan import read_plan_json
        from clusterddp.planning.ssh.plan import SshPlan

        plan = read_plan_json(run)
        ssh, gang = SshPlan.from_json(plan["ssh"]), Gang.from_json(plan["gang"])
    except ClusterddpError as error:
        report(f"{run.name}: {error.message}" + (f"; {error.hint}" if error.hint else ""))
        return []
    except (OSError, TypeError, KeyError, ValueError, AttributeError):
        return []  # read_state reports what is wrong with it
    if gang.token != record.token:
        return []
    host_runs = [_host_run(node, run, record, ssh, gang) for node in ssh.hosts]
    return list(zip(ssh.accesses(), host_runs, strict=True))


def newest_attempt(run: RunDir, paths: Iterable[str] = ()) -> int:
    """Return the number of the newest attempt, here or among these paths on a host."""
    there = [int(path.split("/")[1]) for path in paths if _OF_ATTEMPT.match(path)]
    return max([*there, *(attempt.number for attempt in run.attempts())], default=0)


def _host_run(node: SshNode, run: RunDir, record: RunRecord, ssh: SshPlan, gang: Gang) -> HostRun:
    from clusterddp.planning.ssh.plan import directory_name

    slots = [slot for slot in gang.nodes if slot.host == node.host]
    return HostRun(
        run=run,
        name=directory_name(record.run, record.token),
        token=record.token,
        host=node.host,
        nodes=frozenset(slot.node_rank for slot in slots),
        ranks=frozenset(rank for slot in slots for rank in slot.ranks),
        is_head=any(slot.node_rank == 0 for slot in slots),
        fetch=ssh.fetch,
    )


def _is_safe(path: str) -> bool:
    """Return whether a name stays below the run's directory and is no hidden file, which are this machine's own."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return all(part and not part.startswith(".") and "\0" not in part for part in path.split("/"))
