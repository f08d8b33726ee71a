"""A conflict: values of a spec that are right on their own and do not go together."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Values that do not go together. `keys` are the dotted keys concerned; the first one given is pointed at."""

    keys: tuple[str, ...]
    message: str
    hint: str | None = None
