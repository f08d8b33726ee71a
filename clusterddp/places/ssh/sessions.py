"""Sessions with many hosts: opened and asked all at once, kept alive by heartbeats, or kept open and opened again.

A host that hangs delays no other: each is asked in a thread of its own.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, PreflightError, SshError
from clusterddp.places.ssh.connections import AT_ONCE, EACH_S, Connector, Fan, connect_all
from clusterddp.places.ssh.session import Reply, Session, start_session
from clusterddp.planning.ssh import HostAccess

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
Work = Callable[[Session], Any]
Open = Callable[[HostAccess], Session]


def open_sessions(accesses: Sequence[HostAccess], *, environ: Mapping[str, str]) -> dict[str, Session | SshError]:
    """Connect to hosts and start the agent on each; return a result per host. The caller closes the sessions."""
    by_host = {access.host: access for access in accesses}
    pinned = {access.host: access.host_key for access in accesses if access.host_key}
    connections = connect_all(by_host, environ=environ, pinned=pinned)

    def start(host: str) -> Session | SshError:
        connection = connections[host]
        return connection if isinstance(connection, SshError) else start_session(connection, by_host[host])

    return Fan(by_host, start, _close_if_open).results(AT_ONCE)


def ask_all(
    sessions: Mapping[str, Session],
    do: str,
    facts: Facts = None,
    *,
    timeout_s: float = 30.0,
    body: bytes = b"",
) -> dict[str, Reply | SshError]:
    """Send hosts the same request, `AT_ONCE` at a time; return a result per host."""

    def ask(host: str) -> Reply | SshError:
        try:
            return sessions[host].ask(do, facts(host) if callable(facts) else facts, body=body, timeout_s=timeout_s)
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
        replies = self._ask(do, facts, timeout_s, self.by_host if hosts is None else hosts, body)
        raise_for(errors_of(replies).values())
        return {host: reply for host, reply in replies.items() if isinstance(reply, Reply)}

    def ask_willing(self, do: str, facts: Facts = None, *, timeout_s: float = 30.0) -> dict[str, Reply]:
        """Ask every host; return the replies and put the errors into `failed`."""
        replies = self._ask(do, facts, timeout_s, self.by_host)
        self.failed |= errors_of(replies)
        return {host: reply for host, reply in replies.items() if isinstance(reply, Reply)}

    def _ask(
        self, do: str, facts: Facts, timeout_s: float, hosts: Collection[str], body: bytes = b""
    ) -> dict[str, Reply | SshError]:
        asked = {host: self.by_host[host] for host in hosts}
        return ask_all(asked, do, facts, timeout_s=timeout_s + EACH_S * len(asked), body=body)

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
    results = open_sessions(plan.ssh.accesses(), environ=environ)
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


class Opener:
    """Opens sessions, from any thread; all of them share the connections to jump hosts."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._gate = threading.Semaphore(AT_ONCE)
        self._connector = Connector(environ)

    def __call__(self, access: HostAccess) -> Session:
        """Open a session.

        Raises: SshError.
        """
        connector = self._connector
        with self._gate:
            try:
                connection = connector.connect(access.host, pinned=access.host_key)
            except SshError:
                self._replace(connector)
                raise
            session = start_session(connection, access)
        if isinstance(session, SshError):
            raise session
        return session

    def _replace(self, failed: Connector) -> None:
        """Use a new connector from now on: one remembers the error of a jump host and does not try it again."""
        with self._lock:
            if self._connector is not failed:
                return
            self._connector = Connector(self._environ)
        failed.__exit__()


@dataclass(frozen=True, slots=True)
class Failed:
    """An unexpected error in a thread; the caller that waits raises it."""

    error: BaseException


