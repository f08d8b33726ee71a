"""What a script logs, and where its files lie."""

from __future__ import annotations

import atexit
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import clusterddp
from clusterddp.cli.text.status import progress_text
from clusterddp.errors import ClusterddpError
from clusterddp.run import metrics
from clusterddp.run.directory import RunDir, make_attempt_dirs
from clusterddp.run.record import read_events
from clusterddp.script import place, report
from clusterddp.system.files import append_jsonl, read_jsonl
from clusterddp.view.events import count_lost_rows
from clusterddp.view.progress import read_progress

KEYS = {"kind", "attempt", "step", "time"}


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make this process a script that has called nothing yet, outside of a run."""
    for name in [name for name in os.environ if name.startswith("CLUSTERDDP_")] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "reached", metrics.Reached())
    yield
    if report._report.cache_info().currsize:
        report._report().close()
        atexit.unregister(report._report().close)
    for cached in (report._report, place.find_store, place.resumed_from):
        cached.cache_clear()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunDir:
    """A run, of which this process is rank 0 in attempt 1."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    make_attempt_dirs(run.attempt(1))
    monkeypatch.setenv("CLUSTERDDP_RUN_DIR", str(run.path))
    monkeypatch.setenv("CLUSTERDDP_ATTEMPT", "1")
    monkeypatch.setenv("RANK", "0")
    return run


def rows(run: RunDir, kind: str) -> list[dict[str, object]]:
    return [row for row in read_jsonl(run.metrics) if row["kind"] == kind]


def test_values_are_a_row_with_their_step(run: RunDir) -> None:
    clusterddp.log({"loss": 0.5, "correct": 7}, step=3)
    (row,) = rows(run, "log")
    assert row.keys() == KEYS | {"loss", "correct"}
    assert (row["attempt"], row["step"], row["loss"], row["correct"]) == (1, 3, 0.5, 7)


@pytest.mark.parametrize(("logged", "epoch"), [(0.04, 1), (1.0, 1), (1.2, 2), (3, 3)])
def test_epochs_done_that_a_script_logs_are_shown_as_the_epoch_that_is_trained(
    run: RunDir, logged: float, epoch: int
) -> None:
    clusterddp.log({"epoch": logged, "loss": 1.0}, step=1)
    progress = read_progress(run)
    assert progress is not None
    assert progress.epoch == epoch


def test_the_step_is_that_of_the_progress_unless_it_is_given(run: RunDir) -> None:
    clusterddp.progress(40, 100, epoch=2, epochs=5)
    clusterddp.log({"loss": 0.5})
    clusterddp.log({"loss": 0.4, "step": 41})
    first, second = rows(run, "log")
    assert (first["step"], second["step"]) == (40, 41)
    assert [first[key] for key in ("steps_done", "steps_total", "epoch", "epochs_total")] == [40, 100, 2, 5]


