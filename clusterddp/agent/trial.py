"""A trial of this host (train/host_trial.py): a child process of the agent, which ends with it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from clusterddp.agent.types import Body, Host, Operation
from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import inherited_environment

_CHUNK_BYTES = 1 << 16


class Trial:
    """The process, and what it has reported so far."""

    def __init__(self, environ: dict[str, str], working_dir: str) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._unread = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clusterddp.train.host_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environ,
            cwd=working_dir,
        )

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ClusterddpError(f"the trial has ended: {self.last_line()}") from None

    def read(self, wait_s: float) -> tuple[list[dict[str, Any]], bool]:
        """Return the reports since the last call, and whether the process has ended; waits for the first report."""
        assert self.process.stdout is not None
        reports: list[dict[str, Any]] = []
        ended = False
        deadline = time.monotonic() + wait_s
        while not reports and not ended:
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                break
            data = os.read(self.process.stdout.fileno(), _CHUNK_BYTES)
            ended = not data
            *lines, self._unread = (self._unread + data).split(b"\n")
            reports += [json.loads(line) for line in lines]
        return reports, ended

    def last_line(self) -> str:
        """Return the last line on standard error, or how the process ended."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.wait(timeout=5)}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            if stream is not None:
                stream.close()


def start(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Start a trial with an order, after the end of one that still runs."""
    stop(host, request, body)
    environ = inherited_environment() | request["variables"]
    environ["PYTHONPATH"] = host.python_path(environ)
    host.hold(Trial(environ, str(host.root))).send(request["order"])
    return {}


def send(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Send the trial a message."""
    _trial(host).send(request["message"])
    return {}


def read(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return what the trial has reported since the last time; `ended`: why no more reports come."""
    trial = _trial(host)
    reports, ended = trial.read(float(request["wait_s"]))
    return {"reports": reports, "ended": trial.last_line() if ended else None}


def stop(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """End the trial."""
    host.release_all(Trial)
    return {}


OPERATIONS: dict[str, Operation] = {
    "trial.start": start,
    "trial.send": send,
    "trial.read": read,
    "trial.stop": stop,
}


def _trial(host: Host) -> Trial:
    found = host.find_held(Trial)
    if not found:
        raise ClusterddpError("no trial is running here")
    return found[0]
