"""What the scheduler says of a job that is not submitted: accepted or not, and when it would start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.errors import SlurmError
from clusterddp.planning.slurm.job import SlurmPlan
from clusterddp.slurm.commands import call_slurm

_START = re.compile(r"to start at (\S+) (?:a )?using (\d+) processors on nodes (\S+)(?: in partition (\S+))?")
"""Slurm 26.05 has an `a` before `using`."""
_NO_ANSWER = ("no such command", "could not establish a configuration source", "cannot be run")
"""Words of an error that is no answer of the scheduler's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The scheduler's answer to `sbatch --test-only`."""

    accepted: bool | None
    """None: it could not be asked."""
    words: str
    start: str | None = None
    """When the job would start, in the cluster's local time, were it submitted now."""
    nodes: str | None = None
    """Where it would start, as a host list."""


def ask_scheduler(plan: SlurmPlan, environ: Mapping[str, str]) -> Verdict:
    """Ask the scheduler about the job, with the very argv of the submit; never an error."""
    try:
        # Without a file: nothing is written for a plan that is only shown.
        done = call_slurm([*plan.sbatch, "--test-only"], environ=environ, stdin=plan.script)
    except SlurmError as error:
        unasked = error.transient or any(words in error.message.lower() for words in _NO_ANSWER)
        return Verdict(accepted=None if unasked else False, words=error.message)
    words = " ".join(line.strip().removeprefix("sbatch: ") for line in done.stderr.splitlines() if line.strip())
    match = _START.search(words)
    if match is None:
        return Verdict(accepted=True, words=words or "no estimate of the start")
    return Verdict(accepted=True, words=words, start=match[1], nodes=match[3])
