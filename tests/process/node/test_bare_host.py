"""A host has Python and torch and nothing else, and shares no directory with the others: a whole run on two of them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clusterddp
from clusterddp.planning.program import TRAINER
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry
from clusterddp.system.files import read_json
from tests.support.bare_python import make_bare_python
from tests.support.gang_runs import GangRun, make_gang, start_gang
from tests.support.train_gang import TINY
from tests.support.waiting import wait_until

IMPORT_ALL = """
import importlib, pkgutil, sys, clusterddp.errors
names = ("facts", "network", "node", "places.ssh.agent", "ranks", "run", "script", "system", "train")
rooms = [importlib.import_module(f"clusterddp.{room}") for room in names]
names = [info.name for room in rooms for info in pkgutil.walk_packages(room.__path__, room.__name__ + ".")]
for name in names:
    if name != "clusterddp.places.ssh.agent.boot":  # goes over the connection as text; the module would answer at once
        importlib.import_module(name)
print(len(names), *sys.modules)
"""
NOT_THERE = {"psutil", "pydantic", "yaml", "click", "rich", "numpy", "torchvision", "tensorboard", "platformdirs"}
NOT_NEEDED = NOT_THERE | {"filelock"}
STEPS_PER_EPOCH = 9


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare_python(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package is the only one in a directory, as a launcher puts it on a host."""
    directory = tmp_path_factory.mktemp("package")
    (directory / "clusterddp").symlink_to(Path(clusterddp.__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        yield


class TwoHosts:
    """Two supervisors with a rank each; their run directories are two, with the same plan."""

    def __init__(self, directory: Path, python: Path) -> None:
        self.directory, self.python = directory, python
        self.first, self.second = RunDir(directory / "run"), RunDir(directory / "elsewhere")
        self.gang = make_gang(directory, "", nodes=2, ranks_per_node=1)

    def start(self, attempt: int = 0, **train: Any) -> GangRun:
        for run in (self.first, self.second):
            run.launcher_dir.mkdir(parents=True, exist_ok=True)
            entry = Entry(kind="module", target=TRAINER, working_dir=str(run.launcher_dir), stop_aware=True)
            self.gang = dataclasses.replace(self.gang, entry=entry)
            run.plan.write_text(json.dumps({"gang": self.gang.to_json(), "spec": {"train": TINY | train}}))
        return start_gang(
            self.directory, self.gang, attempt=attempt, python=self.python, run_dirs={1: self.second.path}
        )

    def finish(self, gang: GangRun) -> list[int]:
        try:
            return gang.await_end(120)
        finally:
            gang.kill_all()


@pytest.fixture
def hosts(tmp_path: Path, bare_python: Path) -> TwoHosts:
    return TwoHosts(tmp_path, bare_python)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, bare_python: Path, package: None) -> TwoHosts:
    """Two hosts on which a run has just come to its end."""
    hosts = TwoHosts(tmp_path_factory.mktemp("finished"), bare_python)
    gang = hosts.start(epochs=2)
    assert hosts.finish(gang) == [0, 0], gang.logs()
    return hosts


def test_everything_that_runs_on_a_host_can_be_imported_there(bare_python: Path) -> None:
    done = subprocess.run([bare_python, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, *loaded = done.stdout.split()
    assert int(number) > 80
    assert NOT_NEEDED & {name.partition(".")[0] for name in loaded} == set()


def test_the_bare_python_has_none_of_our_packages(bare_python: Path) -> None:
    code = f"from importlib.util import find_spec; print([name for name in {sorted(NOT_THERE)} if find_spec(name)])"
    done = subprocess.run([bare_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_on_bare_hosts_completes(finished: TwoHosts) -> None:
    summary = read_json(finished.first.summary)
    assert summary is not None
    assert (summary["world_size"], summary["steps"], summary["eval_samples"]) == (2, 2 * STEPS_PER_EPOCH, 57)


def test_a_note_says_that_there_are_no_tensorboard_events(finished: TwoHosts) -> None:
    talk = finished.first.attempt(0).stderr(0).read_text()
    assert "note: no TensorBoard events (No module named 'tensorboard'); metrics.jsonl has the same numbers" in talk


def test_nothing_warns_on_bare_hosts(finished: TwoHosts) -> None:
    logs = [finished.first.attempt(0).stderr(0), finished.second.attempt(0).stderr(1)]
    assert [line for log in logs for line in log.read_text().splitlines() if "arning" in line] == []


def test_a_host_without_rank_0_has_its_own_attempts_files_and_no_others(finished: TwoHosts) -> None:
    there = set(os.listdir(finished.second.path))
    copy = {"checkpoints"}  # of the newest checkpoint, if it has come before the run's end
    assert there - copy == {"attempts", "launcher", "plan.json"}


def test_a_host_with_rank_0_has_all_that_belongs_to_the_run(finished: TwoHosts) -> None:
    names = {"attempts", "checkpoints", "events.jsonl", "launcher", "metrics.jsonl", "plan.json", "summary.json"}
    assert set(os.listdir(finished.first.path)) - {path.name for path in finished.first.path.glob("up-*")} == names


def test_a_stop_on_another_host_is_confirmed_on_the_first_and_resumed_from_there(hosts: TwoHosts) -> None:
    gang = hosts.start(epochs=300)
    try:
        wait_until(hosts.first.metrics.exists, 60, what=gang.logs)
        hosts.second.attempt(0).stop_file.touch()
    finally:
        assert hosts.finish(gang) == [0, 0], gang.logs()
    stopped = read_json(hosts.first.attempt(0).stopped)
    assert stopped is not None
    assert gang.end().outcome == "STOPPED"
    epochs = stopped["epoch"] + 1
    again = hosts.start(attempt=1, epochs=epochs)
    assert hosts.finish(again) == [0, 0], again.logs()
    summary = read_json(hosts.first.summary)
    assert summary is not None
    assert (summary["steps"], summary["resumed_from"]) == (
        epochs * STEPS_PER_EPOCH,
        f"step-{stopped['step']:08d}-a0.pt",
    )


def test_data_that_cannot_be_downloaded_on_a_bare_host_is_an_error_with_a_hint(hosts: TwoHosts, tmp_path: Path) -> None:
    gang = hosts.start(dataset="cifar10", data_dir=str(tmp_path / "data"), samples=None)
    assert hosts.finish(gang) == [1, 1]
    error = gang.end().root_cause
    assert error is not None
    assert "CIFAR-10 could not be downloaded" in error.error
    assert "No module named 'torchvision'" in error.error
