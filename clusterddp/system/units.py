"""Units: of times, and numbers with theirs for people."""

from __future__ import annotations

import re

UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
"""Seconds of the units in which users write times."""
_AGE = re.compile(r"([1-9][0-9]{0,4})([hdw])")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with its unit: `512 MiB`, `1.5 GiB`; one decimal below ten."""
    name, unit = next((each for each in _UNITS if abs(num_bytes) >= each[1]), _UNITS[-1])
    amount = num_bytes / unit
    return f"{amount:.0f} {name}" if abs(amount) >= 9.95 or amount == 0 else f"{amount:.1f} {name}"


def format_count(count: int, noun: str) -> str:
    """Write a number with its noun: `1 rank`, `8 ranks`, `2 processes`, `0 directories`."""
    if count == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {plural}"


def parse_age(text: str) -> float | None:
    """Return the seconds of an age of an hour or more, such as 12h, 30d or 4w; None: it is none."""
    match = _AGE.fullmatch(text.strip())
    return float(int(match[1]) * UNIT_S[match[2]]) if match else None
