"""Sessions with many hosts: opened and asked all at once, kept alive by heartbeats, or kept open and opened again.

A host that hangs delays no other: each is asked in a thread of its own.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from clusterddp.errors import ClusterddpError, PreflightError, SshError
from clusterddp.places.ssh.connections import EACH_S, Connector, blamed, call_each, fulfil
from clusterddp.places.ssh.session import Reply, Session
from clusterddp.planning.ssh import SshNode

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan

HEARTBEAT_INTERVAL_S = 2.0
_HEARTBEAT_ANSWER_S = 60.0
"""How long a host may take to answer a heartbeat; a host that receives none meanwhile ends its ranks by itself."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_CLOSE_TIMEOUT_S = 1.0
"""How long a thread may take to finish the file that it writes."""
Facts = Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None
"""What goes with a request; it may depend on the host."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Work = Callable[[Session], Any]
Open = Callable[[SshNode], Session]


def open_sessions(nodes: Iterable[SshNode], *, environ: Mapping[str, str]) -> dict[str, Session | SshError]:
    """Connect to hosts and start the agent on each; return a result per host. The caller closes the sessions."""
    by_host = {node.host: node for node in nodes}
    with Connector(environ) as connector:
        return call_each(lambda host: connector.open(by_host[host]), by_host, Session.close)


def ask_all(
    sessions: Mapping[str, Session], do: str, facts: Facts = None, *, timeout_s: float = 30.0, body: bytes = b""
) -> dict[str, Reply | SshError]:
    """Send hosts the same request, `AT_ONCE` at a time; return a result per host."""
    longest_s = timeout_s + EACH_S * len(sessions)

    def ask(host: str) -> Reply:
        with blamed(host):
            return sessions[host].ask(do, facts(host) if callable(facts) else facts, body=body, timeout_s=longest_s)

    return call_each(ask, sessions)


def raise_for(errors: Collection[ClusterddpError], problem: str = "cannot be used") -> None:
    """Raise one error for all hosts that failed, if any did; `problem`: what they have in common, as a predicate."""
    first = next(iter(errors), None)
    if first is None:
        return
    if len({error.message for error in errors}) == 1:
        raise first
    lines = [error.message + (f"\n    hint: {error.hint}" if error.hint else "") for error in errors]
    raise PreflightError("\n  ".join([f"{len(errors)} hosts {problem}:", *lines])) from first


@dataclass(kw_only=True)
class HostSessions:
    """A session with each host of one run, in the order of the nodes; the caller who opens them closes them."""

    plan: Plan
    by_host: dict[str, Session]
    """By the host's name in the spec."""
    failed: dict[str, SshError] = field(default_factory=dict)
    """The errors of hosts that did not answer."""

    def of_node(self, node_rank: int) -> Session:
        return self.by_host[self.plan.gang.nodes[node_rank].host]

    def ask_all(
        self,
        do: str,
        facts: Facts = None,
        *,
        timeout_s: float = 30.0,
        hosts: Collection[str] | None = None,
        body: bytes = b"",
    ) -> dict[str, Reply]:
        """Ask every host, or these.

        Raises: SshError, PreflightError: a host refuses or does not answer.
        """
        asked = {host: self.by_host[host] for host in (self.by_host if hosts is None else hosts)}
        return all_or_raise(ask_all(asked, do, facts, timeout_s=timeout_s, body=body))

    def ask_willing(self, do: str, facts: Facts = None, *, timeout_s: float = 30.0) -> dict[str, Reply]:
        """Ask every host; return the replies and put the errors into `failed`."""
        replies = ask_all(self.by_host, do, facts, timeout_s=timeout_s)
        self.failed |= errors_of(replies)
        return good_of(replies)

    def close(self) -> None:
        for session in self.by_host.values():
            session.close()

    def __enter__(self) -> HostSessions:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Heartbeats:
    """Heartbeats to all hosts: the run's supervisors end when they miss them, so the run ends with this process.

    A run depends on them while it is being started.
    """

    def __init__(self, sessions: HostSessions) -> None:
        self._stopped = threading.Event()
        for number, session in enumerate(sessions.by_host.values()):
            first_s = HEARTBEAT_INTERVAL_S * (number + 1) / len(sessions.by_host)
            threading.Thread(target=self._send, args=(session, first_s), daemon=True).start()

    def __enter__(self) -> Heartbeats:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()  # the connections stay open

    def _send(self, session: Session, first_s: float) -> None:
        """Send heartbeats to one host, in a thread of its own: a host that hangs delays no other."""
        wait_s = first_s
        # A connection that breaks ends the ranks on that host, and therefore everywhere.
        with contextlib.suppress(SshError), blamed(session.host):
            while not self._stopped.wait(wait_s):
                session.send_heartbeat(_HEARTBEAT_ANSWER_S)
                wait_s = HEARTBEAT_INTERVAL_S


def open_host_sessions(
    plan: Plan,
    environ: Mapping[str, str],
    *,
    needed: Literal["all", "one", "none"] = "all",
    left_out: Collection[str] = (),
) -> HostSessions:
    """Open a session with every host of a run; put the errors of the others into `failed`.

    `left_out`: hosts that are not needed.
    Raises: SshError, PreflightError: fewer hosts can be used than are needed.
    """
    assert plan.ssh is not None
    results = open_sessions(plan.ssh.hosts, environ=environ)
    sessions = HostSessions(plan=plan, by_host=good_of(results), failed=errors_of(results))
    missed = [error for host, error in sessions.failed.items() if host not in left_out]
    if missed and (needed == "all" or (needed == "one" and not sessions.by_host)):
        sessions.close()
        raise_for(missed)
    return sessions


