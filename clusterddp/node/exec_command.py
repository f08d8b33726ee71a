"""`python -m clusterddp.node.exec_command RUN_DIR ATTEMPT RANKS COMMAND...`: the command of `exec` and `shell`.

It runs COMMAND beside ranks of this machine.

RANKS is `5`, or `0,1,2`. The command starts in the working directory of its rank, with the rank's environment as
`exec_environment` changes it. With one rank it has the streams and the terminal of this process; with several, one
command for each rank has no input, and each line of its output begins with the rank.

The command ends with its rank, with the process that started this one, and by SIGTERM or SIGHUP to this process; what
it has started ends with it. If this process is killed, the kernel kills the command, and the supervisor of the node
kills what is left when the attempt ends: all of it carries the cookie `x2`.

The exit code is the command's, the highest one of several; 126 and 127 as a shell has them, 125: there is no such rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clusterddp.errors import ClusterddpError
from clusterddp.node.processes import Signals, become_subreaper, die_with_parent, reap
from clusterddp.ranks.environment import COOKIE, cookie, exec_environment
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.record import RankRecord, read_gang, read_rank, read_run
from clusterddp.system.processes import (
    Process,
    find_descendants,
    read_environment,
    read_owner,
    read_process,
)

NO_RANK = 125
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_LOOK_EVERY_S = 0.25
_GRACE_S = 2.0
"""How long the command may take to end by itself after its signal."""
_CLEANUP_S = 0.5
_OF_THE_STEP = ("SLURM_", "SLURMD_", "SPANK_", "PMI_", "PMIX_")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHere:
    """A live rank of this machine."""

    record: RankRecord
    process: Process
    environment: dict[str, str]
    """Of a command beside it."""

    @property
    def label(self) -> bytes:
        return f"[r{self.record.rank} {self.record.host}] ".encode()


def main() -> int:
    """Run the command; return its exit code."""
    become_subreaper()
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    run, attempt, ranks = RunDir(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3].split(",")
    signals = Signals()
    for number in (signal.SIGQUIT, signal.SIGTTOU):
        signal.signal(number, lambda *_: None)
    try:
        found = [find_rank(run, run.attempt(attempt), int(rank)) for rank in ranks]
    except (ClusterddpError, OSError) as error:
        message = error.message if isinstance(error, ClusterddpError) else str(error)
        sys.stderr.write(f"clusterddp: {socket.gethostname()}: {message}\n")
        return NO_RANK
    if os.getppid() != parent:  # it has ended before the kernel was asked to signal us
        return NO_RANK
    return _Commands(found, sys.argv[4:], signals).run()


def find_rank(run: RunDir, attempt: AttemptDir, rank: int) -> RankHere:
    """Find the process of a rank by the run's records, and check that it still is this rank's.

    Raises: ClusterddpError: it has ended, or is not on this machine.
    """
    token, gang, record = read_run(run).token, read_gang(run), read_rank(attempt, rank)
    if record is None or record.ended is not None:
        raise ClusterddpError(f"rank {rank} of {run.name} does not run")
    environ = read_environment(record.pid)
    cookies = {cookie(token, f"{role}{record.node_rank}") for role in ("n", "w")}
    # The token is the run's secret: a later process with this pid does not carry it.
    is_it = environ.get(COOKIE) in cookies and environ.get("CLUSTERDDP_ATTEMPT") == str(attempt.number)
    try:
        process = read_process(record.pid)
        if not is_it or environ.get("RANK", str(rank)) != str(rank) or read_owner(record.pid) != os.getuid():
            raise ProcessLookupError
    except ProcessLookupError as error:
        raise ClusterddpError(f"rank {rank} of {run.name} (pid {record.pid}) does not run here") from error
    return RankHere(record=record, process=process, environment=_environment(run, attempt, gang, record, environ))


def _environment(
    run: RunDir, attempt: AttemptDir, gang: Gang, record: RankRecord, environ: dict[str, str]
) -> dict[str, str]:
    if "RANK" not in environ:  # a forked rank: /proc shows what the ranks of its node have in common
        planned = gang.variables_of(
            record.rank, run_dir=str(run.path), attempt=attempt.number, master_port=record.master_port
        )
        environ = {name: variable.value for name, variable in planned.items()} | environ
    changes = gang.entry.environment(environ)
    environ = {name: value for name, value in (environ | changes).items() if value is not None}
    place = {"RANK": record.rank, "LOCAL_RANK": record.local_rank, "NODE_RANK": record.node_rank}
    own = {name: value for name, value in os.environ.items() if name.startswith(_OF_THE_STEP) or name == "TERM"}
    with contextlib.suppress(OSError):
        own["PWD"] = str(Path(f"/proc/{record.pid}/cwd").readlink())
    return exec_environment(environ, place, read_run(run).token) | own


class _Commands:
    """The command, once for each rank."""

    def __init__(self, ranks: list[RankHere], argv: list[str], signals: Signals) -> None:
        self._ranks = ranks
        self._argv = argv
        self._signals = signals
        self._running: dict[int, RankHere] = {}
        """By pid."""
        self._pumps: list[threading.Thread] = []
        self._exit_code = 0

    def run(self) -> int:
        """Start the commands and wait for their end; return the highest exit code."""
        for rank in self._ranks:
            self._start(rank)
        for pump in self._pumps:
            pump.start()
        while self._running:
            select.select([self._signals.reader], [], [], _LOOK_EVERY_S)
            self._take_exits()
            numbers = self._signals.take()
            if ended := numbers & {signal.SIGTERM, signal.SIGHUP}:
                self._end(min(ended))
            if signal.SIGINT in numbers and self._is_step:
                self._signal(signal.SIGINT)
            if lost := [rank for rank in self._running.values() if not rank.process.alive()]:
                _report_end(lost[0])
                self._end(signal.SIGHUP)
        self._end_descendants(signal.SIGHUP)
        for pump in self._pumps:
            pump.join()
        return self._exit_code

    @property
    def _is_step(self) -> bool:
        """True where Slurm signals this process only: not its group, as a terminal or the agent does."""
        return "SLURM_STEP_ID" in os.environ and not sys.stdin.isatty()

    def _start(self, rank: RankHere) -> None:
        several = len(self._ranks) > 1
        try:
            process = subprocess.Popen(
                self._argv,
                env=rank.environment,
                cwd=f"/proc/{rank.process.pid}/cwd",
                stdin=subprocess.DEVNULL if several else None,
                stdout=subprocess.PIPE if several else None,
                stderr=subprocess.PIPE if several else None,
                preexec_fn=die_with_parent,  # noqa: PLW1509  this process has no other thread yet
            )
        except OSError as error:
            sys.stderr.write(f"clusterddp: {self._argv[0]}: {error.strerror}\n")
            code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
            self._exit_code = max(self._exit_code, code)
            return
        self._running[process.pid] = rank
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                self._pumps.append(threading.Thread(target=_pump, args=(source, target.buffer, rank.label)))
        process.returncode = 0  # `reap` collects all children

    def _take_exits(self) -> None:
        for pid, returncode in reap().items():
            rank = self._running.pop(pid, None)
            if rank is None:
                continue
            code = returncode if returncode >= 0 else 128 - returncode
            # The supervisor may have killed both in its cleanup.
            if returncode == -signal.SIGKILL and _ends_within(rank, _CLEANUP_S):
                _report_end(rank)
                code = 128 + signal.SIGHUP
            self._exit_code = max(self._exit_code, code)

    def _signal(self, number: int) -> None:
        for process in find_descendants([os.getpid()]).values():
            process.send_signal(number)

    def _end(self, number: int) -> None:
        """End the commands and what they have started; the exit code is that of the signal."""
        self._end_descendants(number)
        self._exit_code = 128 + number

    def _end_descendants(self, number: int) -> None:
        """Signal all descendants, orphans among them; kill those that are left after the grace."""
        kill_at = time.monotonic() + _GRACE_S
        self._signal(number)
        while find_descendants([os.getpid()]):
            if time.monotonic() >= kill_at:
                self._signal(signal.SIGKILL)
            time.sleep(0.02)
            self._take_exits()
        self._take_exits()


def _ends_within(rank: RankHere, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while rank.process.alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _report_end(rank: RankHere) -> None:
    sys.stderr.write(f"clusterddp: rank {rank.record.rank} has ended, and the command with it\n")


def _pump(source: IO[bytes], target: IO[bytes], label: bytes) -> None:
    """Write each line as one piece, so that lines of several ranks do not mix."""
    with contextlib.suppress(OSError):  # the reader has ended, and signals us
        for line in source:
            target.write(label + line.removesuffix(b"\n") + b"\n")
            target.flush()


if __name__ == "__main__":
    sys.exit(main())