def test_a_row_with_a_total_is_the_progress_too(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clusterddp.log({"loss": 0.5}, step=1, total=2)
    (row,) = rows(run, "log")
    assert [row[key] for key in ("step", "steps_done", "steps_total", "loss")] == [1, 1, 2, 0.5]
    monkeypatch.setenv("RANK", "1")
    clusterddp.log({"loss": 0.5}, step=2, total=2)
    assert report.reached.is_last_step  # for checkpoint.due, which every rank asks
    with pytest.raises(TypeError, match="total without step"):
        clusterddp.log({"loss": 0.5}, total=2)


def test_only_rank_0_writes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    clusterddp.log({"loss": object()})
    clusterddp.progress(1, 2)
    assert not run.metrics.exists()


def test_outside_of_a_run_nothing_is_written(tmp_path: Path) -> None:
    clusterddp.log({"loss": object()})
    clusterddp.progress(1, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_one_element_is_a_number(run: RunDir) -> None:
    torch = pytest.importorskip("torch")
    clusterddp.log({"loss": torch.tensor([0.25], requires_grad=True)})
    assert rows(run, "log")[0]["loss"] == 0.25


@pytest.mark.parametrize("value", ["0.5", None, [1.0], object(), b"1"])
def test_what_is_no_number_is_named_with_its_key(run: RunDir, value: object) -> None:
    with pytest.raises(TypeError, match=f"clusterddp.log: 'loss' is a {type(value).__name__}, expected a number"):
        clusterddp.log({"loss": value})
    assert not run.metrics.exists()


def test_a_key_that_every_row_has_is_refused(run: RunDir) -> None:
    with pytest.raises(ValueError, match="the key 'time' is a column of every row"):
        clusterddp.log({"time": 1.0})
    with pytest.raises(TypeError, match="the key 7 is a int, expected text"):
        clusterddp.log({7: 1.0})  # type: ignore[dict-item]


def test_values_that_are_not_finite_stay_json_and_are_shown(run: RunDir) -> None:
    clusterddp.log({"loss": float("nan"), "norm": float("-inf")}, step=1)
    (row,) = rows(run, "log")
    assert (row["loss"], row["norm"]) == ("nan", "-inf")
    progress = read_progress(run)
    assert progress is not None
    assert progress_text(progress) == "step 1  loss nan  norm -inf"


def test_progress_is_written_now_and_then_and_at_the_last_step(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 101):
        clusterddp.progress(step, 100)
    assert [row["step"] for row in rows(run, "progress")] == [1, 100]
    monkeypatch.setattr(report, "PROGRESS_EVERY_S", 0.0)
    clusterddp.progress(7, 100)
    assert [row["step"] for row in rows(run, "progress")] == [1, 100, 7]


def test_the_end_of_a_script_writes_how_far_it_came(run: RunDir) -> None:
    clusterddp.progress(1, 100)
    clusterddp.progress(2, 100)
    report._report().close()
    assert [row["step"] for row in rows(run, "progress")] == [1, 2]


def test_storage_that_refuses_loses_rows_which_are_counted(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clusterddp.log({"loss": 3})

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(metrics, "append_jsonl", full)
        clusterddp.log({"loss": 2})
        clusterddp.progress(1, 2)
    clusterddp.log({"loss": 1})
    assert [row["loss"] for row in rows(run, "log")] == [3, 1]
    assert count_lost_rows(read_events(run)) == 2


def test_an_attempt_that_was_cut_off_writes_no_row(run: RunDir) -> None:
    make_attempt_dirs(run.attempt(2))
    with pytest.raises(ClusterddpError, match="attempt 2 of the run has begun"):
        clusterddp.log({"loss": 1})
    assert not run.metrics.exists()


def test_tensorboard_gets_the_values(run: RunDir) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for step in (1, 2):
        clusterddp.log({"val/loss": 1 / step}, step=step)
    report._report().close()
    found = accumulator.EventAccumulator(str(run.tensorboard))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("val/loss")] == [(1, 1.0), (2, 0.5)]


def test_progress_and_time_left_are_those_of_the_script(run: RunDir) -> None:
    for step, at in ((10, 100.0), (20, 110.0)):
        append_jsonl(run.metrics, {"kind": "progress", "attempt": 1, "step": step, "steps_total": 40, "time": at})
    row = {"kind": "log", "attempt": 1, "step": 2, "steps_done": 20, "steps_total": 40, "time": 110.0}
    append_jsonl(run.metrics, row | {"loss": 0.25, "val_acc": 0.5, "lr": 0.1})
    progress = read_progress(run)
    assert progress is not None
    assert (progress.step, progress.steps, progress.fraction, progress.eta_s) == (20, 40, 0.5, 20.0)
    assert progress_text(progress) == "step 20/40  50%  loss 0.250  accuracy 50.0%  lr 0.1  20s left"


@pytest.mark.parametrize(
    ("values", "accuracy"),
    [
        ({"accuracy": 0.9}, 0.9),
        ({"val/acc": 93.5, "train/acc": 99.0}, 0.935),
        ({"top1": 0.7, "accuracy": 0.8}, 0.8),
        ({"Test_Accuracy": 0.6}, 0.6),
        ({"train_acc": 0.9, "accurate": 0.2}, None),
    ],
)
def test_an_accuracy_is_known_by_its_name(run: RunDir, values: dict[str, float], accuracy: float | None) -> None:
    clusterddp.log(values)
    progress = read_progress(run)
    assert progress is not None
    assert progress.accuracy == accuracy


def test_list_shows_an_accuracy_that_many_rows_follow(run: RunDir) -> None:
    append_jsonl(run.metrics, {"kind": "log", "attempt": 1, "step": 0, "val_acc": 0.75})
    for step in range(100):
        append_jsonl(run.metrics, {"kind": "log", "attempt": 1, "step": step, "loss": 0.123456})
    progress = read_progress(run, tail_bytes=4096)
    assert progress is not None
    assert (progress.accuracy, progress.step) == (0.75, 99)


def test_results_lie_in_the_run_or_where_the_spec_says(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clusterddp.output_dir() == run.output
    assert run.output.is_dir()
    monkeypatch.setenv("CLUSTERDDP_OUTPUT_DIR", str(run.path / "a/b"))
    assert clusterddp.output_dir() == run.path / "a/b"
    assert (run.path / "a/b").is_dir()


def test_results_of_a_script_alone_lie_in_the_working_directory(tmp_path: Path) -> None:
    assert clusterddp.output_dir() == tmp_path / "output"


def test_a_later_attempt_without_a_checkpoint_knows_that_it_is_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clusterddp.resumed_from() == place.Resumed(attempt=0, checkpoint=None, step=None)
    monkeypatch.setenv("CLUSTERDDP_ATTEMPT", "0")
    place.find_store.cache_clear()
    place.resumed_from.cache_clear()
    assert clusterddp.resumed_from() is None


def test_reporting_needs_no_package_and_not_torch(run: RunDir) -> None:
    code = (
        "import sys, clusterddp; clusterddp.log({'a': 1}); clusterddp.progress(1, 2); clusterddp.resumed_from();"
        "clusterddp.output_dir(); clusterddp.checkpoint; clusterddp.should_stop();"
        "heavy = {'torch', 'click', 'pydantic', 'yaml', 'rich', 'psutil', 'submitit', 'paramiko'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [row["kind"] for row in read_jsonl(run.metrics)] == ["log", "progress"]
