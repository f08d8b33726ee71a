"""The differences of code, which `compare` and `report` draw: the smallest ones, or soon."""

from __future__ import annotations

import difflib
import os
import random
import time
from pathlib import Path

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.view.background import FileDiff, compare_folders
from tests.support.waiting import PATIENCE


def differences(tmp_path: Path, old: list[str], new: list[str]) -> FileDiff:
    for name, lines in (("old", old), ("new", new)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "train.py").write_text("".join(f"{line}\n" for line in lines))
    (diff,) = compare_folders(tmp_path / "old", tmp_path / "new")
    return diff


@pytest.mark.parametrize("seed", range(40))
def test_a_difference_makes_the_new_text_of_the_old_one(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    old = [f"line {rng.randrange(30)}" for _ in range(rng.choice([0, 1, 3, 12, 80]))]
    new = list(old)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(new) + 1)
        new[place : place + rng.randrange(3)] = [f"new {rng.randrange(9)}" for _ in range(rng.randrange(1, 3))]
    diff = differences(tmp_path, old, new)
    hunks = list(difflib.unified_diff(old, new, lineterm=""))[2:]
    assert applied(old, diff.lines) == new
    assert len(diff.lines) <= len(hunks)


def applied(old: list[str], lines: tuple[str, ...]) -> list[str]:
    """Return what a unified diff makes of a text; it has to fit."""
    result, position = [], 0
    for line in lines:
        if line.startswith("@@"):
            begin, _, count = line.split()[1][1:].partition(",")
            place = int(begin) - (count != "0")
            result += old[position:place]
            position = place
            continue
        if line[0] != "+":
            assert old[position] == line[1:]
            position += 1
        if line[0] != "-":
            result.append(line[1:])
    return result + old[position:]


@pytest.mark.parametrize("kinds", [101, 180])
def test_many_lines_of_few_kinds_are_compared_soon(tmp_path: Path, kinds: int) -> None:
    old, new = (
        [line for place in range(12_000) for line in (str(place % kinds), f"{name}{place}")] for name in ("u", "v")
    )
    began = time.monotonic()
    diff = differences(tmp_path, ["first", *old, "last"], ["first", *new, "last"])
    assert time.monotonic() - began < 5 * PATIENCE
    assert (diff.lines[0], diff.left_out_lines > 0) == ("@@ -3,23999 +3,23999 @@", True)


def test_code_that_no_snapshot_can_have_is_refused_unread(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "giant").touch()
        os.truncate(tmp_path / name / "giant", 1 << 40)
    with pytest.raises(ClusterddpError, match=r"has more than 1,000,000,000 bytes"):
        compare_folders(tmp_path / "old", tmp_path / "new")
