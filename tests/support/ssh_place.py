"""A user at a laptop, the head of a rack, who submits runs to hosts that share nothing with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.ranks.environment import COOKIE
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from tests.support.person import Person, state_of
from tests.support.waiting import PATIENCE, wait_until
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack


@dataclass(frozen=True, kw_only=True)
class HostProcess:
    """A process of a run, seen from outside of its host."""

    pid: int
    """Its number on this machine, which is another one on the host."""
    host: str
    role: str
    """The end of its cookie: `s0` node 0's supervisor, `g0` its guard, `n0` its ranks."""
    command: str


@dataclass(kw_only=True)
class SshPlace(Person):
    """A user at a laptop, the head of a rack, from which ssh to every host works."""

    rack: Rack

    def host_run_dir(self, node: str, run: RunDir | None = None, *, user: str = "root") -> RunDir:
        """Return where a host keeps a run, as a path of this machine."""
        run = run or self.run_dir()
        name = f"{run.name}.{self.record(run).token[:8]}"
        return RunDir(self.rack.outside(node, self.rack.home(node, user) / ".clusterddp" / "runs" / name))

    def await_state(self, *states: str, run: RunDir | None = None, within_s: float = 90) -> dict[str, Any]:
        """Ask until a run is in one of these states; return its status."""
        deadline = time.monotonic() + PATIENCE * within_s
        while (status := self.status(run))["state"] not in states:
            assert time.monotonic() < deadline, status
            time.sleep(0.5)  # each question starts a Python
        return status

    def processes(self, host: str, token: str | None = None) -> list[HostProcess]:
        """List the processes of a run (by default of the newest) on a host, by their cookies and from outside."""
        prefix = f"{COOKIE}={token or self.record().token}.".encode()
        found = []
        for pid in self.rack.pids(host):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # it has ended
                continue
            cookies = [word for word in words if word.startswith(prefix)]
            if cookies and command:  # a zombie has no command line
                role = cookies[0].decode().rpartition(".")[2]
                found.append(HostProcess(pid=pid, host=host, role=role, command=command))
        return found

    def all_processes(self, token: str | None = None) -> list[HostProcess]:
        """List the processes of a run on every node that is on."""
        return [each for node in self.rack.powered if node != HEAD for each in self.processes(node, token)]

    def kill(self, host: str, role: str, token: str | None = None, *, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the processes of a run that have a role on a host; there must be one."""
        victims = [process for process in self.processes(host, token) if process.role == role]
        assert victims, self.processes(host, token)
        for process in victims:
            os.kill(process.pid, sig)

    def await_gone(self, token: str | None = None, within_s: float = 30) -> None:
        """Wait until no process of a run is left on any node that is on."""
        wait_until(lambda: self.all_processes(token) == [], within_s)

    def clear(self) -> None:
        """End what is left of the runs of this place, and remove what hosts keep of any run."""
        for run in list_runs(self.runs_dir) if self.runs_dir.exists() else ():
            for process in self.all_processes(self.record(run).token):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for node in self.rack.plan.nodes:
            shutil.rmtree(self.rack.outside(node, self.rack.home(node) / ".clusterddp" / "runs"), ignore_errors=True)
        # The next test's hosts have the same names, and one that is marked is taken last.
        (state_of(self.rack) / "clusterddp" / "nodes.json").unlink(missing_ok=True)
        shutil.rmtree(self.path)


def send(process: subprocess.Popen[str], sig: signal.Signals = signal.SIGINT) -> None:
    """Signal everything that runs in the terminal of a started command, as Ctrl-C does.

    The process itself is the way into the laptop: it waits, and passes on how the command ended.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with suppress(ProcessLookupError):
            if pid != process.pid and os.getpgid(pid) == process.pid:
                os.kill(pid, sig)


@contextmanager
def ssh_place_on(rack: Rack) -> Iterator[SshPlace]:
    """Make a directory for a test in the home of the laptop; clear it and its runs away at the end."""
    path = rack.dir / "home" / "root" / f"place-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    place = SshPlace(rack=rack, path=path)
    try:
        yield place
    finally:
        place.clear()
