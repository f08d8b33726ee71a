"""The learning rate over a run, and the settings of SGD for each parameter."""

from __future__ import annotations

import copy
import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp.errors import ClusterddpError
from clusterddp.spec.train import TrainSpec
from clusterddp.train.optim import (
    Schedule,
    as_matrix,
    build_optimizer,
    orthogonalise,
    orthogonalise_all,
    plan_schedule,
    set_learning_rate,
    turn_at_once,
    turn_one_by_one,
)

SCHEDULE = Schedule(epochs=1, num_samples=10, global_batch=10, peak_lr=0.5, warmup=0.0, shape="constant")


def spec(**train: Any) -> TrainSpec:
    return TrainSpec.from_json({"epochs": 10, "batch_size": 10, "lr_batch": 10, "lr": 0.5, "warmup": 0.2} | train)


def rates(world_size: int = 1, **train: Any) -> list[float]:
    schedule = plan_schedule(spec(**train), num_samples=100, world_size=world_size)
    return [schedule.learning_rate(step) for step in range(schedule.total_steps)]


@pytest.mark.parametrize("shape", ["onecycle", "triangle", "constant"])
def test_rate_rises_over_the_warm_up_to_the_peak_and_never_is_zero(shape: str) -> None:
    run = rates(schedule=shape)
    assert len(run) == 100
    assert run[:20] == sorted(run[:20])
    assert max(run) == pytest.approx(0.5, rel=0.03)
    assert max(run) <= 0.5
    assert min(run) > 0


def test_one_cycle_and_triangle_fall_to_nearly_nothing() -> None:
    assert rates(schedule="onecycle")[20:] == sorted(rates(schedule="onecycle")[20:], reverse=True)
    assert rates(schedule="onecycle")[-1] < 0.001
    assert rates(schedule="triangle")[-1] == pytest.approx(0.5 * 0.5 / 80)


def test_constant_rate_stays_at_the_peak_after_the_warm_up() -> None:
    assert set(rates(schedule="constant")[20:]) == {0.5}


def test_no_warm_up_starts_at_the_peak() -> None:
    assert rates(schedule="constant", warmup=0)[0] == 0.5
    assert rates(schedule="triangle", warmup=0)[0] == pytest.approx(0.5 * (1 - 0.5 / 100))


def test_linear_scaling_goes_by_the_global_batch() -> None:
    scaled = plan_schedule(spec(accumulate=2), num_samples=100, world_size=3)
    assert scaled.global_batch == 60
    assert scaled.peak_lr == pytest.approx(0.5 * 6)


def test_scaling_can_be_switched_off() -> None:
    assert plan_schedule(spec(lr_scaling="none"), num_samples=100, world_size=3).peak_lr == 0.5


@pytest.mark.parametrize(
    ("train", "share"),
    [({}, 0.5), ({"optimizer": "muon"}, 0.5), ({"lr_scaling": "linear"}, 1), ({"lr_scaling": "none"}, 1)],
)
def test_ranks_that_step_alone_take_smaller_steps_unless_the_spec_says_how_the_rate_scales(
    train: dict[str, Any], share: float
) -> None:
    schedule = plan_schedule(spec(**train), num_samples=100, world_size=4)
    for step in range(schedule.total_steps):
        assert schedule.learning_rate(step, own_gradient=True) == pytest.approx(share * schedule.learning_rate(step))


def test_adams_rate_is_the_same_for_ranks_that_step_alone() -> None:
    schedule = plan_schedule(spec(optimizer="adam"), num_samples=100, world_size=4)
    assert schedule.peak(own_gradient=True) == schedule.peak() == 0.5


def test_more_ranks_change_the_steps_and_not_the_samples() -> None:
    one, five = (plan_schedule(spec(), num_samples=100, world_size=world) for world in (1, 5))
    assert one.total_steps * one.global_batch == five.total_steps * five.global_batch == 1000
    assert one.epochs == five.epochs


def test_max_steps_cuts_the_run_and_its_schedule() -> None:
    assert len(rates(max_steps=7)) == 7
    assert rates(max_steps=7)[-1] < 0.05


def test_fewer_images_than_one_global_batch_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ClusterddpError, match=r"global batch of 80 \(4 ranks x batch 10 x accumulate 2\).* 79 train"):
        plan_schedule(spec(accumulate=2), num_samples=79, world_size=4)


