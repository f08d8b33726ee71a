"""Programs that know nothing of clusterddp, unchanged on all launchers: two nodes with two ranks each, on the CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.directory import RunDir
from tests.support.frameworks import put_torchvision_beside
from tests.support.paths import ROOT
from tests.support.person import Person
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace, ssh_place_on
from tests.support.waiting import PATIENCE
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.crowd, pytest.mark.usefixtures("needs_rack")]

EXAMPLES = "https://github.com/pytorch/examples"
CLONE_LIMIT_S = 30
LIBRARIES = ("lightning", "accelerate")
SPECS = {
    "local": "resources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1}\n",
    "slurm": "launcher: slurm\nresources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1, time: '0:10:00'}\n",
    "ssh": "launcher: ssh\nresources: {procs_per_node: 2}\n"
    "ssh: {hosts: [node1, node2], send: {data: ~/data}}\npython: /opt/bare/bin/python\n",
}
DATA = {"local": "data", "slurm": "data", "ssh": "~/data"}
LAST_HOST = {"local": "head", "slurm": "node2", "ssh": "node2"}


@dataclass(frozen=True)
class Ended:
    """A run that has ended, and the lines that its ranks printed, in order of their ranks."""

    exit_code: int
    """Of `clusterddp wait`."""
    status: dict[str, Any]
    lines: list[str]


@dataclass(frozen=True)
class Machines:
    """A cluster, whose head has the local runs too, and a laptop with hosts that share nothing."""

    cluster: Rack
    laptop: SshPlace

    def run(self, entry: str, prepare: Callable[[Path], object]) -> dict[str, Ended]:
        """Submit an entry on each launcher at once, from a directory that `prepare` has filled; wait for all ends."""
        name = uuid.uuid4().hex[:8]
        places: dict[str, Person] = {
            "local": SlurmPerson.at(self.cluster, f"local-{name}"),
            "slurm": SlurmPerson.at(self.cluster, f"slurm-{name}"),
            "ssh": self.laptop,
        }
        runs = {launcher: self._submit(place, launcher, entry, prepare) for launcher, place in places.items()}
        return {launcher: _await_end(places[launcher], run) for launcher, run in runs.items()}

    def _submit(self, place: Person, launcher: str, entry: str, prepare: Callable[[Path], object]) -> RunDir:
        for path in place.path.iterdir():
            if path.name != "runs":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (place.path / "data").mkdir()
        prepare(place.path)
        put_torchvision_beside(place.path)
        filled = entry.replace("DATA", DATA[launcher])
        return place.submit(f"name: third-party\ndevice: cpu\n{SPECS[launcher]}entry: {filled}\n")


def _await_end(place: Person, run: RunDir) -> Ended:
    waited = place.clusterddp("wait", run.name, check=False, timeout_s=PATIENCE * 120)
    status = place.status(run)
    logs = sorted(run.attempts()[-1].logs.glob("rank-*.out"))
    return Ended(waited.returncode, status, [line for log in logs for line in log.read_text().splitlines()])


@pytest.fixture(scope="module")
def machines(rack: Rack) -> Iterator[Machines]:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (the dependency group dev has them)")
    plan = RackPlan(
        nodes=["node1", "node2"], private_hosts=True, slurm=False, python_packages=("torch", "torchvision", *LIBRARIES)
    )
    with running_rack(plan) as lan, ssh_place_on(lan) as laptop:
        yield Machines(rack, laptop)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of pytorch/examples; nothing of it is kept here."""
    if named := os.environ.get("CLUSTERDDP_TEST_EXAMPLES"):
        return Path(named)
    clone = tmp_path_factory.mktemp("pytorch") / "examples"
    command = ["git", "clone", "--quiet", "--depth=1", EXAMPLES, str(clone)]
    environ = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=CLONE_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{EXAMPLES} was not cloned within {CLONE_LIMIT_S} s; CLUSTERDDP_TEST_EXAMPLES=CLONE names one")
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "").strip() or error
        pytest.skip(f"{EXAMPLES} could not be cloned ({why}); CLUSTERDDP_TEST_EXAMPLES=CLONE names one")
    return clone


