"""What a run on Slurm promises, shown on the rack with the command itself: sixteen ranks, and how they fail."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_jsonl
from tests.support.paths import ROOT
from tests.support.picture_files import write_cifar10
from tests.support.slurm_person import ALL_REDUCE, SlurmPerson
from tests.support.waiting import wait_until
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.slow]

TWO_NODES = ["node1", "node2"]
ENDS_WITHIN_S = 15.0
HOST_ENDS_WITHIN_S = 45.0
"""The same where a host is lost: it may be silent for 30 s (network.host_silence)."""
GLANCE_S = 1.0
"""Between the look at whether an attempt is still the newest and the end of what it then writes."""
GANG = """\
name: gang
launcher: slurm
device: cpu
resources: {{nodes: 2, procs_per_node: 3, cpus_per_task: 1, time: "0:10:00"}}
snapshot: false
entry: {{script: gang.py, args: [{word}]}}
"""


@pytest.fixture
def cifar10_dir(tmp_path: Path) -> Path:
    """The real CIFAR-10 where it is at hand, else a small set of noise in its format."""
    if "CLUSTERDDP_TEST_CIFAR" in os.environ:
        return Path(os.environ["CLUSTERDDP_TEST_CIFAR"])
    write_cifar10(tmp_path)
    return tmp_path


@pytest.fixture
def rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=TWO_NODES)) as rack:
        yield rack


def train_2x8(rack: Rack, data_dir: Path, *more: str, ranks_per_node: int = 8) -> None:
    """Submit jobs/resnet18_2x8.yaml, GPUs and all, but to compute on the CPU; look at it all."""
    place = SlurmPerson.at(rack, "train")
    overrides = [
        *(
            "slurm.partition=low",
            "device=cpu",
            f"slurm.gres=gpu:{ranks_per_node}",
            f"train.data_dir={data_dir}",
            "train.max_steps=2",
            "train.batch_size=4",
            f"resources.gpus_per_node={ranks_per_node}",
        ),
        *("resources.cpus_per_task=1", "train.eval_every=30", "resources.time=0:20:00"),
        *more,
    ]
    done = place.clusterddp(
        "submit", str(ROOT / "jobs/resnet18_2x8.yaml"), "--wait", *overrides, timeout_s=350, check=False
    )
    assert done.returncode == 0, done.stderr
    run = RunDir(place.path / "runs" / done.stdout.split()[0])
    status = place.status(run)
    assert status["state"] == "COMPLETED"
    assert f"--gres=gpu:{ranks_per_node}" in json.loads(run.plan.read_text())["slurm"]["sbatch"]
    assert [rank["rank"] for rank in status["ranks"]] == list(range(2 * ranks_per_node))
    assert [rank["host"] for rank in status["ranks"]] == ["node1"] * ranks_per_node + ["node2"] * ranks_per_node
    assert {rank["interface"] for rank in status["ranks"]} == {"eth0"}
    assert {rank["master_addr"] for rank in status["ranks"]} == {rack.plan.address("node1")}
    assert {rank["exit_code"] for rank in status["ranks"]} == {0}
    assert list(run.checkpoints.glob("*.pt"))
    wait_until(lambda: place.processes(run) == [], 20)  # srun ends after the end is recorded


@pytest.mark.crowd
def test_sixteen_ranks_on_two_hosts_train_and_complete(rack, cifar10_dir):
    train_2x8(rack, cifar10_dir)


def test_ranks_train_and_complete_where_slurm_keeps_accounts(needs_rack_accounting, cifar10_dir):
    with running_rack(RackPlan(nodes=TWO_NODES, accounting=True)) as rack:
        train_2x8(rack, cifar10_dir, "train.model=fastnet", "train.width=0.125", ranks_per_node=2)


def start_gang(rack: Rack) -> tuple[SlurmPerson, RunDir]:
    """Start a gang that reduces over both hosts, and wait until all ranks do."""
    place = SlurmPerson.at(rack, "gang")
    (place.path / "gang.py").write_text(ALL_REDUCE)
    run = place.submit(GANG.format(word=place.path / "word"))
    deadline = time.monotonic() + 200
    logs = [run.attempt(0).stdout(rank) for rank in range(6)]
    while not all(log.exists() and "over eth0" in log.read_text() for log in logs):
        assert time.monotonic() < deadline, place.status(run)
        time.sleep(0.1)
    return place, run


def assert_all_over(
    place: SlurmPerson, run: RunDir, since: float, *, within_s: float = ENDS_WITHIN_S
) -> dict[str, object]:
    """Wait for the end of the run and of every process of it; return the root cause."""
    status = place.await_status(run, lambda status: status["state"] == "FAILED", within_s=60)
    while place.processes(run):
        assert time.monotonic() - since < within_s, place.processes(run)
        time.sleep(0.1)
    assert time.monotonic() - since < within_s
    return dict(status["root_cause"])


@pytest.mark.parametrize(
    ("how", "exit_code", "words"), [("raise", 1, "ValueError: the loss is nan"), ("kill", 137, "SIGKILL")]
)
def test_a_rank_that_fails_ends_the_job_and_is_named(rack, how, exit_code, words):
    place, run = start_gang(rack)
    (place.path / "word").write_text(how)
    cause = assert_all_over(place, run, time.monotonic())
    assert (cause["rank"], cause["host"], cause["exit_code"]) == (5, "node2", exit_code)
    assert words in str(cause["error"])
    wait_until(lambda: place.queue() == [], ENDS_WITHIN_S, patience=1)


def test_a_host_that_loses_power_ends_the_job_and_is_named(rack):
    place, run = start_gang(rack)
    rack.power_off("node2")
    cause = assert_all_over(place, run, time.monotonic(), within_s=HOST_ENDS_WITHIN_S)
    assert (cause["rank"], cause["host"]) == (3, "node2")
    assert "ranks 3-5" in str(cause["error"])


def test_the_first_host_that_loses_power_ends_the_job_and_is_named(rack):
    place, run = start_gang(rack)
    rack.power_off("node1")
    cause = assert_all_over(place, run, time.monotonic(), within_s=HOST_ENDS_WITHIN_S)
    assert (cause["rank"], cause["host"]) == (0, "node1")
    assert "ranks 0-2" in str(cause["error"])


TRAIN_ALONE = """\
name: alone
launcher: slurm
device: cpu
restarts: 2
resources: {nodes: 1, cpus_per_task: 1, time: "0:20:00"}
snapshot: false
train: {model: fastnet, width: 0.125, samples: 320, batch_size: 16, epochs: 100000, lr: 0.01}
"""


def test_a_host_that_is_cut_off_commits_nothing_once_its_successor_has_begun(rack):
    place = SlurmPerson.at(rack, "cut")
    run = place.submit(TRAIN_ALONE)
    wait_until(lambda: list(run.checkpoints.glob("*-a0.json")), 30)
    cut = place.status(run)["ranks"][0]["host"]
    rack.pull_cable(cut)
    wait_until(run.attempt(1).claim.exists, 30)  # Slurm has missed the host, and has started the job on the other one
    begun = json.loads(run.attempt(1).claim.read_text())["time"]
    commits = set()
    while time.time() < begun + 10:
        commits |= {path.name: read_created(path) for path in run.checkpoints.glob("*-a0.json")}.items()
        time.sleep(0.02)
    rows = [row for row in read_jsonl(run.metrics) if row["attempt"] == 0]
    assert [name for name, created in commits if created > begun + GLANCE_S] == []
    assert [row for row in rows if row["time"] > begun + GLANCE_S] == []
    assert place.processes(run, "CLUSTERDDP_ATTEMPT=0") == []
    place.await_status(run, lambda _: bool(list(run.checkpoints.glob("*-a1.json"))))
    place.clusterddp("cancel", run.name)
    wait_until(lambda: place.processes(run) == [], ENDS_WITHIN_S, patience=1)


def read_created(manifest: Path) -> float:
    """Read when a checkpoint was committed; one that is pruned meanwhile was committed long ago."""
    try:
        return float(json.loads(manifest.read_text())["created"])
    except FileNotFoundError:
        return 0.0
