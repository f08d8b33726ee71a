"""Code that was uploaded to a login node to be submitted there: `trees/<number>/`, one for each submit.

tree/        the files, or directories above them; a job may write beside them
sent.json    the names of the files, their directory below tree/, and their git commit on the machine they came from
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
    """Uploaded code."""

    root: Path
    files: tuple[str, ...]
    """The uploaded files, relative to `root`; other files there were not uploaded."""
    git: dict[str, Any] | None
    """The result of `describe_commit` on the machine they came from."""


def find_sent(start: Path) -> SentCode | None:
    """Find the uploaded code that `start` belongs to; None: it belongs to none."""
    here = start.resolve()
    for folder in (here, *here.parents):
        if folder.parent.name == FOLDER and (record := read_json(folder / RECORD)):
            root = folder / TREE / record["at"]
            return SentCode(root=root, files=tuple(record["files"]), git=record["git"])
    return None
