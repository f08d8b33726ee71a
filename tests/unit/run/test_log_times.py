"""The notes of a supervisor on how long the logs are: what it writes, and which times a reader finds in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterddp.run.log_times import NOTE_EVERY_S, LogMarks, LogTimesReader, LogTimesWriter
from clusterddp.system.files import append_jsonl, read_jsonl


def test_a_note_has_only_the_logs_that_have_changed(tmp_path: Path) -> None:
    path, writer = tmp_path / "times", LogTimesWriter()
    writer.note(path, {"a": 0, "b": 10}, 0.0)
    writer.note(path, {"a": 5, "b": 10}, NOTE_EVERY_S)
    writer.note(path, {"a": 5, "b": 10}, 2 * NOTE_EVERY_S)
    writer.note(path, {"a": 2, "b": 10}, 3 * NOTE_EVERY_S)
    assert [row["sizes"] for row in read_jsonl(path)] == [{"b": 10}, {"a": 5}, {"a": 2}]


def test_the_first_note_is_written_though_the_logs_are_empty(tmp_path: Path) -> None:
    LogTimesWriter().note(tmp_path / "times", {"a": 0}, 0.0)
    reader = LogTimesReader(tmp_path / "times")
    reader.update()
    assert reader.exists


def test_two_looks_within_the_interval_are_one_note(tmp_path: Path) -> None:
    path, writer = tmp_path / "times", LogTimesWriter()
    writer.note(path, {"a": 1}, 0.0)
    writer.note(path, {"a": 2}, NOTE_EVERY_S / 2)
    writer.note(path, {"a": 3}, NOTE_EVERY_S)
    assert [row["sizes"] for row in read_jsonl(path)] == [{"a": 1}, {"a": 3}]


def test_what_a_refused_note_had_is_in_the_next_one(tmp_path: Path) -> None:
    path, writer = tmp_path / "absent" / "times", LogTimesWriter()
    writer.note(path, {"a": 1}, 0.0)
    path.parent.mkdir()
    writer.note(path, {"a": 1}, NOTE_EVERY_S)
    assert [row["sizes"] for row in read_jsonl(path)] == [{"a": 1}]


def test_a_line_has_the_time_of_the_first_note_after_it(tmp_path: Path) -> None:
    marks = LogMarks()
    for at, size in ((100.0, 10), (105.0, 30)):
        marks.add(at, size)
    assert [marks.time_of(end) for end in (1, 10, 11, 30, 31)] == [100.0, 100.0, 105.0, 105.0, None]


def test_lines_since_a_time_begin_after_the_last_note_before_it() -> None:
    marks = LogMarks()
    for at, size in ((100.0, 10), (105.0, 30)):
        marks.add(at, size)
    assert [marks.size_before(at) for at in (99.0, 100.0, 100.1, 105.0, 200.0)] == [0, 0, 10, 10, 30]


def test_a_log_that_was_emptied_has_only_the_notes_after_that() -> None:
    marks = LogMarks()
    for at, size in ((100.0, 10), (105.0, 4), (110.0, 20)):
        marks.add(at, size)
    assert [marks.time_of(end) for end in (4, 10)] == [105.0, 110.0]


def test_a_clock_that_is_set_back_leaves_the_times_in_order() -> None:
    marks = LogMarks()
    for at, size in ((100.0, 10), (40.0, 20), (101.0, 30)):
        marks.add(at, size)
    assert list(marks.times) == [100.0, 100.0, 101.0]


def test_notes_are_read_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "times"
    append_jsonl(path, {"time": 100.0, "sizes": {"a": 1}})
    reader = LogTimesReader(path)
    reader.update()
    with open(path, "ab") as file:
        file.write(b'{"time": 105.0, "siz')
    reader.update()
    assert reader.marks("a").time_of(2) is None
    with open(path, "ab") as file:
        file.write(b'es": {"a": 2}}\n')
    reader.update()
    assert reader.marks("a").time_of(2) == 105.0


@settings(deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b'{"time": 1e300, "sizes": {"a": -1}}'))))
def test_notes_that_are_none_are_passed_over(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("notes") / "times"
    path.write_bytes(b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines))
    append_jsonl(path, {"time": 100.0, "sizes": {"a": 7}})
    reader = LogTimesReader(path)
    reader.update()
    assert reader.marks("a").time_of(7) == 100.0
