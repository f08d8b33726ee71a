"""Runs on several machines: their processes, what is left over, old directories (ps and gc); a result per machine.

The machines are hosts over SSH, or this one; both use run/leftovers.py and run/stored.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from clusterddp.errors import ClusterddpError, NonsenseError, PreflightError, SshError
from clusterddp.planning.plan import read_plan_json
from clusterddp.planning.ssh.plan import HostAccess, SshPlan
from clusterddp.remote.sessions import Opener, SessionPool, Work
from clusterddp.run.directory import RunDir
from clusterddp.run.leftovers import Ended, RunHere, end_left_over, find_runs
from clusterddp.run.record import read_run
from clusterddp.run.stored import Removed, Storage, find_stored, remove_stored
from clusterddp.system.files import build_record

DEFAULT_ROOT = "~/.clusterddp"
_TIMEOUT_S = 60.0
_DISK_TIMEOUT_S = 600.0
"""A host may have a million files of checkpoints and snapshots."""
_END_TIMEOUT_S = 15.0
"""For each run, on top."""
_T = TypeVar("_T")


class ThisMachine:
    """This machine."""

    def __init__(self, runs_dir: Path, root: str = DEFAULT_ROOT) -> None:
        self.name = socket.gethostname()
        self._root = Path(root).expanduser()
        self._records = [runs_dir, self._root / "runs"]

    def look(self, tokens: Collection[str] | None = None) -> dict[str, list[RunHere] | SshError]:
        return {self.name: find_runs(self._records, only=tokens)}

    def end(self, tokens: Mapping[str, Sequence[str]]) -> dict[str, list[Ended] | SshError]:
        return {name: [end_left_over(token) for token in of_name] for name, of_name in tokens.items()}

    def stored(self, older_than_s: float) -> dict[str, Storage | SshError]:
        return {self.name: find_stored(self._root, older_than_s=older_than_s)}

    def remove(self, places: Mapping[str, Sequence[str]], older_than_s: float) -> dict[str, list[Removed] | SshError]:
        return {name: remove_stored(self._root, of_name, older_than_s=older_than_s) for name, of_name in places.items()}

    def __enter__(self) -> ThisMachine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


class Hosts:
    """Hosts over SSH, asked all at once; connections stay open while the user is asked."""

    def __init__(self, accesses: Sequence[HostAccess], environ: Mapping[str, str]) -> None:
        self._accesses = {access.host: access for access in accesses}
        self._pool = SessionPool(Opener(environ))

    def look(self, tokens: Collection[str] | None = None) -> dict[str, list[RunHere] | SshError]:
        """Find the live processes of runs on each host."""
        facts = {host: {"tokens": None if tokens is None else list(tokens)} for host in self._accesses}
        replies = self._ask("host.list", facts)
        return _read(replies, lambda reply: reply["runs"])

    def end(self, tokens: Mapping[str, Sequence[str]]) -> dict[str, list[Ended] | SshError]:
        """End what is left over of these runs on these hosts."""
        longest = max(map(len, tokens.values()), default=0)
        facts = {host: {"tokens": list(of_host)} for host, of_host in tokens.items()}
        replies = self._ask("run.end", facts, timeout_s=_TIMEOUT_S + longest * _END_TIMEOUT_S)
        return _read(replies, lambda reply: reply["ended"])

    def stored(self, older_than_s: float) -> dict[str, Storage | SshError]:
        """Find the directories on each host that are that old and not needed by any run."""
        facts = {host: {"tokens": [], "older_than_s": older_than_s} for host in self._accesses}
        replies = self._ask("host.list", facts, timeout_s=_DISK_TIMEOUT_S)
        found = _read(replies, lambda reply: reply["stored"])
        return {host: storage or NonsenseError(host, "no old files") for host, storage in found.items()}

    def remove(
        self, places: Mapping[str, Sequence[str]], older_than_s: float | None
    ) -> dict[str, list[Removed] | SshError]:
        """Remove these places on these hosts; `older_than_s` None: directories of ended runs, at any age."""
        facts = {host: {"places": list(of_host), "older_than_s": older_than_s} for host, of_host in places.items()}
        replies = self._ask("host.remove", facts, timeout_s=_DISK_TIMEOUT_S)
        return _read(replies, lambda reply: reply["removed"])

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.close()

    def _ask(
        self, do: str, facts: Mapping[str, Mapping[str, Any]], *, timeout_s: float = _TIMEOUT_S
    ) -> dict[str, dict[str, Any] | SshError]:
        """Ask hosts; a connection that was lost since the last request is opened again."""

        def ask(host: str) -> Work:
            return lambda session: session.ask(do, facts[host], timeout_s=timeout_s).facts

        found = self._pool.run(do, {self._accesses[host]: ask(host) for host in facts}, None, anew=True)
        return {host: found[self._accesses[host]] for host in facts}


Machines = ThisMachine | Hosts


@dataclass(kw_only=True)
class Cleanup:
    """One cleanup of machines: `look` comes first, then `carry_out`."""

    machines: Machines
    tokens: list[str] | None
    """The runs that it is about; None: all."""
    older_than_s: float | None
    """The age from which directories are removed; None: none is removed."""
    found: Mapping[str, list[RunHere] | SshError] = field(default_factory=dict)
    storages: Mapping[str, Storage | SshError] = field(default_factory=dict)
    ended: Mapping[str, list[Ended] | SshError] = field(default_factory=dict)
    removed: Mapping[str, list[Removed] | SshError] = field(default_factory=dict)

    @property
    def left_over(self) -> dict[str, list[RunHere]]:
        """The runs without a supervisor, guard or task, by machine; machines without such runs are left out."""
        return left_over_of(self.found)

    @property
    def removable(self) -> dict[str, list[str]]:
        """The places that can be removed, by machine; machines without are left out."""
        places = {host: [each.place for each in storage.removable] for host, storage in answers(self.storages).items()}
        return {host: of_host for host, of_host in places.items() if of_host}

    @property
    def exit_code(self) -> int:
        replies = [*self.found.values(), *self.storages.values(), *self.ended.values(), *self.removed.values()]
        if any(isinstance(reply, SshError) for reply in replies):
            return PreflightError.exit_code
        alive = any(each.left for ended in answers(self.ended).values() for each in ended)
        kept = any(each.error for removed in answers(self.removed).values() for each in removed)
        return ClusterddpError.exit_code if alive or kept else 0

    def look(self) -> None:
        """Find what is left over and what can be removed."""
        self.found = self.machines.look(self.tokens)
        if self.older_than_s is not None:
            self.storages = self.machines.stored(self.older_than_s)

    def carry_out(self) -> None:
        """End and remove what was found, as far as it is still left over."""
        left_over = {host: [run.token for run in runs] for host, runs in self.left_over.items()}
        self.ended = self.machines.end(left_over)
        if self.older_than_s is not None:
            self.removed = self.machines.remove(self.removable, self.older_than_s)


def answers(replies: Mapping[str, _T | SshError]) -> dict[str, _T]:
    """Return the answers, without the errors."""
    return {host: reply for host, reply in replies.items() if not isinstance(reply, SshError)}


def left_over_of(found: Mapping[str, list[RunHere] | SshError]) -> dict[str, list[RunHere]]:
    """Return the runs without a live supervisor, guard or task, by machine; machines without such runs are left out."""
    runs = {host: [run for run in of_host if run.answered_by is None] for host, of_host in answers(found).items()}
    return {host: of_host for host, of_host in runs.items() if of_host}


def accesses_of(run: RunDir) -> list[HostAccess]:
    """Return the access to each host of a run; none for a run that was not started over SSH.

    Raises: ClusterddpError: it has no plan, or another user has written it.
    """
    if read_run(run).launcher != "ssh":
        return []
    ssh = read_plan_json(run).get("ssh")
    return build_record(SshPlan, ssh, str(run.plan)).accesses() if ssh else []


def _read(
    replies: Mapping[str, dict[str, Any] | SshError], read: Callable[[dict[str, Any]], _T]
) -> dict[str, _T | SshError]:
    return {host: reply if isinstance(reply, SshError) else read(reply) for host, reply in replies.items()}
