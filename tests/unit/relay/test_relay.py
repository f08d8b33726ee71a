"""Relays: what a tracker has after one call, after several, and after one that was killed.

TensorBoard is the real one. `Fake` stands for a tracker that stores nothing before `close`, as W&B does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.main import main
from clusterddp.errors import UsageError
from clusterddp.launchers.state import read_state
from clusterddp.relay import tracker as trackers
from clusterddp.relay.copy import Copy, TrackerError
from clusterddp.relay.facts import RunEnd, RunFacts, read_facts
from clusterddp.relay.memory import MemoryFile
from clusterddp.relay.relay import open_relay
from clusterddp.relay.rows import Point
from clusterddp.run.directory import RunDir
from clusterddp.system.files import append_jsonl
from tests.support.handmade_runs import complete, make_run, start_attempt


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs")
    start_attempt(run)
    return run


def log(run: RunDir, *steps: int, attempt: int = 0) -> None:
    for step in steps:
        append_jsonl(run.metrics, {"kind": "log", "step": step, "attempt": attempt, "loss": 1.0 / step, "time": step})


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it is executed."""


class Fake:
    """A tracker with a memory of its own; `stored` outlives the calls."""

    address = "fake"

    def __init__(self, stored: list[int], *, commits: bool, dies_at: int = 0, fails_at: int = 0) -> None:
        self.stored, self.sent = stored, list[int]()
        self.commits, self.dies_at, self.fails_at = commits, dies_at, fails_at
        self.end: RunEnd | None = None

    def open(self, run: RunFacts, remembered: Mapping[str, Any]) -> None:
        self.facts = run

    def send(self, points: Sequence[Point], *, again: bool) -> None:
        for point in points:
            if point.step == self.fails_at:
                raise OSError("no network")
            if not (again and point.number in self.stored):
                self.stored.append(point.number)
            if point.step == self.dies_at:
                raise Killed

    def commit(self) -> Mapping[str, Any] | None:
        return {} if self.commits else None

    def close(self, end: RunEnd | None) -> Mapping[str, Any]:
        self.end = end
        return {}

    def view(self) -> str:
        return "here"


def copy_with(run: RunDir, fake: Fake) -> None:
    facts = read_facts(run)
    file = MemoryFile(run, facts, "fake here p")
    with file.held():
        copy = Copy(run, facts, file, lambda: fake)
        copy.update()
        view = read_state(run)
        copy.close(view if view.finished else None)


@pytest.mark.parametrize("commits", [True, False])
def test_each_row_arrives_once_over_calls_and_a_call_that_is_killed(run: RunDir, commits: bool) -> None:
    stored: list[int] = []
    log(run, 1, 2)
    copy_with(run, Fake(stored, commits=commits))
    log(run, 3, 4, 5)
    with pytest.raises(Killed):
        copy_with(run, Fake(stored, commits=commits, dies_at=4))
    assert stored == [0, 1, 2, 3]
    log(run, 6)
    copy_with(run, Fake(stored, commits=commits))
    copy_with(run, Fake(stored, commits=commits))
    assert stored == [0, 1, 2, 3, 4, 5]


def test_a_tracker_that_fails_loses_nothing(run: RunDir) -> None:
    stored: list[int] = []
    log(run, 1, 2, 3)
    with pytest.raises(TrackerError, match="OSError: no network"):
        copy_with(run, Fake(stored, commits=True, fails_at=3))
    copy_with(run, Fake(stored, commits=True))
    assert stored == [0, 1, 2]


def test_the_end_is_sent_once_and_the_one_of_a_resumed_run_again(run: RunDir) -> None:
    log(run, 1)
    complete(run, run.attempt(0))
    first, second, third = (Fake([], commits=True) for _ in range(3))
    copy_with(run, first)
    copy_with(run, second)
    assert (first.end and first.end.state.value, second.end) == ("COMPLETED", None)
    complete(run, start_attempt(run, 1))
    copy_with(run, third)
    assert third.end
    assert third.end.attempt == 1


