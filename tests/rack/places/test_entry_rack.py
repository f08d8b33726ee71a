"""Programs that people have, unchanged on real hosts: on Slurm, and over SSH on hosts that share nothing."""

from __future__ import annotations

import sys

import pytest

from clusterddp.run.call import PYTHON
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SLURM = """
name: job
launcher: slurm
device: cpu
resources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1, time: "0:10:00"}
"""
SSH = """
name: job
launcher: ssh
device: cpu
resources: {procs_per_node: 2}
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python
"""


FROM_PYTHON = """
import os, sys, torch, clusterddp, clusterddp.errors

def outer(word):
    def train(tensor):
        if word == "fail" and os.environ["RANK"] == "1":
            raise ValueError(word)
        return word, int(os.environ["RANK"]), tensor * 2, bool(sys.modules["submitit"].__file__)
    return train

run = clusterddp.submit(outer("closure"), base="job.yaml", args=[torch.ones(2)])
print([(word, rank, tensor.tolist(), has) for word, rank, tensor, has in run.results()])
try:
    clusterddp.submit(outer("fail"), base="job.yaml", args=[torch.ones(2)]).results()
except clusterddp.errors.RankError as error:
    print(error.rank, error.traceback.splitlines()[-1])
"""
"""Two ranks on two nodes call a closure with a tensor; the last value says whether they have all of submitit."""


def call_from_python(person: SlurmPerson | SshPlace, spec: str) -> list[str]:
    (person.path / "job.yaml").write_text(spec + "entry: {script: none.py}\n")
    argv = [sys.executable, "-c", FROM_PYTHON]
    return person.rack.run(HEAD, argv, cwd=person.path, env=person.variables(), timeout_s=240).stdout.splitlines()


def test_functions_travel_to_a_job_and_their_results_come_back(slurm: SlurmPerson) -> None:
    spec = SLURM.replace("procs_per_node: 2", "procs_per_node: 1")
    assert call_from_python(slurm, spec) == [
        "[('closure', 0, [2.0, 2.0], True), ('closure', 1, [2.0, 2.0], True)]",
        "1 ValueError: fail",
    ]


def test_functions_travel_to_hosts_without_submitit_and_their_results_come_back(ssh_place: SshPlace) -> None:
    spec = SSH.replace("procs_per_node: 2", "procs_per_node: 1")
    assert call_from_python(ssh_place, spec) == [
        "[('closure', 0, [2.0, 2.0], False), ('closure', 1, [2.0, 2.0], False)]",
        "1 ValueError: fail",
    ]
    failed = ssh_place.run_dir()
    data = failed.submission.read_bytes()
    failed.submission.write_bytes(data.replace(f'"python": "{PYTHON}"'.encode(), b'"python": "3.99"'))
    refused = ssh_place.clusterddp("resume", failed.name, check=False)
    assert refused.returncode == 3
    assert f"node1: the function was pickled by Python 3.99, and this is {PYTHON}" in refused.stderr


def lines_of(run: RunDir) -> list[str]:
    logs = run.attempts()[-1].logs.glob("rank-*.out")
    return sorted(line for log in logs for line in log.read_text().splitlines())


@pytest.fixture
def slurm(rack: Rack, request: pytest.FixtureRequest) -> SlurmPerson:
    return SlurmPerson.at(rack, f"entry-{abs(hash(request.node.name))}")


def test_a_program_that_owns_its_ranks_is_one_task_with_the_cores_of_all_on_each_node(slurm: SlurmPerson) -> None:
    echo = "echo $RANK of $WORLD_SIZE, $LOCAL_WORLD_SIZE each, $SLURM_CPUS_PER_TASK cores"
    entry = f'entry: {{command: "{echo}", shell: true, owns_ranks: true}}\n'
    run = slurm.submit(SLURM + entry)
    job = read_run(run).job_id
    shown = slurm.rack.run("head", ["scontrol", "show", "job", str(job)]).stdout
    status = slurm.await_status(run, lambda status: status["state"] in {"COMPLETED", "FAILED"})
    assert status["state"] == "COMPLETED", status
    assert lines_of(run) == ["0 of 2, 2 each, 2 cores", "1 of 2, 2 each, 2 cores"]
    assert status["warning"].endswith("; each of the 4 ranks may have trained alone")
    assert "NumTasks=4 " in shown  # the job of its ranks
    assert "CPUs/Task=1 " in shown


def test_a_command_over_ssh_works_in_the_copy_of_the_code(ssh_place: SshPlace) -> None:
    (ssh_place.path / "go.sh").write_text('#!/bin/sh\necho "$NODE_RANK $1 $(cat word.py)"\n')
    (ssh_place.path / "go.sh").chmod(0o755)
    (ssh_place.path / "word.py").write_text("here")
    run = ssh_place.submit(SSH + 'entry: {command: [./go.sh, "{rank}"]}\n')
    assert ssh_place.await_state("COMPLETED", "FAILED", run=run)["state"] == "COMPLETED"
    assert lines_of(run) == ["0 0 here", "0 1 here", "1 2 here", "1 3 here"]
