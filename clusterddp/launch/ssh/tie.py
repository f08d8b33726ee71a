"""What ties a run to its launcher: signs of life to every host, whose end is the end of the gang.

Every run is tied while it is being started, an attached one until it ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from clusterddp.errors import SshError
from clusterddp.launch.ssh.crew import Crew
from clusterddp.ssh.fan import Fan

BEAT_S = 2.0


class Tie:
    """Holds the run's supervisors by our connections, until it is closed or this process ends, however it does."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._over = threading.Event()
        self.lost: SshError | None = None
        """Why the tie has torn, when it has: a host's gang ends then by itself."""
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give no more signs of life; the connections stay."""
        self._over.set()

    def close(self) -> None:
        """Let the run end, if it has not ended already."""
        self.release()
        self._thread.join()
        self._crew.close()

    def _beat(self) -> None:
        sessions = self._crew.sessions

        def beat(host: str) -> SshError | None:
            try:
                sessions[host].beat(timeout_s=10.0)
            except SshError as error:
                return error
            return None

        while not self._over.wait(BEAT_S) and self.lost is None:
            errors = Fan(sessions, beat, lambda result: None).results(len(sessions)).values()
            self.lost = next((error for error in errors if error is not None), None)


@contextlib.contextmanager
def tied(crew: Crew) -> Iterator[None]:
    """Tie what is started meanwhile to this process."""
    tie = Tie(crew)
    try:
        yield
    finally:
        tie.release()