def test_the_rate_of_a_run_whose_steps_change_goes_on_and_falls_to_nearly_nothing() -> None:
    """Sizes, images and places of the changes are drawn: no step lies beyond the end, none goes back by a step."""
    random = Random(0)
    for _ in range(300):
        first, *others = (random.randint(1, 60) for _ in range(4))
        images = random.randint(60, 200)
        step = epoch = seen = 0
        schedule = plan_schedule(spec(batch_size=first, epochs=4), num_samples=images, world_size=1)
        place = one = 0.0
        while left := schedule.left(epoch, seen, step):
            before, largest = place, max(one, 1 / schedule.total_steps)
            place, one = (schedule.total_steps - left + 0.5) / schedule.total_steps, 1 / schedule.total_steps
            assert before - largest < place <= 1 - one / 2
            assert schedule.learning_rate(schedule.total_steps - left) > 0
            step, seen = step + 1, seen + schedule.global_batch
            assert seen <= images
            if not schedule.left_in_epoch(seen):
                assert images - seen < schedule.global_batch
                epoch, seen = epoch + 1, 0
            if others and random.random() < 0.2:
                schedule = plan_schedule(spec(batch_size=others.pop(), epochs=4), num_samples=images, world_size=1)
                while epoch < 4 and not schedule.left_in_epoch(seen):
                    epoch, seen = epoch + 1, 0
        assert epoch == 4


def test_a_run_whose_steps_stay_takes_the_rates_one_by_one() -> None:
    schedule = plan_schedule(spec(epochs=3, batch_size=30, max_steps=8), num_samples=100, world_size=1)
    taken = [schedule.total_steps - schedule.left(step // 3, step % 3 * 30, step) for step in range(8)]
    assert taken == list(range(8))


def test_accumulation_counts_as_one_step() -> None:
    assert plan_schedule(spec(accumulate=5), num_samples=100, world_size=1).steps_per_epoch == 2


def test_biases_and_batch_norm_do_not_decay_and_frozen_weights_do_not_move() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].weight.requires_grad_(False)
    weights, rest = build_optimizer(model, spec(weight_decay=0.01), SCHEDULE).param_groups
    assert weights["weight_decay"] == 0.01
    assert [id(p) for p in weights["params"]] == [id(model[0].weight)]
    assert rest["weight_decay"] == 0
    assert {id(p) for p in rest["params"]} == {
        id(model[0].bias),
        id(model[1].weight),
        id(model[1].bias),
        id(model[2].bias),
    }


def test_no_momentum_means_no_nesterov() -> None:
    groups = build_optimizer(nn.Linear(2, 2), spec(momentum=0, nesterov=True), SCHEDULE).param_groups
    assert [group["nesterov"] for group in groups] == [False, False]


def test_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), spec(), SCHEDULE)
    set_learning_rate(optimizer, 0.123)
    assert [group["lr"] for group in optimizer.param_groups] == [0.123, 0.123]


def test_adam_is_torchs_adam_with_the_same_groups() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), spec(optimizer="adam", weight_decay=0.01), SCHEDULE)
    assert type(optimizer) is torch.optim.Adam
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0]
    assert not optimizer.param_groups[0]["decoupled_weight_decay"]


def test_adams_rate_does_not_grow_with_the_batch() -> None:
    assert plan_schedule(spec(optimizer="adam"), num_samples=100, world_size=3).peak_lr == 0.5


@pytest.mark.parametrize("shape", [(16, 90), (90, 16), (16, 16)])
def test_orthogonalised_keeps_directions_and_makes_their_lengths_alike(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 16)).Q for size in shape)
    lengths = torch.linspace(1, 10, 16)
    found = left.mT @ orthogonalise(left @ torch.diag(lengths) @ right.mT) @ right
    assert (found - torch.diag(found.diag())).abs().max() < 1e-4
    assert 0.6 < found.diag().min() <= found.diag().max() < 1.3


