"""Logs of the ranks, read from their files as bytes, a piece at a time, while they are being written or after."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from clusterddp.errors import UsageError
from clusterddp.places.ssh.sync import NO_HOSTS, Synchroniser
from clusterddp.places.state import read_state
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.log_times import LogTimesReader
from clusterddp.run.record import read_gang, read_ranks
from clusterddp.run.steps import is_whole_script, job_output
from clusterddp.system.files import open_regular, read_json, read_last_bytes
from clusterddp.system.units import UNIT_S
from clusterddp.view.printable import printable

PIECE_BYTES = 64 * 1024
"""A longer line is returned in pieces, so that no line is too long for memory."""
TURN_BYTES = 16 * PIECE_BYTES
"""How much of one file is read before the next one is."""
_FOLDED_TURN_BYTES = PIECE_BYTES
"""Of each log, when several are compared."""
_LOOK_EVERY_S = 0.1
"""How often it is looked when a log was changed, while lines of it are read."""
_LINE_END = re.compile(rb"\n|\r(?!\n)")
"""As `bytes.splitlines` ends lines: progress bars write no other end than \\r for minutes."""
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_NO_TIME = "-".ljust(20)
JOB = -1
"""Stands for a rank: the output of a batch script's job."""
_WINDOW_BYTES = 64 * 1024
"""How far the lines of a rank are compared with those of the others."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A line of one rank with its end, or part of a line that is too long or not finished."""

    rank: int
    host: str
    data: bytes
    written: float | None = None
    """Seconds since the epoch, as far as it was asked for and is known."""
    others: tuple[int, ...] = ()
    """Further ranks that wrote the same line."""


@dataclass(frozen=True, slots=True)
class NewAttempt:
    """The pieces after it belong to another attempt."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogQuery:
    """Which lines of a run's logs are wanted."""

    attempt: int | None = None
    """None: the newest one; when the logs are followed, it and all later ones."""
    tail_lines: int | None = None
    """The last lines of each file."""
    since: float | None = None
    """Lines that were written at this time or later; seconds since the epoch."""
    matches: Callable[[bytes], bool] | None = None
    """Of the lines that are left, those for which this is true."""
    timestamps: bool = False
    """Each piece has the time when it was written."""
    folds: bool = False
    """Equal lines of several ranks are one piece."""
    tails: Path | None = None
    """Where the ends of logs of SSH hosts are, by the paths that they have in the run's directory."""


ALL_LINES = LogQuery()


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Read a list of ranks: `0`, `0,3-5`, `all`.

    Raises: UsageError: it is none of these, or a rank that the run does not have.
    """
    if text == "all":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if found is None:
            raise UsageError(f"--rank {text}: not understood", hint="write 0, or 0,3-5, or all, or failed")
        chosen = range(int(found[1]), int(found[2] or found[1]) + 1)
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

    A batch script has no ranks, its steps have: of the whole run the output of its job is selected.
    Raises: UsageError: it is not understood, or the run has no such rank, or no rank failed.
    """
    if is_whole_script(run):
        return (JOB,)
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
    logs = _open_logs(run, number, ranks, query)
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
        logs = _open_logs(run, number, ranks, wanted)
        yield from _follow_attempt(run, logs, number, poll_interval_s, sync, folds=query.folds and len(ranks) > 1)
        later = [found for found in _attempts(run) if found > number]
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
        unfolded = (piece for log in logs for piece in (log.read_all() if over else log.read(TURN_BYTES)))
        for piece in unfolded if foldings is None else _fold_turn(logs, foldings, turn, over=over):
            idle = False
            yield piece
        if over:
            return
        if idle:
            yield None
            time.sleep(poll_interval_s)


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


def _attempts(run: RunDir) -> list[int]:
    """List the attempts that have logs: of a batch script those whose output is seen from here."""
    is_script = is_whole_script(run)
    return [found.number for found in run.attempts() if not is_script or job_output(found)]


def _newest_attempt(run: RunDir) -> int | None:
    return next(reversed(_attempts(run)), None)


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


def _open_logs(run: RunDir, number: int, ranks: tuple[int, ...], query: LogQuery) -> list[_RankLog]:
    """Open the logs of an attempt: two of each rank, standard output before standard error; of a job what it has."""
    attempt = run.attempt(number)
    gang = read_gang(run, attempt)
    logs = []
    readers: dict[int, LogTimesReader] = {}
    for rank in ranks:
        if rank >= gang.world_size:
            continue  # the attempt has fewer nodes than the run was planned for
        node = gang.nodes[0] if rank == JOB else gang.node_of(rank)
        times = readers.setdefault(node.node_rank, LogTimesReader(attempt.log_times(node.node_rank)))
        for path in job_output(attempt) if rank == JOB else (attempt.stdout(rank), attempt.stderr(rank)):
            tail = query.tails / path.relative_to(run.path) if query.tails else path
            file = _open_log(tail if tail.exists() else path, times, query)
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


