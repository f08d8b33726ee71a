"""What one host has of a run that interests at home, and where it lies on both sides."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.planning.plan import read_plan_json
from clusterddp.planning.ssh import SshNode, SshPlan, directory_name
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.host_reports import start_of
from clusterddp.run.host_state import is_foreign
from clusterddp.run.record import RunRecord, read_run

if TYPE_CHECKING:
    from clusterddp.ssh.session import HostAccess

Kind = Literal["grows", "whole", "end", "events", "big"]
"""How a file comes home. grows: it is only added to. whole: small, replaced at once. end: small, the first one stays.
events: its rows are added to ours. big: beside its place first, and checked."""

_ATTEMPT_FACTS = re.compile(r"attempts/\d+/(start|stopped)\.json")
_OF_ATTEMPT = re.compile(r"attempts/\d+/")
_END = re.compile(r"attempts/\d+/end\.json")
_RANK = re.compile(
    r"attempts/(?P<attempt>\d+)/(ranks/(?P<record>\d+)(\.error)?\.json|logs/rank-(?P<log>\d+)\.(out|err|nccl))"
)
_NODE_LOG = re.compile(r"launcher/(?:supervisor|torchrun)-(\d+)\.log")
_LOCK_S = 5.0
_LOCK_POLL_S = 0.05


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
    """With `results`: not all is told while somebody answers for the run, who may still write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
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

    def wanting(self, wants: Wants) -> Target:
        """Return it as it is asked for now."""
        # Read before anybody is asked: an answer never counts for a later start.
        return dataclasses.replace(self, wants=wants, start=start_of(read_run(self.run)))

    def wanting_from(self, newest: int) -> Target:
        """Return it with the attempt filled in from which logs are wanted, when that is the newest one."""
        if self.wants.first_attempt is not None:
            return self
        return dataclasses.replace(self, wants=dataclasses.replace(self.wants, first_attempt=newest))

    def fetches(self, what: str) -> bool:
        return self.wants.results and what in self.fetch

    def home(self, path: str) -> Path:
        """Return where a file of the host lies here."""
        return self.run.launcher_dir / "head-events.jsonl" if path == "events.jsonl" else self.run.path / path

    def kind_of(self, path: str) -> Kind | None:
        """Say how a file comes home; None when it does not.

        It is decided here, whatever a host tells: no name leads out of the run's directory, or into its code.
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
            return "big" if self.fetches("checkpoints") else None
        return None


def find_targets(run: RunDir, say: Callable[[str], object] = lambda text: None) -> list[tuple[HostAccess, Target]]:
    """Find out which hosts have something of a run; none when it is not on SSH hosts, or cannot be made out.

    `say` hears why the hosts of a run that this user has not submitted are not asked.
    """
    try:
        record = read_run(run)
        if record.launcher != "ssh" or is_foreign(run):
            return []
        plan = read_plan_json(run)
        ssh, gang = SshPlan.from_json(plan["ssh"]), Gang.from_json(plan["gang"])
    except ClusterddpError as error:
        say(f"{run.name}: {error.message}" + (f"; {error.hint}" if error.hint else ""))
        return []
    except (OSError, TypeError, KeyError, ValueError, AttributeError):
        return []  # read_state says what is wrong with it
    if gang.token != record.token:
        return []
    targets = [_target_of(node, run, record, ssh, gang) for node in ssh.hosts]
    return list(zip(ssh.accesses(), targets, strict=True))


def newest_attempt(run: RunDir, paths: Iterable[str] = ()) -> int:
    """Return the number of the newest attempt that is here, or that has one of these files on a host."""
    there = [int(path.split("/")[1]) for path in paths if _OF_ATTEMPT.match(path)]
    return max([*there, *(attempt.number for attempt in run.attempts())], default=0)


@contextlib.contextmanager
def locked(run: RunDir, what: str, timeout_s: float = _LOCK_S) -> Iterator[bool]:
    """Be the only process on this machine that does `what` with a run's mirror; False: another one is at it for long.

    Raises: ClusterddpError: the file system refuses.
    """
    try:
        file = os.open(run.launcher_dir / f".{what}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unwritable(run, error) from error
    try:
        yield _take_lock(file, time.monotonic() + timeout_s)
    finally:
        os.close(file)  # which frees it


def _take_lock(file: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError:  # a file system without locks
            return True
        else:
            return True


def unwritable(run: RunDir, error: OSError) -> ClusterddpError:
    return ClusterddpError(
        f"{error.filename or run.path}: what comes from the hosts cannot be written here: {error.strerror}",
        hint="the run goes on and loses nothing; it is fetched when there is room",
    )


def _target_of(node: SshNode, run: RunDir, record: RunRecord, ssh: SshPlan, gang: Gang) -> Target:
    slots = [slot for slot in gang.nodes if slot.host == node.host]
    return Target(
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
