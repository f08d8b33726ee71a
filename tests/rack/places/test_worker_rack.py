"""`clusterddp worker` over several hosts: srun in salloc, both mpiruns, and machines that share nothing."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE
from tests.support.worker_ranks import MPI_AS_ROOT, Place, demand, demand_open_mpi_4, worker
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

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
    mpirun = [demand_open_mpi_4(), "-x", "PYTHONPATH", "--host", "node1,node2", "-n", "2"]
    done = cluster.run(*mpirun, *worker())
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("MASTER_ADDR") == ["10.77.0.11"] * 2


def test_open_mpi_finds_rank_0_where_mpirun_is(cluster: Cluster) -> None:
    mpirun = [demand_open_mpi_4(), "-x", "PYTHONPATH", "--host", "head,node2", "-n", "2"]
    done = cluster.run(*mpirun, *worker())
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("MASTER_ADDR") == ["10.77.0.1"] * 2


def test_open_mpi_in_an_allocation_is_not_mistaken_for_srun(cluster: Cluster) -> None:
    done = cluster.run("salloc", "-N2", "-n2", demand("mpirun.openmpi"), *worker())
    assert done.returncode == 0, done.stderr
    assert "started by mpirun (Open MPI)" in done.stderr


def test_mpich_over_several_hosts_takes_the_address_of_rank_0(cluster: Cluster) -> None:
    done = cluster.run(
        demand("mpirun.mpich"), "-hosts", "node1,node2", "-genv", "MASTER_ADDR", "node1", "-n", "2", *worker()
    )
    assert done.returncode == 0, done.stderr
    assert cluster.place.values("interface") == ["eth0"] * 2


def test_mpich_in_an_allocation_is_not_mistaken_for_srun(cluster: Cluster) -> None:
    done = cluster.run("salloc", "-N2", "-n2", demand("mpirun.mpich"), *worker())
    assert done.returncode == 0, done.stderr
    assert "started by mpirun (MPICH)" in done.stderr
