"""What ties a run to its launcher: signs of life to every host, whose end is the end of the gang.

Every run is tied while it is being started, an attached one until it ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from clusterddp.errors import SshError
from clusterddp.launchers.ssh.sessions import HostSessions
from clusterddp.ssh.session import Session

BEAT_S = 2.0
_ANSWER_S = 60.0
"""How long an answer may take: a host that hears nothing meanwhile ends its gang by itself."""


class Tie:
    """Holds the run's supervisors by our connections, until it is closed or this process ends, however it does."""

    def __init__(self, sessions: HostSessions) -> None:
        self._sessions = sessions
        self._over = threading.Event()
        for number, session in enumerate(sessions.by_host.values()):
            first_s = BEAT_S * (number + 1) / len(sessions.by_host)
            threading.Thread(target=self._beat, args=(session, first_s), daemon=True).start()

    def release(self) -> None:
        """Give no more signs of life; the connections stay."""
        self._over.set()

    def close(self) -> None:
        """Let the run end, if it has not ended already."""
        self.release()
        self._sessions.close()

    def _beat(self, session: Session, first_s: float) -> None:
        """Give signs of life to one host, in its own thread: one that hangs keeps them from no other."""
        wait_s = first_s
        # A connection that breaks ends the gang on that host, and therefore everywhere.
        with contextlib.suppress(SshError):
            while not self._over.wait(wait_s):
                session.beat(_ANSWER_S)
                wait_s = BEAT_S


@contextlib.contextmanager
def tied(sessions: HostSessions) -> Iterator[None]:
    """Tie what is started meanwhile to this process."""
    tie = Tie(sessions)
    try:
        yield
    finally:
        tie.release()
