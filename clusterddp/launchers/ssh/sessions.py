"""Sessions with all hosts of a run: opened together, asked together, closed together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.planning.plan import Plan
from clusterddp.remote.package import package
from clusterddp.ssh.fan import AT_ONCE, EACH_S, Fan
from clusterddp.ssh.session import Reply, Session, ask_all, open_sessions, raise_for

Facts = Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None


@dataclass(kw_only=True)
class HostSessions:
    """A session with each host of one run, in the order of the nodes; the caller that opened them closes them."""

    plan: Plan
    by_host: dict[str, Session]
    """By the host's name in the spec; a host that carries several nodes is there once."""
    failed: dict[str, SshError] = field(default_factory=dict)
    """Hosts that could not be asked."""

    def of_node(self, node_rank: int) -> Session:
        return self.by_host[self.plan.gang.nodes[node_rank].host]

    @property
    def by_node(self) -> dict[int, Session]:
        return {node.node_rank: self.by_host[node.host] for node in self.plan.gang.nodes}

    def ask_all(self, do: str, facts: Facts = None, *, timeout_s: float = 30.0) -> dict[str, Reply]:
        """Ask every host.

        Raises: SshError, PreflightError: the answers of hosts that refuse, or why they cannot be asked any more.
        """
        replies = self._ask(do, facts, timeout_s)
        raise_for(errors_of(replies).values())
        return {host: reply for host, reply in replies.items() if isinstance(reply, Reply)}

    def ask_willing(self, do: str, facts: Facts = None, *, timeout_s: float = 30.0) -> dict[str, Reply]:
        """Ask those hosts that answer; the others are then in `failed`."""
        replies = self._ask(do, facts, timeout_s)
        self.failed |= errors_of(replies)
        return {host: reply for host, reply in replies.items() if isinstance(reply, Reply)}

    def _ask(self, do: str, facts: Facts, timeout_s: float) -> dict[str, Reply | SshError]:
        return ask_all(self.by_host, do, facts, timeout_s=timeout_s + EACH_S * len(self.by_host))

    def close(self) -> None:
        for session in self.by_host.values():
            session.close()

    def __enter__(self) -> HostSessions:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_host_sessions(plan: Plan, environ: Mapping[str, str], *, all_needed: bool = True) -> HostSessions:
    """Open a session with every host of a run.

    Raises: SshError, PreflightError: a host cannot be used; with `all_needed` False only when none can.
    """
    sessions = try_host_sessions(plan, environ)
    if sessions.failed and (all_needed or not sessions.by_host):
        sessions.close()
        raise_for(sessions.failed.values())
    return sessions


def try_host_sessions(plan: Plan, environ: Mapping[str, str]) -> HostSessions:
    """Open a session with every host of a run that can be used; the others are then in `failed`."""
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
    """Call a function for all items at once.

    Raises: SshError, PreflightError: of those that failed.
    """

    def call(item: int) -> dict[str, Any] | ClusterddpError:
        try:
            return function(item)
        except ClusterddpError as error:
            return error

    results = Fan(items, call, lambda result: None).results(AT_ONCE)
    raise_for([error for error in results.values() if isinstance(error, SshError)])
    return {item: result for item, result in results.items() if isinstance(result, dict)}
