"""Runs on several machines: their processes, what is left over, old directories (ps and gc); a result per machine.

The machines are hosts over SSH, or this one; both use run/leftovers.py and run/removal.py.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.errors import NonsenseError, SshError
from clusterddp.places.ssh.connections import Connector
from clusterddp.places.ssh.sessions import SessionPool, Work
from clusterddp.planning.ssh import SshNode, SshPlan
from clusterddp.run.directory import RunDir
from clusterddp.run.leftovers import Ended, RunHere, end_left_over, find_runs
from clusterddp.run.record import read_run
from clusterddp.run.removal import Removed, Storage, find_stored, remove_stored
from clusterddp.run.seal import demand_sealed
from clusterddp.system.files import build_record

DEFAULT_ROOT = "~/.clusterddp"
_TIMEOUT_S = 60.0
_DISK_TIMEOUT_S = 600.0
"""A host may have a million files of checkpoints and snapshots."""
_END_TIMEOUT_S = 15.0
"""For each run, on top."""


class ThisMachine(contextlib.AbstractContextManager["ThisMachine"]):
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

    def __exit__(self, *exception: object) -> None:
        return None


class Hosts(contextlib.AbstractContextManager["Hosts"]):
    """Hosts over SSH, asked all at once; connections stay open while the user is asked."""

    def __init__(self, nodes: Sequence[SshNode], environ: Mapping[str, str]) -> None:
        self._nodes = {node.host: node for node in nodes}
        self._pool = SessionPool(Connector(environ).open)

    def look(self, tokens: Collection[str] | None = None) -> dict[str, list[RunHere] | SshError]:
        """Find the live processes of runs on each host."""
        facts = {"tokens": None if tokens is None else list(tokens)}
        return self._ask("host.list", dict.fromkeys(self._nodes, facts), "runs")

    def end(self, tokens: Mapping[str, Sequence[str]]) -> dict[str, list[Ended] | SshError]:
        """End what is left over of these runs on these hosts."""
        facts = {host: {"tokens": list(of_host)} for host, of_host in tokens.items()}
        longest_s = max(map(len, tokens.values()), default=0) * _END_TIMEOUT_S
        return self._ask("run.end", facts, "ended", timeout_s=_TIMEOUT_S + longest_s)

    def stored(self, older_than_s: float) -> dict[str, Storage | SshError]:
        """Find the directories on each host that are that old and not needed by any run."""
        facts = {"tokens": [], "older_than_s": older_than_s}
        found = self._ask("host.list", dict.fromkeys(self._nodes, facts), "stored", timeout_s=_DISK_TIMEOUT_S)
        return {host: storage or NonsenseError(host, "no old files") for host, storage in found.items()}

    def remove(
        self, places: Mapping[str, Sequence[str]], older_than_s: float | None
    ) -> dict[str, list[Removed] | SshError]:
        """Remove these places on these hosts; `older_than_s` None: directories of ended runs, at any age."""
        facts = {host: {"places": list(of_host), "older_than_s": older_than_s} for host, of_host in places.items()}
        return self._ask("host.remove", facts, "removed", timeout_s=_DISK_TIMEOUT_S)

    def __exit__(self, *exception: object) -> None:
        self._pool.close()

    def _ask(
        self, do: str, facts: Mapping[str, Mapping[str, Any]], key: str, *, timeout_s: float = _TIMEOUT_S
    ) -> dict[str, Any]:
        """Return `key` of each host's reply; a connection that was lost since the last request is opened again."""

        def ask(host: str) -> Work:
            return lambda session: session.ask(do, facts[host], timeout_s=timeout_s).facts

        found = self._pool.run(do, {self._nodes[host]: ask(host) for host in facts}, None, anew=True)
        replies = {host: found[self._nodes[host]] for host in facts}
        return {host: reply if isinstance(reply, SshError) else reply[key] for host, reply in replies.items()}


Machines = ThisMachine | Hosts


def hosts_of(run: RunDir) -> list[SshNode]:
    """Return the hosts of a run; none for a run that was not started over SSH.

    Raises: UsageError: it is not this user's own. ClusterddpError: it has no plan.
    """
    if read_run(run).launcher != "ssh":
        return []
    ssh = demand_sealed(run).get("ssh")
    return list(build_record(SshPlan, ssh, str(run.plan)).hosts) if ssh else []
