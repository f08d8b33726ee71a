"""JSON from any writer becomes a value of the type that is wanted, or an error that says where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

from clusterddp.system.files import append_jsonl, read_json, read_jsonl, write_json
from clusterddp.wire import build, read_object, read_value


@dataclass(frozen=True)
class Point:
    x: float
    tags: tuple[str, ...] = ()


class Named(TypedDict):
    name: str
    points: list[Point]


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        (Point, {"x": 1, "tags": ["a"], "later": True}, Point(1, ("a",))),
        (Named, {"name": "n", "points": [{"x": 0.5}]}, {"name": "n", "points": [Point(0.5)]}),
        ({"a": int, "b": str | None}, {"a": 1, "c": 2}, {"a": 1, "b": None}),
        (tuple[int, str], [1, "x"], (1, "x")),
        (frozenset[int], [1, 1], frozenset({1})),
        (dict[str, tuple[int, int]], {"f": [1, 2]}, {"f": (1, 2)}),
        (Literal["there", "gone"] | None, "gone", "gone"),
        (Path, "/tmp/x", Path("/tmp/x")),
        (Any, {"any": [None]}, {"any": [None]}),
    ],
)
def test_a_value_of_the_type_is_made(kind: Any, value: Any, wanted: Any) -> None:
    assert build(kind, value) == wanted


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Point, [], "it is []"),
        (Point, {}, "it has no x"),
        (Point, {"x": "1"}, "x is '1'"),
        (Point, {"x": True}, "x is True"),
        (Point, {"x": float("nan")}, "x is nan"),
        (Point, {"x": float("inf")}, "x is inf"),
        (Point, {"x": 10**400}, "x is 1000000"),
        (Point, {"x": 1, "tags": "abc"}, "tags is 'abc'"),
        (Named, {"name": "n", "points": [{"x": 1}, None]}, "points[1] is None"),
        ({"a": int}, {}, "a is None"),
        (tuple[int, str], [1], "it is [1]"),
        (Literal[1, "x"], True, "it is True"),
        (Point | None, {"x": None}, "x is None"),
        (dict[str, int], {"k" * 99: "v"}, "k" * 40 + " is 'v'"),
        (Path, 7, "it is 7"),
    ],
)
def test_another_value_is_an_error_that_says_where(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        build(kind, value)


@pytest.mark.parametrize("data", ["", "[", "[" * 100_000, "[" * 99 + "]" * 99, b"\xff", "9" * 5000])
def test_what_is_no_json_or_nested_deep_is_an_error(data: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"nested too deep|Expecting|codec|Exceeds the limit"):
        read_value(data)


@pytest.mark.parametrize("data", ["[]", "null", "7"])
def test_an_object_is_wanted(data: str) -> None:
    with pytest.raises(ValueError, match="where an object belongs"):
        read_object(data)


def test_half_a_character_is_written_so_that_it_reads_again(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"host": "a\ud800"})
    append_jsonl(tmp_path / "x.jsonl", {"host": "a\ud800"})
    assert read_json(path) == {"host": "a\ud800"}
    assert list(read_jsonl(tmp_path / "x.jsonl")) == [{"host": "a\ud800"}]
    path.read_text(encoding="utf-8")
