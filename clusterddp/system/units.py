"""How numbers with a unit are written for people."""

from __future__ import annotations


def spell_bytes(num_bytes: float) -> str:
    """Write a number of bytes for people: `3.4 GB`, `120.0 MB`, `8 kB`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
