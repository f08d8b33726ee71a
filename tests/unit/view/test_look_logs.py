"""Reading logs as bytes: bounded memory, exact bytes, nothing that commands a terminal."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterddp.errors import UsageError
from clusterddp.view.logs import (
    PIECE_BYTES,
    LogFile,
    LogPiece,
    LogQuery,
    NewAttempt,
    choose_ranks,
    follow_logs,
    format_piece,
    parse_ranks,
    position_of_last_lines,
    read_logs,
)
from clusterddp.view.printable import printable
from tests.support.handmade_runs import HOST, complete, fail, make_run, start_attempt


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", (0,)), ("0,3-5", (0, 3, 4, 5)), ("all", tuple(range(8))), ("7", (7,)), ("2,2,1-2", (1, 2))],
)
def test_ranks_are_written_as_numbers_ranges_or_all(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 8) == ranks


@pytest.mark.parametrize("text", ["", "8", "-1", "a", "0-", "0,,1", "0-8", "3-2", "²", "9" * 5_000])
def test_ranks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_ranks(text, 8)


@settings(deadline=None)
@given(st.binary(max_size=300).map(lambda data: data.replace(b"x", b"\r\n").replace(b"y", b"\n")))
def test_pieces_put_together_are_the_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("logs") / "log"
    path.write_bytes(data)
    assert b"".join(LogFile(path).read_all()) == data


def test_a_line_is_held_back_until_it_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    log = LogFile(path)
    assert list(log.read()) == [b"one\n"]
    with open(path, "ab") as file:
        file.write(b"o\nthree")
    assert list(log.read()) == [b"two\n"]
    assert list(log.read_all()) == [b"three"]
    assert list(log.read_all()) == []


def test_a_log_that_another_one_took_the_place_of_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    log = LogFile(path)
    assert list(log.read()) == [b"one\n"]
    (tmp_path / "other").write_bytes(b"two\nthree\n")
    (tmp_path / "other").rename(path)
    assert list(log.read()) == [b"two\n", b"three\n"]


def test_a_progress_bar_is_shown_while_it_moves(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\r 10%\r 20%\r 30%")
    assert list(LogFile(path).read()) == [b"\r", b" 10%\r", b" 20%\r"]


def test_a_line_without_end_takes_no_more_memory_than_a_few_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "wb") as file:
        file.truncate(200 * 1024 * 1024)
    tracemalloc.start()
    total = sum(map(len, LogFile(path).read_all()))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 200 * 1024 * 1024
    assert peak_bytes < 20 * PIECE_BYTES


def test_a_long_line_is_not_cut_inside_a_character(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a" + "€" * PIECE_BYTES, encoding="utf-8")
    pieces = list(LogFile(path).read_all())
    assert len(pieces) > 1
    assert "".join(piece.decode("utf-8") for piece in pieces) == "a" + "€" * PIECE_BYTES


def test_a_log_that_was_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    log = LogFile(path)
    list(log.read())
    path.write_bytes(b"new\n")
    assert list(log.read()) == [b"new\n"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9999])
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize("is_finished", [False, True])
def test_the_last_lines_are_found_from_the_end(tmp_path: Path, count: int, end: bytes, is_finished: bool) -> None:
    path = tmp_path / "log"
    lines = [b"line %d " % number + b"x" * (number * 31 % 50_000) for number in range(20)]
    last = end if is_finished else b""
    path.write_bytes(end.join(lines) + last)
    expected = end.join(lines[-count:] if count else []) + (last if count else b"")
    assert path.read_bytes()[position_of_last_lines(path, count) :] == expected


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"b" * (PIECE_BYTES - 2)]), max_size=12), st.integers(1, 5))
def test_the_last_lines_are_those_that_reading_ends_with(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], count: int
) -> None:
    path = tmp_path_factory.mktemp("logs") / "log"
    path.write_bytes(b"".join(parts))
    expected = b"".join(path.read_bytes().splitlines(keepends=True)[-count:])
    assert path.read_bytes()[position_of_last_lines(path, count) :] == expected


def test_of_a_progress_bar_a_tail_is_its_last_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"\r %d/50000" % number for number in range(50_000)))
    last = [b" %d/50000\r" % number for number in range(49_995, 49_999)]
    assert list(LogFile(path, tail_lines=5).read_all()) == [*last, b" 49999/50000"]


def test_what_would_command_a_terminal_is_escaped() -> None:
    assert printable(b"\x1b]0;title\x07 \x9b \xff\ttab \xc2\x9b31m") == "\\x1b]0;title\\x07 \\x9b \\xff\ttab \\x9b31m"
    assert printable("\u202etxt.exe") == "\\u202etxt.exe"
    assert printable("größer 日本 é") == "größer 日本 é"


def test_bytes_pass_unchanged_where_nothing_is_asked() -> None:
    piece = LogPiece(0, "h", b"\x1b[31m\xff\r\n")
    assert format_piece(piece, prefix=False, escape=False) == b"\x1b[31m\xff\r\n"
    assert format_piece(piece, prefix=True, escape=False) == b"[r0 h] \x1b[31m\xff\n"
    assert format_piece(piece, prefix=True, escape=True) == b"[r0 h] \\x1b[31m\\xff\n"
    assert format_piece(LogPiece(0, "h", b"cut"), prefix=False, escape=True) == b"cut"
    assert format_piece(LogPiece(0, "h", b"\r"), prefix=False, escape=True) == b""


def test_both_streams_of_the_chosen_ranks_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run)
    attempt.stdout(1).write_text("out\n")
    attempt.stderr(1).write_text("err")
    pieces = list(read_logs(run, (0, 1)))
    assert pieces == [LogPiece(1, HOST, b"out\n"), LogPiece(1, HOST, b"err")]


def test_an_attempt_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start_attempt(run)
    with pytest.raises(UsageError, match="newest attempt of brisk-otter-3 is 0"):
        list(read_logs(run, (0,), LogQuery(attempt=1)))


def test_failed_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    run = make_run(tmp_path, nodes=2)
    fail(start_attempt(run, ranks=4), rank=3, ranks=4)
    assert choose_ranks(run, "failed", attempt=None, follow=False) == (3,)


def test_failed_is_refused_while_none_has_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start_attempt(run)
    with pytest.raises(UsageError, match="no rank of brisk-otter-3 has failed"):
        choose_ranks(run, "failed", attempt=None, follow=False)


def test_following_goes_on_over_a_restart_and_ends_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    def live() -> None:
        first = start_attempt(run, 0)
        first.stdout(0).write_text("first\n")
        time.sleep(0.2)
        fail(first, will_restart=True)
        second = start_attempt(run, 1)
        second.stdout(0).write_text("second\n")
        time.sleep(0.2)
        with open(second.stdout(0), "a") as file:
            file.write("the end")
        complete(run, second)

    thread = threading.Thread(target=live)
    thread.start()
    seen = [piece for piece in follow_logs(run, (0,), poll_interval_s=0.02) if piece]
    thread.join()
    assert seen == [
        LogPiece(0, HOST, b"first\n"),
        NewAttempt(1),
        LogPiece(0, HOST, b"second\n"),
        LogPiece(0, HOST, b"the end"),
    ]