def test_the_id_follows_from_the_run_and_not_from_its_token_or_place(run: RunDir, tmp_path: Path) -> None:
    before = read_facts(run)
    record = json.loads(run.record.read_text())
    run.path.rename(tmp_path / "moved")
    moved = RunDir(tmp_path / "moved")
    moved.record.write_text(json.dumps(record | {"token": "another"}))
    assert read_facts(moved).id == before.id
    moved.record.write_text(json.dumps(record | {"created_ns": 7}))
    assert read_facts(moved).id != before.id
    assert record["token"] not in repr(before)


def test_two_relays_of_a_run_to_one_tracker_are_refused(run: RunDir) -> None:
    with open_relay([run], "tensorboard", project=None, environ={}):
        again = open_relay([run], "tensorboard", project=None, environ={})
        with pytest.raises(UsageError, match="another process relays this run"), again:
            pass
        with open_relay([run], "tensorboard", project="another", environ={}):
            pass


def test_a_library_that_is_missing_is_named_with_the_command(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    assert main(["relay", str(run.path), "--to", "wandb"]) == 3
    assert "hint: pip install wandb" in capfd.readouterr().err
    assert not (run.path / "relay").exists()


def test_a_relay_prints_what_it_copied_as_json(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    log(run, 1, 2)
    assert main(["relay", str(run.path), "--to", "tensorboard", "-o", "json"]) == 0
    copied = json.loads(capfd.readouterr().out)
    (row,) = copied.pop("runs")
    assert copied == {"schema": 1, "tracker": "tensorboard"}
    assert row.pop("where")
    assert row == {"run": run.name, "state": read_state(run).state.value, "new_rows": 2}


def test_every_tracker_has_a_module() -> None:
    from clusterddp.cli.relay import _TRACKERS

    assert _TRACKERS == trackers.TRACKERS


def events(folder: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            yield tag, event.step, round(event.value, 3)


def test_tensorboard_has_each_point_once_after_a_call_that_was_killed(run: RunDir, tmp_path: Path) -> None:
    log(run, 1, 2)
    argv = ["relay", str(run.path), "--to", "tensorboard", "--project", "p"]
    assert main(argv) == 0
    folder = tmp_path / "tensorboard" / "p" / "test brisk-otter-3"
    (file,) = folder.iterdir()
    with file.open("ab") as cut:
        cut.write(file.read_bytes()[-40:-3])  # as a call that was killed leaves it
    log(run, 3)
    complete(run, run.attempt(0))
    assert main(argv) == 0
    assert main(argv) == 0
    assert list(folder.iterdir()) == [file]
    assert list(events(folder)) == [("loss", 1, 1.0), ("loss", 2, 0.5), ("loss", 3, 0.333)]


def test_tensorboard_shows_the_steps_of_a_later_attempt_in_place_of_those_it_repeats(
    run: RunDir, tmp_path: Path
) -> None:
    log(run, 1, 2, 4)
    log(run, 2, attempt=1)
    assert main(["relay", str(run.path), "--to", "tensorboard", "--project", "p"]) == 0
    assert [step for _, step, _ in events(tmp_path / "tensorboard" / "p" / "test brisk-otter-3")] == [1, 2]


def test_the_table_of_hyperparameters_has_the_configuration(run: RunDir, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    plan = json.loads(run.plan.read_text())
    run.plan.write_text(json.dumps(plan | {"spec": {"name": "test", "train": {"lr": 0.5}, "env": {"KEY": "x"}}}))
    log(run, 1)
    complete(run, run.attempt(0))
    assert main(["relay", str(run.path), "--to", "tensorboard", "--project", "p"]) == 0
    accumulator = EventAccumulator(str(tmp_path / "tensorboard" / "p" / "test brisk-otter-3"))
    accumulator.Reload()
    content = accumulator.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(content)
    assert {key: value.number_value or value.string_value for key, value in start.hparams.items()} == {
        "name": "test",
        "train.lr": 0.5,
    }


def test_a_relay_that_follows_ends_with_the_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def goes_on(seconds: float) -> None:
        log(run, 2)
        complete(run, run.attempt(0))

    log(run, 1)
    monkeypatch.setattr("clusterddp.relay.relay.time.sleep", goes_on)
    assert main(["relay", str(run.path), "--to", "tensorboard", "--project", "p", "--follow"]) == 0
    assert [step for _, step, _ in events(tmp_path / "tensorboard" / "p" / "test brisk-otter-3")] == [1, 2]
    assert "COMPLETED: 2 new rows" in capfd.readouterr().err
