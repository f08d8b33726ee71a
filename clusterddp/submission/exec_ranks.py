"""Run the command of `exec` or `shell` beside running ranks: records have their machines, the launcher reaches them."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from clusterddp.errors import ClusterddpError, PreflightError, UsageError
from clusterddp.launchers.exec_command import ExecCommand, Write
from clusterddp.launchers.registry import launcher_named
from clusterddp.launchers.state import read_state
from clusterddp.ranks.spelling import spell_ranks
from clusterddp.results.sync import Synchroniser
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import RankRecord, RunRecord, read_ranks, read_run
from clusterddp.run.view import RunState, RunView
from clusterddp.system.keyboard import Keyboard

_FETCH_S = 0.5
_JOIN_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRanks:
    """Running ranks that were chosen for a command."""

    run: RunDir
    record: RunRecord
    attempt: AttemptDir
    nodes: tuple[tuple[RankRecord, ...], ...]
    """At least one, each with at least one rank."""

    def exec_command(self, argv: Sequence[str], environ: Mapping[str, str], keyboard: Keyboard | None) -> int:
        """Run a command beside each of them; return the highest exit code. `keyboard`: the input, beside one rank only.

        Raises: ClusterddpError: a node cannot be reached; the commands on the others have ended by then.
        """
        commands = [
            ExecCommand(
                host=ranks[0].host,
                node_rank=ranks[0].node_rank,
                ranks=tuple(each.rank for each in ranks),
                argv=tuple(argv),
                keyboard=keyboard,
            )
            for ranks in self.nodes
        ]
        if len(commands) > 1:
            return _OnNodes(self, environ).run(commands)
        return self.exec_on_node(commands[0], environ)

    def exec_on_node(self, command: ExecCommand, environ: Mapping[str, str]) -> int:
        launcher = launcher_named(self.record.launcher, environ)
        return launcher.exec_command(self.run, self.record, self.attempt, command)


def find_running(
    run: RunDir, environ: Mapping[str, str], *, ranks: Sequence[int] = (), node_rank: int | None = None
) -> RunningRanks:
    """Find these ranks of a run, or the first rank of a node.

    Raises: UsageError: one of them does not run, or the run is another user's. PreflightError: its machine or Slurm
    does not answer.
    """
    run = RunDir(run.path.absolute())
    if os.stat(run.path).st_uid != os.geteuid():  # root, too, would start the command as another user than the rank's
        raise UsageError(f"{run.name} is another user's; a command runs beside your own ranks only")
    with Synchroniser([run], environ, interval_s=_FETCH_S) as sync:
        sync.update()
        view = read_state(run)
    if view.state is RunState.UNKNOWN:
        raise PreflightError(f"{run.name}: whether its ranks run is not known: {view.reason}")
    if view.state is not RunState.RUNNING or view.attempt is None:
        raise UsageError(f"{run.name} has no running rank: it is {view.state.value}", hint=_advise(run, view))
    attempt = run.attempt(view.attempt)
    started = read_ranks(attempt)
    if node_rank is not None:
        ranks = [min((each.rank for each in started if each.node_rank == node_rank), default=-1)]
        if ranks == [-1]:
            raise UsageError(f"{run.name} has no running rank on node {node_rank}", hint=_advise(run, view))
    running = {each.rank: each for each in started if each.ended is None}
    missing = [rank for rank in ranks if rank not in running]
    if missing:
        verb = "does not run" if len(missing) == 1 else "do not run"
        raise UsageError(f"{run.name}: {spell_ranks(missing)} {verb}", hint=f"clusterddp status {run.name}")
    nodes: dict[int, list[RankRecord]] = {}
    for rank in ranks:
        nodes.setdefault(running[rank].node_rank, []).append(running[rank])
    return RunningRanks(run=run, record=read_run(run), attempt=attempt, nodes=tuple(map(tuple, nodes.values())))


@dataclass(kw_only=True)
class _Ended:
    """How the command on one node has ended."""

    code: int = 0
    error: Exception | None = None


@dataclass
class _OnNodes:
    """A command on several nodes at once, each in a thread of its own."""

    ranks: RunningRanks
    environ: Mapping[str, str]
    interrupted: threading.Event = field(default_factory=threading.Event)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def run(self, commands: Sequence[ExecCommand]) -> int:
        ends = [_Ended() for _ in commands]
        threads = [
            threading.Thread(target=self._run_one, args=pair, daemon=True) for pair in zip(commands, ends, strict=True)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            try:
                for thread in threads:
                    thread.join(_JOIN_S)
            except KeyboardInterrupt:
                if self.interrupted.is_set():
                    raise
                self.interrupted.set()
        for end in ends:
            if end.error is not None:
                raise end.error
        return max(end.code for end in ends)

    def _run_one(self, command: ExecCommand, end: _Ended) -> None:
        lines = (self._writer(sys.stdout.buffer), self._writer(sys.stderr.buffer))
        own = dataclasses.replace(command, lines=lines, interrupted=self.interrupted)
        try:
            end.code = self.ranks.exec_on_node(own, self.environ)
        except (ClusterddpError, OSError) as error:
            end.error = error

    def _writer(self, stream: IO[bytes]) -> Write:
        def write(line: bytes) -> None:
            with self.writing:
                stream.write(line)
                stream.flush()

        return write


def _advise(run: RunDir, view: RunView) -> str:
    """Return what to do about a run without running ranks."""
    if view.finished:
        return f"clusterddp logs {run.name} shows what it wrote; clusterddp rerun {run.name} starts it again"
    return f"clusterddp status {run.name} shows when its ranks run"
