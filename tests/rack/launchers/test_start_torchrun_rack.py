"""`start: torchrun` on real hosts: one task per node of a job on Slurm, hosts over SSH that share nothing."""

from __future__ import annotations

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.outcome import read_end
from clusterddp.run.record import read_run
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SCRIPT = """\
import os
import torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["CLUSTERDDP_ATTEMPT"] == "0" and dist.get_rank() == 2:
    raise ValueError("the loss is nan")
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size(), "here", os.environ["LOCAL_RANK"], flush=True)
dist.destroy_process_group()
"""
SPEC = """
name: job
device: cpu
start: torchrun
restarts: 1
resources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1, time: "0:10:00"}
entry: {script: entry.py}
"""


def check(run: RunDir, host: str) -> None:
    end = read_end(run.attempt(0))
    assert end is not None
    assert end.root_cause is not None
    assert (end.root_cause.rank, end.root_cause.host, end.will_restart) == (2, host, True)
    assert end.root_cause.error.endswith("ValueError: the loss is nan")
    said = [run.attempt(1).stdout(rank).read_text() for rank in range(4)]
    assert said == [f"rank {rank} of 4 here {rank % 2}\n" for rank in range(4)]


def test_a_job_has_one_task_for_each_node_and_its_ranks_are_started_again_by_torchrun(rack: Rack) -> None:
    place = SlurmPerson.at(rack, "start-torchrun")
    (place.path / "entry.py").write_text(SCRIPT)
    run = place.submit(SPEC + "launcher: slurm\n")
    shown = rack.run("head", ["scontrol", "show", "job", read_run(run).job_id]).stdout
    status = place.await_status(run, lambda status: status["state"] in {"COMPLETED", "FAILED"})
    assert status["state"] == "COMPLETED", status
    assert "NumTasks=2 " in shown
    assert "CPUs/Task=2 " in shown
    check(run, status["ranks"][2]["host"])
    assert len({rank["host"] for rank in status["ranks"]}) == 2


def test_hosts_over_ssh_start_their_ranks_by_torchrun_and_again(ssh_place: SshPlace) -> None:
    (ssh_place.path / "entry.py").write_text(SCRIPT)
    hosts = "launcher: ssh\nssh: {hosts: [node1, node2], python: /opt/bare/bin/python}\n"
    run = ssh_place.submit(SPEC + hosts)
    assert ssh_place.await_state("COMPLETED", "FAILED", run=run)["state"] == "COMPLETED"
    wait_until(lambda: all(run.attempt(1).stdout(rank).exists() for rank in range(4)), 60)
    check(run, "node2")
    assert (run.launcher_dir / "torchrun-1.log").exists()
