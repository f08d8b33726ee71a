"""The run that a start of a Slurm job runs, and the environment of its tasks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.ranks.environment import COOKIE, cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, read_run
from clusterddp.slurm.commands import run_slurm
from clusterddp.slurm.control import END_TIME, read_time_left_s
from clusterddp.slurm.identity import tag_of
from clusterddp.system.files import read_json
from clusterddp.system.storage import set_storage_timeout

_KEPT_PREFIXES = ("SLURM_", "SLURMD_", "SPANK_", "_SLURM_SPANK_")
_KEPT = frozenset({"TMPDIR", "HOME", "USER", "LOGNAME", "SHELL", "KRB5CCNAME"})
"""Variables of the host or of this start of the job, which win over those of the submitting shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStart:
    """One start of one job, as its batch script sees it."""

    job_id: str
    """As Slurm's commands take it: `123`, or `123_7` for the task of an array."""
    name: str
    restart_count: int
    """0 for a job's first start; Slurm adds 1 for each further start."""
    host: str

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> JobStart:
        """Read the start from the variables of a batch script.

        Raises: ClusterddpError: this is no batch script of a Slurm job.
        """
        job_id = environ.get("SLURM_JOB_ID")
        if not job_id:
            raise ClusterddpError("SLURM_JOB_ID is not set: only Slurm runs this command, as the batch script of a job")
        task = environ.get("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=f"{environ.get('SLURM_ARRAY_JOB_ID', job_id)}_{task}" if task else job_id,
            name=environ.get("SLURM_JOB_NAME", ""),
            restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
            host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        )

    def carries(self, record: RunRecord) -> bool:
        """Say whether this job is the newest that the run was submitted as."""
        return tag_of(self.name) == record.job_tag or self.job_id == record.job_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """A run, and the start of a job that runs it."""

    run: RunDir
    record: RunRecord
    start: JobStart
    restarts: int
    """How many further attempts the spec allows."""
    srun: tuple[str, ...]
    """argv without its last word, the number of the attempt."""
    environment: Mapping[str, str] = field(repr=False)
    """For srun, the tasks and a follow-up job: the submitting shell's variables, the secrets, this job's variables."""

    def may_begin(self, attempt: int) -> bool:
        """Say whether `restarts` allows this attempt; it limits all further attempts, whatever their cause."""
        return attempt - self.record.base_attempt <= self.restarts


def job_environment(run: RunDir, own: Mapping[str, str], token: str) -> dict[str, str]:
    """Return the environment of srun and the tasks; this job's own variables win over submitted ones.

    Raises: ClusterddpError: a file with submitted variables is damaged.
    """
    submitted: dict[str, str] = {}
    for path in (run.job_environment, run.job_secrets):
        submitted |= read_json(path) or {}
    # SLURM_EXPORT_ENV is about the batch step; srun would apply it to its tasks.
    ours = {
        name: value
        for name, value in own.items()
        if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and name != "SLURM_EXPORT_ENV"
    }
    return {"PATH": own.get("PATH", os.defpath)} | submitted | ours | {COOKIE: cookie(token, "task")}


def read_carried(run: RunDir, start: JobStart, environ: Mapping[str, str]) -> Carried:
    """Read the run that this start of a job runs.

    Raises: ClusterddpError: the run has no plan for Slurm.
    """
    record = read_run(run)
    plan = read_json(run.plan)
    if not plan or not plan.get("slurm"):
        raise ClusterddpError(f"{run.plan}: found no plan for Slurm")
    set_storage_timeout(plan["gang"].get("host_silence_s"))
    environment = job_environment(run, environ, record.token)
    if plan["slurm"].get("container"):
        environment = job_end(start.job_id, environment) | environment
    return Carried(
        run=run,
        record=record,
        start=start,
        restarts=int(plan["gang"]["restarts"]),
        srun=tuple(plan["slurm"]["srun"]),
        environment=environment,
    )


def job_end(job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which Slurm 23.02 and newer give tasks the job's end: containers have no scontrol."""
    try:
        left_s = read_time_left_s(run_slurm(["scontrol", "show", "job", "-o", job_id], environ=environ))
    except SlurmError:
        return {}
    return {} if left_s is None else {END_TIME: str(int(time.time() + left_s))}
