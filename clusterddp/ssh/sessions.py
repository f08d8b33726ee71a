"""Many hosts at once: start the agent on each, send each a request, and raise one error for all that failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from clusterddp.errors import ClusterddpError, PreflightError, SshError
from clusterddp.ssh.connections import connect_all
from clusterddp.ssh.fan import AT_ONCE, Fan
from clusterddp.ssh.session import HostAccess, Package, Reply, Session, start_session


def open_sessions(
    accesses: Sequence[HostAccess], *, environ: Mapping[str, str], package: Package
) -> dict[str, Session | SshError]:
    """Connect to hosts and start the agent on each; return a result per host. The caller closes the sessions."""
    by_host = {access.host: access for access in accesses}
    pinned = {access.host: access.host_key for access in accesses if access.host_key}
    connections = connect_all(by_host, environ=environ, pinned=pinned)

    def start(host: str) -> Session | SshError:
        connection = connections[host]
        return connection if isinstance(connection, SshError) else start_session(connection, by_host[host], package)

    return Fan(by_host, start, _close_if_open).results(AT_ONCE)


def ask_all(
    sessions: Mapping[str, Session],
    do: str,
    facts: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None,
    *,
    timeout_s: float = 30.0,
) -> dict[str, Reply | SshError]:
    """Send hosts the same request, `AT_ONCE` at a time; `facts` may depend on the host. Return a result per host."""

    def ask(host: str) -> Reply | SshError:
        try:
            return sessions[host].ask(do, facts(host) if callable(facts) else facts, timeout_s=timeout_s)
        except SshError as error:
            return error

    return Fan(sessions, ask).results(AT_ONCE)


def raise_for(errors: Collection[ClusterddpError], problem: str = "cannot be used") -> None:
    """Raise one error for all hosts that failed, if any did; `problem`: what they have in common, as a predicate."""
    first = next(iter(errors), None)
    if first is None:
        return
    if len({error.message for error in errors}) == 1:
        raise first
    lines = [error.message + (f"\n    hint: {error.hint}" if error.hint else "") for error in errors]
    raise PreflightError("\n  ".join([f"{len(errors)} hosts {problem}:", *lines])) from first


def _close_if_open(result: Session | SshError) -> None:
    if isinstance(result, Session):
        result.close()
