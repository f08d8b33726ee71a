"""How numbers with a unit are written for people."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes for people: `3.4 GB`, `120.0 MB`, `8 kB`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def format_count(count: int, noun: str) -> str:
    """Write how many there are: `1 rank`, `8 ranks`, `2 processes`, `0 directories`."""
    if count == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {plural}"
