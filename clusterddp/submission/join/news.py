"""One machine's part of a run that was joined: news of the run go from node 0 to the others, files say them."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import threading
import time
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import MAX_ATTEMPTS, RunDir, make_attempt_dirs, read_json, write_json
from clusterddp.run.outcome import parse_end, write_end
from clusterddp.run.record import ProcessIdentity
from clusterddp.submission.join.head import Gathering
from clusterddp.submission.join.member import Seat
from clusterddp.system.storage import retry_outage
from clusterddp.wire import build

_POLL_S = 0.1
_LAST_WORDS_S = 10.0
"""How long node 0 may take to tell the others how the run ended, once their supervisors have left."""


class Joined:
    """This machine's part of a run; closing it, or the end of this process, ends the run."""

    def __init__(
        self,
        run: RunDir,
        node_rank: int,
        supervisor: subprocess.Popen[bytes],
        company: Gathering | Seat | None,
        *,
        shares_files: bool = False,
    ) -> None:
        self.run = run
        self.node_rank = node_rank
        self._shares_files = shares_files
        self._supervisor = supervisor
        self._company = company
        self._over = threading.Event()
        self._told_start = -1
        self._thread = threading.Thread(target=self._stay, daemon=True)

    def watch(self) -> Joined:
        """Begin to hand news of the run on; the files of the run say on each machine how it goes."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Let the supervisor, and with it the gang, end, unless it has ended; wait until everybody knows how."""
        if self._supervisor.stdin is not None:
            with contextlib.suppress(OSError):
                self._supervisor.stdin.close()
        self._thread.join()

    def _stay(self) -> None:
        while self._supervisor.poll() is None:
            self._exchange()
            time.sleep(_POLL_S)
        deadline = time.monotonic() + _LAST_WORDS_S
        while isinstance(self._company, Seat) and not self._company.ended and time.monotonic() < deadline:
            self._exchange()
            time.sleep(_POLL_S)
        self._exchange()
        if isinstance(self._company, Gathering):
            self._tell_end(self._company)
        if self._company is not None:
            self._company.close()

    def _exchange(self) -> None:
        """Tell the others of the start, or take in what node 0 tells."""
        if isinstance(self._company, Gathering):
            with contextlib.suppress(OSError, ClusterddpError):  # storage that is away is asked again
                self._tell_start(self._company)
        elif self._company is not None:
            for words in self._company.news():
                with contextlib.suppress(OSError, ClusterddpError):
                    self._take_in(words)

    def _tell_start(self, company: Gathering) -> None:
        attempts = self.run.attempts()
        number = attempts[-1].number if attempts else -1
        started = read_json(attempts[-1].start) if attempts and number > self._told_start else None
        if started is not None:
            self._told_start = number
            company.say_all({"started": started, "attempt": number})

    def _take_in(self, words: dict[str, Any]) -> None:
        try:
            words = build({"attempt": int, "started": dict[str, Any] | None, "ended": dict[str, Any] | None}, words)
        except ValueError:
            return
        if self._shares_files or not 0 <= words["attempt"] < MAX_ATTEMPTS:
            return
        attempt = self.run.attempt(words["attempt"])
        make_attempt_dirs(attempt)
        if words["started"] is not None:
            # Here this node's own supervisor is the one to ask for.
            with contextlib.suppress(ProcessLookupError):
                own = dataclasses.asdict(ProcessIdentity.of(self._supervisor.pid))
                write_json(attempt.start, words["started"] | {"supervisor": own})
        elif words["ended"] is not None:
            write_end(attempt, parse_end(words["ended"]))

    def _tell_end(self, company: Gathering) -> None:
        with contextlib.suppress(OSError, ClusterddpError):
            attempt = retry_outage(self.run.newest_attempt)
            ended = read_json(attempt.end)
            if ended is not None:
                company.say_all({"ended": ended, "attempt": attempt.number})
