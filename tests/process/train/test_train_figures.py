"""What is reported of a training besides loss and accuracy: where the time went, and who holds the others up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clusterddp.train.group import Group
from clusterddp.train.loop import train
from clusterddp.train.models.fastnet import FastNet
from clusterddp.train.models.resnet import resnet18
from clusterddp.train.report.figures import Totals, figures_of, quantiles
from clusterddp.train.report.flops import count_flops, find_peak
from clusterddp.train.report.step_clock import StepEvent, times_of
from clusterddp.train.report.straggler import StragglerWatch, ask_throttling, find_slowest
from tests.support.train_gang import Gang, make_run, metrics_rows, one_rank, settle, train_once

# -- one rank's times

STEP: list[tuple[StepEvent, float]] = [
    ("step", 0),
    ("load_begin", 1),
    ("load_end", 4),
    ("wait_begin", 20),
    ("wait_end", 25),
    ("step_end", 30),
]


def later(events: list[tuple[StepEvent, float]], ms: float) -> list[tuple[StepEvent, float]]:
    return [(event, at + ms) for event, at in events]


def test_a_step_lasts_until_the_next_one_begins() -> None:
    assert times_of([*STEP, *later(STEP, 32), ("step", 70)]).steps_ms == [32, 38]


def test_a_rank_is_busy_while_it_does_not_wait_for_the_others() -> None:
    assert times_of([*STEP, ("step", 32)]).busy_ms == [25]


def test_every_micro_batch_is_waited_for_and_only_the_last_ones_gradients_meet_the_others() -> None:
    events: list[tuple[StepEvent, float]] = [
        *[("step", 0), ("load_begin", 0), ("load_end", 2), ("wait_begin", 10)],
        *[("load_begin", 11), ("load_end", 14), ("wait_begin", 22), ("wait_end", 26), ("step_end", 27), ("step", 28)],
    ]
    times = times_of(events)
    assert (times.data_ms, times.exposed_ms) == (5, 4)


def test_waiting_after_the_step_counts_as_well() -> None:
    after: list[tuple[StepEvent, float]] = [("wait_begin", 27), ("wait_end", 47), ("step_end", 47), ("step", 50)]
    assert times_of([*STEP[:-1], *after]).exposed_ms == 25


def test_a_backward_pass_before_the_first_step_is_no_step() -> None:
    assert times_of([("wait_begin", -9), *STEP, ("step", 32)]) == times_of([*STEP, ("step", 32)])


# -- sums


def test_quantiles_are_values_that_occurred() -> None:
    assert quantiles([(3.0, 1), (1.0, 50), (2.0, 45), (9.0, 4)]) == {"p50": 1.0, "p95": 2.0, "max": 9.0}


def figures(peak_tflop_per_s: float | None) -> dict[str, Any]:
    return figures_of(
        Totals(), 100_000, world_size=2, flop_per_image=2_000_000_000, peak_tflop_per_s=peak_tflop_per_s, comm="bf16"
    )


def test_the_share_of_the_peak_is_that_of_all_devices() -> None:
    found = figures(peak_tflop_per_s=2000.0)
    assert (found["tflop_per_s"], found["mfu_percent"], found["comm"]) == (200.0, 10.0, "bf16")


def test_without_a_known_peak_no_share_of_it_is_reported() -> None:
    assert figures(peak_tflop_per_s=None)["mfu_percent"] is None


def test_a_run_remembers_the_worst_straggler() -> None:
    totals = Totals()
    for ratio in (1.3, 2.0, 1.5):
        totals.add(Totals(straggler={"rank": 1, "host": "node01", "ratio": ratio}))
    totals.add(Totals())
    assert totals.straggler == {"rank": 1, "host": "node01", "ratio": 2.0}


def test_an_accuracy_is_reached_once() -> None:
    totals = Totals()
    totals.reach(0.55, 10.0)
    totals.reach(0.49, 20.0)
    totals.reach(0.71, 30.0)
    assert totals.time_to_accuracy == {"0.50": 10.0, "0.60": 30.0, "0.70": 30.0}


# -- arithmetic


@pytest.mark.parametrize("name", ["resnet18", "fastnet"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = resnet18(channels=3, num_classes=10) if name == "resnet18" else FastNet(width=0.25)
    image = torch.zeros(1, 3, 32, 32)
    counted = count_flops(model, image)
    with FlopCounterMode(display=False) as counter:
        model(image.expand(2, 3, 32, 32)).sum().backward()
    assert counted == counter.get_total_flops() / 2


def test_counting_leaves_a_model_as_it_was() -> None:
    model = FastNet(width=0.125)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    count_flops(model, torch.zeros(1, 3, 32, 32))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "tflop_per_s"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, tflop_per_s: float) -> None:
    peak = find_peak(name, "bf16")
    assert peak is not None
    assert peak.tflop_per_s == tflop_per_s


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "?"])
def test_a_gpu_without_a_known_peak_gets_none(name: str) -> None:
    assert find_peak(name, "bf16") is None


# -- stragglers


def test_the_slowest_rank_is_compared_with_the_others_median() -> None:
    assert find_slowest([10.0, 30.0, 10.0, 20.0]) == (1, 3.0)


def test_a_single_rank_is_compared_with_itself() -> None:
    assert find_slowest([10.0]) == (0, 1.0)


def watch(group: Group, windows: list[list[float]]) -> list[str | None]:
    stragglers = StragglerWatch(group)
    return [stragglers.look(busy_ms) for busy_ms in windows]


def test_a_rank_that_is_slow_in_two_windows_in_a_row_is_named_once(gang: Gang) -> None:
    lines, _ = gang.run(2, watch, [[10.0, 13.0]] * 4)
    assert [line is not None for line in lines] == [False, True, False, False]
    assert "straggler: rank 1 on " in lines[1]
    assert "takes 13.0 ms a step, 1.30 times the others' 10.0 ms" in lines[1]


def test_a_rank_that_is_slow_in_one_window_is_not_named(gang: Gang) -> None:
    lines, _ = gang.run(2, watch, [[10.0, 20.0], [10.0, 10.0], [20.0, 10.0], [10.0, 20.0]])
    assert lines == [None] * 4


def test_a_straggler_that_recovers_is_reported_as_recovered(gang: Gang) -> None:
    lines, _ = gang.run(2, watch, [[20.0, 10.0], [20.0, 10.0], [10.0, 10.0]])
    assert "rank 0 on" in lines[2]
    assert "is no straggler any more" in lines[2]


def watch_where_the_reason_takes_its_time(group: Group) -> list[str | None]:
    known = threading.Event()
    stragglers = StragglerWatch(group, ask=lambda: "it is too hot" if known.wait(20) else "the windows waited for it")
    lines = [stragglers.look([10.0, 20.0]) for _ in range(3)]
    known.set()
    time.sleep(0.5)
    return lines + [stragglers.look([10.0, 20.0]) for _ in range(3)]


def test_no_rank_waits_for_the_reason_and_it_is_printed_once_it_is_known(gang: Gang) -> None:
    lines, _ = gang.run(2, watch_where_the_reason_takes_its_time)
    assert [line is not None for line in lines] == [False, True, False, True, False, False]
    assert lines[1].endswith("times the others' 10.0 ms")
    assert lines[3].startswith("straggler: rank 1 on ")
    assert lines[3].endswith(": it is too hot")


def train_with_a_slow_rank(group: Group, path: Path, slow: int) -> dict[str, Any]:
    """Train with a rank whose forward pass takes 0.2 s longer."""

    def sleep(module: nn.Module, given: Any) -> None:
        if isinstance(module, FastNet) and module.training and group.rank == slow:
            time.sleep(0.2)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(sleep)
    try:
        return train_once(group, path, max_steps=9, samples=320)
    finally:
        hook.remove()


def test_a_rank_that_holds_the_others_up_is_named_in_the_rows(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    gang.run(2, train_with_a_slow_rank, path, 1)
    rows = metrics_rows(path, "train")
    assert [row["straggler"] and row["straggler"]["rank"] for row in rows] == [None, 1, 1]


NVIDIA_SMI = """#!/bin/sh
echo "1110 MHz, 1980 MHz, 87, Active, Not Active, Not Active, Active, Not Active"
"""


def test_a_gpu_that_is_slowed_down_is_reported_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(NVIDIA_SMI)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = "its GPU is slowed down: it is too hot, its hardware slows it down (1110 MHz of 1980 MHz, 87 C)"
    assert ask_throttling(["-i", "GPU-1"]) == words


def test_without_nvidia_smi_no_reason_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_throttling([]) == ""


# -- a training's figures


def test_rows_of_two_ranks_show_where_the_time_went(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    gang.run(2, train_once, path)
    for row in metrics_rows(path, "train"):
        assert row["images_per_s_per_rank"] == row["images_per_s"] / 2
        assert 0 < row["step_ms"]["p50"] <= row["step_ms"]["p95"] <= row["step_ms"]["max"]
        assert 0 < row["data_wait_percent"] < 100
        assert 0 < row["comm_exposed_percent"] < 100
        assert row["memory_peak_mb"] > 50
        assert row["straggler_spread"] >= 1


def parameter_bytes(group: Group, path: Path) -> int:
    setting = settle(group, path, max_steps=1)
    state = train(setting)
    setting.reporter.close()
    return sum(parameter.nbytes for parameter in state.model.parameters() if parameter.requires_grad)


def test_of_two_ranks_each_sends_the_gradients_once_in_a_step(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    num_bytes = gang.run(2, parameter_bytes, path)[0]
    assert metrics_rows(path, "train")[0]["comm_bytes_per_step"] == num_bytes


def test_a_single_rank_sends_nothing_and_waits_for_no_other(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, max_steps=3)
    (row,) = metrics_rows(path, "train")
    assert (row["comm_bytes_per_step"], row["comm_exposed_percent"]) == (0, 0.0)


def totals_after(group: Group, path: Path, attempt: int, stop_after: int | None) -> Totals:
    setting = settle(group, path, attempt=attempt, stop_after=stop_after, lr=0.02)
    state = train(setting)
    setting.reporter.close()
    return state.totals


def test_a_resumed_run_adds_up_the_figures_of_all_attempts(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    ((first, last),) = gang.run(1, stop_and_resume, path)
    assert (first.steps, last.steps, sum(last.bins.values())) == (20, 36, 36)
    assert last.time_to_accuracy.items() >= first.time_to_accuracy.items()
    assert last.eval_seconds > first.eval_seconds


def stop_and_resume(group: Group, path: Path) -> list[Totals]:
    """Stop after the first epoch (18 steps), its evaluation and two steps more; then go on."""
    return [totals_after(group, path, 0, 22), totals_after(group, path, 1, None)]
