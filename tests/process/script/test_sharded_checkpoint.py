"""A state with DTensors: every rank writes its part, and another number of ranks loads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp import checkpoint
from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir, make_attempt_dirs
from clusterddp.script import place
from clusterddp.train.group import Group
from tests.support.train_gang import Gang, open_gang

torch = pytest.importorskip("torch")

WIDTHS = (6, 10, 3)  # no number of ranks above divides them all: shards differ in size


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with open_gang() as gang:
        yield gang


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


def enter(run: Path, attempt: int) -> RunDir:
    """Make this process a rank of an attempt, as a new process would be."""
    directory = RunDir(run)
    make_attempt_dirs(directory.attempt(attempt))
    os.environ |= {"CLUSTERDDP_RUN_DIR": str(run), "CLUSTERDDP_ATTEMPT": str(attempt)}
    os.environ.pop("RANK", None)
    checkpoint._session.cache_clear()
    place.find_store.cache_clear()
    place.resumed_from.cache_clear()
    return directory


def build(group: Group, *, sharded: bool = True) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
    model = torch.nn.Sequential(layers[0], torch.nn.BatchNorm1d(WIDTHS[1]), torch.nn.ReLU(), layers[1])
    if sharded:
        mesh = torch.distributed.init_device_mesh("cpu", (group.world_size,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: Any, optimizer: Any, steps: range) -> None:
    """Train on batches that follow from the step and are the same on every rank: sums are in one order."""
    for step in steps:
        images = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(step))
        loss = model(images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "rng": torch.get_rng_state(), "facts": ["text", 1.5, None]}


def full(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return every tensor of model and optimizer, gathered, in a form that travels."""
    found = {}
    for part, state in state_of(model, optimizer).items():
        if part in {"model", "optimizer"}:
            for name, tensor in _tensors(part, state):
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[name] = whole.double().flatten().tolist()
    return found


def _tensors(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(f"{name}.{key}", value)


def save_steps(group: Group, run: str, attempt: int, until: int) -> dict[str, Any]:
    enter(Path(run), attempt)
    model, optimizer = build(group)
    train(model, optimizer, range(until))
    checkpoint.save(state_of(model, optimizer), step=until)
    train(model, optimizer, range(until, until + 1))  # what is written is a copy
    checkpoint.wait()
    torch.manual_seed(0)
    again, moments = build(group)
    train(again, moments, range(until))
    return full(again, moments)


def load_all(group: Group, run: str, attempt: int, until: int) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Load; return the tensors, what travelled beside them, and the tensors after more steps."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    enter(Path(run), attempt)
    model, optimizer = build(group, sharded=group.world_size > 1)
    saved = checkpoint.load(state_of(model, optimizer))
    assert saved is not None
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    loaded = full(model, optimizer)
    train(model, optimizer, range(saved["step"], until))
    return loaded, (saved["facts"], len(saved["rng"]), saved["step"]), full(model, optimizer)


@pytest.mark.slow
def test_ranks_go_on_to_the_bit_and_another_number_of_ranks_loads_the_same(gang: Gang, run: RunDir) -> None:
    before = gang.run(2, save_steps, str(run.path), 0, 5)
    names = sorted(path.name for path in run.checkpoints.iterdir())
    stem = "step-00000005-a0"
    assert names == [f"{stem}.json", f"{stem}.pt", f"{stem}.shard-00000", f"{stem}.shard-00001"]
    (run.path.parent / "other").mkdir()
    undisturbed = gang.run(2, save_steps, str(run.path.parent / "other"), 0, 9)
    for attempt, ranks in enumerate((2, 1, 3, 4), 1):
        answers = gang.run(ranks, load_all, str(run.path), attempt, 9)
        assert [loaded for loaded, _, _ in answers] == before[:1] * ranks
        assert [beside for _, beside, _ in answers] == [(["text", 1.5, None], 5056, 5)] * ranks
        if ranks == 2:
            assert [after for _, _, after in answers] == undisturbed
