"""Code that was sent to a login node, to be submitted from there: `trees/<number>/`, one for each submit.

tree/        the files, with room for what a job writes beside them; they may lie below it
sent.json    which files they are, where they begin, and what git said of them where they came from
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.system.files import read_json

FOLDER = "trees"
TREE = "tree"
RECORD = "sent.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SentCode:
    """Code that came from elsewhere."""

    root: Path
    files: tuple[str, ...]
    """Relative to `root`: what else lies there was not sent."""
    git: dict[str, Any] | None
    """As `describe_commit` gave it there."""


def find_sent(start: Path) -> SentCode | None:
    """Find the code that was sent and that `start` belongs to; None: none was."""
    here = start.resolve()
    for folder in (here, *here.parents):
        if folder.parent.name == FOLDER and (record := read_json(folder / RECORD)):
            root = folder / TREE / record["at"]
            return SentCode(root=root, files=tuple(record["files"]), git=record["git"])
    return None
