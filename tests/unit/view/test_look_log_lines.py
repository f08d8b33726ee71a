"""Which lines of logs are shown, when they were written, and equal lines of several ranks as one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterddp.errors import UsageError
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.system.files import append_jsonl
from clusterddp.view.logs import (
    LogPiece,
    LogQuery,
    NewAttempt,
    fold,
    follow_logs,
    format_piece,
    parse_pattern,
    parse_since,
    read_logs,
)
from tests.support.handmade_runs import HOST, complete, fail, make_run, start_attempt

T0 = 1_800_000_000.0


def timed_attempt(run: RunDir) -> AttemptDir:
    """Make an attempt whose rank 0 wrote `one` by T0, `two` and `three` by T0 + 10, `four` at T0 + 12."""
    attempt = start_attempt(run)
    log = attempt.stdout(0)
    log.write_bytes(b"one\ntwo\nthree\nfour\n")
    os.utime(log, (T0 + 12, T0 + 12))
    for at, size in ((T0, 4), (T0 + 10, 14)):
        append_jsonl(attempt.log_times(0), {"time": at, "sizes": {log.name: size}})
    return attempt


def folded(*logs: bytes) -> list[tuple[str, bytes]]:
    """Fold the logs of ranks 0, 1, ..."""
    pieces = fold({rank: iter(lines_of(rank, log)) for rank, log in enumerate(logs)})
    return [(spell_ranks([piece.rank, *piece.others]).split()[1], piece.data) for piece in pieces]


def lines_of(rank: int, log: bytes) -> list[LogPiece]:
    return [LogPiece(rank, HOST, line) for line in log.splitlines(keepends=True)]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("1d", 86400)])
def test_since_is_a_span_before_now(text: str, seconds: int) -> None:
    assert parse_since(text, now=T0) == T0 - seconds


@pytest.mark.parametrize("text", ["2027-01-15T08:00:00Z", "2027-01-15T09:00:00+01:00"])
def test_since_is_a_time_with_a_zone(text: str) -> None:
    assert parse_since(text, now=0.0) == T0


def test_since_without_a_zone_is_local_time() -> None:
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(T0))
    assert parse_since(text, now=0.0) == T0


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "yesterday", "2027-13-01"])
def test_since_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        parse_since(text, now=T0)


@pytest.mark.parametrize(
    ("since", "lines"),
    [(T0 - 1, b"one two three four"), (T0, b"one two three four"), (T0 + 5, b"two three four"), (T0 + 11, b"four")],
)
def test_lines_since_a_time_are_shown(tmp_path: Path, since: float, lines: bytes) -> None:
    run = make_run(tmp_path)
    timed_attempt(run)
    pieces = read_logs(run, (0,), LogQuery(since=since))
    assert b" ".join(piece.data.strip() for piece in pieces) == lines


def test_a_log_that_has_not_changed_since_a_time_shows_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    timed_attempt(run)
    assert list(read_logs(run, (0,), LogQuery(since=T0 + 13))) == []


def test_a_line_that_was_begun_before_a_time_is_shown_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = timed_attempt(run)
    append_jsonl(attempt.log_times(0), {"time": T0 + 11, "sizes": {attempt.stdout(0).name: 16}})
    assert [piece.data for piece in read_logs(run, (0,), LogQuery(since=T0 + 11.5))] == [b"four\n"]


def test_each_line_has_the_time_by_which_it_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    timed_attempt(run)
    pieces = list(read_logs(run, (0,), LogQuery(timestamps=True)))
    assert [piece.written for piece in pieces] == [T0, T0 + 10, T0 + 10, T0 + 12]


def test_lines_whose_times_were_not_recorded_have_none(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = timed_attempt(run)
    attempt.log_times(0).unlink()
    assert [piece.written for piece in read_logs(run, (0,), LogQuery(timestamps=True))] == [None] * 4


def test_lines_that_match_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    timed_attempt(run)
    pieces = read_logs(run, (0,), LogQuery(matches=parse_pattern("^t|r$")))
    assert b"".join(piece.data for piece in pieces) == b"two\nthree\nfour\n"


def test_a_pattern_of_any_language_matches() -> None:
    matches = parse_pattern("[äö]l")
    assert (matches("Öl und öl".encode()), matches("Oel, ä l".encode())) == (True, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [("loss(", "missing \\), unterminated subpattern at character 5"), ("a[", "unterminated character set at ch")],
)
def test_a_bad_pattern_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_pattern(text)


def test_equal_lines_of_several_ranks_are_one() -> None:
    log = b"start\nepoch 1\n"
    assert folded(log, log, log) == [("0-2", b"start\n"), ("0-2", b"epoch 1\n")]


def test_a_line_of_one_rank_comes_between_the_lines_of_all() -> None:
    assert folded(b"a\nb\n", b"a\nown\nb\n", b"a\nb\n") == [("0-2", b"a\n"), ("1", b"own\n"), ("0-2", b"b\n")]


def test_what_two_ranks_have_before_the_next_line_of_all_is_one() -> None:
    assert folded(b"a\n", b"x\na\n", b"x\na\n") == [("1-2", b"x\n"), ("0-2", b"a\n")]


def test_an_empty_line_less_does_not_part_the_others() -> None:
    body = b"".join(b"line %d\n" % number for number in range(5))
    expected = [("0", b"\n"), *(("0-1", b"line %d\n" % number) for number in range(5)), ("0-1", b"\n")]
    assert folded(b"\n" + body + b"\n", body + b"\n") == expected


def test_ranks_that_share_nothing_are_shown_one_after_the_other() -> None:
    assert folded(b"a\nb\n", b"c\nd\n") == [("0", b"a\n"), ("0", b"b\n"), ("1", b"c\n"), ("1", b"d\n")]


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n"]), max_size=8), min_size=1, max_size=4))
def test_folding_keeps_the_lines_of_each_rank_in_order(logs: list[list[bytes]]) -> None:
    pieces = list(fold({rank: iter(lines_of(rank, b"".join(log))) for rank, log in enumerate(logs)}))
    for rank, log in enumerate(logs):
        assert [piece.data for piece in pieces if rank in (piece.rank, *piece.others)] == log


def test_folding_long_logs_takes_only_their_next_lines() -> None:
    taken = [0, 0]

    def lines(rank: int) -> Iterator[LogPiece]:
        for number in range(100_000):
            taken[rank] += 1
            yield LogPiece(rank, HOST, b"line %d of rank %d\n" % (number, rank))

    assert next(fold({0: lines(0), 1: lines(1)})).rank == 0
    assert max(taken) < 10_000


def test_the_ranks_of_a_line_are_before_it() -> None:
    piece = LogPiece(0, HOST, b"text\n", T0, others=(1, 2, 5))
    assert format_piece(piece, prefix=True, escape=False) == b"[ranks 0-2, 5] text\n"
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(T0)).encode()
    assert format_piece(piece, prefix=False, escape=False, timestamps=True) == moment + b" text\n"
    assert format_piece(LogPiece(0, HOST, b"x\n"), prefix=False, escape=False, timestamps=True)[:2] == b"- "


def test_following_folds_over_a_restart_and_shows_every_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    def live() -> None:
        first = start_attempt(run, 0)
        for rank in (0, 1):
            first.stdout(rank).write_text("hello\n")
        time.sleep(0.2)
        fail(first, will_restart=True)
        second = start_attempt(run, 1)
        for rank in (0, 1):
            second.stdout(rank).write_text("again\n")
            time.sleep(0.02)  # a rank that is late
        time.sleep(0.2)
        complete(run, second)

    thread = threading.Thread(target=live)
    thread.start()
    query = LogQuery(folds=True, since=time.time() - 60)
    seen = [piece for piece in follow_logs(run, (0, 1), query, poll_interval_s=0.05) if piece]
    thread.join()
    hello, again = (LogPiece(0, HOST, text, others=(1,)) for text in (b"hello\n", b"again\n"))
    assert (seen[0], seen[-2:]) == (hello, [NewAttempt(1), again])
    assert LogPiece(1, HOST, b"ValueError: the loss is nan\n") in seen[1:-2]
