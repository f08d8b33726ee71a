"""Identifies the job of a run by a tag in the job's name, not only by the job id.

Slurm reuses a job id when slurmctld is killed before it has written its state, and sbatch may report a failure for a
job that it has queued. The tag is a hash of the run's secret token, which it does not reveal: job names are public.
"""

from __future__ import annotations

import hashlib

TAG_LENGTH = 20


def job_tag(token: str, first_attempt: int) -> str:
    """Return the tag of the job whose first attempt is this one, in the run (or the sweep) with this token."""
    return hashlib.sha256(f"slurm job {first_attempt} of {token}".encode()).hexdigest()[:TAG_LENGTH]


def job_name(name: str, tag: str) -> str:
    """Return the job's name: the spec's name, which people read, and the tag."""
    return f"{name}.{tag}"


def tag_of(name: str) -> str | None:
    """Return the tag in a job's name; None for a job that is not clusterddp's."""
    tag = name.rpartition(".")[2]
    return tag if is_tag(tag) else None


def is_tag(text: str) -> bool:
    """Return whether a text has the form of a tag."""
    return len(text) == TAG_LENGTH and all(digit in "0123456789abcdef" for digit in text)
