"""What each way of exchanging does to the weights, and that a stop and a resume change nothing of it."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_jsonl
from clusterddp.train import exchange as exchanges
from clusterddp.train.begin import begin
from clusterddp.train.exchange import LocalSteps, SharedMemory, _map, build_exchange, share_memory
from clusterddp.train.group import Group
from clusterddp.train.loop import train, train_epoch
from clusterddp.train.main import summarise
from clusterddp.train.state import tensors_sha256
from tests.support.train_gang import Gang, make_run, one_rank, open_gang, outcome, settle, train_once

MODES = ["exact", "bf16", "local:4"]
PLAIN = {"momentum": 0.0, "nesterov": False, "max_steps": 6}


def moved(group: Group, path: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train; return how far that has moved each weight."""
    start = begin(settle(group, path, **options)).model.state_dict()
    setting = settle(group, path, **options)
    state = train(setting)
    setting.reporter.close()
    return {name: value.detach() - start[name] for name, value in state.model.named_parameters()}


def train_with(group: Group, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    return train_once(group, path, **options)


def stop_and_resume(group: Group, path: Path, stops: list[int], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with a stop at each of `stops`, one attempt after the other, then to the end."""
    results = []
    for attempt, stop_after in enumerate([*stops, None]):
        if group.is_first:
            (path / "attempts" / str(attempt)).mkdir(parents=True)
        results.append(train_once(group, path, attempt=attempt, stop_after=stop_after, **options))
    return results


def relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """How far two sets of tensors are from each other, as a share of the norm of the first."""
    apart = sum((one[name] - other[name]).square().sum() for name in one)
    return float((apart / sum(value.square().sum() for value in one.values())).sqrt())


# -- stop, resume, look


@pytest.mark.parametrize(
    ("comm", "optimizer"), [*((comm, "sgd") for comm in MODES), ("exact", "muon"), ("local:8", "muon")]
)
def test_a_run_stopped_again_and_again_goes_on_to_the_same_bits(
    gang: Gang, tmp_path: Path, comm: str, optimizer: str
) -> None:
    options = {"comm": comm, "optimizer": optimizer}
    whole = [each[-1] for each in gang.run(2, stop_and_resume, make_run(tmp_path / "whole"), [], options)]
    # At all but the last, asked for in an evaluation, a part of the weights of local:4 and local:8 is under way.
    cut = gang.run(2, stop_and_resume, make_run(tmp_path / "cut"), [2, 2, 4, 3], options)
    assert [result["step"] for result in cut[0]][:3] == [2, 4, 8]
    assert [each[-1] for each in cut] == whole


def changed_by_looking(group: Group, path: Path, options: dict[str, Any]) -> tuple[list[str], float]:
    """Stop in the middle of an epoch; return what looking at the mean changed, and how far this rank is from it."""
    setting = settle(group, path, stop_after=6, **options)
    state = train(setting)
    before = outcome(state)
    with state.exchange.averaged(state.model):
        inside = {name: value.detach().clone() for name, value in state.model.named_parameters()}
    after = outcome(state)
    setting.reporter.close()
    mine = dict(state.model.named_parameters())
    return [key for key in before if before[key] != after[key]], relative_difference(inside, mine)


@pytest.mark.parametrize("comm", MODES)
def test_looking_at_the_mean_changes_nothing(gang: Gang, tmp_path: Path, comm: str) -> None:
    results = gang.run(2, changed_by_looking, make_run(tmp_path / "run"), {"comm": comm})
    assert [changed for changed, _ in results] == [[], []]
    assert all((distance > 0) == comm.startswith("local") for _, distance in results)


@pytest.mark.parametrize("comm", MODES)
def test_all_ranks_end_with_the_same_weights_and_momentum(gang: Gang, tmp_path: Path, comm: str) -> None:
    results = gang.run(3, train_with, make_run(tmp_path / "run"), {"comm": comm})
    assert len({(result["params"], result["momentum"]) for result in results}) == 1


def epoch_beside_a_stray(group: Group, path: Path, stray: int | None, **options: Any) -> tuple[dict[str, Any], str]:
    """Train an epoch in which rank `stray` has other weights from the start; return its end, and what was printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        setting = settle(group, path, **options)
        state = begin(setting)
        if group.rank == stray:
            with torch.no_grad():
                state.model.head.weight.view(-1)[0] += 1e-6  # type: ignore[index,operator,union-attr]
        train_epoch(state, setting, lambda: None)
        setting.reporter.close()
    kept = [*state.exchange.common_tensors(), *(state.ema.model.parameters() if state.ema else ())]
    more = tensors_sha256((str(number), tensor) for number, tensor in enumerate(kept))
    return outcome(state) | {"more": more}, printed.getvalue()


@pytest.mark.parametrize("stray", [None, 0, 2])
def test_ranks_that_have_come_apart_end_the_epoch_as_rank_0_and_that_is_printed(
    gang: Gang, tmp_path: Path, stray: int | None
) -> None:
    results = gang.run(3, epoch_beside_a_stray, make_run(tmp_path / "run"), stray)
    assert len({(end["params"], end["momentum"]) for end, _ in results}) == 1
    printed = results[0][1]
    assert ("were not those of rank 0" in printed) == (stray is not None)
    assert stray is None or f"the weights of {'ranks 1-2' if stray == 0 else 'rank 2'} were not" in printed


def epoch_with_a_running_mean(group: Group, path: Path) -> tuple[dict[str, Any], str]:
    return epoch_beside_a_stray(group, path, 1, ema=0.9)


def test_the_running_mean_is_brought_together_too(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(2, epoch_with_a_running_mean, make_run(tmp_path / "run"))
    assert len({(end["params"], end["momentum"], end["more"]) for end, _ in results}) == 1


def resume_with(group: Group, path: Path, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Begin a second attempt; return how far its weights are from the checkpoint's mean, then its end."""
    setting = settle(group, path, attempt=1, **options)
    state = begin(setting)
    setting.reporter.close()
    (file,) = (path / "checkpoints").glob("*-a0.pt")
    saved = torch.load(file, weights_only=True)["model"]
    distance = relative_difference(dict(state.model.named_parameters()), saved)
    return distance, train_once(group, path, attempt=1, **options)


def test_another_number_of_ranks_starts_from_the_mean(gang: Gang, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    gang.run(2, train_with, path, {"comm": "local:4", "batch_size": 8, "stop_after": 8})
    results = gang.run(1, resume_with, path, {"comm": "local:4", "batch_size": 16})
    assert [distance for distance, _ in results] == [0.0]
    assert results[0][1]["finished"]


@pytest.mark.parametrize(("before", "after"), [("local:4", "exact"), ("exact", "local:4"), ("local:4", "local:2")])
def test_another_mode_starts_from_the_mean(gang: Gang, tmp_path: Path, before: str, after: str) -> None:
    path = make_run(tmp_path / "run")
    gang.run(2, train_with, path, {"comm": before, "stop_after": 7})
    results = gang.run(2, resume_with, path, {"comm": after})
    assert [distance for distance, _ in results] == [0.0, 0.0]
    assert results[0][1]["params"] == results[1][1]["params"]


# -- how near to exact


@pytest.mark.parametrize("comm", ["bf16", "local:1"])
def test_what_is_rounded_to_bf16_stays_near_to_exact_training(gang: Gang, tmp_path: Path, comm: str) -> None:
    exact = gang.run(2, moved, make_run(tmp_path / "exact"), PLAIN)[0]
    other = gang.run(2, moved, make_run(tmp_path / "other"), PLAIN | {"comm": comm})[0]
    assert 0 < relative_difference(exact, other) < 0.02


def rate_used_and_printed(group: Group, path: Path, comm: str) -> tuple[float, float, str]:
    """Train; return the optimizer's rate in the last step, the one in the metrics, and what was printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        setting = settle(group, path, comm=comm, epochs=1, lr_batch=64, schedule="constant")
        state = train(setting)
        setting.reporter.close()
    rows = [row for row in read_jsonl(RunDir(path).metrics) if row["kind"] == "train"] if group.is_first else []
    return state.optimizer.param_groups[0]["lr"], rows[-1]["lr"] if rows else 0.0, printed.getvalue()


@pytest.mark.parametrize(("comm", "rate"), [("exact", 0.2), ("local:1", 0.2), ("local:2", 0.1)])
def test_ranks_that_step_alone_take_the_rate_that_their_noise_allows_and_say_so(
    gang: Gang, tmp_path: Path, comm: str, rate: float
) -> None:
    used, in_metrics, printed = gang.run(4, rate_used_and_printed, make_run(tmp_path / "run"), comm)[0]
    assert used == in_metrics == pytest.approx(rate)
    assert f"peak lr {rate:.3g}" in printed
    assert ("at 0.50 of exact's rate" in printed) == (comm == "local:2")


def test_local_steps_meet_at_the_mean_of_the_weights(gang: Gang) -> None:
    assert gang.run(3, weights_of_local_steps) == [[[2.0, 2.0], [3.0, 3.0]]] * 3


def weights_of_local_steps(group: Group) -> list[list[float]]:
    """Move a weight pair by (rank, 1) in each of two steps, in a model whose weights begin at (1, 1)."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    exchange = LocalSteps(model, group, every=2, optimizer=torch.optim.SGD(model.parameters()))
    seen = []
    for step in (1, 2):
        with torch.no_grad():
            model.weight += torch.tensor([[group.rank, 1.0]])
        exchange.after_step(step, epoch_ends=False)
        with exchange.averaged(model):
            seen.append(model.weight.detach().clone())
    return [each.flatten().tolist() for each in seen]


def test_parts_come_in_after_another_step_and_what_a_rank_moves_meanwhile_stays_its_own(gang: Gang) -> None:
    steps = list(zip(*gang.run(3, weights_after_each_step), strict=True))
    assert steps[0] == ([1.0, 1.0], [2.0, 2.0], [3.0, 3.0])  # the second weight's moves of 0, 1 and 2 are sent
    assert steps[1] == ([1.0, 2.0], [3.0, 3.0], [5.0, 4.0])  # and come in; the first one's of 0, 2 and 4 are sent
    assert steps[2] == ([3.0, 2.0], [4.0, 4.0], [5.0, 6.0])
    assert steps[3] == ([5.0, 5.0],) * 3


def weights_after_each_step(group: Group) -> list[list[float]]:
    """Move a weight pair, at first (1, 1), by the rank in each of four steps, an epoch; return it after each."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    exchange = LocalSteps(model, group, every=2, optimizer=torch.optim.SGD(model.parameters()))
    seen = []
    for step in (1, 2, 3, 4):
        with torch.no_grad():
            model.weight += group.rank
        exchange.after_step(step, epoch_ends=step == 4)
        seen.append(model.weight.detach().flatten().tolist())
    return seen


def test_the_smallest_weights_go_along_with_every_part(gang: Gang) -> None:
    after = gang.run(2, weights_after_three_steps)
    assert [small for small, _ in after] == [2.0, 3.0]  # the mean of two steps, and the own third
    assert after[0][1] == [1.0, 1.0, 0.5, 0.5]  # of the large one a half is the mean of two steps, a half of one
    assert after[1][1] == [2.0, 2.0, 2.5, 2.5]


def weights_after_three_steps(group: Group) -> tuple[float, list[float]]:
    """Move a bias, at first 1, and a weight of four, at first 0, by the rank in each of three steps; return both."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.ones_(model.bias)
    exchange = LocalSteps(model, group, every=2, optimizer=torch.optim.SGD(model.parameters()))
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight += group.rank
            model.bias += group.rank
        exchange.after_step(step, epoch_ends=False)
    return float(model.bias), model.weight.detach().flatten().tolist()


def test_more_local_steps_than_weights_are_taken_and_meet(gang: Gang) -> None:
    assert gang.run(2, a_weight_after_nine_steps) == [[9.0, 4.5]] * 2


def a_weight_after_nine_steps(group: Group) -> list[float]:
    """Move a weight pair, at first (0, 0), by (1, rank) in each of nine steps, an epoch; return it."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    exchange = LocalSteps(model, group, every=8, optimizer=torch.optim.SGD(model.parameters()))
    for step in range(1, 10):
        with torch.no_grad():
            model.weight += torch.tensor([[1.0, group.rank]])
        exchange.after_step(step, epoch_ends=step == 9)
    return model.weight.detach().flatten().tolist()


def test_local_steps_average_momentum_at_the_end_of_an_epoch(gang: Gang) -> None:
    assert gang.run(2, momentum_after, False) == [0.0, 2.0]
    assert gang.run(2, momentum_after, True) == [1.0, 1.0]


def momentum_after(group: Group, epoch_ends: bool) -> float:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = LocalSteps(model, group, every=1, optimizer=optimizer)
    model.weight.grad = torch.full((1, 1), 2.0 * group.rank)
    optimizer.step()
    exchange.after_step(1, epoch_ends=epoch_ends)
    return float(optimizer.state[model.weight]["momentum_buffer"])


# -- what is sent


def bytes_sent(group: Group, comm: str) -> float:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Linear(40, 30))  # weights of 16 x 72 and 30 x 40, and 46 biases
    optimizer = torch.optim.SGD(model.parameters())
    return build_exchange(comm, model, group, optimizer=optimizer).bytes_sent_per_step


@pytest.mark.parametrize(
    ("comm", "expected"),
    [
        ("exact", 4 * (1152 + 1200 + 46)),
        ("bf16", 2 * (1152 + 1200 + 46)),
        ("local:4", 2 * (46 + (1152 + 1200) / 4)),  # biases go in every step
    ],
)
def test_two_ranks_send_what_the_mode_says(gang: Gang, comm: str, expected: float) -> None:
    assert gang.run(2, bytes_sent, comm) == [expected, expected]


def reported_exchange(group: Group, path: Path, options: dict[str, Any]) -> tuple[str, bool]:
    setting = settle(group, path, **options)
    state = train(setting)
    setting.reporter.close()
    summary = summarise(state, setting, None)
    return summary["comm"], summary["exact"]


@pytest.mark.parametrize("comm", MODES)
def test_the_summary_says_whether_the_exchange_was_exact(gang: Gang, tmp_path: Path, comm: str) -> None:
    results = gang.run(2, reported_exchange, make_run(tmp_path / "run"), {"comm": comm, "max_steps": 2})
    assert results == [(comm, comm == "exact")] * 2


def test_a_single_rank_is_exact_whatever_the_mode(tmp_path: Path) -> None:
    assert reported_exchange(one_rank(), make_run(tmp_path / "run"), {"comm": "local:4", "max_steps": 1}) == (
        "exact",
        True,
    )


# -- memory that all ranks see


def maps(group: Group, blind: int) -> bool:
    """Try to share memory, while rank `blind` cannot open rank 0's file."""
    if group.rank == blind:
        with mock.patch.object(exchanges, "_map", lambda path, size: _map("/proc/self/fd/none", size)):
            return share_memory(nn.Linear(3, 5), group) is not None
    return share_memory(nn.Linear(3, 5), group) is not None


def test_memory_is_shared_by_all_ranks_or_by_none(gang_on_one_host: Gang) -> None:
    assert [gang_on_one_host.run(3, maps, blind) for blind in (-1, 0, 2)] == [[True] * 3, [False] * 3, [False] * 3]


def maps_without_memfd(group: Group) -> list[float]:
    with mock.patch.object(os, "memfd_create", create=True):
        del os.memfd_create
        memory = share_memory(nn.Linear(3, 5), group)
    assert memory is not None
    memory[group.rank, :] = group.rank + 1.0
    dist.barrier()
    return memory.sum(dim=1).tolist()


def test_memory_is_shared_where_python_knows_no_memfd(gang_on_one_host: Gang) -> None:
    assert gang_on_one_host.run(2, maps_without_memfd) == [[20.0, 40.0, 0.0]] * 2


def what_is_open(group: Group, path: Path) -> list[str]:
    """Begin to train; return which shared memory is mapped, and which is still open as a file."""
    setting = settle(group, path)
    state = begin(setting)
    mapped = [line.split()[-2:] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    opened = [each for each in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "memfd" in each]
    setting.reporter.close()
    assert isinstance(state.exchange, SharedMemory)
    return [*itertools.chain(*mapped), *opened]


def test_what_is_shared_has_no_name_and_no_open_file(tmp_path: Path) -> None:
    with open_gang() as fresh:  # ranks that have mapped nothing else yet
        found = fresh.on_one_host().run(2, what_is_open, make_run(tmp_path / "run"))
    assert found == [["/memfd:clusterddp-gradients", "(deleted)"]] * 2
