"""submitit's Slurm executor for one planned job: script, options and environment come from the plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.commands import call_slurm
from clusterddp.planning.slurm import SlurmPlan

SBATCH_TIMEOUT_S = 120.0
"""How long sbatch may take: it retries by itself while the controller is busy."""


class JobExecutor(submitit.SlurmExecutor):
    """Submits one planned job; submitit adds no pickle and no options, the caller's SBATCH_* variables do nothing."""

    def __init__(self, folder: Path, plan: SlurmPlan, environ: Mapping[str, str]) -> None:
        super().__init__(folder)
        self.plan = plan
        self.environ = environ
        self.warnings = ""
        """What sbatch wrote to its standard error when it accepted the job."""

    @classmethod
    def affinity(cls) -> int:
        return 2  # with the default submitit requires srun on PATH, which a submit does not need

    def submit_job(self) -> str:
        """Submit the job; return its id, followed by a semicolon and the cluster where sbatch names one.

        Raises: SlurmError: Slurm refuses the job. `transient`: Slurm may have accepted it.
        """
        return str(self._submit_command("").job_id)

    def _submit_command(self, command: str) -> Any:
        script = Path(self.folder) / self.plan.file
        script.parent.mkdir(mode=0o700, exist_ok=True)
        script.write_bytes(self._make_submission_file_text(command, "").encode(errors="surrogateescape"))
        argv = self._make_submission_command(script)
        done = call_slurm(argv, environ=self.environ, timeout_s=SBATCH_TIMEOUT_S, directory=self.plan.directory)
        self.warnings = done.stderr.strip()
        job_id = self._get_job_id_from_submission_command(done.stdout)
        return self.job_class(folder=self.folder, job_id=job_id, tasks=[0])

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.plan.script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self.plan.sbatch, str(submission_file_path), *self.plan.arguments]

    @staticmethod
    def _get_job_id_from_submission_command(string: str | bytes) -> str:
        """Find the answer of `sbatch --parsable` among the lines that a site's wrapper may print around it."""
        text = string.decode(errors="replace") if isinstance(string, bytes) else string
        numbers = {line.strip() for line in text.splitlines() if re.fullmatch(r"\s*[0-9]+(;[\w.-]+)?\s*", line)}
        if len(numbers) != 1:
            raise SlurmError(f"sbatch: found no job id in its output: {text.strip()[:200]!r}", transient=True)
        return numbers.pop()