@dataclass(kw_only=True)
class _Host:
    """One host: its thread does the work for it, one call after the other."""

    access: HostAccess
    open_session: Open
    changed: threading.Condition
    """Notified when there is a result."""
    jobs: queue.SimpleQueue[Work | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None
    busy: bool = False
    kind: str = ""
    """The kind of the last work."""
    result: Any = None
    """The result of the last work, until it is collected."""
    session: Session | None = None
    closed: bool = False
    num_failures: int = 0
    last_error: SshError | None = None
    retry_at: float = 0.0
    """Monotonic time in seconds before which a host that cannot be reached is not tried again."""

    def post(self, kind: str, work: Work) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()
        self.busy, self.kind, self.result = True, kind, None
        self.jobs.put(work)

    def close(self) -> None:
        """End the thread; closing its session interrupts one that waits for an answer."""
        self.closed = True
        self.jobs.put(None)
        if self.busy and self.session is not None:
            threading.Thread(target=self.session.close, daemon=True).start()

    def _work(self) -> None:
        while (work := self.jobs.get()) is not None:
            result: Any
            try:
                result = self._do(work)
            except BaseException as error:
                result = Failed(error)
            with self.changed:
                self.result, self.busy = result, False
                self.changed.notify_all()
        self._drop()

    def _do(self, work: Work) -> Any:
        """Do the work; when the session breaks, do it once more in a new one."""
        while True:
            is_old = self.session is not None
            try:
                session = self.session = self.session or self.open_session(self.access)
                result = work(session)
            except SshError as error:
                if error.dropped or error.phase != "ask":
                    self._drop()
                if is_old and error.dropped and not self.closed:
                    continue
                self._fail(error)
                return error
            self.num_failures, self.last_error = 0, None
            return result

    def _fail(self, error: SshError) -> None:
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.num_failures)
        self.retry_at = time.monotonic() + pause_s * random.uniform(0.5, 1.0)
        self.num_failures += 1
        self.last_error = error

    def _drop(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            with contextlib.suppress(OSError, EOFError):
                session.close()


class SessionPool:
    """Sessions with many hosts, opened when they are first needed."""

    def __init__(self, open_session: Open) -> None:
        self._open = open_session
        self._changed = threading.Condition()
        self._hosts: dict[HostAccess, _Host] = {}

    def run(
        self, kind: str, works: Mapping[HostAccess, Work], timeout_s: float | None, *, anew: bool = False
    ) -> dict[HostAccess, Any]:
        """Do work on hosts; return the results so far when all are done, or at the timeout.

        A host that is still busy with an earlier call is not waited for; the late result of an earlier call of the
        same kind counts as its result. With `anew` it is waited for, and asked again. The result of a host that cannot
        be reached is an `SshError`, without a new try before its `retry_at`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        hosts = {access: self._host(access) for access in works}
        if anew:
            self._await(hosts.values(), deadline)
        results: dict[HostAccess, Any] = {}
        posted = []
        for access, host in hosts.items():
            if host.busy:
                continue
            if host.last_error is not None and time.monotonic() < host.retry_at:
                results[access] = host.last_error
            else:
                posted.append(host)
                host.post(kind, works[access])
        self._await(posted, deadline)
        for access, host in hosts.items():
            if not host.busy and host.kind == kind and host.result is not None:
                results[access], host.result = host.result, None
        for result in results.values():
            if isinstance(result, Failed):
                raise result.error
        return results

    def _host(self, access: HostAccess) -> _Host:
        if access not in self._hosts:
            self._hosts[access] = _Host(access=access, open_session=self._open, changed=self._changed)
        return self._hosts[access]

    def _await(self, hosts: Collection[_Host], deadline: float | None) -> None:
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: not any(host.busy for host in hosts), timeout_s)

    def close(self) -> None:
        """Close all sessions; a daemon thread that still waits for a host is not waited for."""
        for host in self._hosts.values():
            host.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for host in self._hosts.values():
            if host.thread is not None and host.session is not None:  # one that connects writes nothing
                host.thread.join(max(0.0, deadline - time.monotonic()))


def _close_if_open(result: Session | SshError) -> None:
    if isinstance(result, Session):
        result.close()
