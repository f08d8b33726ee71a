"""The run that a start of a Slurm job carries, and the environment that its tasks get."""

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
from clusterddp.slurm.identity import tag_of
from clusterddp.slurm.time_left import END_TIME, read_time_left_s
from clusterddp.system.files import read_json
from clusterddp.system.storage import set_storage_timeout

_KEPT_PREFIXES = ("SLURM_", "SLURMD_", "SPANK_", "_SLURM_SPANK_")
_KEPT = frozenset({"TMPDIR", "HOME", "USER", "LOGNAME", "SHELL", "KRB5CCNAME"})
"""What belongs to the host, or to this start of the job, not to the shell that submitted it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStart:
    """One start of one job: what its batch script is."""

    job_id: str
    """As Slurm's commands take it: `123`, or `123_7` for the task of an array."""
    name: str
    restart_count: int
    """0 for a job's first start; one more each time that Slurm starts it again."""
    host: str

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> JobStart:
        """Read which job's batch script this is.

        Raises: ClusterddpError: none's.
        """
        job_id = environ.get("SLURM_JOB_ID")
        if not job_id:
            raise ClusterddpError(
                "SLURM_JOB_ID is not set: this is the batch script of a Slurm job, and not for people"
            )
        task = environ.get("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=f"{environ.get('SLURM_ARRAY_JOB_ID', job_id)}_{task}" if task else job_id,
            name=environ.get("SLURM_JOB_NAME", ""),
            restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
            host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        )

    def carries(self, record: RunRecord) -> bool:
        """Say whether this is the job that the run was last handed to, not one that was given up since."""
        return tag_of(self.name) == record.job_tag or self.job_id == record.job_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """The run that is carried, and by which start of which job."""

    run: RunDir
    record: RunRecord
    start: JobStart
    restarts: int
    """Of the spec: how many further attempts there may be."""
    srun: tuple[str, ...]
    """argv; the attempt's number follows."""
    environment: Mapping[str, str] = field(repr=False)
    """For srun, the tasks and a follow-up job: the submitting shell's variables, the secrets, this job's own."""

    def may_begin(self, attempt: int) -> bool:
        """Say whether `restarts` allows this attempt; it bounds all further attempts, whatever they are for."""
        return attempt - self.record.base_attempt <= self.restarts


def job_environment(run: RunDir, own: Mapping[str, str], token: str) -> dict[str, str]:
    """Put the environment of srun and the tasks together; what is this job's own beats what was submitted.

    Raises: ClusterddpError: a file of it is damaged.
    """
    submitted: dict[str, str] = {}
    for path in (run.job_environment, run.job_secrets):
        submitted |= read_json(path) or {}
    # Of the batch step, not of the job: srun would take it for what its tasks are to inherit.
    ours = {
        name: value
        for name, value in own.items()
        if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and name != "SLURM_EXPORT_ENV"
    }
    return {"PATH": own.get("PATH", os.defpath)} | submitted | ours | {COOKIE: cookie(token, "task")}


def read_carried(run: RunDir, start: JobStart, environ: Mapping[str, str]) -> Carried:
    """Read what this start of a job carries.

    Raises: ClusterddpError: the run has no plan for Slurm.
    """
    record = read_run(run)
    plan = read_json(run.plan)
    if not plan or not plan.get("slurm"):
        raise ClusterddpError(f"{run.plan}: is gone, or is no plan for Slurm")
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
    """Return when the job ends, as Slurm 23.02 and newer tell tasks: inside a container there is no scontrol."""
    try:
        left_s = read_time_left_s(run_slurm(["scontrol", "show", "job", "-o", job_id], environ=environ))
    except SlurmError:
        return {}
    return {} if left_s is None else {END_TIME: str(int(time.time() + left_s))}
