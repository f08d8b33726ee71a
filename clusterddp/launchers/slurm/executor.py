"""submitit's executor, for one job whose script, options and environment are ours and whose number is never guessed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit

from clusterddp.errors import SlurmError
from clusterddp.planning.slurm.job import SCRIPT, SlurmPlan
from clusterddp.slurm.commands import call_slurm

SBATCH_TIMEOUT_S = 120.0
"""How long sbatch may take: it waits by itself while the controller is busy."""


class JobExecutor(submitit.SlurmExecutor):
    """Hands one planned job to sbatch: no pickle, no option in the script, none of the caller's SBATCH_* variables."""

    def __init__(self, folder: Path, plan: SlurmPlan, environ: Mapping[str, str]) -> None:
        super().__init__(folder)
        self.plan = plan
        self.environ = environ
        self.said = ""
        """What sbatch wrote to its standard error although it took the job: warnings."""

    @classmethod
    def affinity(cls) -> int:
        return 2  # submitit would ask for srun on PATH, which a plan does not need

    def submit_job(self) -> str:
        """Submit the job; return its number, with the cluster behind a semicolon where sbatch names one.

        Raises: SlurmError: refused; or `transient`: Slurm may have the job all the same.
        """
        return str(self._submit_command("").job_id)

    def _submit_command(self, command: str) -> Any:
        script = Path(self.folder) / SCRIPT
        script.write_text(self._make_submission_file_text(command, ""), encoding="utf-8")
        done = call_slurm(self._make_submission_command(script), environ=self.environ, timeout_s=SBATCH_TIMEOUT_S)
        self.said = done.stderr.strip()
        job_id = self._get_job_id_from_submission_command(done.stdout)
        return self.job_class(folder=self.folder, job_id=job_id, tasks=[0])

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.plan.script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self.plan.sbatch, str(submission_file_path), *self.plan.arguments]

    @staticmethod
    def _get_job_id_from_submission_command(string: str | bytes) -> str:
        """Read the answer of `sbatch --parsable` among whatever a site's wrapper prints around it."""
        text = string.decode(errors="replace") if isinstance(string, bytes) else string
        numbers = {line.strip() for line in text.splitlines() if re.fullmatch(r"\s*[0-9]+(;[\w.-]+)?\s*", line)}
        if len(numbers) != 1:
            raise SlurmError(f"sbatch: no job's number in its answer: {text.strip()[:200]!r}", transient=True)
        return numbers.pop()
