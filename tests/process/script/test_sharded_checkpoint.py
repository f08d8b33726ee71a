"""A state with DTensors: every rank writes its part, and another number of ranks loads it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
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
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
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


def save_on_own_disk(group: Group, path: str, attempt: int) -> list[str]:
    """Save with a disk for each rank; return what is on this one's."""
    run = enter(Path(path) / str(group.rank), attempt)
    model, optimizer = build(group)
    train(model, optimizer, range(3))
    checkpoint.save(state_of(model, optimizer), step=3)
    checkpoint.wait()
    return sorted(path.name for path in run.checkpoints.iterdir()) if run.checkpoints.exists() else []


def load_on_own_disk(group: Group, path: str, attempt: int) -> dict[str, Any]:
    return load_all(group, str(Path(path) / str(group.rank)), attempt, 0)[0]


@pytest.mark.slow
def test_without_a_shared_disk_rank_0_has_all_shards_and_sends_them(gang: Gang, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    stem = "step-00000003-a0"
    first, second = gang.run(2, save_on_own_disk, str(tmp_path), 0)
    assert first == [f"{stem}.json", f"{stem}.pt", f"{stem}.shard-00000", f"{stem}.shard-00001"]
    assert second == []
    expected = gang.run(2, save_steps, str(tmp_path / "2"), 0, 3)[0]
    assert gang.run(3, load_on_own_disk, str(tmp_path), 1) == [expected] * 3


@pytest.mark.slow
def test_a_checkpoint_whose_shard_is_damaged_or_gone_is_passed_over(gang: Gang, run: RunDir) -> None:
    gang.run(2, save_steps, str(run.path), 0, 2)
    gang.run(2, save_steps, str(run.path), 1, 3)
    shard = run.checkpoints / "step-00000003-a1.shard-00001"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert {beside[2] for _, beside, _ in gang.run(2, load_all, str(run.path), 2, 0)} == {2}
    shard.unlink()
    assert {beside[2] for _, beside, _ in gang.run(3, load_all, str(run.path), 3, 0)} == {2}


def save_twice(group: Group, run: str) -> None:
    """Save, and save again with so much that the files take a while; a rank is killed meanwhile."""
    directory = enter(Path(run), 0)
    model, optimizer = build(group)
    checkpoint.save(state_of(model, optimizer), step=1)
    checkpoint.wait()
    checkpoint.save({"model": state_of(model, optimizer)["model"], "more": [big(group)] * 40}, step=2)
    if group.rank == 0:
        while not list(directory.checkpoints.glob("*step-00000002*shard*")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.wait()


def big(group: Group) -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", (group.world_size,))
    return torch.distributed.tensor.ones((256, 1024), device_mesh=mesh, placements=[torch.distributed.tensor.Shard(0)])


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_saves_leaves_the_older_checkpoint(run: RunDir) -> None:
    with open_gang() as own, pytest.raises((AssertionError, EOFError)):
        own.run(2, save_twice, str(run.path))
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert "step-00000002-a0.json" not in left
    assert any("step-00000002" in name for name in left)
    with open_gang() as own:
        assert {beside[2] for _, beside, _ in own.run(3, load_all, str(run.path), 1, 0)} == {1}
        own.run(2, save_steps, str(run.path), 2, 3)
    assert not any("step-00000002" in path.name for path in run.checkpoints.iterdir())  # what was left over is removed


def errors_of(group: Group, run: str) -> list[str]:
    directory = enter(Path(run), 0)
    model, optimizer = build(group)
    state = state_of(model, optimizer)
    errors = [error_of(lambda: checkpoint.save({"model": state["model"] if group.rank else {}}, step=1))]
    checkpoint.save(state, step=1)
    checkpoint.wait()
    errors.append(error_of(checkpoint.load))
    errors.append(error_of(lambda: checkpoint.load({"model": {**state["model"], "0.bias": torch.zeros(4)}})))
    if group.rank == 0:
        directory.checkpoints.rename(directory.path / "away")
        directory.checkpoints.touch()  # no directory: rank 0 cannot write
    torch.distributed.barrier()
    checkpoint.save(state, step=2)
    errors.append(error_of(checkpoint.wait))
    return errors


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except ClusterddpError as error:
        return error.message
    return "no error"


@pytest.mark.slow
def test_errors_are_the_same_on_every_rank_and_name_the_tensor(gang: Gang, run: RunDir) -> None:
    first, second = gang.run(2, errors_of, str(run.path))
    assert (
        first[0] == "clusterddp.checkpoint.save: the DTensors in the state of rank 1 are not those of rank 0 (0 here)"
    )
    assert (
        second[0] == "clusterddp.checkpoint.save: the DTensors in the state of rank 1 are not those of rank 0 (6 here)"
    )
    assert first[1:] == second[1:]
    start = "clusterddp.checkpoint.load: the checkpoint of step 1 is sharded, and state['model']['0."
    assert first[1] == f"{start}weight'] of shape (10, 6) is not given"
    assert first[2] == f"{start}bias'] of shape (10,) has the shape (4,)"
    assert "the checkpoint was not written: " in first[3]


def replicate(group: Group, run: str) -> tuple[list[int], list[float]]:
    """Save a tensor that each pair of ranks has in halves; return the sizes of the shards, and what is loaded."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    directory = enter(Path(run), 0)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    wholes = {"x": torch.arange(6.0), "empty": torch.zeros(0, 3)}
    layout = [Replicate(), Shard(0)]
    state = {name: distribute_tensor(whole, mesh, layout) for name, whole in wholes.items()}
    state["number"] = distribute_tensor(torch.tensor(7.0), mesh, [Replicate(), Replicate()])
    checkpoint.save(state, step=1)
    checkpoint.wait()
    shards = [torch.load(path, weights_only=True) for path in sorted(directory.checkpoints.glob("*.shard-*"))]
    saved = checkpoint.load({"x": torch.zeros(6), "empty": torch.zeros(0, 3), "number": torch.zeros(())})
    assert saved is not None
    assert saved["empty"].device.type == "cpu"
    return [len(shard) for shard in shards], [*saved["x"].tolist(), saved["number"].item()]


@pytest.mark.slow
def test_of_a_part_that_several_ranks_have_one_writes_it(gang: Gang, run: RunDir) -> None:
    assert gang.run(4, replicate, str(run.path)) == [([2, 1, 0, 0], [0, 1, 2, 3, 4, 5, 7])] * 4


def save_fsdp1(group: Group, run: str) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    enter(Path(run), 0)
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    try:
        checkpoint.save({"model": model.state_dict()}, step=1)
    except TypeError as error:
        return str(error)
    return "saved"


@pytest.mark.slow
def test_the_parts_of_fsdp1_are_refused(gang: Gang, run: RunDir) -> None:
    first = gang.run(2, save_fsdp1, str(run.path))[0]
    start = "clusterddp.checkpoint.save: state['model']['weight'] is a ShardedTensor of FSDP1, of which each rank has"
    assert first.startswith(start)
    assert "fully_shard" in first
    assert not list(run.checkpoints.glob("*"))


def lose_the_group(group: Group, run: str) -> str:
    enter(Path(run), 0)
    checkpoint.save({"x": [big(group)] * 64}, step=1)
    torch.distributed.destroy_process_group(checkpoint._session()._writing_group.control)
    return error_of(checkpoint.wait)


@pytest.mark.slow
def test_a_group_that_is_destroyed_too_early_is_named(run: RunDir) -> None:
    with open_gang() as own:
        errors = own.run(2, lose_the_group, str(run.path))
    assert all("destroy_process_group came before clusterddp.checkpoint.wait" in error for error in errors)
    assert not list(run.checkpoints.glob("*.json"))
