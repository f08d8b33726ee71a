"""The scheduler's verdict on a job before it is submitted (`sbatch --test-only`): accepted, and its estimated start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.commands import call_slurm
from clusterddp.planning.slurm import SlurmPlan

_START = re.compile(r"to start at (\S+) (?:a )?using (\d+) processors on nodes (\S+)(?: in partition (\S+))?")
"""Slurm 26.05 has an `a` before `using`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The scheduler's answer to `sbatch --test-only`."""

    accepted: bool | None
    """None: the scheduler could not be asked."""
    words: str
    start: str | None = None
    """When the job would start if it were submitted now, in the cluster's local time."""
    nodes: str | None = None
    """Where it would start, as a host list."""


def ask_scheduler(plan: SlurmPlan, environ: Mapping[str, str]) -> Verdict:
    """Ask the scheduler about the job with the argv of the submit; an error becomes a verdict."""
    try:
        # The script goes over standard input: a dry run writes no file.
        done = call_slurm([*plan.sbatch, "--test-only"], environ=environ, stdin=plan.script)
    except SlurmError as error:
        unasked = error.transient or error.reason in {"no command", "cannot run", "no cluster"}
        return Verdict(accepted=None if unasked else False, words=error.message)
    words = " ".join(line.strip().removeprefix("sbatch: ") for line in done.stderr.splitlines() if line.strip())
    match = _START.search(words)
    if match is None:
        return Verdict(accepted=True, words=words or "no estimate of the start")
    return Verdict(accepted=True, words=words, start=match[1], nodes=match[3])
