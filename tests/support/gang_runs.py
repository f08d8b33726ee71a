"""Real gangs for tests: supervisors, guards and ranks as processes of this machine, ranks that need no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.run.attempts import AttemptEnd, read_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.run.record import RankRecord, read_ranks
from clusterddp.run.seal import sealed
from tests.support.waiting import PATIENCE, wait_until

TASK = Path(__file__).parent / "gang" / "task.py"
PRELUDE = """
import os, signal, subprocess, sys, time
import clusterddp.errors  # which makes the ranks forked ones
from pathlib import Path
rank, attempt = int(os.environ["RANK"]), int(os.environ["CLUSTERDDP_ATTEMPT"])
run_dir, stop_file = Path(os.environ["CLUSTERDDP_RUN_DIR"]), Path(os.environ["CLUSTERDDP_STOP_FILE"])
def up():
    (run_dir / f"up-{attempt}-{rank}").touch()
def forever():
    up()
    while True:
        time.sleep(0.02)
def leave_daemon(environment=None):
    # Leave a process in a session of its own, an orphan that ignores SIGTERM: only a sweep finds it.
    program = (
        "import os, signal, time\\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
        "if os.fork(): os._exit(0)\\n"
        "os.setsid()\\n"
        "if os.fork(): os._exit(0)\\n"
        f"open('daemon-{rank}-%d' % os.getpid(), 'w').close()\\n"
        "time.sleep(600)\\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=run_dir, check=True, env=environment)
    while not list(run_dir.glob(f"daemon-{rank}-*")):
        time.sleep(0.01)
def until_stop():
    up()
    while not stop_file.exists():
        time.sleep(0.02)
"""


def processes_with(text: str) -> list[tuple[int, str]]:
    """List live processes that have `text` in their environment, by /proc alone: not what the product itself uses."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ProcessLookupError):
            continue
        if text.encode() in environment and state not in "ZX":
            found.append((int(entry.name), command))
    return found


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@dataclass
class GangRun:
    """A gang that was started, and what can be seen of it."""

    run: RunDir
    gang: Gang
    task: subprocess.Popen[str]
    supervisors: list[int] = field(default_factory=list)
    link: dict[str, Any] = field(default_factory=dict)

    def attempt(self, number: int = 0) -> AttemptDir:
        return self.run.attempt(number)

    def end(self, number: int = 0) -> AttemptEnd:
        end = read_end(self.attempt(number))
        assert end is not None, f"no end of attempt {number} is recorded\n{self.logs()}"
        return end

    def ranks(self, number: int = 0) -> list[RankRecord]:
        return read_ranks(self.attempt(number))

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.run.launcher_dir.glob("*.log")))

    def left(self) -> list[tuple[int, str]]:
        return processes_with(self.gang.token)

    def pids(self, role: str) -> list[int]:
        """List the live processes of a role, for example `g1`."""
        return [pid for pid, _ in processes_with(f"CLUSTERDDP_COOKIE={self.gang.token}.{role}\0")]

    def await_up(self, number: int = 0) -> None:
        """Wait until the program of every rank says that it runs."""
        names = [self.run.path / f"up-{number}-{rank}" for rank in range(self.gang.world_size)]
        wait_until(lambda: all(name.exists() for name in names), what="ranks up")
        wait_until(lambda: len(self.ranks(number)) == self.gang.world_size, what="rank records")

    def await_end(self, timeout_s: float = 20.0, *, after_kill: bool = False) -> list[int]:
        """Wait until all supervisors have gone, and nothing else is left; return their exit codes.

        `after_kill`: a supervisor was killed, whose guard may need another moment to put things in order.
        """
        out, _ = self.task.communicate(timeout=PATIENCE * timeout_s)
        if after_kill:
            self.await_nothing_left(5.0)
        left = self.left()
        assert left == [], f"left: {left}"
        return list(json.loads(out.splitlines()[-1])["exit_codes"])

    def await_nothing_left(self, within_s: float = 8.0) -> None:
        wait_until(lambda: not self.left(), within_s, what=self.left)

    def daemons(self) -> list[int]:
        """List the pids, dead or alive, of what `leave_daemon` left."""
        return [int(path.name.rpartition("-")[2]) for path in self.run.path.glob("daemon-*")]

    def kill_all(self) -> None:
        """Leave nothing behind, whatever the test found out."""
        for _ in range(3):
            for pid in [pid for pid, _ in self.left()]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.task.kill()
        self.task.wait()
        if self.task.stdout:
            self.task.stdout.close()


