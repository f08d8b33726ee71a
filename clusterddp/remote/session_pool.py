"""Sessions with hosts that are kept open, each in a thread of its own, and opened again when they break.

A host that hangs delays no other: a call to many hosts waits for all of them until its timeout, then goes on without.
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
from clusterddp.ssh.network import Network
from clusterddp.ssh.session import HostAccess, Session, start_session

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_PER_BASTION = 8
_LEAVE_S = 1.0
"""How long a thread may finish the file that it writes."""

Work = Callable[[Session], Any]
Open = Callable[[HostAccess], Session]


class Opener:
    """Opens sessions, from any thread; hosts on the way are shared by all of them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._network = Network(environ, _PER_BASTION)

    def __call__(self, access: HostAccess) -> Session:
        """Open a session.

        Raises: SshError.
        """
        network = self._network
        try:
            connection = network.connect(access.host, pinned=access.host_key)
        except SshError:
            self._forget(network)
            raise
        with self._lock:  # it is made once, and not in every thread
            sent = package()
        session = start_session(connection, access, sent)
        if isinstance(session, SshError):
            raise session
        return session

    def _forget(self, network: Network) -> None:
        """Start again: a network remembers which host on the way could not be reached."""
        with self._lock:
            if self._network is not network:
                return
            self._network = Network(self._environ, _PER_BASTION)
        network.__exit__()


@dataclass(frozen=True, slots=True)
class Failed:
    """Our own mistake in a thread; the caller that waits raises it."""

    error: BaseException


@dataclass(kw_only=True)
class _Host:
    """One host: what it is asked is done in its thread, one after the other."""

    access: HostAccess
    open_session: Open
    changed: threading.Condition
    """Announces a result."""
    jobs: queue.SimpleQueue[Work | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None
    busy: bool = False
    kind: str = ""
    """Of the last work."""
    result: Any = None
    """Of the last work, until it is collected."""
    session: Session | None = None
    closed: bool = False
    num_failures: int = 0
    last_error: SshError | None = None
    retry_at: float = 0.0
    """Seconds of the monotonic clock: before that a host that cannot be reached is not tried again."""

    def post(self, kind: str, work: Work) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()
        self.busy, self.kind, self.result = True, kind, None
        self.jobs.put(work)

    def close(self) -> None:
        """Have the thread end; one that waits for an answer hears that the session is closed."""
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
        """Do the work; when the session turns out to be broken, once more with another one."""
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
        """Have work done on hosts; return the results that are there when all are done or the time is up.

        A host that is still busy with an earlier call is not waited for, and the late result of a call of the same
        kind is one too; with `anew` it is waited for, and asked again. A host that cannot be reached has an `SshError`
        for its result, at once while it is too early to try it again.
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
        """Let go of all hosts; a thread that still waits for one is left behind."""
        for host in self._hosts.values():
            host.close()
        deadline = time.monotonic() + _LEAVE_S
        for host in self._hosts.values():
            if host.thread is not None and host.session is not None:  # one that connects writes nothing
                host.thread.join(max(0.0, deadline - time.monotonic()))
