"""The rows of metrics.jsonl as points, from an offset on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.relay.facts import flat_config
from clusterddp.relay.rows import Place, Point, read_points


def write(path: Path, *rows: Any, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)[:-1] + end)


def read(path: Path, place: Place | None = None) -> tuple[list[Point], Place]:
    points, place = [], place or Place()
    for some, after in read_points(path, place):
        points, place = points + some, after
    return points, place


def test_values_are_named_by_the_kind_of_the_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path, {"kind": "train", "step": 10, "attempt": 1, "time": 5.0, "loss": 2, "step_ms": {"p50": 3.5}, "comm": "x"}
    )
    write(path, {"kind": "log", "step": 11, "reward": "nan", "time": 6.0}, {"kind": "progress", "step": 12})
    points, _ = read(path)
    assert points[0] == Point(
        number=0, step=10, attempt=1, time=5.0, values={"train/loss": 2.0, "train/step_ms.p50": 3.5}
    )
    assert len(points) == 2
    assert math.isnan(points[1].values["reward"])


def test_a_row_without_a_step_has_that_of_the_row_before_also_in_the_next_call(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"kind": "progress", "step": 7})
    _, place = read(path)
    write(path, {"kind": "log", "loss": 1.0})
    assert [(point.number, point.step) for point in read(path, place)[0]] == [(1, 7)]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"kind": "log", "loss": 1.0})
    write(path, '{"kind": "log", "lo', end="")
    points, place = read(path)
    assert (len(points), place.rows) == (1, 1)
    write(path, 'ss": 2.0}')
    assert [point.values for point in read(path, place)[0]] == [{"loss": 2.0}]


def test_a_line_that_is_no_row_is_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, "{broken", "[1]", {"kind": "log", "loss": 1.0}, {"kind": "log", "text": "x", "huge": 10**400})
    points, place = read(path)
    assert [point.number for point in points] == [2]
    assert place == Place(offset=path.stat().st_size, rows=4, step=0)


def test_a_file_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"kind": "log", "loss": 1.0})
    _, place = read(path)
    path.write_text("")
    with pytest.raises(ClusterddpError, match=r"fewer than the .* bytes that were relayed"):
        read(path, place)


def test_a_configuration_has_no_variables_secrets_or_addresses_with_passwords() -> None:
    spec = {
        "name": "a",
        "env": {"HOME": "/x"},
        "secrets": ["KEY"],
        "notify": {"url": "https://x"},
        "train": {"lr": 0.1, "ema": None, "milestones": [1, 2]},
        "entry": {"args": {"api_key": "x", "data": "s3://user:pass@host/x", "url": "https://host/x"}},
    }
    assert flat_config(spec) == {
        "name": "a",
        "train.lr": 0.1,
        "train.milestones": "1 2",
        "entry.args.url": "https://host/x",
    }
    assert flat_config({"train": {"data_dir": "s3://user:pass@host/x", "root": "s3://user@host/x"}}) == {}
    assert flat_config({"slurm": {"access_key": "x", "my_secret_name": "x"}}) == {}
    assert flat_config({"entry": {"args": ["--token", "x", "--lr", "1"]}}) == {
        "entry.args": "--token (not shown) --lr 1"
    }
