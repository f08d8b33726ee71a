"""What ties an attached run to its launcher: signs of life to every host, whose end is the end of the gang."""

from __future__ import annotations

import threading

from clusterddp.errors import SshError
from clusterddp.launch.ssh_crew import Crew

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

    def close(self) -> None:
        """Let the run end, if it has not ended already."""
        self._over.set()
        self._thread.join()
        self._crew.close()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S) and self.lost is None:
            self._crew.ask_willing("beat", timeout_s=10.0)
            self.lost = next(iter(self._crew.failed.values()), None)