def a_muon_step(gradient_scale: float, **train: Any) -> tuple[nn.Conv2d, nn.Conv2d]:
    """Return a convolution before and after a step of muon."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last)
    before = copy.deepcopy(conv)
    optimizer = build_optimizer(conv, spec(optimizer="muon", muon_lr=0.1, weight_decay=0.0, **train), SCHEDULE)
    set_learning_rate(optimizer, 0.5)
    for parameter in conv.parameters():
        parameter.grad = gradient_scale * torch.randn_like(parameter)
    optimizer.step()
    return before, conv


def test_muon_moves_the_weights_of_convolutions_by_a_share_of_their_length_whatever_the_gradient() -> None:
    (before, small), (_, large) = a_muon_step(1e-3), a_muon_step(1e3)
    length = len(before.weight) ** 0.5
    way = small.weight - before.weight * length / before.weight.norm()
    assert float(way.detach().norm() / length) == pytest.approx(0.1, rel=0.3)
    torch.testing.assert_close(small.weight, large.weight, rtol=1e-3, atol=1e-4)
    assert small.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_muon_does_not_turn_is_sgds() -> None:
    before, after = a_muon_step(1.0)
    torch.manual_seed(0)
    assert after.bias is not None
    assert before.bias is not None
    sgd = nn.Parameter(before.bias.detach().clone())
    optimizer = torch.optim.SGD([sgd], lr=0.5, momentum=0.9, nesterov=True)
    torch.manual_seed(0)
    nn.Conv2d(8, 6, 3)
    torch.randn_like(before.weight)
    sgd.grad = torch.randn_like(sgd)
    optimizer.step()
    torch.testing.assert_close(after.bias.detach(), sgd.detach())


def test_muons_own_rate_follows_the_schedule_and_not_the_batch() -> None:
    for world_size in (1, 3):
        chosen = spec(optimizer="muon", muon_lr=0.2)
        schedule = plan_schedule(chosen, num_samples=100, world_size=world_size)
        assert schedule.peak_lr == pytest.approx(0.5 * world_size)
        optimizer = build_optimizer(nn.Conv2d(1, 1, 1), chosen, schedule)
        set_learning_rate(optimizer, schedule.peak_lr / 2)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [schedule.peak_lr / 2, schedule.peak_lr / 2, 0.1]
        )


def test_muons_own_rate_stays_when_a_run_goes_on_with_more_ranks() -> None:
    chosen = spec(optimizer="muon", muon_lr=0.2)
    schedules = [plan_schedule(chosen, num_samples=100, world_size=world_size) for world_size in (1, 3)]
    before, after = (build_optimizer(nn.Conv2d(1, 1, 1), chosen, schedule) for schedule in schedules)
    after.load_state_dict(before.state_dict())
    set_learning_rate(after, schedules[1].peak_lr)
    assert after.param_groups[2]["lr"] == pytest.approx(0.2)


def test_gradients_that_are_not_finite_are_still_there_after_muons_step() -> None:
    conv = nn.Conv2d(3, 8, 3)
    train = spec(optimizer="muon")
    optimizer = build_optimizer(conv, train, plan_schedule(train, num_samples=50_000, world_size=1))
    conv.weight.grad = torch.full_like(conv.weight, math.nan)
    optimizer.step()
    assert conv.weight.grad is not None
    assert conv.weight.grad.isnan().all()


SHAPES = [(8, 6, 3, 3), (8, 8, 3, 3), (16, 2, 1, 1), (8, 8, 1, 1), (40, 4, 3, 3)]
"""Of convolutions whose matrices are wide, wide and longer, tall, square, tall."""


def convolutions(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(memory_format=torch.channels_last) for shape in SHAPES]


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_turns_all_weights_at_once_as_it_turns_them_one_by_one(nesterov: bool) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "dtype": torch.float32}
    one_by_one, at_once = [(convolutions(0), convolutions(1)) for _ in range(2)]
    turn_one_by_one(one_by_one[0], convolutions(2), one_by_one[1], 0.1, **options)
    turn_at_once(at_once[0], convolutions(2), at_once[1], torch.tensor(0.1), **options)
    for expected, found in zip(one_by_one[0], at_once[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert found.stride() == expected.stride()
    assert all(map(torch.equal, one_by_one[1], at_once[1]))


def test_muon_multiplies_no_more_often_for_more_matrices_of_as_many_rows() -> None:
    products = []
    for matrices in (convolutions(0)[:1], convolutions(0)[:2]):
        with torch.profiler.profile() as profile:
            orthogonalise_all([as_matrix(matrix) for matrix in matrices], torch.float32)
        products.append(
            sum(each.count for each in profile.key_averages() if each.key in ("aten::bmm", "aten::baddbmm"))
        )
    assert products == [9, 9]


def test_compiled_muon_is_one_graph_whatever_the_rate() -> None:
    torch._dynamo.reset()
    turn = torch.compile(turn_at_once, dynamic=False, fullgraph=True, backend="aot_eager")
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "dtype": torch.float32}
    plain, compiled = [(convolutions(0), convolutions(1)) for _ in range(2)]
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for rate in (0.1, 0.2, 0.3):
            turn_at_once(plain[0], convolutions(2), plain[1], torch.tensor(rate), **options)
            turn(compiled[0], convolutions(2), compiled[1], torch.tensor(rate), **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for expected, found in zip(plain[0], compiled[0], strict=True):
        torch.testing.assert_close(found, expected)
