"""Checkpoints of a script that is the only rank."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clusterddp
from clusterddp import checkpoint
from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir, make_attempt_dirs
from clusterddp.run.stop import LOOK_EVERY_S, request_stop
from clusterddp.script import place, report
from clusterddp.system.files import read_json
from clusterddp.train.checkpoint import Timer
from tests.support.storage_faults import hung

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("CLUSTERDDP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    start_again()
    yield
    start_again()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunDir:
    """A run, of which this process is the only rank."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    monkeypatch.setenv("CLUSTERDDP_RUN_DIR", str(run.path))
    begin(run, 0, monkeypatch)
    return run


def begin(run: RunDir, attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start_again()
    make_attempt_dirs(run.attempt(attempt))
    monkeypatch.setenv("CLUSTERDDP_ATTEMPT", str(attempt))


def start_again() -> None:
    """Forget what a process knows, as its successor does."""
    if checkpoint._session.cache_info().currsize:
        checkpoint._session().close()
        atexit.unregister(checkpoint._session().close)
    for cached in (checkpoint._session, report._report, place.find_store, place.resumed_from):
        cached.cache_clear()
    report.reached.step = report.reached.total = None


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.pt"))


def test_what_is_saved_is_loaded_with_its_step(run: RunDir) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state: dict[str, Any] = {
        "model": {"weight": weight},
        "shape": torch.Size([2, 3]),
        "facts": [1, 0.5, True, None, "text", b"bytes", (torch.float16, torch.device("cpu"))],
        5: {"epoch": torch.tensor(3)},
    }
    checkpoint.save(state, step=7)
    with torch.no_grad():
        weight.zero_()
    checkpoint.wait()
    assert files(run.checkpoints) == ["step-00000007-a0.pt"]
    saved = checkpoint.load()
    assert saved is not None
    assert saved["model"]["weight"].tolist() == [1, 1]
    assert saved == state | {"step": 7, "shape": (2, 3), "model": saved["model"]}


def test_there_is_nothing_to_load_at_the_first_start(run: RunDir) -> None:
    assert checkpoint.load() is None
    assert clusterddp.resumed_from() is None


def test_the_newest_generations_stay(run: RunDir) -> None:
    for step in (1, 2, 3):
        checkpoint.save({}, step=step, keep=2)
    checkpoint.wait()
    assert files(run.checkpoints) == ["step-00000002-a0.pt", "step-00000003-a0.pt"]


def test_a_damaged_checkpoint_is_passed_over(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        checkpoint.save({"x": torch.zeros(100)}, step=step)
    checkpoint.wait()
    path = run.checkpoints / "step-00000002-a0.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    saved = checkpoint.load()
    assert saved is not None
    assert saved["step"] == 1
    assert "step-00000002-a0.json is not valid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"rng": {"numpy": object()}}, r"state\['rng'\]\['numpy'\] is a object"),
        ({"seen": [1, {2}]}, r"state\['seen'\]\[1\] is a set"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(run: RunDir, state: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=f"clusterddp.checkpoint.save: {words}, expected a tensor"):
        checkpoint.save(state, step=1)
    assert not run.checkpoints.exists()


def test_a_checkpoint_that_was_not_written_is_an_error(run: RunDir) -> None:
    run.checkpoints.touch()
    checkpoint.save({}, step=1)
    with pytest.raises(ClusterddpError, match="the checkpoint was not written"):
        checkpoint.wait()


def test_an_attempt_that_was_cut_off_saves_nothing(run: RunDir) -> None:
    checkpoint.load()
    make_attempt_dirs(run.attempt(1))
    checkpoint.save({}, step=1)
    with pytest.raises(ClusterddpError, match="attempt 1 of the run has begun"):
        checkpoint.wait()


def test_the_next_attempt_goes_on_from_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save({"x": 1}, step=5)
    begin(run, 1, monkeypatch)
    path = run.checkpoints / "step-00000005-a0.pt"
    assert clusterddp.resumed_from() == place.Resumed(attempt=0, checkpoint=path, step=5)
    assert checkpoint.load() == {"x": 1, "step": 5}


def test_due_counts_steps_and_names_the_last_one(run: RunDir) -> None:
    due = []
    for step in range(1, 8):
        clusterddp.progress(step, 7)
        if checkpoint.due(step, every=3):
            due.append(step)
    assert due == [3, 6, 7]


def test_due_counts_seconds_since_the_last_checkpoint(run: RunDir) -> None:
    assert not checkpoint.due(1, every_s=3600)
    assert checkpoint.due(2, every_s=0)
    checkpoint.save({}, step=2)
    assert not checkpoint.due(3, every_s=3600)


def test_with_neither_steps_nor_seconds_it_is_due_by_what_it_takes(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    checkpoint._session()._timer = Timer(None, lambda: now[0])
    due = []
    for step in range(1, 200):  # of two seconds each
        now[0] += 2
        if checkpoint.due(step):
            due.append(step)
            time.sleep(0.7)
            checkpoint.save({}, step=step)
    assert due[0] == 30
    assert all(70 <= 2 * (later - earlier) < 140 for earlier, later in itertools.pairwise(due))
    assert capsys.readouterr().err.count("s from the steps: the next ones are") == 1


def test_what_the_script_saves_by_other_means_counts_too(run: RunDir) -> None:
    assert checkpoint.due(1, every_s=0)
    assert not checkpoint.due(2, every_s=3600)


def test_not_in_the_background_it_is_on_disk_at_once(run: RunDir) -> None:
    checkpoint.save({}, step=1, background=False)
    assert files(run.checkpoints) == ["step-00000001-a0.pt"]


def test_one_that_is_due_while_another_is_being_written_is_due_later(run: RunDir) -> None:
    run.checkpoints.mkdir()
    with hung(run.checkpoints):
        checkpoint.save({}, step=1)
        assert [checkpoint.due(step, every=2) for step in (2, 3, 4, 5)] == [False] * 4
        assert not checkpoint.due(6, every_s=0)
    checkpoint.wait()
    assert checkpoint.due(7, every=2)
    checkpoint.save({}, step=7)
    checkpoint.wait()
    assert not checkpoint.due(9, every=2)
    assert files(run.checkpoints) == ["step-00000001-a0.pt", "step-00000007-a0.pt"]


def test_a_stop_is_due_and_ends_the_script_when_its_checkpoint_is_written(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not checkpoint.due(1)
    request_stop(run.attempt(0).stop_file, "a test")
    time.sleep(1.2 * LOOK_EVERY_S)
    assert checkpoint.due(2)
    with pytest.raises(SystemExit) as left:
        checkpoint.save({"x": 1}, step=2)
    assert left.value.code == 0
    stopped = read_json(run.attempt(0).stopped)
    assert stopped is not None
    assert stopped["step"] == 2
    assert json.loads((run.checkpoints / "step-00000002-a0.json").read_text())["step"] == 2
    assert "stopped at step 2, checkpoint written: a test" in capsys.readouterr().err


def test_a_stop_at_the_last_step_lets_the_script_end(run: RunDir) -> None:
    request_stop(run.attempt(0).stop_file, "a test")
    clusterddp.progress(9, 9)
    assert checkpoint.due(9)
    checkpoint.save({}, step=9)
    assert not run.attempt(0).stopped.exists()
    assert files(run.checkpoints) == ["step-00000009-a0.pt"]


def test_alone_each_start_goes_on_from_the_newest_and_overwrites_none(tmp_path: Path) -> None:
    checkpoint.save({"x": 1}, step=5)
    start_again()
    resumed = clusterddp.resumed_from()
    assert resumed is not None
    assert (resumed.attempt, resumed.step) == (0, 5)
    checkpoint.save({"x": 2}, step=5)
    checkpoint.wait()
    assert files(tmp_path / "checkpoints") == ["step-00000005-a0.pt", "step-00000005-a1.pt"]
    assert checkpoint.load() == {"x": 2, "step": 5}


def test_several_ranks_have_to_meet_first(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterddpError, match="before the ranks have met"):
        checkpoint.due(1)


def test_at_least_one_checkpoint_stays(run: RunDir) -> None:
    with pytest.raises(ValueError, match="keep is 0, expected at least 1"):
        checkpoint.save({}, step=1, keep=0)
