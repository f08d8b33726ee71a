"""The state of a run that another launcher has started: what its ranks have recorded, and which of them live.

Nobody records the end of the whole. A rank writes how it ends by itself; one that was killed has written nothing, and
whether it lives can be told on its own host only.
"""

from __future__ import annotations

import dataclasses
import socket

from clusterddp.ranks.spelling import spell_ranks
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import AttemptEnd, RootCause, failed_by
from clusterddp.run.record import ProcessIdentity, RankRecord, RunRecord, read_gang, read_ranks
from clusterddp.run.view import RunState, RunView, final_view
from clusterddp.system.files import read_json

_TRACEBACK = 8_000


def read_worker_state(run: RunDir, record: RunRecord, attempt: AttemptDir | None) -> RunView:
    """Tell the state of a run that has no recorded end."""
    ranks = read_ranks(attempt) if attempt else []
    if attempt is None or not ranks:
        return _unstarted(record, attempt)
    unended = [rank for rank in ranks if rank.ended is None]
    lives = {rank.rank: _alive(rank) for rank in unended}
    here = [rank for rank, alive in lives.items() if alive]
    elsewhere = [rank for rank in unended if lives[rank.rank] is None]
    gone = [rank for rank in unended if lives[rank.rank] is False]
    failed = sorted((rank for rank in ranks if rank.exit_code), key=lambda rank: rank.ended or 0.0)
    if here:
        words = "" if not failed + gone else f"; {spell_ranks(rank.rank for rank in failed + gone)} ended early"
        return _view(RunState.RUNNING, attempt, f"{spell_ranks(here)} on this host{words}")
    if gone:
        return _final(attempt, _killed(gone[0]), ranks)
    if failed:
        return _final(attempt, _failed(attempt, failed[0]), ranks)
    if elsewhere:
        hosts = ", ".join(sorted({rank.host for rank in elsewhere}))
        return _view(RunState.UNKNOWN, attempt, f"runs on {hosts}, which cannot be asked from {socket.gethostname()}")
    return _completed(run, attempt, ranks)


def _unstarted(record: RunRecord, attempt: AttemptDir | None) -> RunView:
    alive = ProcessIdentity.from_json(record.submitter).alive() if record.submitter else False
    number = attempt.number if attempt else None
    if alive is None:
        host = record.submitter.get("host", "another host")
        return RunView(state=RunState.UNKNOWN, attempt=number, end=None, reason=f"is being started on {host}")
    if alive:
        return RunView(state=RunState.PENDING, attempt=number, end=None, reason="is being started")
    return RunView(state=RunState.LOST, attempt=number, end=None, reason="was never started: rank 0 is gone")


def _alive(rank: RankRecord) -> bool | None:
    return ProcessIdentity.from_json(rank.process).alive() if rank.process else False


def _killed(rank: RankRecord) -> RootCause:
    error = f"rank {rank.rank} on {rank.host} is gone without a word: it was killed, or its host was"
    return RootCause(rank=rank.rank, host=rank.host, exit_code=None, error=error, log=None)


def _failed(attempt: AttemptDir, rank: RankRecord) -> RootCause:
    traceback = None
    told = read_json(attempt.error_file(rank.rank))
    if isinstance(told, dict) and isinstance(told.get("message"), dict):
        extra = told["message"].get("extraInfo") or {}
        traceback = str(extra.get("py_callstack") or "")[-_TRACEBACK:] or None
    error = f"rank {rank.rank} on {rank.host}: {rank.error or f'left with exit code {rank.exit_code}'}"
    return RootCause(
        rank=rank.rank, host=rank.host, exit_code=rank.exit_code, error=error, log=None, traceback=traceback
    )


def _completed(run: RunDir, attempt: AttemptDir, ranks: list[RankRecord]) -> RunView:
    size = read_gang(run).world_size
    words = f"{spell_ranks(rank.rank for rank in ranks)} left with exit code 0"
    if len(ranks) < size:
        words += f"; the other hosts keep the records of the other {size - len(ranks)}"
    end = AttemptEnd(outcome="COMPLETED", reason=words, ended=_last(ranks))
    return final_view(attempt, end)


def _final(attempt: AttemptDir, cause: RootCause, ranks: list[RankRecord]) -> RunView:
    end = dataclasses.replace(failed_by(cause), ended=_last(ranks))
    return final_view(attempt, end)


def _last(ranks: list[RankRecord]) -> float:
    return max((rank.ended or rank.started for rank in ranks), default=0.0)


def _view(state: RunState, attempt: AttemptDir, reason: str) -> RunView:
    return RunView(state=state, attempt=attempt.number, end=None, reason=reason)
