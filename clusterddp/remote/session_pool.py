"""Keeps sessions with hosts open, each in a thread of its own, and opens a broken one again.

A host that hangs delays no other: a call to many hosts returns at its timeout without the results that are missing.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import SshError
from clusterddp.remote.package import package
from clusterddp.ssh.connections import Connector
from clusterddp.ssh.session import HostAccess, Session, start_session

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_CLOSE_TIMEOUT_S = 1.0
"""How long a thread may take to finish the file that it writes."""

Work = Callable[[Session], Any]
Open = Callable[[HostAccess], Session]


class Opener:
    """Opens sessions, from any thread; all of them share the connections to jump hosts."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._connector = Connector(environ)

    def __call__(self, access: HostAccess) -> Session:
        """Open a session.

        Raises: SshError.
        """
        connector = self._connector
        try:
            connection = connector.connect(access.host, pinned=access.host_key)
        except SshError:
            self._replace(connector)
            raise
        with self._lock:  # else every thread makes the package
            made = package()
        session = start_session(connection, access, made)
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
