"""How numbers with a unit are written for people."""

from __future__ import annotations

import pytest

from clusterddp.system.units import format_bytes, format_count


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 KiB"),
        (1, "0.0 KiB"),
        (8192, "8.0 KiB"),
        (2**20 - 1, "1024 KiB"),
        (512 * 2**20, "512 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (9.97 * 2**30, "10 GiB"),
        (20 * 2**40, "20480 GiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_they_fill(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "rank", "1 rank"), (8, "rank", "8 ranks"), (2, "process", "2 processes"), (0, "directory", "0 directories")],
)
def test_a_count_has_its_noun_in_the_plural_but_for_one(count: int, noun: str, text: str) -> None:
    assert format_count(count, noun) == text
