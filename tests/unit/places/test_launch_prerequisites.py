"""What a job on Slurm must find on its nodes, checked on the machine that submits, before any GPU is taken."""

from __future__ import annotations

import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clusterddp.doctor.cluster import check_plan
from clusterddp.errors import PreflightError
from clusterddp.places.slurm.launcher import SlurmLauncher
from clusterddp.planning import prerequisites
from clusterddp.planning.plan import Plan
from clusterddp.planning.prerequisites import storage_notes
from clusterddp.spec.load import load_spec
from clusterddp.spec.train import NAMES, is_there
from clusterddp.submission.submit import submit
from clusterddp.system.python import module_command
from clusterddp.system.storage import Mount
from tests.support.launch_runs import plan_text

GPUS = "name: a\nlauncher: slurm\nresources: {gpus_per_node: 2}\n"


def plan(directory: Path, train: str, more: str = "") -> Plan:
    return plan_text(f"{GPUS}train: {train}\n{more}\n", directory, environ={})


def write_cifar10(directory: Path) -> None:
    """Write a set of four images in each batch."""
    folder = directory / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {b"data": np.zeros((4, 3072), dtype=np.uint8), b"labels": [0, 1, 2, 3]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=4))


def test_a_job_whose_data_are_absent_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch of the tests is for the CPU, which is refused first; that is not asked here."""
    monkeypatch.setattr("clusterddp.submission.submit.check_trainer", lambda gang, *, elsewhere: None)
    (tmp_path / "sets").mkdir()
    planned = plan(tmp_path, f"{{dataset: cifar10, data_dir: {tmp_path}/sets}}")
    with pytest.raises(
        PreflightError, match=r"cifar10 is not in .*/sets, and the nodes would look for it only after"
    ) as refused:
        submit(planned)
    download = module_command("clusterddp.train.data", "cifar10", f"{tmp_path}/sets")
    assert shlex.join(download) in str(refused.value.hint)
    assert not planned.run_dir.exists()


def test_the_command_that_is_named_is_one_that_can_be_typed(tmp_path: Path) -> None:
    """It finds a set that is there; nothing is downloaded in a test."""
    write_cifar10(tmp_path / "sets")
    (tmp_path / "empty").mkdir()
    planned = plan(tmp_path, f"{{dataset: cifar10, data_dir: {tmp_path}/empty}}")
    with pytest.raises(PreflightError) as refused:
        SlurmLauncher({}).check(planned)
    command = str(refused.value.hint).partition("  #")[0].replace("/empty", "/sets")
    done = subprocess.run(["sh", "-c", command], cwd="/", env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"cifar10 is in {tmp_path}/sets\n"), done.stderr


def test_the_doctor_names_data_that_are_absent(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    spec = tmp_path / "job.yaml"
    spec.write_text(f"{GPUS}train: {{dataset: cifar10, data_dir: {tmp_path}/sets}}\n")
    environ = {"PATH": "/nowhere"}
    found = dict(check_plan(load_spec(spec, environ={}), tmp_path / "runs", environ))
    assert (found["data"].level, "clusterddp.train.data cifar10" in str(found["data"].fix)) == ("red", True)
    write_cifar10(tmp_path / "sets")
    assert "data" not in dict(check_plan(load_spec(spec, environ={}), tmp_path / "runs", environ))


def test_the_place_that_is_taken_without_data_dir_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    planned = plan(tmp_path, "{dataset: cifar10}")
    with pytest.raises(PreflightError):
        SlurmLauncher({}).check(planned)
    write_cifar10(Path(planned.spec["train"]["data_dir"]))
    SlurmLauncher({}).check(planned)


def test_for_a_set_that_is_not_downloaded_its_directory_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    with pytest.raises(PreflightError) as refused:
        SlurmLauncher({}).check(
            plan(tmp_path, f"{{dataset: folder, data_dir: {tmp_path}/sets, image_size: 64, model: resnet18}}")
        )
    assert "train.data_dir names the directory that has it" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("train", "more"),
    [
        ("{dataset: shapes}", ""),
        ("{dataset: random}", ""),
        ("{dataset: cifar10, data_dir: /local/sets}", ""),
        ("{dataset: cifar10, data_dir: HERE}", "device: cpu"),
        ("{dataset: cifar10, data_dir: HERE}", "container: {image: a, mounts: ['/host/sets:HERE']}"),
    ],
    ids=["generated", "noise", "seen by nodes alone", "no GPU", "mounted into a container"],
)
def test_what_cannot_be_known_from_here_is_not_refused(tmp_path: Path, train: str, more: str) -> None:
    (tmp_path / "sets").mkdir()
    here = str(tmp_path / "sets")
    spec = GPUS if more != "device: cpu" else "name: a\nlauncher: slurm\n"
    SlurmLauncher({}).check(
        plan_text(f"{spec}train: {train}\n{more}\n".replace("HERE", here), tmp_path, environ={"PATH": "/usr/bin"})
    )


def test_a_directory_that_is_not_seen_from_here_is_noted(tmp_path: Path) -> None:
    notes = plan(tmp_path, "{dataset: cifar10, data_dir: /local/sets}").notes
    assert "train.data_dir /local/sets is not seen from here: each node needs the set there" in notes
    assert not any("not seen" in note for note in plan(tmp_path, "{dataset: shapes}").notes)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_directory_has_no_set_that_is_files(tmp_path: Path, name: str) -> None:
    assert is_there(name, tmp_path) is (name in {"shapes", "random"})


def test_a_python_on_a_disk_of_the_login_node_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the table of mounts is made up: of where this Python lies."""
    monkeypatch.setattr(prerequisites, "find_mount", lambda path: Mount(point="/", kind="ext4"))
    [note] = storage_notes()
    assert note.endswith("on ext4 (/); the job's nodes must see the same there, or its start fails")
    assert sys.prefix in note
    monkeypatch.setattr(prerequisites, "find_mount", lambda path: Mount(point="/home", kind="nfs4"))
    assert storage_notes() == ()
