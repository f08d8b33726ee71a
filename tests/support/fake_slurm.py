"""Slurm's commands as scripts on PATH that print what a test sets, and the rows of squeue and sacct."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from clusterddp.places.slurm.queue import SACCT_FIELDS, SEPARATOR, SQUEUE_FIELDS, Slurm

DISABLED = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
DATABASE_DOWN = (  # as sacct 22.05 prints it
    "echo 'sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:head:6819: "
    "Connection refused' >&2; exit 1"
)
CONTROLLER_DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def tag(number: int) -> str:
    return f"{number:020x}"


def squeue_row(**facts: str) -> str:
    """Return a line of squeue about a job, by the names of `SQUEUE_FIELDS`."""
    job = facts.get("id", "17")
    plain = {"id": job, "array_id": job, "task": "N/A", "state": "PENDING", "submitted": "2026-01-02T12:00:00"}
    plain |= {"started": "N/A", "ended": "N/A", "partition": "gpu", "num_nodes": "1", "reason": "None"}
    return _row(SQUEUE_FIELDS, plain | facts)


def sacct_row(**facts: str) -> str:
    """Return a line of sacct about a job, by the names of `SACCT_FIELDS`."""
    plain = {"job_id": "17", "state": "FAILED", "exit_code": "1:0", "submitted": "2026-01-02T12:00:00"}
    plain |= {"started": "2026-01-02T12:00:00", "ended": "2026-01-02T12:00:00", "partition": "gpu", "num_nodes": "1"}
    return _row(SACCT_FIELDS, plain | {"nodes": "node1"} | facts)


def _row(names: Iterable[str], facts: Mapping[str, str]) -> str:
    return SEPARATOR.join(facts.get(name, "") for name in names) + "\n"


def queued(number: int, state: str = "RUNNING", *, job_id: int | None = None, submitted: str = "12:00:00") -> str:
    return squeue_row(
        id=str(job_id or 100 + number),
        state=state,
        submitted=f"2026-01-02T{submitted}",
        nodes="node1",
        name=f"x.{tag(number)}",
    )


def accounted(number: int, state: str = "FAILED", *, job_id: str = "") -> str:
    return sacct_row(job_id=job_id or str(100 + number), state=state, name=f"x.{tag(number)}")


class Fakes:
    """Fake squeue and sacct: they print what a test sets, and record their arguments."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.answer("squeue", "")
        self.answer("sacct", "")

    def answer(self, name: str, text: str) -> None:
        (self.directory / f"{name}.text").write_text(text)
        self.do(name, f"cat {self.directory / name}.text")

    def do(self, name: str, script: str) -> None:
        command = self.directory / name
        command.write_text(f'#!/bin/sh\necho "$@" >> {self.directory / name}.calls\n{script}\n')
        command.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        calls = self.directory / f"{name}.calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def slurm(self, max_age_s: float = 60.0) -> Slurm:
        return Slurm({"PATH": f"{self.directory}:/usr/bin:/bin"}, max_age_s=max_age_s)
