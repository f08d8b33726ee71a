"""How a job of ours is told from any other: by a tag in its name, never by its number alone.

Slurm gives a number twice when slurmctld is killed before it has written its state, and sbatch may report a failure for
a job that it queued. The tag follows from the run's secret token, which it does not reveal: job names are public.
"""

from __future__ import annotations

import hashlib

TAG_LENGTH = 20


def job_tag(token: str, first_attempt: int) -> str:
    """Return the tag of the job that begins with this attempt of the run (or of a sweep) with this token."""
    return hashlib.sha256(f"slurm job {first_attempt} of {token}".encode()).hexdigest()[:TAG_LENGTH]


def job_name(name: str, tag: str) -> str:
    """Return the job's name: the spec's name for people, the tag for us."""
    return f"{name}.{tag}"


def tag_of(name: str) -> str | None:
    """Return the tag in a job's name; None for a job that is not ours."""
    tag = name.rpartition(".")[2]
    return tag if is_tag(tag) else None


def is_tag(text: str) -> bool:
    """Say whether this can be the tag of a job of ours."""
    return len(text) == TAG_LENGTH and all(digit in "0123456789abcdef" for digit in text)
