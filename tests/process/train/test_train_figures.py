"""What is reported of a training besides loss and accuracy: where the time went."""

from __future__ import annotations

from pathlib import Path

from clusterddp.train.begin import begin
from clusterddp.train.group import Group
from clusterddp.train.loop import train
from clusterddp.train.report.figures import StepEvent, Totals, quantiles, times_of
from clusterddp.train.state import gather_state, restore_state
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


def test_an_accuracy_is_reached_once() -> None:
    totals = Totals()
    totals.reach(0.55, 10.0)
    totals.reach(0.49, 20.0)
    totals.reach(0.71, 30.0)
    assert totals.time_to_accuracy == {"0.50": 10.0, "0.60": 30.0, "0.70": 30.0}


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


def test_figures_that_only_earlier_versions_kept_are_passed_over(tmp_path: Path) -> None:
    setting = settle(one_rank(), make_run(tmp_path / "run"))
    state, num_samples = begin(setting), len(setting.dataset.train_labels)
    saved = gather_state(state, spec=setting.spec, num_samples=num_samples, group=setting.group)
    setting.reporter.close()
    assert saved is not None
    saved["totals"] |= {"steps": 7, "straggler": {"rank": 1, "ratio": 2.0}}
    restore_state(
        state, saved, spec=setting.spec, schedule=setting.schedule, num_samples=num_samples, group=setting.group
    )
    assert state.totals.steps == 7
