"""One machine of a joined run: node 0 sends the start and the end of attempts, the others write them into files."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import threading
import time
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import MAX_ATTEMPTS, RunDir, make_attempt_dirs
from clusterddp.run.outcome import parse_end, write_end
from clusterddp.run.record import ProcessIdentity
from clusterddp.submission.join.client import JoinClient
from clusterddp.submission.join.server import JoinServer
from clusterddp.system.files import read_json, write_json
from clusterddp.system.storage import retry_outage
from clusterddp.wire import build

_POLL_S = 0.1
_LAST_UPDATE_S = 10.0
"""How long after the end of their supervisors the other machines wait for the end of the run from node 0."""


class Joined:
    """The run on this machine; `close`, or the end of this process, ends it on all machines."""

    def __init__(
        self,
        run: RunDir,
        node_rank: int,
        supervisor: subprocess.Popen[bytes],
        others: JoinServer | JoinClient | None,
        *,
        shares_files: bool = False,
    ) -> None:
        self.run = run
        self.node_rank = node_rank
        self._shares_files = shares_files
        self._supervisor = supervisor
        self._others = others
        self._over = threading.Event()
        self._sent_start = -1
        self._thread = threading.Thread(target=self._stay, daemon=True)

    def watch(self) -> Joined:
        """Start the thread that sends or receives updates of the run."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End the supervisor, which ends the gang; wait until the end was sent or received."""
        if self._supervisor.stdin is not None:
            with contextlib.suppress(OSError):
                self._supervisor.stdin.close()
        self._thread.join()

    def _stay(self) -> None:
        while self._supervisor.poll() is None:
            self._exchange()
            time.sleep(_POLL_S)
        deadline = time.monotonic() + _LAST_UPDATE_S
        while isinstance(self._others, JoinClient) and not self._others.ended and time.monotonic() < deadline:
            self._exchange()
            time.sleep(_POLL_S)
        self._exchange()
        if isinstance(self._others, JoinServer):
            self._send_end(self._others)
        if self._others is not None:
            self._others.close()

    def _exchange(self) -> None:
        """Send the start of an attempt, or write what node 0 has sent."""
        if isinstance(self._others, JoinServer):
            self._others.flush()
            with contextlib.suppress(OSError, ClusterddpError):  # the next call tries the storage again
                self._send_start(self._others)
        elif self._others is not None:
            for message in self._others.updates():
                with contextlib.suppress(OSError, ClusterddpError):
                    self._write(message)

    def _send_start(self, others: JoinServer) -> None:
        attempts = self.run.attempts()
        number = attempts[-1].number if attempts else -1
        started = read_json(attempts[-1].start) if attempts and number > self._sent_start else None
        if started is not None:
            self._sent_start = number
            others.send_all({"kind": "started", "attempt": number, "record": started})

    def _write(self, message: dict[str, Any]) -> None:
        try:
            message = build({"kind": str, "attempt": int, "record": dict[str, Any]}, message)
        except ValueError:
            return
        if self._shares_files or not 0 <= message["attempt"] < MAX_ATTEMPTS:
            return
        attempt = self.run.attempt(message["attempt"])
        make_attempt_dirs(attempt)
        if message["kind"] == "started":
            # The state of the run here follows this node's supervisor.
            with contextlib.suppress(ProcessLookupError):
                own = dataclasses.asdict(ProcessIdentity.of(self._supervisor.pid))
                write_json(attempt.start, message["record"] | {"supervisor": own})
        elif message["kind"] == "ended":
            write_end(attempt, parse_end(message["record"]))

    def _send_end(self, others: JoinServer) -> None:
        with contextlib.suppress(OSError, ClusterddpError):
            attempt = retry_outage(self.run.newest_attempt)
            ended = read_json(attempt.end)
            if ended is not None:
                others.send_all({"kind": "ended", "attempt": attempt.number, "record": ended})
