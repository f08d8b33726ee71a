"""Training is the same whatever way it is cut: over ranks, over micro-batches, by stops and resumes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_gang import TINY, Gang, free_port, make_run, one_rank, open_gang, outcome, settle, train_once

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import read_jsonl
from clusterddp.run.stop import request_stop
from clusterddp.train.comm import Group, StopAgreement
from clusterddp.train.loop import Setting, train
from clusterddp.train.state import tensors_sha256


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with open_gang() as gang:
        yield gang


def trained_parameters(group: Group, path: Path, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    setting = settle(group, path, **options)
    state = train(setting)
    setting.reporter.close()
    return {name: value.detach().clone() for name, value in state.model.named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def rows(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(path / "metrics.jsonl") if row["kind"] == kind]


# -- the same over ranks and over micro-batches


@pytest.mark.parametrize("model", ["fastnet", "resnet18"])
def test_two_ranks_equal_one_rank_that_accumulates_twice_to_the_last_bit(
    gang: Gang, tmp_path: Path, model: str
) -> None:
    options = {"model": model, "batch_size": 8, "max_steps": 4, "samples": 80}
    two = gang.run(2, trained_parameters, make_run(tmp_path / "two"), options)
    one = gang.run(1, trained_parameters, make_run(tmp_path / "one"), options | {"accumulate": 2})
    assert largest_difference(two[0], two[1]) == 0.0
    assert largest_difference(two[0], one[0]) == 0.0


def test_three_ranks_equal_one_rank_that_accumulates_thrice(gang: Gang, tmp_path: Path) -> None:
    three = gang.run(3, trained_parameters, make_run(tmp_path / "three"), {"max_steps": 4})
    one = gang.run(1, trained_parameters, make_run(tmp_path / "one"), {"max_steps": 4, "accumulate": 3})
    assert largest_difference(three[0], three[2]) == 0.0
    assert largest_difference(three[0], one[0]) <= 1e-6


def test_ranks_that_accumulate_too_equal_one_rank(gang: Gang, tmp_path: Path) -> None:
    options = {"max_steps": 4, "accumulate": 2}
    two = gang.run(2, trained_parameters, make_run(tmp_path / "two"), options)
    one = gang.run(1, trained_parameters, make_run(tmp_path / "one"), options | {"accumulate": 4})
    assert largest_difference(two[0], one[0]) <= 1e-6


def test_the_same_spec_trained_twice_is_the_same_to_the_last_bit(gang: Gang, tmp_path: Path) -> None:
    first = gang.run(2, train_once, make_run(tmp_path / "first"))
    second = gang.run(2, train_once, make_run(tmp_path / "second"))
    assert first == second


# -- stop and resume


def stop_and_resume(group: Group, path: Path, stops: list[int], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with a stop at each of `stops`, one attempt after the other, then to the end."""
    results = []
    for attempt, stop_after in enumerate([*stops, None]):
        setting = settle(group, path, attempt=attempt, stop_after=stop_after, **options)
        (path / "attempts" / str(attempt)).mkdir(parents=True, exist_ok=True)
        state = train(setting)
        setting.reporter.close()
        results.append(outcome(state) | {"finished": state.finished(setting.schedule)})
    return results


