"""Programs that people have, unchanged on real hosts: on Slurm, and over SSH on hosts that share nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rack.rack import Rack, wait_until
from slurm_place import Place
from ssh_place import SshPlace

from clusterddp.run.directory import RunDir

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

ENTRIES = Path(__file__).parent / "entries"
MODELARTS = """
entry:
  script: modelarts.py
  data_dir: {data}
  args: [--init_method, "{{init_method}}", --rank, "{{rank}}", --world_size, "{{world_size}}",
         --data_url, "{{data_dir}}", --output_dir, "{{output_dir}}", --lr, 0.1]
"""
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
ssh: {hosts: [node1, node2], python: /opt/bare/bin/python, send: {data: ~/slope}}
"""


def lines_of(run: RunDir) -> list[str]:
    logs = run.attempts()[-1].logs.glob("rank-*.out")
    return sorted(line for log in logs for line in log.read_text().splitlines())


@pytest.fixture
def slurm(rack: Rack, request: pytest.FixtureRequest) -> Place:
    place = Place(rack, f"entry-{abs(hash(request.node.name))}")
    for script in ENTRIES.glob("*.py"):
        shutil.copy(script, place.path)
    (place.path / "slope.json").write_text("3.0")
    return place


@pytest.mark.parametrize("init", ["tcp", "file"])
def test_modelarts_interface_runs_unchanged_on_slurm(slurm: Place, init: str) -> None:
    run = slurm.submit(SLURM + MODELARTS.format(data=".") + f"network: {{init: {init}}}\n")
    status = slurm.await_status(run, lambda status: status["state"] in {"COMPLETED", "FAILED"})
    assert status["state"] == "COMPLETED", status
    told = json.loads((run.output / "result.json").read_text())
    assert (told["world_size"], told["init"].partition(":")[0]) == (4, init)
    assert not list(run.path.glob("attempts/*/rendezvous"))


def test_a_program_that_owns_its_ranks_is_one_task_with_all_cores_on_each_node_of_a_job(slurm: Place) -> None:
    entry = "entry: {script: spawning.py, owns_ranks: true, args: [--nprocs, '{procs_per_node}']}\n"
    run = slurm.submit(SLURM + entry)
    job = json.loads(run.record.read_text())["job_id"]
    told = slurm.rack.run("head", ["scontrol", "show", "job", str(job)]).stdout
    status = slurm.await_status(run, lambda status: status["state"] in {"COMPLETED", "FAILED"})
    assert status["state"] == "COMPLETED", status
    assert lines_of(run) == [f"rank {rank} of 4: 4" for rank in range(4)]
    assert "NumTasks=2 " in told
    assert "CPUs/Task=2 " in told


def test_modelarts_interface_runs_unchanged_over_ssh_and_its_output_comes_home(ssh_place: SshPlace) -> None:
    shutil.copy(ENTRIES / "modelarts.py", ssh_place.path)
    (ssh_place.path / "data").mkdir()
    (ssh_place.path / "data/slope.json").write_text("3.0")
    run = ssh_place.submit(SSH + MODELARTS.format(data="~/slope"))
    assert ssh_place.await_state("COMPLETED", "FAILED", run=run)["state"] == "COMPLETED"
    wait_until((run.output / "result.json").exists, 60)
    assert json.loads((run.output / "result.json").read_text())["world_size"] == 4


def test_a_command_over_ssh_works_in_the_copy_of_the_code(ssh_place: SshPlace) -> None:
    (ssh_place.path / "go.sh").write_text('#!/bin/sh\necho "$NODE_RANK $1 $(cat word.py)"\n')
    (ssh_place.path / "go.sh").chmod(0o755)
    (ssh_place.path / "word.py").write_text("here")
    run = ssh_place.submit(SSH.replace(", send: {data: ~/slope}", "") + 'entry: {command: [./go.sh, "{rank}"]}\n')
    assert ssh_place.await_state("COMPLETED", "FAILED", run=run)["state"] == "COMPLETED"
    assert lines_of(run) == ["0 0 here", "0 1 here", "1 2 here", "1 3 here"]