def parse_since(text: str, *, now: float) -> float:
    """Read `--since`: `90s`, `10m`, `2h`, `1d` before now, or a time in ISO form, local where it names no zone.

    Raises: UsageError.
    """
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return now - float(ago[1]) * UNIT_S[ago[2]]
    try:
        # Python 3.10 does not read Z.
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip())).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {printable(text)}: is not a time", hint="write 90s, 10m, 2h or 1d, or 2026-01-31T14:30"
        ) from None


def parse_pattern(text: str) -> Callable[[bytes], bool]:
    """Compile `--grep` to a test of lines.

    Raises: UsageError: it is no regular expression; the message says where.
    """
    try:
        pattern = re.compile(text)
        if text.isascii():
            search = re.compile(text.encode()).search
            return lambda line: search(line.rstrip(b"\r\n")) is not None
    except (re.error, OverflowError, RecursionError) as error:
        where = getattr(error, "pos", None)
        what = getattr(error, "msg", None) or str(error)
        at = "" if where is None else f' at character {where + 1}, before "{printable(text[where : where + 20])}"'
        raise UsageError(
            f"--grep {printable(text)}: is not a regular expression: {what}{at}",
            hint="write \\ before a character that is meant as itself: \\(",
        ) from None
    return lambda line: pattern.search(line.rstrip(b"\r\n").decode(errors="replace")) is not None


def format_piece(piece: LogPiece, *, prefix: bool, escape: bool, timestamps: bool = False) -> bytes:
    """Return what to write for a piece: `[r3 host] ` before it, and its control characters escaped.

    With `timestamps` the time is before both. Without any, the bytes are exactly those of the file.
    """
    if not (prefix or escape or timestamps):
        return piece.data
    body = piece.data.rstrip(b"\r\n")
    ending = piece.data[len(body) :]
    if not body and ending == b"\r":
        return b""  # how progress bars begin a line
    text = printable(body).encode() if escape else body
    head = ""
    if timestamps:
        written = piece.written
        head = _NO_TIME if written is None else time.strftime("%Y-%m-%dT%H:%M:%S ", time.localtime(written))
    if prefix:
        whose = f"r{piece.rank} {printable(piece.host)}"
        head += f"[{spell_ranks([piece.rank, *piece.others]) if piece.others else whose}] "
    return head.encode() + text + (b"\n" if ending or head else b"")


def json_piece(piece: LogPiece) -> dict[str, object]:
    """Return a piece as `logs -o json` writes it; `ends` is false where the rest of the line follows."""
    return {
        "schema": 1,
        "ranks": [] if piece.rank == JOB else sorted([piece.rank, *piece.others]),
        "host": piece.host,
        "time": piece.written,
        "text": piece.data.rstrip(b"\r\n").decode(errors="replace"),
        "ends": piece.data.endswith((b"\n", b"\r")),
    }


