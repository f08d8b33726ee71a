"""Checkpoints by time: within an epoch, at one step of all ranks, while training goes on, and to the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import clusterddp
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_rank, read_run
from clusterddp.system.files import read_json
from clusterddp.train.group import Agreement, Group
from clusterddp.train.loop import train
from tests.support.storage_faults import hung
from tests.support.train_gang import Gang, make_run, metrics_rows, one_rank, outcome, settle, train_once
from tests.support.waiting import PATIENCE, wait_until

ALWAYS = 1e-9
"""Minutes: there is a checkpoint as often as the ranks can agree on one."""


def trained(group: Group, path: Path, options: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Train to the end, each checkpoint on disk before the next step; return the outcome, and what it began with."""
    setting = settle(group, path, **options)
    state = train(setting, after_step=setting.writer.wait)
    setting.reporter.close()
    counted = {"counted": state.totals.steps, "reached": sorted(state.totals.time_to_accuracy)}
    return outcome(state) | counted, state.resumed_from


def steps_saved(path: Path) -> list[int]:
    return sorted(int(manifest.stem.split("-")[1]) for manifest in (path / "checkpoints").glob("*.json"))


def leave_until(path: Path, step: int) -> None:
    """Leave the checkpoints that the first attempt would have left if it had been killed after `step`."""
    for file in (path / "checkpoints").iterdir():
        if int(file.name.split("-")[1]) > step or "-a0." not in file.name:
            file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comm", "ranks", "on_one_host"),
    [("exact", 1, False), ("exact", 2, False), ("exact", 2, True), ("bf16", 2, False), ("local:3", 2, False)],
)
def test_a_checkpoint_within_an_epoch_goes_on_to_the_same_bits(
    gang: Gang, tmp_path: Path, comm: str, ranks: int, on_one_host: bool
) -> None:
    gang = gang.on_one_host() if on_one_host else gang
    options = {"comm": comm, "ema": 0.9, "samples": 320 * ranks, "log_every": 4, "keep_checkpoints": 100}
    epoch = 20
    whole = gang.run(ranks, trained, make_run(tmp_path / "whole"), options | {"checkpoint_minutes": 0})
    path = make_run(tmp_path / "run")
    options["checkpoint_minutes"] = ALWAYS
    assert gang.run(ranks, trained, path, options) == whole  # checkpoints change nothing
    saved = steps_saved(path)
    within = [step for step in saved if step % epoch]
    assert len(within) >= epoch // 2
    assert {epoch, 2 * epoch} <= set(saved)
    for attempt, step in enumerate((within[-1], within[4]), 1):
        leave_until(path, step)
        again = gang.run(ranks, trained, path, options | {"attempt": attempt})
        assert again[0][1] == f"step-{step:08d}-a0.pt"
        assert [result for result, _ in again] == [result for result, _ in whole]


def test_the_newest_checkpoints_stay_whatever_made_them(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    trained(one_rank(), path, {"checkpoint_minutes": ALWAYS, "max_steps": 20, "keep_checkpoints": 3})
    assert steps_saved(path) == [18, 19, 20]


def test_the_steps_before_a_checkpoint_are_reported_before_it(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    trained(one_rank(), path, {"checkpoint_minutes": ALWAYS, "max_steps": 5, "log_every": 100})
    assert [row["step"] for row in metrics_rows(path, "train")] == [1, 2, 3, 4, 5]


def test_a_disk_that_does_not_answer_delays_no_step(tmp_path: Path) -> None:
    whole = train_once(one_rank(), make_run(tmp_path / "whole"), epochs=3)
    path = make_run(tmp_path / "run")
    (path / "checkpoints").mkdir()
    setting = settle(one_rank(), path, epochs=3, checkpoint_minutes=0, keep_checkpoints=100)
    steps: list[int] = []
    with contextlib.ExitStack() as disk:

        def after_step() -> None:
            steps.append(len(steps) + 1)
            if steps[-1] == 1:
                disk.enter_context(hung(path / "checkpoints"))
            if steps[-1] == 40:  # the first epoch's checkpoint is not written yet; the second one's was due at step 36
                assert setting.writer.is_busy
                disk.close()
                setting.writer.wait()

        state = train(setting, after_step=after_step)
    setting.reporter.close()
    assert outcome(state) == {key: whole[key] for key in outcome(state)}
    assert steps_saved(path) == [18, 40, 54]


def agreed(group: Group, due_at: int, stop_at: int) -> list[tuple[bool, bool]]:
    """Ask in ten steps, and save two steps after it was agreed; the last rank is asked to stop."""
    step = 0
    agreement = Agreement(
        group,
        stop_requested=lambda: group.rank == group.world_size - 1 and step >= stop_at,
        save_due=lambda: due_at <= step < due_at + 2,
    )
    answers = []
    while step < 10:
        step += 1
        stops = agreement.agreed()
        answers.append((stops, agreement.saving))
        if len(answers) > 1 and answers[-2][1]:
            agreement.saved()
    agreement.settle()
    return answers


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_save_at_one_step_and_stop_at_one_step(gang: Gang, ranks: int) -> None:
    answers = gang.run(ranks, agreed, 3, 8)
    late = int(ranks > 1)
    expected = [(step >= 8 + late, step in (3 + late, 4 + late)) for step in range(1, 11)]
    assert answers == [expected] * ranks


SPEC = """
name: job
device: cpu
resources: {procs_per_node: 2, cpus_per_task: 1}
restarts: 1
train:
  {dataset: shapes, samples: 8000, model: fastnet, width: 0.125, batch_size: 4, epochs: 1, precision: fp32,
   checkpoint_minutes: MINUTES, kernels: native, log_every: 50}
"""
MINUTES = 0.01


@pytest.mark.slow
def test_a_rank_that_is_killed_within_an_epoch_costs_no_more_than_the_time_between_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    undisturbed = clusterddp.submit(SPEC.replace("MINUTES", "0"))
    assert undisturbed.wait(PATIENCE * 120) == "COMPLETED"
    run = clusterddp.submit(SPEC.replace("MINUTES", str(MINUTES)))
    directory = RunDir(run.path)
    try:
        wait_until(lambda: steps_saved(run.path), 60)
        time.sleep(0.3)
        manifests = [read_json(path) for path in directory.checkpoints.glob("*.json")]
        victim = read_rank(directory.attempts()[-1], 1)
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        age_s = time.time() - max(manifest["created"] for manifest in manifests if manifest)
        assert age_s < 60 * MINUTES + 5
        assert run.wait(PATIENCE * 120) == "COMPLETED"
    finally:
        end_processes(f"{read_run(directory).token}.", timeout_s=5)
    first, second = (json.loads((each / "summary.json").read_text()) for each in (undisturbed.path, run.path))
    number = int(second["resumed_from"].split("-")[1])
    assert 0 < number < first["steps"]
    assert number >= max(manifest["step"] for manifest in manifests if manifest)
    assert second["params_sha256"] == first["params_sha256"]
    assert second["samples"] == first["samples"] == 8000
