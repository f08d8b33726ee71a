"""Sessions that are kept open while somebody watches, one per host, each in a thread of its own, made again when lost.

A host that hangs holds up nobody else: whoever asks many hosts waits for all of them a while, then goes on without.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterddp.errors import SshError

if TYPE_CHECKING:
    from clusterddp.ssh.session import HostAccess, Session

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_LEAVE_S = 1.0
"""How long a thread may finish the file that it writes."""

Work = Callable[["Session"], Any]
Open = Callable[["HostAccess"], "Session"]


@dataclass(frozen=True, slots=True)
class Failed:
    """Our own mistake in a thread; whoever waits raises it."""

    error: BaseException


@dataclass(kw_only=True)
class _Link:
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


class Links:
    """The links to many hosts."""

    def __init__(self, open_session: Open) -> None:
        self._open = open_session
        self._changed = threading.Condition()
        self._links: dict[HostAccess, _Link] = {}

    def run(
        self, kind: str, works: Mapping[HostAccess, Work], timeout_s: float | None, *, anew: bool = False
    ) -> dict[HostAccess, Any]:
        """Have work done on hosts; return the results that are there when all are done or the time is up.

        A host that is still busy with an earlier call is not waited for, and the late result of a call of the same
        kind is one too; with `anew` it is waited for, and asked again. A host that cannot be reached has an `SshError`
        for its result, at once while it is too early to try it again.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        links = {access: self._link(access) for access in works}
        if anew:
            self._await(links.values(), deadline)
        results: dict[HostAccess, Any] = {}
        posted = []
        for access, link in links.items():
            if link.busy:
                continue
            if link.last_error is not None and time.monotonic() < link.retry_at:
                results[access] = link.last_error
            else:
                posted.append(link)
                link.post(kind, works[access])
        self._await(posted, deadline)
        for access, link in links.items():
            if not link.busy and link.kind == kind and link.result is not None:
                results[access], link.result = link.result, None
        for result in results.values():
            if isinstance(result, Failed):
                raise result.error
        return results

    def _link(self, access: HostAccess) -> _Link:
        if access not in self._links:
            self._links[access] = _Link(access=access, open_session=self._open, changed=self._changed)
        return self._links[access]

    def _await(self, links: Collection[_Link], deadline: float | None) -> None:
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: not any(link.busy for link in links), timeout_s)

    def close(self) -> None:
        """Let go of all hosts; a thread that still waits for one is left behind."""
        for link in self._links.values():
            link.close()
        deadline = time.monotonic() + _LEAVE_S
        for link in self._links.values():
            if link.thread is not None and link.session is not None:  # one that connects writes nothing
                link.thread.join(max(0.0, deadline - time.monotonic()))
