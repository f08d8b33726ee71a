"""Identifies the job of a run by a tag in the job's name and comment, not only by the job id.

Users and administrators rename jobs; then the comment still has the tag. Slurm reuses a job id when slurmctld is
killed before it has written its state, and sbatch may report a failure for a job that it has queued. The tag is a
hash of the run's secret token, which it does not reveal: job names are public.
"""

from __future__ import annotations

import hashlib
import re

TAG_LENGTH = 20


def job_tag(token: str, first_attempt: int) -> str:
    """Return the tag of the job whose first attempt is this one, in the run (or the sweep) with this token."""
    return hashlib.sha256(f"slurm job {first_attempt} of {token}".encode()).hexdigest()[:TAG_LENGTH]


def job_name(name: str, tag: str) -> str:
    """Return the job's name: the spec's name, which people read, and the tag."""
    return f"{name}.{tag}"


def job_comment(run: str, tag: str) -> str:
    """Return the job's comment; `run`: the name of the run, or of the sweep."""
    return f"clusterddp {run} {tag}"


def tag_of(name: str, comment: str = "") -> str | None:
    """Return the tag in a job's name or else in its comment; None for a job that is not clusterddp's."""
    tag = name.rpartition(".")[2]
    if is_tag(tag):
        return tag
    found = re.search(rf"clusterddp \S+ ([0-9a-f]{{{TAG_LENGTH}}})\b", comment)
    return found[1] if found else None


def is_tag(text: str) -> bool:
    """Return whether a text has the form of a tag."""
    return len(text) == TAG_LENGTH and all(digit in "0123456789abcdef" for digit in text)
