"""Logs of the ranks, read from their files as bytes, a piece at a time, while they are being written or after."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.launchers.state import read_state
from clusterddp.look.log_file import PIECE_BYTES, TURN_BYTES, LogFile
from clusterddp.look.log_folding import Folding, fold
from clusterddp.look.log_pieces import LogPiece, LogQuery, NewAttempt
from clusterddp.results.sync import NO_HOSTS, Synchroniser
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.log_times import NOTE_EVERY_S, LogTimesReader
from clusterddp.run.outcome import read_end
from clusterddp.run.record import read_gang, read_ranks, read_start
from clusterddp.system.files import read_json

ALL_LINES = LogQuery()
_FOLDED_TURN_BYTES = PIECE_BYTES
"""Of each log, when several are compared."""
_LOOK_EVERY_S = 0.1
"""How often it is looked when a log was changed, while lines of it are read."""


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Read a list of ranks: `0`, `0,3-5`, `all`.

    Raises: UsageError: it is none of these, or a rank that the run does not have.
    """
    if text == "all":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--rank {text}: not understood", hint="write 0, or 0,3-5, or all, or failed")
        chosen = range(int(first), int(last or first) + 1)
        if not chosen or chosen[-1] >= world_size:
            raise UsageError(f"--rank {text}: the run has ranks 0-{world_size - 1}")
        ranks.update(chosen)
    return tuple(sorted(ranks))


def failed_ranks(attempt: AttemptDir) -> tuple[int, ...]:
    """Return the ranks that failed by themselves, the first failure first, without those that were ended after it."""
    end = read_end(attempt)
    first = [end.root_cause.rank] if end and end.root_cause and end.root_cause.rank is not None else []
    others = [record.rank for record in read_ranks(attempt) if record.exit_code and record.signal is None]
    return tuple(dict.fromkeys(first + others))


def choose_ranks(run: RunDir, text: str, *, attempt: int | None, follow: bool) -> tuple[int, ...]:
    """Return the ranks that `--rank TEXT` selects; `attempt` None: of the newest one.

    Raises: UsageError: it is not understood, or the run has no such rank, or no rank failed.
    """
    if text != "failed":
        return parse_ranks(text, read_gang(run).world_size)
    if follow:
        raise UsageError("--rank failed with --follow: which ranks failed is known when the attempt has ended")
    newest = _newest_attempt(run) if attempt is None else attempt
    known = range(read_gang(run).world_size)
    failed = tuple(rank for rank in failed_ranks(run.attempt(newest)) if rank in known) if newest is not None else ()
    if not failed:
        raise UsageError(f"--rank failed: no rank of {run.name} has failed")
    return failed


def read_logs(run: RunDir, ranks: tuple[int, ...], query: LogQuery = ALL_LINES) -> Iterator[LogPiece]:
    """Yield the present content of the logs, rank after rank, each rank's standard output before its standard error.

    Folded, the standard output of all ranks comes before their standard error.
    Raises: UsageError: the run has no such attempt.
    """
    newest = _newest_attempt(run)
    if query.attempt is not None and query.attempt > (-1 if newest is None else newest):
        raise UsageError(f"--attempt {query.attempt}: the newest attempt of {run.name} is {newest}")
    number = newest if query.attempt is None else query.attempt
    if number is None:
        return
    logs = _open_logs(run, read_gang(run), number, ranks, query)
    if not query.folds or len(ranks) == 1:
        for log in logs:
            yield from log.read_all()
        return
    for stream in (0, 1):
        yield from fold({log.rank: log.read_all() for log in logs[stream::2]})


def follow_logs(
    run: RunDir,
    ranks: tuple[int, ...],
    query: LogQuery = ALL_LINES,
    *,
    poll_interval_s: float = 0.2,
    sync: Synchroniser = NO_HOSTS,
) -> Iterator[LogPiece | NewAttempt | None]:
    """Yield the content of the logs and what is added, until the run ends; with an attempt, until that one does.

    Yields None when there is no more output now.
    """
    gang = read_gang(run)
    number = query.attempt
    while number is None:
        sync.update()
        over = read_state(run).finished  # read first: an attempt that ends meanwhile is still found
        number = _newest_attempt(run)
        if number is None:
            if over:
                return  # it was never started
            yield None
            time.sleep(poll_interval_s)
    wanted = query
    while True:
        logs = _open_logs(run, gang, number, ranks, wanted)
        yield from _follow_attempt(run, logs, number, poll_interval_s, sync, folds=query.folds and len(ranks) > 1)
        later = [found.number for found in run.attempts() if found.number > number]
        if query.attempt is not None or not later:
            return
        number, wanted = later[0], dataclasses.replace(query, tail_lines=None, since=None)
        yield NewAttempt(number)