def uninterrupted(gang: Gang, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    (result, *_) = gang.run(2, stop_and_resume, make_run(path), [], options)
    return result[-1]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_stopped_anywhere_goes_on_to_the_same_bits(gang: Gang, tmp_path: Path, accumulate: int) -> None:
    options = {"accumulate": accumulate, "keep_checkpoints": 1}
    whole = uninterrupted(gang, tmp_path / "whole", options)
    questions = 2 * 288 // (32 * accumulate) + 4  # one for each step and evaluation batch, one before the first
    where = set()
    for stop_after in range(questions):
        first, last = gang.run(2, stop_and_resume, make_run(tmp_path / f"{stop_after}"), [stop_after], options)[0]
        assert last == whole, f"stopped at step {first['step']}"
        assert rows(tmp_path / f"{stop_after}", "eval")[-1]["accuracy"] == whole["accuracy"]
        where.add((first["step"], first["finished"]))
    steps = whole["step"]
    assert {step for step, _ in where} == set(range(steps + 1))


def test_a_run_stopped_again_and_again_goes_on_to_the_same_bits(gang: Gang, tmp_path: Path) -> None:
    whole = uninterrupted(gang, tmp_path / "whole", {})
    *stopped, last = gang.run(2, stop_and_resume, make_run(tmp_path / "cut"), [0, 3, 4, 4], {})[0]
    assert [result["finished"] for result in stopped] == [False] * 4
    assert [result["step"] for result in stopped] == sorted(result["step"] for result in stopped)
    assert last == whole


def test_all_ranks_stop_at_the_same_step_when_one_of_them_sees_the_request(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(3, stop_and_resume, make_run(tmp_path / "run"), [3], {"batch_size": 8})
    assert [result[0]["step"] for result in results] == [3] * 3


def test_a_stop_before_the_first_step_leaves_a_checkpoint_of_step_zero(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    first, last = gang.run(2, stop_and_resume, path, [0], {})[0]
    assert (first["step"], first["finished"]) == (0, False)
    assert (last["step"], last["finished"]) == (18, True)


def test_a_stop_in_the_last_evaluation_is_made_up_for_by_the_next_attempt(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    # Asked before the first step, at each of 18 steps, in the first epoch's evaluation; the next is the last one's.
    first, last = gang.run(2, stop_and_resume, path, [19], {})[0]
    assert (first["step"], first["finished"]) == (18, False)
    assert (last["step"], last["finished"]) == (18, True)
    assert [row["epoch"] for row in rows(path, "eval")] == [1, 2]


def test_a_finished_run_has_nothing_to_resume(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    first = train_once(one_rank(), path)
    size = (path / "metrics.jsonl").stat().st_size
    assert train_once(one_rank(), path, attempt=1) == first
    assert (path / "metrics.jsonl").stat().st_size == size


def agreed_steps(group: Group, sees: int, at: int) -> list[bool]:
    asked = iter(range(100))
    stop = StopAgreement(lambda: group.rank == sees and next(asked) >= at, group)
    answers = [stop.agreed() for _ in range(6)]
    stop.settle()
    return answers


def test_a_stop_is_agreed_one_question_after_it_was_seen(gang: Gang) -> None:
    assert gang.run(2, agreed_steps, 1, 2) == [[False, False, False, True, True, True]] * 2


# -- another number of ranks


def test_more_ranks_resume_at_the_samples_seen(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    (first,) = gang.run(1, train_once, path, *[])  # both epochs, 36 steps of 16
    assert first["samples"] == 576
    path = make_run(tmp_path / "cut")
    (stopped, _) = gang.run(1, cut, path, 7)[0]
    assert stopped["samples"] == 96
    results = gang.run(2, resumed, path)
    assert [result["samples"] for result in results] == [576, 576]
    assert [result["step"] for result in results] == [18, 18]


def cut(group: Group, path: Path, stop_after: int) -> tuple[dict[str, Any], None]:
    return train_once(group, path, stop_after=stop_after), None


def resumed(group: Group, path: Path) -> dict[str, Any]:
    return train_once(group, path, attempt=1)


def test_ranks_whose_step_does_not_divide_the_samples_seen_are_refused_in_words(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    gang.run(1, cut, path, 8)  # 7 steps of 16
    with pytest.raises(AssertionError, match=r"between two steps: it was 112 samples into epoch 1, 1 ranks, 16 a step"):
        gang.run(2, resumed, path)


# -- what makes no sense


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, epochs=1)
    with pytest.raises(ClusterddpError, match=r"another training: train.width was 0.125, is 0.25"):
        train_once(one_rank(), path, attempt=1, width=0.25)


def test_another_train_set_is_refused(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, epochs=1)
    with pytest.raises(ClusterddpError, match=r"the train set had 288 samples, has 320"):
        train_once(one_rank(), path, attempt=1, samples=320)


def test_a_longer_run_goes_on_from_a_finished_one_and_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, epochs=1)
    assert train_once(one_rank(), path, attempt=1, epochs=2)["step"] == 36
    assert "changed since the checkpoint: train.epochs 1 -> 2" in capsys.readouterr().err


def spoiled(group: Group, path: Path, step: int) -> Setting:
    """A training whose weights are not finite from `step` on."""
    setting = settle(group, path)
    return setting


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(tmp_path: Path) -> None:
    setting = settle(one_rank(), make_run(tmp_path / "run"), lr=1e30, schedule="constant", warmup=0)
    with pytest.raises(ClusterddpError, match=r"gone astray: the loss of step 2 is nan"):
        train(setting)


def test_gradients_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    setting = settle(one_rank(), make_run(tmp_path / "run"), max_steps=1)
    assert math.isfinite(setting.schedule.peak_lr)
    with pytest.raises(ClusterddpError, match=r"the gradients of step 1 have the norm"):
        train_with_broken_gradients(setting)


def train_with_broken_gradients(setting: Setting) -> None:
    handle = torch.nn.modules.module.register_module_full_backward_hook(
        lambda module, given, taken: tuple(None if grad is None else grad * float("inf") for grad in given)
    )
    try:
        train(setting)
    finally:
        handle.remove()


# -- what is written


def test_metrics_rows_tell_place_and_speed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, batch_size=32)
    assert [row["step"] for row in rows(path, "train")] == [3, 6, 9, 12, 15, 18]
    assert set(rows(path, "train")[0]) == {
        *("kind", "attempt", "epoch", "step", "loss", "accuracy", "images_per_s", "lr"),
        *("epochs_total", "steps_total", "time"),
    }
    assert [(row["epoch"], row["step"], row["samples"]) for row in rows(path, "eval")] == [(1, 9, 57), (2, 18, 57)]
    assert all(0 <= row["accuracy"] <= 1 for row in rows(path, "eval"))


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, batch_size=32)
    events = EventAccumulator(str(path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/accuracy")] == [9, 18]
    assert [event.step for event in events.Scalars("train/loss")] == [3, 6, 9, 12, 15, 18]


def heavy_modules(group: Group, path: Path) -> set[str]:
    train_once(group, path)
    return {"tensorboard", "torchvision", "rich"} & set(sys.modules)


def test_only_the_first_rank_loads_tensorboard_and_none_loads_torchvision(tmp_path: Path) -> None:
    with open_gang() as fresh:  # ranks that have loaded nothing else yet
        first, second = fresh.run(2, heavy_modules, make_run(tmp_path / "run"))
    assert second == set()
    assert first <= {"tensorboard"}


# -- the program


def start_program(path: Path, world_size: int = 1, **variables: str) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"} | variables
    environ |= {"CLUSTERDDP_RUN_DIR": str(path), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "clusterddp.train.main"],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CLUSTERDDP_BACKEND": "gloo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


def test_the_program_trains_alone_and_writes_its_summary(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", batch_size=32)
    (process,) = start_program(path)
    _, talk = process.communicate(timeout=60)
    assert process.returncode == 0, talk
    summary = json.loads((path / "summary.json").read_text())
    assert summary["eval_samples"] == 57
    assert (summary["epochs"], summary["steps"], summary["samples"]) == (2, 18, 576)
    assert summary["world_size"] == 1
    assert summary["dataset"] == "shapes (generated)"
    assert len(summary["params_sha256"]) == len(summary["buffers_sha256"]) == 64
    assert summary["start_up_seconds"] < 60
    assert "epoch 1/2 step 3/9 loss " in talk
    assert "fastnet on shapes (generated): 1 rank on cpu, fp32, 18 steps of 32 samples" in talk


@pytest.mark.slow
def test_the_program_obeys_the_stop_file_on_both_ranks_and_resumes(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", epochs=300)
    (path / "attempts" / "0").mkdir(parents=True)
    processes = start_program(path, 2)
    while processes[0].stderr is not None and "epoch 2/" not in processes[0].stderr.readline():
        assert processes[0].poll() is None
    request_stop(path / "attempts" / "0" / "STOP", "a test")
    talk = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], talk
    stopped = json.loads((path / "attempts" / "0" / "stopped.json").read_text())
    assert 0 < stopped["step"] < 300 * 9
    assert not (path / "summary.json").exists()
    assert "checkpoint written: a test" in talk[0]
    (path / "attempts" / "1").mkdir()
    (path / "attempts" / "1" / "STOP").touch()
    (again, _) = start_program(path, 2, CLUSTERDDP_ATTEMPT="1")
    _, talk_again = again.communicate(timeout=60)
    assert again.returncode == 0, talk_again
    assert f"resumed from step-{stopped['step']:08d}-a0.pt" in talk_again


def test_hashes_tell_name_shape_type_and_values() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    variants = [
        [("a", tensor)],
        [("b", tensor)],
        [("a", tensor.view(2, 3))],
        [("a", tensor.double())],
        [("a", tensor + 1)],
        [("a", tensor), ("b", tensor)],
    ]
    assert len({tensors_sha256(variant) for variant in variants}) == len(variants)
    image = torch.randn(2, 3, 4, 4)
    assert tensors_sha256([("a", image)]) == tensors_sha256([("a", image.to(memory_format=torch.channels_last))])
    assert tensors_sha256([("a", tensor), ("b", image)]) == tensors_sha256([("b", image), ("a", tensor)])


def test_tiny_is_what_the_tests_say_it_is() -> None:
    assert TINY["samples"] / TINY["batch_size"] == 18
