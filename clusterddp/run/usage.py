"""How much disk a run takes, by what it is for; how long ago it ended, and how long it is kept."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.system.directories import walk_files
from clusterddp.system.files import read_json
from clusterddp.system.units import UNIT_S

_AGE = re.compile(r"([1-9][0-9]{0,4})([hdw])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Bytes on disk of one run, by what they are for."""

    checkpoints: int = 0
    logs: int = 0
    output: int = 0
    tensorboard: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.checkpoints + self.logs + self.output + self.tensorboard + self.other


def parse_age(text: str) -> float | None:
    """Return the seconds of an age of an hour or more, such as 12h, 30d or 4w; None: it is none."""
    match = _AGE.fullmatch(text.strip())
    return float(int(match[1]) * UNIT_S[match[2]]) if match else None


def measure_run(run: RunDir) -> Usage:
    """Add up what a run has on disk; a file with several hard links counts once, and in `code` it is the snapshot's."""
    sizes = dict.fromkeys(("checkpoints", "logs", "output", "tensorboard", "other"), 0)
    kinds = {"checkpoints": "checkpoints", "output": "output", "tb": "tensorboard", "launcher": "logs"}
    counted: set[tuple[int, int]] = set()
    for folder, status in walk_files(run.path):
        parts = Path(folder).relative_to(run.path).parts
        if parts[:1] == (run.code.name,) and status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
            continue
        of_attempt = parts[:1] == ("attempts",) and parts[2:3] == ("logs",)
        kind = "logs" if of_attempt else kinds.get(parts[0], "other") if parts else "other"
        if (status.st_dev, status.st_ino) not in counted:
            sizes[kind] += status.st_blocks * 512
        if status.st_nlink > 1:
            counted.add((status.st_dev, status.st_ino))
    return Usage(**sizes)


def measure(path: Path) -> int:
    """Add up the bytes on disk below a directory."""
    return sum(status.st_blocks * 512 for _, status in walk_files(path))


def expires_at(run: RunDir, ended: float) -> float | None:
    """Return when `keep` of a run that has ended, such as 30d, is over; None: never."""
    try:
        keep = ((read_json(run.plan) or {}).get("spec") or {}).get("keep")
    except (ClusterddpError, OSError, AttributeError):
        return None
    keep_s = parse_age(keep) if isinstance(keep, str) else None
    return ended + keep_s if keep_s else None
