"""`clusterddp worker` over several hosts: srun in salloc, both mpiruns, and machines that share nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from patience import PATIENCE
from rack.plan import HEAD, RackPlan
from rack.rack import Rack, running_rack
from worker_ranks import MPI_AS_ROOT, REPORT, ROOT, Place, demand, wait_for, worker

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]


@dataclass
class Cluster:
    """A directory that all hosts share, seen from the head."""

    rack: Rack
    place: Place

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.rack.plan.path(HEAD)}"
        variables = {"PYTHONPATH": str(ROOT), "PATH": path, **MPI_AS_ROOT}
        return self.rack.run(HEAD, command, cwd=self.place.path, env=variables, check=False, timeout_s=PATIENCE * 100)


@pytest.fixture
def cluster(hosts: Rack) -> Iterator[Cluster]:
    directory = hosts.dir / "shared" / uuid.uuid4().hex
    directory.mkdir(parents=True)
    yield Cluster(hosts, Place(directory).write())
    shutil.rmtree(directory)


def test_srun_starts_a_rank_in_each_task(cluster: Cluster) -> None:
    done = cluster.run("srun", "-N2", "--ntasks-per-node=2", *worker())
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("GROUP_RANK") == ["0", "0", "1", "1"]
    assert cluster.place.values("LOCAL_RANK") == ["0", "1", "0", "1"]


def test_srun_works_inside_of_salloc(cluster: Cluster) -> None:
    done = cluster.run("salloc", "-N2", "-n2", "srun", *worker())
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("MASTER_ADDR") == ["10.77.0.11"] * 2


def test_cyclic_tasks_are_ranks_as_slurm_counts_them(cluster: Cluster) -> None:
    done = cluster.run("srun", "-N2", "--ntasks-per-node=2", "--distribution=cyclic", *worker())
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("GROUP_RANK") == ["0", "1", "0", "1"]


def test_open_mpi_finds_rank_0_where_mpirun_is_not(cluster: Cluster) -> None:
    mpirun = [demand("mpirun.openmpi"), "-x", "PYTHONPATH", "--host", "node1,node2", "-n", "2"]
    done = cluster.run(*mpirun, *worker())
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("MASTER_ADDR") == ["10.77.0.11"] * 2


def test_open_mpi_finds_rank_0_where_mpirun_is(cluster: Cluster) -> None:
    mpirun = [demand("mpirun.openmpi"), "-x", "PYTHONPATH", "--host", "head,node2", "-n", "2"]
    done = cluster.run(*mpirun, *worker())
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("MASTER_ADDR") == ["10.77.0.1"] * 2


def test_open_mpi_in_an_allocation_is_not_mistaken_for_srun(cluster: Cluster) -> None:
    done = cluster.run("salloc", "-N2", "-n2", demand("mpirun.openmpi"), *worker())
    assert done.returncode == 0, done.stderr
    assert "started by mpirun (Open MPI)" in done.stderr


def test_mpich_tells_over_pmi_where_rank_0_is(cluster: Cluster) -> None:
    done = cluster.run(demand("mpirun.mpich"), "-hosts", "node1,node2", "-n", "2", *worker())
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("interface") == ["eth0"] * 2


def test_mpich_in_an_allocation_is_not_mistaken_for_srun(cluster: Cluster) -> None:
    done = cluster.run("salloc", "-N2", "-n2", demand("mpirun.mpich"), *worker())
    assert done.returncode == 0, done.stderr
    assert "started by mpirun (MPICH)" in done.stderr


def test_one_torchrun_per_node_of_a_job_makes_one_gang(cluster: Cluster) -> None:
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d"
    endpoint = "--rdzv-endpoint node1:29533 --rdzv-id $SLURM_JOB_ID"
    command = f"{torchrun} {endpoint} -m clusterddp worker job.yaml"
    done = cluster.run("srun", "-N2", "--ntasks-per-node=1", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    assert sorted(cluster.place.values("GROUP_RANK")) == ["0", "1"]


def test_hosts_that_share_nothing_each_have_the_run() -> None:
    packages = ("torch", "click", "pydantic", "pyyaml", "platformdirs")
    plan = RackPlan(nodes=["node1", "node2"], private_hosts=True, slurm=False, python_packages=packages)
    with running_rack(plan) as rack:
        processes = []
        for rank, node in enumerate(plan.nodes):
            home = rack.outside(node, "/root/work")
            shutil.copytree(ROOT / "clusterddp", home / "clusterddp", ignore=shutil.ignore_patterns("__pycache__"))
            (home / "entry.py").write_text(REPORT)
            (home / "job.yaml").write_text(
                "name: job\nentry: {script: entry.py, args: [/root/work]}\nsnapshot: false\n"
            )
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29511"}
            command = ["sh", "-c", "cd /root/work && exec python -m clusterddp worker job.yaml"]
            argv = rack.argv(node, command, env=variables)
            processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        ended = wait_for(processes)
        assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
        names = [[path.name for path in rack.outside(node, "/root/work/runs").glob("job-*")] for node in plan.nodes]
        assert names[0] == names[1]