class Folding:
    """The lines of one stream of several ranks, between their files and the output; it keeps the order of each rank."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lines: dict[int, deque[tuple[LogPiece, int]]] = {}
        """By rank: what was read and is not shown yet, each with the round in which it was read."""
        self._counts: dict[int, Counter[bytes]] = {}
        self.bytes: Counter[int] = Counter()
        """By rank: the length of its lines here."""

    def add(self, piece: LogPiece, round_: int = 0) -> None:
        """Add the next line of a rank."""
        self._lines.setdefault(piece.rank, deque()).append((piece, round_))
        self._counts.setdefault(piece.rank, Counter())[piece.data] += 1
        self.bytes[piece.rank] += len(piece.data)

    def take(self, *, until: int | None = None) -> LogPiece | None:
        """Return the next line with all ranks that have it next, too; None: there is none.

        `until`: a line that not all ranks have is returned if it was read in this round or earlier.
        """
        waiting = [rank for rank in sorted(self._lines) if self._lines[rank]]
        if not waiting:
            return None
        lead, seen = waiting[0], set[int]()
        while (before := self._must_precede(lead, waiting)) is not None and lead not in seen:
            seen.add(lead)
            lead = before
        line = self._lines[lead][0][0]
        ranks = [rank for rank in waiting if self._lines[rank][0][0].data == line.data]
        is_due = until is None or any(self._lines[rank][0][1] <= until for rank in ranks)
        if not is_due and len(ranks) < self._num_ranks:
            return None
        for rank in ranks:
            self._drop(rank)
        return dataclasses.replace(line, others=tuple(rank for rank in ranks if rank != lead))

    def _must_precede(self, lead: int, waiting: list[int]) -> int | None:
        """Return a rank that has the next line of `lead` later; its lines before that one come first."""
        line = self._lines[lead][0][0].data
        for rank in waiting:
            head = self._lines[rank][0][0].data
            if head == line or not self._counts[rank][line]:
                continue
            # The nearer of two meetings is the likelier one: empty lines, for one, are everywhere.
            if not self._counts[lead][head] or self._depth(rank, line) < self._depth(lead, head):
                return rank
        return None

    def _depth(self, rank: int, line: bytes) -> int:
        return next(depth for depth, (piece, _) in enumerate(self._lines[rank]) if piece.data == line)

    def _drop(self, rank: int) -> None:
        data = self._lines[rank].popleft()[0].data
        self.bytes[rank] -= len(data)
        self._counts[rank][data] -= 1
        if not self._counts[rank][data]:
            del self._counts[rank][data]


def fold(pieces_of: Mapping[int, Iterator[LogPiece]], folding: Folding | None = None) -> Iterator[LogPiece]:
    """Fold one stream of several ranks, after what is in `folding`; of each rank only the next lines are in memory."""
    folding = folding or Folding(len(pieces_of))
    ranks: tuple[int, ...] = tuple(pieces_of)
    while True:
        for rank in ranks:
            while folding.bytes[rank] < _WINDOW_BYTES and (piece := next(pieces_of[rank], None)):
                folding.add(piece)
        taken = folding.take()
        if taken is None:
            return
        yield taken
        ranks = (taken.rank, *taken.others)


class LogFile:
    """One growing file, read from a position onwards; it is open only while it is read."""

    def __init__(self, path: Path, *, tail_lines: int | None = None, start: int = 0) -> None:
        """Read from the line on that has the byte at `start`, of it and what follows at most the last `tail_lines`."""
        self.path = path
        self._position = position_of_last_lines(path, 1, before=start) if start else 0
        if tail_lines is not None:
            self._position = max(self._position, position_of_last_lines(path, tail_lines))
        self.end = self._position
        """Where the piece ends that was yielded last."""
        self._begun = b""  # the beginning of a line whose end has not been written yet
        self._inode: int | None = None

    def read(self, turn_bytes: int = TURN_BYTES) -> Iterator[bytes]:
        """Yield the lines that were finished since the last call; about `turn_bytes` a call at most.

        A carriage return ends a line too: progress bars write nothing else for minutes.
        """
        try:
            found = os.stat(self.path)
            size, inode, self._inode = found.st_size, self._inode, found.st_ino
            if size < self._position or inode not in {None, found.st_ino}:  # emptied, or another one: begin anew
                self._position, self.end, self._begun = 0, 0, b""
            if size == self._position:
                return
            with open_regular(self.path) as file:
                file.seek(self._position)
                for _ in range(turn_bytes // PIECE_BYTES):
                    if not (block := file.read(PIECE_BYTES)):
                        return
                    self._position += len(block)
                    yield from self._split(block)
        except FileNotFoundError:
            return

    def read_all(self) -> Iterator[bytes]:
        """Yield the whole content, with an unfinished last line."""
        while True:
            position = self._position
            yield from self.read()
            if self._position == position:
                break
        if self._begun:
            begun, self._begun = self._begun, b""
            self.end += len(begun)
            yield begun

    def _split(self, block: bytes) -> Iterator[bytes]:
        *lines, last = (self._begun + block).splitlines(keepends=True)
        if last.endswith(b"\n"):
            lines.append(last)
            last = b""
        elif len(last) >= PIECE_BYTES:
            cut = _character_boundary(last)
            lines.append(last[:cut])
            last = last[cut:]
        self._begun = last
        for line in lines:
            self.end += len(line)
            yield line


def position_of_last_lines(path: Path, count: int, *, before: int | None = None) -> int:
    """Find where the last `count` lines of a file begin, reading backwards from its end; 0 when it has no more.

    `before`: the offset of a byte, whose line is the last one then.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            if count <= 0:
                return size
            for ends in _line_ends_before(file, size if before is None else min(before, size)):
                begins = [end for end in ends if end < size or before is not None]  # the last line's end begins none
                if count <= len(begins):
                    return begins[-count]
                count -= len(begins)
    except FileNotFoundError:
        pass
    return 0


def _line_ends_before(file: BinaryIO, position: int) -> Iterator[list[int]]:
    """Yield where lines end before a position of a file: block after block backwards, in each in their order."""
    while position > 0:
        until, position = position, max(0, position - PIECE_BYTES)
        file.seek(position)
        block = file.read(until + 1 - position)  # with the byte after it: \r and \n are one end
        yield [end for match in _LINE_END.finditer(block) if (end := position + match.end()) <= until]


def read_log_tail(path: Path, *, max_lines: int = 10, max_columns: int = 200) -> list[str]:
    """Read the last lines of a log that are not empty, escaped for a terminal; none when there is no such file."""
    lines = read_last_bytes(path, 16 * 1024).splitlines()
    kept = [printable(line.rstrip()) for line in lines if line.strip()][-max_lines:]
    return [line if len(line) <= max_columns else line[: max_columns - 3] + "..." for line in kept]


def _character_boundary(data: bytes) -> int:
    """Find a place near the end of `data` where no UTF-8 character is cut."""
    for cut in range(len(data) - 1, max(0, len(data) - 4), -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return len(data)
