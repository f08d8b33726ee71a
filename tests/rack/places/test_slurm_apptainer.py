"""Ranks in a real container: apptainer, where Debian has it (`make test-slurm RELEASE=sid`); the image is made here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from tests.support.container_image import make_image
from tests.support.gang_runs import processes_with
from tests.support.paths import ROOT
from tests.support.slurm_person import SlurmPerson
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, SYSTEM_PATH, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("needs_rack")]

CONFIG = Path("/etc/apptainer/apptainer.conf")
SPEC = """\
name: contained
launcher: slurm
device: cpu
resources: {{nodes: 2, procs_per_node: 2, cpus_per_task: 1, time: "0:10:00"}}
container: {{runtime: apptainer, image: {image}, mounts: {mounts}}}
python: {python}
snapshot: false
{more}
"""
GANG = """\
import os, time
import clusterddp, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), os.environ["APPTAINER_CONTAINER"], flush=True)
while not clusterddp.should_stop():
    time.sleep(0.05)
"""
TRAIN = "train: {model: fastnet, width: 0.125, samples: 320, batch_size: 16, epochs: 1, lr: 0.01}"


@pytest.fixture(scope="module")
def rack(needs_rack: None) -> Iterator[Rack]:
    """Two nodes with apptainer, for which root's capabilities are those that this machine lets it have."""
    if shutil.which("apptainer", path=SYSTEM_PATH) is None:
        pytest.skip("no apptainer is here: Debian has it in sid, make test-slurm RELEASE=sid")
    with running_rack(RackPlan(nodes=["node1", "node2"], gpus_per_host=0)) as rack:
        own = rack.dir / "apptainer.conf"
        own.write_text(CONFIG.read_text().replace("capabilities = full", "capabilities = no"))
        for node in rack.plan.nodes:
            rack.run(node, ["mount", "--bind", str(own), str(CONFIG)])
        yield rack


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    directory = tmp_path_factory.mktemp("container") / "image"
    return directory, make_image(directory)


def start(rack: Rack, image: tuple[Path, list[str]], name: str, more: str) -> tuple[SlurmPerson, RunDir]:
    place = SlurmPerson.at(rack, name)
    (place.path / "gang.py").write_text(GANG)
    directory, mounts = image
    text = SPEC.format(image=directory, mounts=json.dumps(mounts), python=sys.executable, more=more)
    return place, place.submit(text)


def await_gang(run: RunDir) -> list[str]:
    """Wait until all ranks have reduced; return what they print."""
    logs = [run.attempt(0).stdout(rank) for rank in range(4)]
    wait_until(lambda: all(log.exists() and "sum" in log.read_text() for log in logs), 90)
    return [log.read_text() for log in logs]


def end(place: SlurmPerson, run: RunDir) -> dict[str, object]:
    """Wait until the run has ended, and nothing of it is left; return its status."""
    status = place.await_status(run, lambda status: status["state"] in {"FAILED", "COMPLETED", "CANCELLED"})
    wait_until(lambda: place.queue() == [], 60)
    assert place.processes(run) == []
    return status


def test_ranks_train_in_a_container_and_complete(rack, image):
    place, run = start(rack, image, "train", TRAIN)
    status = end(place, run)
    assert status["state"] == "COMPLETED", status
    assert {rank["host"] for rank in status["ranks"]} == {"node1", "node2"}
    assert list(run.checkpoints.glob("*.pt"))


def test_a_killed_rank_in_a_container_is_named_and_nothing_is_left(rack, image):
    place, run = start(rack, image, "kill", "entry: {script: gang.py}")
    assert await_gang(run) == [f"sum 4.0 {image[0]}\n"] * 4
    token = json.loads(run.record.read_text())["token"]
    environs = {pid: Path("/proc", str(pid), "environ").read_bytes() for pid, _ in processes_with(f"{token}.n")}
    os.kill(next(pid for pid, environ in environs.items() if b"\0RANK=3\0" in environ), signal.SIGKILL)
    cause = end(place, run)["root_cause"]
    assert (cause["rank"], cause["host"], cause["exit_code"]) == (3, "node2", 137)


def test_a_run_in_a_container_is_stopped_and_cancelled(rack, image):
    place, run = start(rack, image, "stop", "entry: {script: gang.py}")
    await_gang(run)
    began = time.monotonic()
    rack.run(
        HEAD,
        [sys.executable, "-m", "clusterddp", "cancel", "--save", run.name],
        cwd=place.path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert end(place, run)["state"] == "CANCELLED"
    assert time.monotonic() - began < 60


def test_scancel_reaches_the_supervisor_in_a_container(rack, image):
    place, run = start(rack, image, "scancel", "entry: {script: gang.py}")
    await_gang(run)
    rack.run(HEAD, ["scancel", place.queue()[0].split()[0]])
    status = end(place, run)
    assert status["state"] == "CANCELLED"
    assert status["reason"]
