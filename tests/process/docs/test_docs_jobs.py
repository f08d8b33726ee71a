"""The specs of jobs/ that run a user's script: submitted here, where no Slurm and no GPU is, they run to the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

LINE = "y = 3.000 x + 1.000"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "options"),
    [("script", []), ("function", []), ("slurm_script", ["--launcher", "local", "--cpu"])],
)
def test_a_job_with_a_script_runs_to_its_end(job: str, options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clusterddp"]
    place = ["--runs", str(tmp_path)]
    subprocess.run([*command, "submit", f"jobs/{job}.yaml", "--wait", *options, *place], cwd=ROOT, check=True)
    logs = subprocess.run([*command, "logs", *place], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert LINE in logs