def check_one_group(ends: Mapping[str, Ended]) -> None:
    """Check that four ranks ended well, printed a world of four, and ended with the same weight.

    They begin with weights of their own and see other samples, so without a group the weights would differ.
    """
    for launcher, end in ends.items():
        assert (launcher, end.status["state"], end.exit_code) == (launcher, "COMPLETED", 0), end
        assert [rank["exit_code"] for rank in end.status["ranks"]] == [0, 0, 0, 0]
        printed = [match for line in end.lines if (match := re.fullmatch(r"rank (\d) of 4: (\S+)", line))]
        assert [match[1] for match in printed] == ["0", "1", "2", "3"], end.lines
        assert len({match[2] for match in printed}) == 1, end.lines


def copy(script: str) -> Callable[[Path], object]:
    return lambda place: shutil.copy(ROOT / "jobs" / "frameworks" / script, place)


@pytest.mark.parametrize("script", ["lightning_ddp.py", "accelerate_ddp.py", "fsdp2.py"])
def test_a_script_of_a_framework_runs_as_one_group_on_every_launcher(machines: Machines, script: str) -> None:
    check_one_group(machines.run(f"{{script: {script}}}", copy(script)))


def test_imagenet_of_pytorch_examples_runs_as_one_group_on_every_launcher(machines: Machines, examples: Path) -> None:
    def prepare(place: Path) -> None:
        shutil.copy(examples / "imagenet/main.py", place)
        write_pictures(place / "data")

    options = "--dist-url env:// --dist-backend gloo --no-accel -a squeezenet1_1 --epochs 1 -b 2 -j 0 -p 1"
    words = ", ".join(f'"{word}"' for word in f"{options} {{data_dir}}".split())
    ends = machines.run(f"{{script: main.py, data_dir: DATA, args: [{words}]}}", prepare)
    for launcher, end in ends.items():
        assert (launcher, end.status["state"], end.exit_code) == (launcher, "COMPLETED", 0), end
        assert [rank["exit_code"] for rank in end.status["ranks"]] == [0, 0, 0, 0]
        # 16 images in batches of 2 are 2 steps for each of four ranks, and 8 for one that is alone.
        steps = [line.split("\t")[0] for line in end.lines if line.startswith("Epoch: ")]
        assert steps == ["Epoch: [0][1/2]", "Epoch: [0][2/2]"] * 4, end.lines
        accuracies = [line for line in end.lines if line.startswith(" * ")]
        assert len(accuracies) == 4, end.lines
        assert len(set(accuracies)) == 1, end.lines


def test_what_a_rank_of_a_script_for_lightning_raises_is_the_root_cause_on_every_launcher(machines: Machines) -> None:
    def prepare(place: Path) -> None:
        text = (ROOT / "jobs" / "frameworks" / "lightning_ddp.py").read_text()
        bad = "        if batch_idx == 1 and self.global_rank == 3:\n            raise ValueError('batch 1 is bad')\n"
        (place / "bad.py").write_text(text.replace("        return loss\n", f"{bad}        return loss\n"))

    ends = machines.run("{script: bad.py}", prepare)
    for launcher, end in ends.items():
        cause = end.status["root_cause"]
        assert (launcher, end.status["state"], end.exit_code) == (launcher, "FAILED", 5), end
        host = LAST_HOST[launcher]
        error = f"rank 3 on {host}: ValueError: batch 1 is bad"
        assert (cause["rank"], cause["host"], cause["exit_code"], cause["error"]) == (3, host, 1, error)


def write_pictures(data: Path) -> None:
    """Write images in the folders that torchvision's ImageFolder reads: 16 to learn from, 8 to be tested with."""
    from PIL import Image

    for part, count in (("train", 8), ("val", 4)):
        for shade, kind in ((60, "dark"), (200, "light")):
            (data / part / kind).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8), (shade, shade, number)).save(data / part / kind / f"{number}.png")
