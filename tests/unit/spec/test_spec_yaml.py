"""Reading YAML strictly: what is refused, where, and that nothing makes the reader crash or hang."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.load import load_spec
from clusterddp.spec.tree import ListNode, Mapping, Scalar, decode, read_bytes, read_stdin
from clusterddp.spec.yamlfile import parse


def problems_of(data: bytes | str) -> tuple[Problem, ...]:
    data = data.encode() if isinstance(data, str) else data
    with pytest.raises(SpecError) as caught:
        parse(decode(data, "job.yaml"), "job.yaml")
    return caught.value.problems


def scalar(text: str) -> Scalar:
    node = parse(text, "job.yaml").entries["a"]
    assert isinstance(node, Scalar)
    return node


@pytest.mark.parametrize("text", ["4:00:00", "no", "1e-3", "010", "1_000", "2026-11-21", "0x10", ".5", "=", "1,2"])
def test_a_scalar_stays_the_text_that_was_written(text: str) -> None:
    assert (scalar(f"a: {text}").text, scalar(f"a: {text}").quoted) == (text, False)


@pytest.mark.parametrize("text", ['"8"', "'8'", "|-\n  8", ">-\n  8"])
def test_quoted_and_block_scalars_are_marked_as_quoted(text: str) -> None:
    assert (scalar(f"a: {text}").text, scalar(f"a: {text}").quoted) == ("8", True)


@pytest.mark.parametrize(("text", "null"), [("null", True), ("~", True), ("", True), ('""', False), ('"null"', False)])
def test_nulls_are_plain(text: str, null: bool) -> None:
    assert scalar(f"a: {text}").null is null


def test_every_node_knows_its_line_and_column() -> None:
    tree = parse("a: 1\nb:\n  - x\n  - {c: 2}\n", "job.yaml")
    items = tree.entries["b"]
    assert isinstance(items, ListNode)
    assert isinstance(items.items[1], Mapping)
    place = items.items[1].entries["c"].place
    assert (place.line, place.column, place.source_line) == (4, 9, "  - {c: 2}")


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, 1, 'duplicate key "a"'),
        ("a: &x 1\n", 1, 4, "anchors (&x) are not allowed"),
        ("a: *x\n", 1, 4, "aliases (*x) are not allowed"),
        ("a: &x [*x]\n", 1, 4, "anchors (&x) are not allowed"),
        ("a:\n  <<: {b: 1}\n", 2, 3, "merge keys (<<) are not allowed"),
        ("a: !!int 3\n", 1, 4, "tags (!!int) are not allowed"),
        ("a: !!python/object/apply:os.system [x]\n", 1, 4, "tags (!!python/object/apply:os.system)"),
        ("a: ! x\n", 1, 4, "tags (!) are not allowed"),
        ("a: 1\n---\nb: 2\n", 2, 1, "second document"),
        ("a:\n\tb: 1\n", 2, 1, "tabs are not allowed in indentation"),
        ("a: 1\nb: x\x07y\n", 2, 5, "character U+0007 is not allowed"),
        ("a: x\u2028y\n", 1, 5, "character U+2028 is not allowed"),
        ("a: x\u0085y\n", 1, 5, "character U+0085 is not allowed"),
        ("? [a]\n: 1\n", 1, 3, "a list or a mapping as a key"),
        ("- a\n- b\n", 1, 1, "found a list, expected keys and values"),
        ("just text\n", 1, 1, 'found the text "just text"'),
        ("a: b: c\n", 1, 5, "a second `: ` in one value"),
        ("a\nb: 1\n", 2, 2, "does not fit the lines above"),
        ("a:\n  - 1\n b: 2\n", 3, 2, "does not fit the lines above"),
        ("a: 1\nb: 'x\n\nc: 1\n", 2, 4, "a quote is opened and never closed"),
        ("a: [1, 2\nb: 3\n", 2, 2, "a list is opened with [ and never closed"),
        ("a: {x: 1\nb: 3\n", 2, 2, "a mapping is opened with { and never closed"),
        ("a: {b: [node[1-2]]}\n", 1, 9, "a nodelist needs quotes in a list or a mapping in one line"),
        ("a: {b: gpu[01-04]}\n", 1, 8, "a nodelist needs quotes"),
        ("a: {b: node[1-2}\n", 1, 8, "a nodelist needs quotes, and a ]"),
        ("a:local\nb: 1\n", 1, 1, "a space is missing after the colon"),
        ("a:local\n# c\n\nb:x\nc: {d: e}\n", 1, 1, "a space is missing after the colon"),
        ("a:local\n", 1, 1, "a space is missing after the colon"),
        ("a: @x\n", 1, 4, "needs quotes"),
        ('a: "\\q"\n', 1, 6, "an escape that YAML does not know"),
        ('a: "\\x4"\n', 1, 7, "too few hexadecimal digits"),
        ('a: 1\nb: "\\UFFFFFFFF"\n', 2, 2, "not YAML"),
    ],
)
def test_what_yaml_allows_and_a_spec_does_not_is_refused_in_its_place(
    text: str, line: int, column: int, words: str
) -> None:
    problem = problems_of(text)[0]
    assert (problem.line, problem.column) == (line, column)
    assert words in problem.message


def test_refused_constructs_are_reported_together() -> None:
    problems = problems_of("a: 1\na: 2\nb: &x 1\nc: *x\nd: !!str 1\n")
    assert [problem.line for problem in problems] == [2, 3, 4, 5]


def test_a_second_key_names_the_line_of_the_first() -> None:
    assert problems_of("a: 1\nb: 2\na: 3\n")[0].hint == "the first one is in line 1"


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n", "---\n...\n"])
def test_an_empty_file_says_so(text: str) -> None:
    assert problems_of(text)[0].message.startswith("is empty, expected keys and values")


def test_byte_order_mark_and_windows_line_ends_are_accepted() -> None:
    tree = parse(decode(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", "job.yaml"), "job.yaml")
    assert tree.keys["b"].line == 2
    assert tree.keys["b"].column == 1
    assert tree.keys["b"].source_line == "b: 2"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a: é\n".encode("latin-1"), "byte 0xe9 is not UTF-8"),
        ("a: 1\n".encode("utf-16"), "UTF-16"),
        (b"a: \x00\n", "U+0000"),
        (b"a: \xed\xa0\x80\n", "byte 0xed is not UTF-8"),
    ],
)
def test_other_encodings_are_refused(data: bytes, words: str) -> None:
    assert words in problems_of(data)[0].message


def test_a_wrong_byte_is_pointed_at() -> None:
    problem = problems_of("a: 1\nbé: ".encode() + b"\xff\n")[0]
    assert (problem.line, problem.column) == (2, 5)


TOO_DEEP = "nested deeper than 20 levels"
COLLECTION_AS_KEY = "found a list or a mapping as a key, expected a word"


@pytest.mark.parametrize(
    ("data", "message", "column"),
    [
        (b"[" * 100_000, TOO_DEEP, 21),
        (b"{" * 100_000, COLLECTION_AS_KEY, 2),
        (b"a: " + b"[" * 100_000 + b"]" * 100_000, TOO_DEEP, 23),
        (b"a: " + b"{b: " * 100_000, TOO_DEEP, 80),
        (b"- " * 100_000 + b"x", TOO_DEEP, 41),
        (b"? " * 100_000 + b"x", COLLECTION_AS_KEY, 3),
        (b"".join(b" " * depth + b"a:\n" for depth in range(1000)), TOO_DEEP, 21),
        (b"&a " * 100_000, "anchors (&a) are not allowed", 1),
        (b"'" * 900_001, "a quote is opened and never closed", 1),
        (b"a: [" + b"1," * 400_000, "more than 50,000 values", 99_999),
    ],
    ids=["lists", "maps", "closed lists", "nested maps", "dashes", "keys", "blocks", "anchors", "quotes", "values"],
)
def test_a_hostile_file_is_read_no_further_than_its_first_error(data: bytes, message: str, column: int) -> None:
    problem = problems_of(data)[0]
    assert (problem.message, problem.column) == (message, column)


def test_twenty_levels_are_accepted_and_one_more_is_not() -> None:
    assert parse("a: " + "[" * 19 + "]" * 19, "job.yaml")
    assert "deeper than 20" in problems_of("a: " + "[" * 20 + "]" * 20)[0].message


def test_ten_thousand_lines_are_read() -> None:
    text = "name: x\nenv:\n" + "".join(f"  KEY_{index}: {index}\n" for index in range(10_000))
    assert len(load_spec(text, environ={}).job.env) == 10_000


def test_a_file_is_read_up_to_one_megabyte(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"a: 1\n#" + b"x" * (1_000_000 - 6))
    assert len(read_bytes(path)) == 1_000_000
    path.write_bytes(b"x" * 1_000_001)
    with pytest.raises(SpecError, match="1 problem") as caught:
        read_bytes(path)
    assert caught.value.problems[0].message == "is larger than 1 MB, expected a YAML file"


def test_devices_directories_and_missing_files_are_refused(tmp_path: Path) -> None:
    for path, words in [
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path, "is a directory"),
        (tmp_path / "none.yaml", "cannot be read: No such file"),
        (tmp_path / "nul\0.yaml", "cannot be read"),
    ]:
        with pytest.raises(SpecError) as caught:
            read_bytes(path)
        assert words in caught.value.problems[0].message


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    outcome: list[str] = []

    def read() -> None:
        try:
            read_bytes(fifo)
        except SpecError as error:
            outcome.append(error.problems[0].hint or "")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert outcome == ["- reads it from the standard input"]


def test_a_refused_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(SpecError):
            read_bytes(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


class _Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def test_a_dash_reads_the_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(b"name: piped\n"))
    resolved = load_spec("-", environ={})
    assert (resolved.job.name, resolved.path, resolved.origins["name"]) == ("piped", None, "<stdin>:1")


def test_the_standard_input_has_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(b"x" * 1_000_001))
    with pytest.raises(SpecError):
        read_stdin()