def _follow_attempt(
    run: RunDir, logs: list[_RankLog], number: int, poll_interval_s: float, sync: Synchroniser, *, folds: bool
) -> Iterator[LogPiece | None]:
    """Yield the pieces of one attempt until the run is finished or a later attempt exists, then what is left."""
    foldings = (Folding(len(logs) // 2), Folding(len(logs) // 2)) if folds else None
    for turn in itertools.count():
        sync.update()
        # Read before the logs: what was written before the end is then read after it.
        over = (_newest_attempt(run) or 0) > number or read_state(run).finished
        if over:
            sync.update_logs()
        idle = True
        pieces = _read_turn(logs, over=over) if foldings is None else _fold_turn(logs, foldings, turn, over=over)
        for piece in pieces:
            idle = False
            yield piece
        if over:
            return
        if idle:
            yield None
            time.sleep(poll_interval_s)


def _read_turn(logs: list[_RankLog], *, over: bool) -> Iterator[LogPiece]:
    for log in logs:
        yield from log.read_all() if over else log.read(TURN_BYTES)


def _fold_turn(logs: list[_RankLog], foldings: Sequence[Folding], turn: int, *, over: bool) -> Iterator[LogPiece]:
    """Yield the lines that all ranks have, and those of the last turn: a rank that is late by one joins the others."""
    for stream, folding in enumerate(foldings):
        if over:
            yield from fold({log.rank: log.read_all() for log in logs[stream::2]}, folding)
            continue
        for log in logs[stream::2]:
            for piece in log.read(_FOLDED_TURN_BYTES):
                folding.add(piece, turn)
        while (taken := folding.take(until=turn - 1)) is not None:
            yield taken


def lacks_times(run: RunDir, ranks: tuple[int, ...], attempt: int | None) -> bool:
    """Return whether the supervisors of an attempt have not recorded when lines were written, as older ones do not."""
    number = _newest_attempt(run) if attempt is None else attempt
    if number is None:
        return False
    directory, gang = run.attempt(number), read_gang(run)
    started = None
    with contextlib.suppress(ClusterddpError):
        started = (read_start(directory) or {}).get("started")
    if started is None or time.time() - started < 2 * NOTE_EVERY_S:
        return False
    return not all(directory.log_times(gang.node_of(rank).node_rank).exists() for rank in ranks)


def _newest_attempt(run: RunDir) -> int | None:
    attempts = run.attempts()
    return attempts[-1].number if attempts else None


@dataclass(kw_only=True, slots=True)
class _RankLog:
    """One of the two log files of a rank, and the lines of it that are wanted."""

    rank: int
    file: LogFile
    query: LogQuery
    times: LogTimesReader
    attempt: AttemptDir
    planned_host: str
    known_host: str | None = None
    changed: float | None = None
    """When the log was changed last, as far as that is the time of lines after the last note."""
    look_at: float = 0.0

    def read(self, turn_bytes: int) -> Iterator[LogPiece]:
        """Yield the wanted lines that were finished since the last call."""
        return self._select(self.file.read(turn_bytes))

    def read_all(self) -> Iterator[LogPiece]:
        """Yield all wanted lines that are left, with an unfinished last one."""
        return self._select(self.file.read_all())

    def _select(self, lines: Iterator[bytes]) -> Iterator[LogPiece]:
        matches, host = self.query.matches, None
        for data in lines:
            if matches is None or matches(data):
                host = host or self._host()
                yield LogPiece(self.rank, host, data, self._time_of(self.file.end) if self.query.timestamps else None)

    def _time_of(self, end: int) -> float | None:
        """Return when the line that ends at an offset was written, as far as it is known."""
        marks = self.times.marks(self.file.path.name)
        known = marks.time_of(end)
        if known is None and (now := time.monotonic()) >= self.look_at:
            self.look_at = now + _LOOK_EVERY_S
            self.times.update()
            known = marks.time_of(end)
            self.changed = _changed(self.file.path) if self.times.exists else None
        return self.changed if known is None else known

    def _host(self) -> str:
        """Return the rank's host: by its record, which exists when it has printed anything, before that by the plan."""
        if self.known_host is None:
            record = read_json(self.attempt.rank_record(self.rank)) or {}
            self.known_host = str(record.get("host", self.planned_host))
        return self.known_host


def _open_logs(run: RunDir, gang: Gang, number: int, ranks: tuple[int, ...], query: LogQuery) -> list[_RankLog]:
    """Open the logs of an attempt: two of each rank, standard output before standard error."""
    attempt = run.attempt(number)
    logs = []
    readers: dict[int, LogTimesReader] = {}
    for rank in ranks:
        node = gang.node_of(rank)
        times = readers.setdefault(node.node_rank, LogTimesReader(attempt.log_times(node.node_rank)))
        for path in (attempt.stdout(rank), attempt.stderr(rank)):
            file = _open_log(path, times, query)
            logs.append(
                _RankLog(rank=rank, file=file, query=query, times=times, attempt=attempt, planned_host=node.host)
            )
    return logs


def _open_log(path: Path, times: LogTimesReader, query: LogQuery) -> LogFile:
    """Open a log at the first line that is wanted."""
    if query.since is None:
        return LogFile(path, tail_lines=query.tail_lines)
    if (_changed(path) or query.since) < query.since:
        return LogFile(path, tail_lines=0)
    times.update()
    return LogFile(path, tail_lines=query.tail_lines, start=times.marks(path.name).size_before(query.since))


def _changed(path: Path) -> float | None:
    """Return when a log was changed last; None when there is none."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