@contextlib.contextmanager
def running(tmp_path: Path, program: str, *, order: dict[str, Any] | None = None, **options: Any) -> Iterator[GangRun]:
    """Start a gang of 2 nodes x 2 ranks (`options` change it) that runs `program`; leave nothing of it behind."""
    with started(tmp_path, make_gang(tmp_path, program, **options), **(order or {})) as gang:
        yield gang


@contextlib.contextmanager
def started(tmp_path: Path, gang: Gang, **order: Any) -> Iterator[GangRun]:
    """Start the supervisors of `gang`; leave nothing of it behind."""
    gang_run = start_gang(tmp_path, gang, **order)
    try:
        yield gang_run
    finally:
        gang_run.kill_all()


def make_gang(tmp_path: Path, program: str, *, nodes: int = 2, ranks_per_node: int = 2, **options: Any) -> Gang:
    """Make a gang whose ranks run `program`, Python text that follows PRELUDE."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700, exist_ok=True)
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + program)
    stop_aware = options.pop("stop_aware", False)
    places = tuple(
        Node(
            node_rank=node,
            host=f"host{node}",
            ranks=tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node)),
        )
        for node in range(nodes)
    )
    entry = Entry(
        kind="script", target=str(script), args=("--x", "1"), working_dir=str(tmp_path), stop_aware=stop_aware
    )
    defaults: dict[str, Any] = {
        "run": "brisk-otter-3",
        "token": os.urandom(16).hex(),
        "nodes": places,
        "entry": entry,
        "threads_per_rank": 1,
        "backend": "gloo",
        "master_addr": "127.0.0.1",
        "interface": "lo",
        "on_cpu": True,
    }
    gang = Gang(**(defaults | options))
    (run_dir / "plan.json").write_text(json.dumps(sealed({"gang": gang.to_json()})))
    return gang


def start_gang(
    tmp_path: Path,
    gang: Gang,
    *,
    attempt: int = 0,
    only: tuple[int, ...] = (),
    python: str | Path = sys.executable,
    run_dirs: dict[int, Path] | None = None,
    hold: Sequence[Sequence[int]] = (),
    **order: Any,
) -> GangRun:
    """Start the supervisors of a gang; `only` some nodes, where the others are to stay away.

    `python` runs all of it; `run_dirs` are those of nodes that do not share the first one's; `hold`: for each node the
    descriptors that its supervisor inherits.
    """
    run = RunDir(tmp_path / "run")
    base = {"run_dir": str(run.path), "gang": gang.to_json(), "attempt": attempt, "parent_bound": True} | order
    nodes = [node.node_rank for node in gang.nodes if not only or node.node_rank in only]
    orders = tmp_path / "orders.json"
    holds = dict(enumerate(hold))
    of_node = {
        node: {"node_rank": node, "run_dir": str((run_dirs or {}).get(node, run.path)), "hold": holds.get(node, ())}
        for node in nodes
    }
    orders.write_text(json.dumps([base | of_node[node] for node in nodes]))
    task = subprocess.Popen(
        [str(python), str(TASK), str(orders)],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[descriptor for each in hold for descriptor in each],
    )
    assert task.stdout is not None
    said = json.loads(task.stdout.readline())
    return GangRun(run=run, gang=gang, task=task, supervisors=said["supervisors"], link=said["link"])
