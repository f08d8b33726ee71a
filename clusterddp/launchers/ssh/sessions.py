"""Sessions with all hosts of a run: opened, asked, kept alive by heartbeats, and closed together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.planning.plan import Plan
from clusterddp.remote.package import package
from clusterddp.ssh.fan import AT_ONCE, EACH_S, Fan
from clusterddp.ssh.session import Reply, Session
from clusterddp.ssh.sessions import ask_all, open_sessions, raise_for

HEARTBEAT_INTERVAL_S = 2.0
_HEARTBEAT_ANSWER_S = 60.0
"""How long a host may take to answer a heartbeat; a host that receives none meanwhile ends its ranks by itself."""

Facts = Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None


@dataclass(kw_only=True)
class HostSessions:
    """A session with each host of one run, in the order of the nodes; the caller who opens them closes them."""

    plan: Plan
    by_host: dict[str, Session]
    """By the host's name in the spec; a host with several nodes has one session."""
    failed: dict[str, SshError] = field(default_factory=dict)
    """The errors of hosts that did not answer."""

    def of_node(self, node_rank: int) -> Session:
        return self.by_host[self.plan.gang.nodes[node_rank].host]

    @property
    def by_node(self) -> dict[int, Session]:
        return {node.node_rank: self.by_host[node.host] for node in self.plan.gang.nodes}

    def ask_all(
        self, do: str, facts: Facts = None, *, timeout_s: float = 30.0, hosts: Collection[str] | None = None
    ) -> dict[str, Reply]:
        """Ask every host, or these.

        Raises: SshError, PreflightError: a host refuses or does not answer.
        """
        replies = self._ask(do, facts, timeout_s, self.by_host if hosts is None else hosts)
        raise_for(errors_of(replies).values())
        return {host: reply for host, reply in replies.items() if isinstance(reply, Reply)}

    def ask_willing(self, do: str, facts: Facts = None, *, timeout_s: float = 30.0) -> dict[str, Reply]:
        """Ask every host; return the replies and put the errors into `failed`."""
        replies = self._ask(do, facts, timeout_s, self.by_host)
        self.failed |= errors_of(replies)
        return {host: reply for host, reply in replies.items() if isinstance(reply, Reply)}

    def _ask(self, do: str, facts: Facts, timeout_s: float, hosts: Collection[str]) -> dict[str, Reply | SshError]:
        asked = {host: self.by_host[host] for host in hosts}
        return ask_all(asked, do, facts, timeout_s=timeout_s + EACH_S * len(asked))

    def close(self) -> None:
        for session in self.by_host.values():
            session.close()

    def __enter__(self) -> HostSessions:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Heartbeats:
    """Heartbeats to all hosts: the run's supervisors end when they miss them, so the run ends with this process.

    A run depends on them while it is being started, an attached run until it ends.
    """

    def __init__(self, sessions: HostSessions) -> None:
        self._sessions = sessions
        self._stopped = threading.Event()
        for number, session in enumerate(sessions.by_host.values()):
            first_s = HEARTBEAT_INTERVAL_S * (number + 1) / len(sessions.by_host)
            threading.Thread(target=self._send, args=(session, first_s), daemon=True).start()

    def stop(self) -> None:
        """Stop the heartbeats; the connections stay open."""
        self._stopped.set()

    def close(self) -> None:
        """Stop the heartbeats and close the connections, which ends the run if it still runs."""
        self.stop()
        self._sessions.close()

    def __enter__(self) -> Heartbeats:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _send(self, session: Session, first_s: float) -> None:
        """Send heartbeats to one host, in a thread of its own: a host that hangs delays no other."""
        wait_s = first_s
        # A connection that breaks ends the ranks on that host, and therefore everywhere.
        with contextlib.suppress(SshError):
            while not self._stopped.wait(wait_s):
                session.send_heartbeat(_HEARTBEAT_ANSWER_S)
                wait_s = HEARTBEAT_INTERVAL_S


def open_host_sessions(plan: Plan, environ: Mapping[str, str], *, all_needed: bool = True) -> HostSessions:
    """Open a session with every host of a run.

    Raises: SshError, PreflightError: a host cannot be used; with `all_needed` False, no host can be used.
    """
    sessions = try_host_sessions(plan, environ)
    if sessions.failed and (all_needed or not sessions.by_host):
        sessions.close()
        raise_for(sessions.failed.values())
    return sessions


def try_host_sessions(plan: Plan, environ: Mapping[str, str]) -> HostSessions:
    """Open a session with every host of a run; put the errors of the others into `failed`."""
    assert plan.ssh is not None
    results = open_sessions(plan.ssh.accesses(), environ=environ, package=package())
    return HostSessions(
        plan=plan,
        by_host={host: result for host, result in results.items() if isinstance(result, Session)},
        failed=errors_of(results),
    )


def errors_of(results: Mapping[str, object]) -> dict[str, SshError]:
    return {host: result for host, result in results.items() if isinstance(result, SshError)}


def each(items: list[int], function: Callable[[int], dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Call a function for all items concurrently.

    Raises: SshError, PreflightError: the function failed for an item.
    """

    def call(item: int) -> dict[str, Any] | ClusterddpError:
        try:
            return function(item)
        except ClusterddpError as error:
            return error

    results = Fan(items, call, lambda result: None).results(AT_ONCE)
    raise_for([error for error in results.values() if isinstance(error, SshError)])
    return {item: result for item, result in results.items() if isinstance(result, dict)}
