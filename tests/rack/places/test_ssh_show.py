"""What a run over SSH promises, shown on hosts that share nothing: sixteen ranks train on what was sent."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from tests.support.paths import ROOT
from tests.support.picture_files import write_cifar10
from tests.support.ssh_place import SshPlace, ssh_place_on
from tests.testbed.plan import RackPlan
from tests.testbed.rack import running_rack

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.crowd]

RANKS_OF = {"node1": range(8), "node2": range(8, 16)}


@pytest.fixture
def place(needs_rack: None) -> Iterator[SshPlace]:
    plan = RackPlan(nodes=list(RANKS_OF), private_hosts=True, slurm=False)
    with running_rack(plan) as rack, ssh_place_on(rack) as place:
        yield place


@pytest.fixture
def cifar10_dir(tmp_path: Path) -> Path:
    """The real CIFAR-10 where it is at hand, else a small set of noise in its format."""
    if "CLUSTERDDP_TEST_CIFAR" in os.environ:
        return Path(os.environ["CLUSTERDDP_TEST_CIFAR"])
    write_cifar10(tmp_path)
    return tmp_path


def test_sixteen_ranks_on_two_hosts_train_on_data_that_was_sent_and_the_checkpoint_comes_home(
    place: SshPlace, cifar10_dir: Path
) -> None:
    overrides = [
        *(f"ssh.send={{{cifar10_dir}: ~/cifar}}", "train.data_dir=~/cifar", "train.max_steps=2", "train.batch_size=4"),
        *("train.eval_every=30", "resources.cpus_per_task=1", "resources.time=0:20:00"),
    ]
    done = place.clusterddp(
        *("submit", str(ROOT / "jobs/resnet18_2x8.yaml"), "--launcher", "ssh", "--hosts", "node1,node2", "--cpu"),
        *("--wait", *overrides),
        timeout_s=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = RunDir(place.runs_dir / done.stdout.split()[0])
    status = place.status(run)
    assert status["state"] == "COMPLETED"
    assert [(rank["rank"], rank["host"], rank["exit_code"]) for rank in status["ranks"]] == [
        (rank, host, 0) for host, ranks in RANKS_OF.items() for rank in ranks
    ]
    assert {rank["interface"] for rank in status["ranks"]} == {"eth0"}
    assert json.loads(run.summary.read_text())["world_size"] == 16
    for host in RANKS_OF:
        assert sums(place.rack.outside(host, "/root/cifar")) == sums(cifar10_dir)
    (manifest,) = run.checkpoints.glob("*.json")
    kept = json.loads(manifest.read_text())
    assert hashlib.sha256(manifest.with_suffix(".pt").read_bytes()).hexdigest() == kept["sha256"]
    place.await_gone()


def sums(folder: Path) -> dict[str, str]:
    """Sum the batches of a set in CIFAR-10's layout."""
    files = [path for path in (folder / "cifar-10-batches-py").iterdir() if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