def good_of(results: Mapping[_Item, _Result | SshError]) -> dict[_Item, _Result]:
    return {item: result for item, result in results.items() if not isinstance(result, SshError)}


def errors_of(results: Mapping[_Item, object]) -> dict[_Item, SshError]:
    return {item: result for item, result in results.items() if isinstance(result, SshError)}


def all_or_raise(results: Mapping[_Item, _Result | SshError], problem: str = "cannot be used") -> dict[_Item, _Result]:
    """Return the results of all hosts.

    Raises: SshError, PreflightError: a host failed; `problem`: what those that failed have in common, as a predicate.
    """
    raise_for(errors_of(results).values(), problem)
    return good_of(results)


@dataclass(kw_only=True)
class _Host:
    """One host: work for it is done one call after the other, each in a thread of its own."""

    node: SshNode
    open_session: Open
    future: Future[Any] | None = None
    """The result of the last work, until it is collected."""
    kind: str = ""
    """The kind of the last work."""
    session: Session | None = None
    closed: bool = False
    num_failures: int = 0
    last_error: SshError | None = None
    retry_at: float = 0.0
    """Monotonic time in seconds before which a host that cannot be reached is not tried again."""

    @property
    def busy(self) -> bool:
        return self.future is not None and not self.future.done()

    def post(self, kind: str, work: Work) -> Future[Any]:
        self.kind, self.future = kind, _in_thread(self._work, work)
        return self.future

    def close(self) -> None:
        """Drop the session, which interrupts work that waits for an answer."""
        self.closed = True
        session, self.session = self.session, None
        if session is not None:
            with contextlib.suppress(OSError, EOFError):
                session.close()

    def _work(self, work: Work) -> Any:
        try:
            return self._do(work)
        finally:
            if self.closed:
                self.close()

    def _do(self, work: Work) -> Any:
        """Do the work; when the session breaks, do it once more in a new one."""
        while True:
            session, is_old = self.session, self.session is not None
            try:
                with blamed(self.node.host):
                    session = self.session = session or self.open_session(self.node)
                    result = work(session)
            except SshError as error:
                if session is not None and (error.dropped or error.phase != "ask"):
                    self.session = None
                    with contextlib.suppress(OSError, EOFError):
                        session.close()
                if is_old and error.dropped and not self.closed:
                    continue
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.num_failures)
                self.retry_at = time.monotonic() + pause_s * random.uniform(0.5, 1.0)
                self.num_failures, self.last_error = self.num_failures + 1, error
                raise
            self.num_failures, self.last_error = 0, None
            return result


class SessionPool:
    """Sessions with many hosts, opened when they are first needed."""

    def __init__(self, open_session: Open) -> None:
        self._open = open_session
        self._hosts: dict[SshNode, _Host] = {}

    def run(
        self, kind: str, works: Mapping[SshNode, Work], timeout_s: float | None, *, anew: bool = False
    ) -> dict[SshNode, Any]:
        """Do work on hosts; return the results so far when all are done, or at the timeout.

        A host that is still busy with an earlier call is not waited for; the late result of an earlier call of the
        same kind counts as its result. With `anew` it is waited for, and asked again. The result of a host that cannot
        be reached is an `SshError`, without a new try before its `retry_at`.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        hosts = {node: self._hosts.setdefault(node, _Host(node=node, open_session=self._open)) for node in works}
        if anew:
            _await([host.future for host in hosts.values() if host.future is not None], deadline)
        results: dict[SshNode, Any] = {}
        posted = []
        for node, host in hosts.items():
            if host.busy:
                continue
            if host.last_error is not None and time.monotonic() < host.retry_at:
                results[node] = host.last_error
            else:
                posted.append(host.post(kind, works[node]))
        _await(posted, deadline)
        for node, host in hosts.items():
            if host.future is not None and host.future.done() and host.kind == kind:
                results[node], host.future = host.future.result(), None
        return results

    def retry_now(self) -> None:
        """Try hosts that cannot be reached again at the next call: the network may be back."""
        for host in self._hosts.values():
            host.num_failures, host.retry_at = 0, 0.0

    def close(self) -> None:
        """Close all sessions; a host that still does not answer is not waited for."""
        open_now = [host for host in self._hosts.values() if host.session is not None]  # others write nothing
        for host in self._hosts.values():
            host.closed = True
        ends = [_in_thread(host.close) for host in open_now]
        ends += [host.future for host in open_now if host.future is not None]
        _await(ends, time.monotonic() + _CLOSE_TIMEOUT_S)


def _in_thread(function: Callable[..., Any], *words: Any) -> Future[Any]:
    """Call a function in a daemon thread."""
    future: Future[Any] = Future()
    threading.Thread(target=fulfil, args=(future, function, *words), daemon=True).start()
    return future


def _await(futures: Collection[Future[Any]], deadline: float) -> None:
    """Wait for futures until a time of the monotonic clock."""
    wait(futures, None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
