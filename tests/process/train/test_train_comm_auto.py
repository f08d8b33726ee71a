"""`comm: auto` works out each mode's step from what it measured, prints it, and keeps to its choice."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.train.begin import begin
from clusterddp.train.group import Group
from clusterddp.train.models import build_model
from clusterddp.train.research.auto_mode import Measured, choose_comm, explain_choice, measure
from tests.support.train_gang import Gang, make_run, one_rank, settle, train_once

# Two machines with a core each, 1 Gbit/s between them, ResNet-18 in bf16, 8 images a rank.
SLOW_LINK = Measured(
    world_size=2,
    compute=0.159,
    last_pass=0.159,
    sent={"fp32": 0.374, "bf16": 0.188, "powersgd:4": 0.09, "local:8": 0.036, "local:1": 0.188},
)
FAST_LINK = Measured(
    world_size=2, compute=0.159, last_pass=0.159, sent={"fp32": 0.034, "bf16": 0.017, "local:8": 0.003}
)


@pytest.mark.parametrize(
    ("comm", "step_ms"),
    [
        ("exact", 53 + 374),
        ("bf16", 53 + 188),
        ("powersgd:4", 159 + 90),
        ("local:8", 159),
        ("local:1", 159 + 188),
    ],
)
def test_a_step_over_a_slow_link_takes_what_does_not_hide_behind_computing(comm: str, step_ms: float) -> None:
    assert 1000 * SLOW_LINK.step_s(comm) == pytest.approx(step_ms)


def test_a_step_over_a_fast_link_takes_no_more_than_computing() -> None:
    assert FAST_LINK.step_s("exact") == pytest.approx(0.159)


def test_local_steps_wait_for_a_part_that_takes_longer_than_a_step() -> None:
    slower = Measured(world_size=2, compute=0.1, last_pass=0.1, sent={"fp32": 0.6, "bf16": 0.3, "local:2": 0.15})
    assert slower.step_s("local:2") == pytest.approx(0.15)


def test_what_hides_behind_computing_still_takes_its_time_of_the_processors_that_compute() -> None:
    busy = {"fp32": 0.1, "bf16": 0.06, "powersgd:4": 0.05, "local:8": 0.012}
    on_processors = replace(SLOW_LINK, busy=busy)
    assert on_processors.step_s("local:8") == pytest.approx(0.159 + 0.012)
    assert on_processors.step_s("bf16") == pytest.approx(0.053 + 0.188)  # waits for longer than it is busy
    assert on_processors.step_s("powersgd:4") == pytest.approx(0.159 + 0.09)  # hides nothing
    assert replace(FAST_LINK, busy=busy).step_s("exact") == pytest.approx(0.159 + 0.1)


def test_of_two_that_hide_the_one_that_keeps_the_processors_less_busy_is_chosen() -> None:
    sent = {**SLOW_LINK.sent, "local:4": 0.069}
    assert choose_comm(replace(SLOW_LINK, sent=sent), ["local:4", "local:8"]) == "local:4"
    busy = {"local:4": 0.023, "local:8": 0.012}
    assert choose_comm(replace(SLOW_LINK, sent=sent, busy=busy), ["local:4", "local:8"]) == "local:8"


def test_what_is_sent_hides_behind_the_last_micro_batch_alone() -> None:
    accumulated = Measured(world_size=2, compute=0.8, last_pass=0.2, sent={"fp32": 0.3, "bf16": 0.15})
    assert accumulated.step_s("exact") == pytest.approx(0.8 - 2 / 3 * 0.2 + 0.3)


@pytest.mark.parametrize(
    ("allowed", "chosen"),
    [(["bf16"], "bf16"), (["bf16", "powersgd:4"], "bf16"), (["powersgd:4", "bf16"], "powersgd:4"),
     (["bf16", "local:8"], "local:8")],
)  # fmt: skip
def test_the_fastest_of_what_is_allowed_is_chosen_and_the_first_one_wins_a_tie(allowed: list[str], chosen: str) -> None:
    assert choose_comm(SLOW_LINK, allowed) == chosen


def test_exact_is_chosen_where_nothing_is_gained() -> None:
    assert choose_comm(FAST_LINK, ["bf16", "local:8"]) == "exact"


def test_the_numbers_the_rule_and_the_choice_are_printed() -> None:
    assert explain_choice(SLOW_LINK, ["bf16", "local:8"]) == [
        "comm auto: 2 ranks; ms a step: computing 159.0; "
        "ms to exchange at once: fp32 374.0, bf16 188.0, powersgd:4 90.0, local:8 36.0, local:1 188.0",
        "  one step of 2 ranks beats 2 steps of one if the exchange adds less than 1 x 159.0 = 159.0 ms:",
        "  mode           ms a step  exchange adds  against one rank",
        "  exact              427.0          268.0             0.74x",
        "  bf16               241.0           82.0             1.32x",
        "  local:8            159.0            0.0             2.00x",
        "  chosen: local:8",
    ]


def test_how_busy_the_exchange_keeps_the_processors_is_printed() -> None:
    lines = explain_choice(replace(SLOW_LINK, busy={"fp32": 0.1, "local:8": 0.012}), ["local:8"])
    assert lines[1] == "  of that the processors that compute are busy with it for: fp32 100.0, local:8 12.0"
    assert lines[-2] == "  local:8            171.0           12.0             1.86x"


def choice(group: Group, path: Path, options: dict[str, Any]) -> tuple[str, str]:
    """Return the mode that the ranks begin with, and what rank 0 printed before."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        setting = settle(group, path, **options)
        state = begin(setting)
        setting.reporter.close()
    return state.exchange.label, printed.getvalue()


