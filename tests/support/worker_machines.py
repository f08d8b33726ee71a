"""Machines of a rack on each of which a user types `clusterddp worker`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until
from tests.testbed.rack import Rack


class Machines:
    """Each machine has a directory of its own, with the same files in it; none reaches another by SSH."""

    def __init__(self, rack: Rack, path: Path) -> None:
        self.rack = rack
        self.path = path
        self._started: list[subprocess.Popen[str]] = []

    def place(self, node: str) -> Path:
        return self.path / node

    def write(self, name: str, text: str, *nodes: str) -> None:
        """Put a file on machines; on all of them when none is named."""
        for node in nodes or self.rack.plan.nodes:
            self.place(node).mkdir(exist_ok=True)
            (self.place(node) / name).write_text(text)

    def worker(self, node: str, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Type `clusterddp worker job.yaml` on a machine."""
        command = [sys.executable, "-m", "clusterddp", "worker", "job.yaml", *arguments]
        variables = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **(environ or {})}
        process = subprocess.Popen(
            self.rack.argv(node, command, cwd=self.place(node), env=variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, node: str) -> RunDir:
        """Return the newest run of a machine."""
        return list_runs(self.place(node) / "runs")[-1]

    def await_ranks(self, node: str, within_s: float = 60) -> None:
        """Wait until a machine's record says that ranks were started."""

        def started() -> bool:
            runs = self.place(node) / "runs"
            return runs.is_dir() and any(run.attempt(0).start.exists() for run in list_runs(runs))

        wait_until(started, within_s)

    def processes(self) -> list[str]:
        """List the processes of any run of these machines, by what they have in their environment."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "environ").read_bytes().split(b"\0")
                inside = any(word.startswith(b"PWD=" + bytes(self.path)) for word in words)
                if inside or any(word.startswith(b"CLUSTERDDP_RUN_DIR=" + bytes(self.path)) for word in words):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def end_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def result(process: subprocess.Popen[str], within_s: float = 90) -> tuple[int, str]:
    """Return how a `worker` ended, and everything that it said, on one line."""
    said, _ = process.communicate(timeout=PATIENCE * within_s)
    return process.returncode, " ".join(said.split())


def interrupt(process: subprocess.Popen[str], sig: signal.Signals = signal.SIGINT) -> None:
    """Signal what was typed on a machine; the process itself is only the way in."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if int(entry.name) != process.pid and os.getpgid(int(entry.name)) == process.pid:
                os.kill(int(entry.name), sig)


@contextmanager
def machines_on(rack: Rack) -> Iterator[Machines]:
    path = rack.dir / "shared" / f"worker-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    machines = Machines(rack, path)
    try:
        yield machines
    finally:
        machines.end_all()
