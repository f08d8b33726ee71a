"""Which Python runs the ranks, and the setup lines before it: in a job of Slurm, and on hosts over SSH."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.directory import RunDir
from tests.support.environments import REPORT, make_conda_home, make_venv
from tests.support.person import Person
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace
from tests.testbed.plan import SYSTEM_PATH
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SLURM = """\
name: job
launcher: slurm
device: cpu
resources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1, time: "0:10:00"}
entry: {script: report.py}
snapshot: false
"""
SSH = """\
name: job
launcher: ssh
device: cpu
resources: {procs_per_node: 1}
ssh: {hosts: [node1, node2]}
entry: {script: report.py}
"""
MODULE = """\
#%Module
prepend-path PATH {prefix}/bin
setenv OF_THE_SETUP module
"""
NUM_RANKS = 4


@pytest.fixture
def slurm(rack: Rack, tmp_path: Path) -> SlurmPerson:
    return SlurmPerson.at(rack, tmp_path.name)


def submit_and_read(person: Person, text: str, num_ranks: int = NUM_RANKS, **environ: str) -> list[Any]:
    (person.path / "report.py").write_text(REPORT)
    (person.path / "job.yaml").write_text(text)
    person.clusterddp("submit", "job.yaml", "--wait", timeout_s=240, environ={"PYTHONPATH": "", **environ})
    logs = [person.run_dir().attempts()[-1].stdout(rank) for rank in range(num_ranks)]
    return [json.loads(log.read_text().splitlines()[-1]) for log in logs]


def cause_of(person: Person, text: str, run: RunDir | None = None) -> str:
    """Submit a spec whose run fails; return its root cause."""
    (person.path / "job.yaml").write_text(text)
    done = person.clusterddp("submit", "job.yaml", "--wait", timeout_s=240, check=False)
    assert done.returncode == 5, done.stderr
    end = person.end(run)
    assert end is not None
    assert end.root_cause is not None
    assert not list(person.run_dir().attempts()[-1].logs.glob("rank-*"))
    return end.root_cause.error


def test_ranks_of_a_job_take_the_python_of_the_activated_environment(slurm: SlurmPerson) -> None:
    prefix = make_venv(slurm.path / "B")
    active = {"VIRTUAL_ENV": str(prefix), "PATH": f"{prefix}/bin:{SYSTEM_PATH}"}
    for found in submit_and_read(slurm, SLURM, **active):
        assert (found["python"], found["venv"]) == (f"{prefix}/bin/python", str(prefix))
        assert found["torch"].startswith(str(prefix))
        assert found["others"] == []
    for found in submit_and_read(slurm, f"{SLURM}venv: B\n"):
        assert (found["python"], found["venv"], found["path"]) == (
            f"{prefix}/bin/python",
            str(prefix),
            f"{prefix}/bin",
        )


def test_a_job_loads_modules_and_activates_conda(slurm: SlurmPerson) -> None:
    home = make_conda_home(slurm.path / "conda", "torch")
    modules = slurm.path / "modules"
    (modules / "torch").mkdir(parents=True)
    (modules / "torch" / "1.0").write_text(MODULE.format(prefix=home / "envs" / "torch"))
    lines = f"setup:\n- module use {modules}\n- module load torch/1.0\n"
    for found in submit_and_read(slurm, SLURM + lines):
        assert found["python"] == f"{home}/envs/torch/bin/python"
        assert found["variable"] == "module"
    cause = cause_of(slurm, SLURM + lines.replace("torch/1.0", "cuda/99"))
    assert ": setup line 2 (exit code 1): module load cuda/99: ERROR: Unable to locate a modulefile" in cause
    conda = "setup: [conda activate torch]\n"
    for found in submit_and_read(slurm, SLURM + conda, CONDA_EXE=f"{home}/bin/conda"):
        assert (found["python"], found["conda"]) == (f"{home}/envs/torch/bin/python", f"{home}/envs/torch")


def test_over_ssh_the_hosts_run_the_lines_and_take_the_python_of_the_spec(ssh_place: SshPlace) -> None:
    key = "python: /opt/bare/bin/python\n"
    found = submit_and_read(ssh_place, SSH + key + "setup: ['export OF_THE_SETUP=$(hostname)']\n", 2)
    assert [(each["python"], each["variable"]) for each in found] == [
        ("/opt/bare/bin/python", "node1"),
        ("/opt/bare/bin/python", "node2"),
    ]
    status = ssh_place.clusterddp("status", ssh_place.run_dir().name).stdout
    assert re.search(r"(?m)^  python: /opt/bare/bin/python \(3\.\d+\.\d+, torch 2\.\S+\)$", status), status
    cause = cause_of(ssh_place, SSH + key + 'setup: ["[ $(hostname) = node1 ] || ls /nothing"]\n')
    assert cause.startswith("node2: setup line 1 (exit code 2): [ $(hostname) = node1 ] || ls /nothing: ls: cannot")
