"""A run as one host has it: which of its files are downloaded, how, and where they lie here."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.host_reports import start_of
from clusterddp.run.host_state import is_foreign
from clusterddp.run.record import RunRecord, read_run

if TYPE_CHECKING:
    from clusterddp.planning.ssh.plan import SshNode, SshPlan
    from clusterddp.ssh.session import HostAccess

Kind = Literal["grows", "whole", "end", "events", "large"]
"""How a file is downloaded. grows: it is only added to. whole: small, replaced at once. end: small, the first one
stays. events: its rows are added to ours. large: beside its place first, and checked."""

_ATTEMPT_FACTS = re.compile(r"attempts/\d+/(start|stopped|stacks/[A-Za-z0-9-]{1,40})\.json")
_OF_ATTEMPT = re.compile(r"attempts/\d+/")
_END = re.compile(r"attempts/\d+/end\.json")
_RANK = re.compile(
    r"attempts/(?P<attempt>\d+)/(ranks/(?P<record>\d+)(\.error)?\.json|logs/rank-(?P<log>\d+)\.(out|err|nccl))"
)
_NODE_LOG = re.compile(r"launcher/(?:supervisor|torchrun)-(\d+)\.log")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wants:
    """What is wanted beside the records, which always are."""

    logs: frozenset[int] = frozenset()
    """Ranks whose logs are wanted while the run goes on."""
    first_attempt: int | None = None
    """The first attempt whose logs are wanted; None: the newest one."""
    results: bool = False
    """True when the run has ended: everything that its spec says to fetch."""
    patient: bool = False
    """With `results`: more may be written while a supervisor or guard of the run is alive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRun:
    """A run, as one host has it."""

    run: RunDir
    name: str
    """Of its directory on the host."""
    token: str
    host: str
    nodes: frozenset[int]
    ranks: frozenset[int]
    is_head: bool
    fetch: tuple[str, ...]
    wants: Wants = Wants()
    start: str = ""
    """Which start of the run is asked about."""

    def wanting(self, wants: Wants) -> HostRun:
        """Return it as it is asked for now."""
        # Read before anybody is asked: an answer never counts for a later start.
        return dataclasses.replace(self, wants=wants, start=start_of(read_run(self.run)))

    def wanting_from(self, newest: int) -> HostRun:
        """Return it with the attempt filled in from which logs are wanted, when that is the newest one."""
        if self.wants.first_attempt is not None:
            return self
        return dataclasses.replace(self, wants=dataclasses.replace(self.wants, first_attempt=newest))

    def fetches(self, what: str) -> bool:
        return self.wants.results and what in self.fetch

    def place_of(self, path: str) -> Path:
        """Return where a file of the host lies here."""
        return self.run.launcher_dir / "head-events.jsonl" if path == "events.jsonl" else self.run.path / path

    def kind_of(self, path: str) -> Kind | None:
        """Say how a file is downloaded; None when it is not.

        It is decided here, whatever a host lists: no name leads out of the run's directory, or into its code.
        """
        rank = _RANK.fullmatch(path)
        if rank:
            return self._kind_of_rank_file(rank)
        log = _NODE_LOG.fullmatch(path)
        if log:
            return "grows" if int(log[1]) in self.nodes and self.fetches("logs") else None
        return self._kind_of_head_file(path) if self.is_head else None

    def _kind_of_rank_file(self, match: re.Match[str]) -> Kind | None:
        if int(match["record"] or match["log"]) not in self.ranks:
            return None
        if match["record"]:
            return "whole"
        wanted = int(match["log"]) in self.wants.logs and int(match["attempt"]) >= (self.wants.first_attempt or 0)
        return "grows" if wanted or self.fetches("logs") else None

    def _kind_of_head_file(self, path: str) -> Kind | None:
        if _END.fullmatch(path):
            return "end"
        if path == "summary.json" or _ATTEMPT_FACTS.fullmatch(path):
            return "whole"
        if path in {"metrics.jsonl", "events.jsonl"}:
            return "grows" if path == "metrics.jsonl" else "events"
        if path.startswith("tb/") and _is_harmless(path):
            return "grows" if self.fetches("metrics") else None
        if path.startswith(("checkpoints/", "output/")) and _is_harmless(path):
            return "large" if self.fetches("checkpoints") else None
        return None


def find_host_runs(run: RunDir, say: Callable[[str], object] = lambda text: None) -> list[tuple[HostAccess, HostRun]]:
    """Find out which hosts have a part of a run; none when it is not on SSH hosts, or its record is damaged.

    `say` is called with the reason why the hosts of a run that this user has not submitted are not asked.
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
        say(f"{run.name}: {error.message}" + (f"; {error.hint}" if error.hint else ""))
        return []
    except (OSError, TypeError, KeyError, ValueError, AttributeError):
        return []  # read_state says what is wrong with it
    if gang.token != record.token:
        return []
    host_runs = [_host_run(node, run, record, ssh, gang) for node in ssh.hosts]
    return list(zip(ssh.accesses(), host_runs, strict=True))


def newest_attempt(run: RunDir, paths: Iterable[str] = ()) -> int:
    """Return the number of the newest attempt that is here, or that has one of these files on a host."""
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


def _is_harmless(path: str) -> bool:
    """Say whether a name stays below the run's directory, and is not of this machine's own."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return all(part and not part.startswith(".") and "\0" not in part for part in path.split("/"))