AUTO: dict[str, Any] = {"comm": "auto", "comm_allow": ("bf16", "powersgd:2", "local:4")}


def test_all_ranks_choose_the_first_of_the_modes_that_are_about_the_fastest(gang: Gang, tmp_path: Path) -> None:
    choices = gang.run(3, choice, make_run(tmp_path / "run"), AUTO)
    (chosen,) = {label for label, _ in choices}
    lines = [line.split() for line in choices[0][1].splitlines()]
    step_ms = {words[0]: float(words[1]) for words in lines if words and words[0] in ("exact", *AUTO["comm_allow"])}
    assert list(step_ms) == ["exact", *AUTO["comm_allow"]]
    fast_ms, rounding_ms = 1.05 * min(step_ms.values()), 0.2
    earlier = list(step_ms)[: list(step_ms).index(chosen)]
    assert step_ms[chosen] <= fast_ms + rounding_ms
    assert all(step_ms[mode] > fast_ms - rounding_ms for mode in earlier)
    assert ["chosen:", chosen] in lines


def train_with(group: Group, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    return train_once(group, path, **options)


@pytest.mark.parametrize("chosen", ["powersgd:2", "local:4"])
def test_an_attempt_that_resumes_keeps_to_the_choice(gang: Gang, tmp_path: Path, chosen: str) -> None:
    path = make_run(tmp_path / "run")
    gang.run(2, train_with, path, {"comm": chosen, "stop_after": 3})
    choices = gang.run(2, choice, path, AUTO)
    assert [label for label, _ in choices] == [chosen] * 2
    assert "comm auto" not in choices[0][1]


def test_another_number_of_ranks_chooses_anew(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    gang.run(2, train_with, path, {"comm": "local:4", "stop_after": 3})
    choices = gang.run(3, choice, path, AUTO | {"batch_size": 8, "accumulate": 4})
    assert "comm auto: 3 ranks" in choices[0][1]


def test_ranks_that_share_memory_have_nothing_to_choose(gang_on_one_host: Gang, tmp_path: Path) -> None:
    choices = gang_on_one_host.run(2, choice, make_run(tmp_path / "run"), AUTO)
    assert [label for label, _ in choices] == ["exact"] * 2
    assert "comm auto: exact, through memory that all ranks see" in choices[0][1]


def test_one_rank_has_nothing_to_choose(tmp_path: Path) -> None:
    assert choice(one_rank(), make_run(tmp_path / "run"), AUTO)[0] == "exact"


def changed_by_measuring(group: Group, path: Path) -> bool:
    setting = settle(group, path, **AUTO)
    model = build_model(setting.spec, setting.dataset)
    before = [tensor.clone() for tensor in (*model.state_dict().values(), torch.get_rng_state())]
    measure(model, setting.dataset, group, spec=setting.spec, precision="fp32")
    after = [*model.state_dict().values(), torch.get_rng_state()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return bool(gradients) or not all(map(torch.equal, before, after))


def test_measuring_changes_nothing(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(2, changed_by_measuring, make_run(tmp_path / "run")) == [False, False]
