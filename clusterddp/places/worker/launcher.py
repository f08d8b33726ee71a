"""Runs that another launcher (torchrun, srun, mpirun, Kubeflow) or a user starts with `clusterddp worker`.

Only that launcher starts and ends them. clusterddp reads their state, asks them to stop, and kills their ranks on this
host. No process records the end of the whole run: each rank records its own end, and a rank that was killed records
none. Only a rank's own host can check whether the rank lives.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Collection
from typing import TYPE_CHECKING

from clusterddp.errors import UsageError
from clusterddp.places.base import Launcher
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.attempts import AttemptEnd, failed_by, read_error_file
from clusterddp.run.cleanup import end_run_here, find_processes
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import ProcessIdentity, RankEnd, RankRecord, RunRecord, read_gang, read_ranks
from clusterddp.run.state import Answer, Records

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Slurm
    from clusterddp.places.ssh.sync import Synchroniser


class ExternalLauncher(Launcher):
    """Runs that another launcher starts and ends."""

    killed = "cancelled; its ranks here were killed"

    def request_end(self, run: RunDir, record: RunRecord, sync: Synchroniser) -> bool:
        """Return False: the run has no supervisor that would answer its CANCEL file."""
        if not find_processes(f"{record.token}."):
            ranks = [rank for rank in read_ranks(run.attempts()[-1]) if rank.ended is None]
            hosts = ", ".join(sorted({rank.host for rank in ranks})) or "another host"
            run.cancel_file.unlink(missing_ok=True)
            raise UsageError(
                f"{run.name}: {record.job_id} started it; its ranks are on {hosts}, none on {socket.gethostname()}",
                hint="end it where it was started: scancel, or Ctrl-C in mpirun or torchrun; or cancel it on that host",
            )
        return False

    def request_stacks(self, run: RunDir, attempt: AttemptDir, sync: Synchroniser) -> str:
        """Refuse: no supervisor would answer."""
        raise UsageError(
            f"{run.name}: its ranks were started by another launcher, and no supervisor of clusterddp asks them",
            hint="py-spy dump --pid PID shows the stacks of one process; clusterddp status has the pids",
        )

    def end_by_force(self, run: RunDir, record: RunRecord, timeout_s: float) -> bool:
        """Kill the ranks on this host; their launcher then ends the others. False when no rank is here."""
        return end_run_here(record.token, timeout_s=max(1.0, timeout_s))[0] > 0

    def clear_away(self, run: RunDir, record: RunRecord, *, left_out: Collection[str] = ()) -> int:
        """Kill leftover processes of a run on this host; return their number."""
        return end_run_here(record.token)[0]

    def probe(self, records: Records, slurm: Slurm) -> Answer:
        """Look for the processes of the ranks on this host; their records say how the others ended."""
        attempt, submitter = records.attempt, records.submitter
        ranks = read_ranks(attempt) if attempt else []
        if attempt is None or not ranks:
            alive = submitter.alive() if submitter else False
            if submitter and alive is None:
                return Answer(life="unknown", words=f"starts on {submitter.host}, which cannot be asked from here")
            return Answer(life="alive") if alive else Answer(life="ended", words="rank 0 is gone")
        unended = [rank for rank in ranks if rank.ended is None]
        lives = {each.rank: bool(each.process) and ProcessIdentity.from_json(each.process).alive() for each in unended}
        here = [rank for rank, alive in lives.items() if alive]
        gone = [rank for rank in unended if lives[rank.rank] is False]
        failed = sorted((rank for rank in ranks if rank.exit_code), key=lambda rank: rank.ended or 0.0)
        if here:
            early = (f"{spell_ranks(rank.rank for rank in failed + gone)} ended early",) if failed + gone else ()
            return Answer(life="alive", words=f"{spell_ranks(here)} on this host", notes=early)
        if gone or failed:
            rank, what = (gone or failed)[0], "is gone and recorded no end: it was killed, or its host failed"
            killed = RankEnd(rank=rank.rank, host=rank.host, error=f"rank {rank.rank} on {rank.host} {what}")
            end = failed_by(killed if gone else _failed(attempt, rank))
        elif unended:
            hosts = ", ".join(sorted({rank.host for rank in unended}))
            return Answer(life="unknown", words=f"runs on {hosts}, which cannot be asked from here")
        else:
            end = _completed(records.run, ranks)
        last = max((rank.ended or rank.started for rank in ranks), default=0.0)
        return Answer(life="ended", end=dataclasses.replace(end, ended=last))


def _failed(attempt: AttemptDir, rank: RankRecord) -> RankEnd:
    traceback = read_error_file(attempt.error_file(rank.rank))[1]
    error = rank.end.spell(f"rank {rank.rank} on {rank.host}")
    return dataclasses.replace(rank.end, error=error, traceback=traceback)


def _completed(run: RunDir, ranks: list[RankRecord]) -> AttemptEnd:
    size = read_gang(run).world_size
    reason = f"{spell_ranks(rank.rank for rank in ranks)} exited with code 0"
    if len(ranks) < size:
        reason += f"; the other hosts keep the records of the other {size - len(ranks)}"
    return AttemptEnd(outcome="COMPLETED", reason=reason)
