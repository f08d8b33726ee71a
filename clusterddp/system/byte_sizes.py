"""Numbers of bytes as people read them."""

from __future__ import annotations

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with its unit: `512 MiB`, `1.5 GiB`; one decimal below ten."""
    name, unit = next((each for each in _UNITS if abs(num_bytes) >= each[1]), _UNITS[-1])
    amount = num_bytes / unit
    return f"{amount:.0f} {name}" if abs(amount) >= 9.95 or amount == 0 else f"{amount:.1f} {name}"
