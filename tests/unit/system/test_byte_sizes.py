"""Numbers of bytes as people read them."""

from __future__ import annotations

import pytest

from clusterddp.system.byte_sizes import format_bytes


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
