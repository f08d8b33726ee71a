"""Logs of the ranks, read from their files as bytes, a piece at a time, while they are being written or after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from clusterddp.errors import UsageError
from clusterddp.launchers.state import read_state
from clusterddp.look.log_file import LogFile
from clusterddp.look.printable import printable
from clusterddp.results.sync import NO_HOSTS, Synchroniser
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.outcome import read_end
from clusterddp.run.record import read_gang, read_ranks
from clusterddp.system.files import read_json


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A line of one rank with its end, or part of a line that is too long or not finished."""

    rank: int
    host: str
    data: bytes


@dataclass(frozen=True, slots=True)
class NewAttempt:
    """The pieces after it belong to another attempt."""

    number: int


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


def format_piece(piece: LogPiece, *, prefix: bool, escape: bool) -> bytes:
    """Return what to write for a piece: `[r3 host] ` before it, and its control characters escaped.

    Without either, the bytes are exactly those of the file.
    """
    if not prefix and not escape:
        return piece.data
    body = piece.data.rstrip(b"\r\n")
    ending = piece.data[len(body) :]
    if not body and ending == b"\r":
        return b""  # how progress bars begin a line
    text = printable(body).encode() if escape else body
    head = f"[r{piece.rank} {printable(piece.host)}] ".encode() if prefix else b""
    return head + text + (b"\n" if ending or prefix else b"")


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


def read_logs(
    run: RunDir, ranks: tuple[int, ...], *, attempt: int | None, tail_lines: int | None
) -> Iterator[LogPiece]:
    """Yield the present content of the logs, rank after rank, each rank's standard output before its standard error.

    `attempt` None means the newest one.
    Raises: UsageError: the run has no such attempt.
    """
    newest = _newest_attempt(run)
    if attempt is not None and attempt > (-1 if newest is None else newest):
        raise UsageError(f"--attempt {attempt}: the newest attempt of {run.name} is {newest}")
    number = newest if attempt is None else attempt
    if number is None:
        return
    for log in _open_logs(run, read_gang(run), number, ranks, tail_lines):
        for data in log.file.read_all():
            yield LogPiece(log.rank, log.host(), data)


def follow_logs(
    run: RunDir,
    ranks: tuple[int, ...],
    *,
    attempt: int | None,
    tail_lines: int | None,
    poll_interval_s: float = 0.2,
    sync: Synchroniser = NO_HOSTS,
) -> Iterator[LogPiece | NewAttempt | None]:
    """Yield the content of the logs and what is added, until the run ends; with `attempt`, until that attempt does.

    Yields None when there is no more output now.
    """
    gang = read_gang(run)
    number = attempt
    while number is None:
        sync.update()
        over = read_state(run).finished  # read first: an attempt that ends meanwhile is still found
        number = _newest_attempt(run)
        if number is None:
            if over:
                return  # it was never started
            yield None
            time.sleep(poll_interval_s)
    while True:
        logs = _open_logs(run, gang, number, ranks, tail_lines)
        yield from _follow_attempt(run, logs, number, poll_interval_s, sync)
        later = [found.number for found in run.attempts() if found.number > number]
        if attempt is not None or not later:
            return
        number, tail_lines = later[0], None
        yield NewAttempt(number)


def _follow_attempt(
    run: RunDir, logs: list[_RankLog], number: int, poll_interval_s: float, sync: Synchroniser
) -> Iterator[LogPiece | None]:
    """Yield the pieces of one attempt until the run is finished or a later attempt exists, then what is left."""
    while True:
        sync.update()
        # Read before the logs: what was written before the end is then read after it.
        over = (_newest_attempt(run) or 0) > number or read_state(run).finished
        if over:
            sync.update_logs()
        idle = True
        for log in logs:
            for data in log.file.read_all() if over else log.file.read():
                idle = False
                yield LogPiece(log.rank, log.host(), data)
        if over:
            return
        if idle:
            yield None
            time.sleep(poll_interval_s)


def _newest_attempt(run: RunDir) -> int | None:
    attempts = run.attempts()
    return attempts[-1].number if attempts else None


@dataclass(slots=True)
class _RankLog:
    """One of the two log files of a rank."""

    rank: int
    file: LogFile
    attempt: AttemptDir
    planned_host: str
    known_host: str | None = None

    def host(self) -> str:
        """Return the rank's host: by its record, which exists when it has printed anything, before that by the plan."""
        if self.known_host is None:
            record = read_json(self.attempt.rank_record(self.rank)) or {}
            self.known_host = str(record.get("host", self.planned_host))
        return self.known_host


def _open_logs(run: RunDir, gang: Gang, number: int, ranks: tuple[int, ...], tail_lines: int | None) -> list[_RankLog]:
    attempt = run.attempt(number)
    return [
        _RankLog(rank, LogFile(path, tail_lines=tail_lines), attempt, gang.node_of(rank).host)
        for rank in ranks
        for path in (attempt.stdout(rank), attempt.stderr(rank))
    ]
