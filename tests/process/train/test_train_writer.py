"""Training goes on while a checkpoint is written; what needs it on disk waits for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.train.checkpoint import Store, Writer, write_checkpoint
from clusterddp.train.host_copy import copy_to_host, cut_apart, flatten
from clusterddp.train.loop import train
from tests.support.train_gang import make_run, one_rank, settle, train_once

TIMEOUT_S = 60.0


class SlowSave:
    """torch.save waits until it may go on, as it would for a large model and a slow disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self._save = torch.save
        patch.setattr(torch, "save", self)

    def __call__(self, *args: Any) -> None:
        assert self.may_go_on.wait(TIMEOUT_S), "nothing went on while the checkpoint was written"
        self._save(*args)


def manifests(path: Path) -> list[str]:
    return sorted(each.stem for each in (path / "checkpoints").glob("*.json"))


def test_the_next_steps_are_taken_while_a_checkpoint_is_written_and_do_not_get_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_once(one_rank(), make_run(tmp_path / "whole"), optimizer="muon", ema=0.9)
    slow = SlowSave(monkeypatch)
    path = make_run(tmp_path / "run")
    setting = settle(one_rank(), path, optimizer="muon", ema=0.9)
    steps = iter(range(1, 100))

    def after_step() -> None:
        if next(steps) == 20:  # two steps after the first epoch's checkpoint has begun
            assert manifests(path) == []
            slow.may_go_on.set()

    train(setting, after_step=after_step)
    setting.reporter.close()
    assert manifests(path) == ["step-00000018-a0", "step-00000036-a0"]
    (path / "checkpoints" / "step-00000036-a0.json").unlink()
    assert train_once(one_rank(), path, attempt=1, optimizer="muon", ema=0.9) == whole


def test_a_stop_ends_when_its_checkpoint_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowSave(monkeypatch)
    path = make_run(tmp_path / "run")
    threading.Timer(0.5, slow.may_go_on.set).start()
    assert not train_once(one_rank(), path, stop_after=4)["finished"]
    assert manifests(path) == ["step-00000003-a0"]


def test_a_checkpoint_that_cannot_be_written_ends_training_at_the_next_step(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    (path / "checkpoints").touch()
    steps: list[int] = []

    def after_step() -> None:
        steps.append(len(steps) + 1)
        while any(thread.name == "checkpoint" for thread in threading.enumerate()):
            time.sleep(0.01)

    with pytest.raises(ClusterddpError, match="the checkpoint was not written"):
        train(settle(one_rank(), path), after_step=after_step)
    assert steps[-1] == 19


def test_an_error_that_ends_training_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowSave(monkeypatch)
    path = make_run(tmp_path / "run")
    steps = iter(range(1, 100))

    def after_step() -> None:
        if next(steps) == 19:
            threading.Timer(0.5, slow.may_go_on.set).start()
            raise ValueError("a script's own mistake")

    with pytest.raises(ValueError, match="own mistake"):
        train(settle(one_rank(), path), after_step=after_step)
    assert manifests(path) == ["step-00000018-a0"]


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowSave(monkeypatch)
    (tmp_path / "run").mkdir()
    store = Store(run=RunDir(tmp_path / "run"), attempt=0, keep=2)
    with Writer() as writer:
        writer.begin(lambda: write_checkpoint(store, {"epoch": 0, "step": 1, "samples": 1}))
        threading.Timer(0.5, slow.may_go_on.set).start()
        writer.begin(lambda: write_checkpoint(store, {"epoch": 0, "step": 2, "samples": 2}))
        assert manifests(tmp_path / "run") == ["step-00000001-a0"]
    assert manifests(tmp_path / "run") == ["step-00000001-a0", "step-00000002-a0"]


def test_copies_in_one_piece_have_the_values_and_strides_of_what_they_are_of() -> None:
    tensors = [
        torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.tensor(7.0),
        torch.randn(6, 4).mT,
        torch.randn(8)[::2],
        torch.empty(0),
    ]
    flat, copies = flatten(tensors)
    assert [torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True)] == [True] * 5
    assert [copy.stride() for copy in copies] == [tensor.clone().stride() for tensor in tensors]
    assert flat.numel() == sum(tensor.numel() for tensor in tensors)
    assert {copy.untyped_storage().data_ptr() for copy in copies} == {flat.untyped_storage().data_ptr()}
    apart = cut_apart({"a": copies})["a"]
    assert [torch.equal(copy, tensor) for copy, tensor in zip(apart, tensors, strict=True)] == [True] * 5
    assert [copy.untyped_storage().nbytes() for copy in apart] == [tensor.nbytes for tensor in tensors]


def test_a_copy_of_a_state_shares_nothing_with_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    state = {"weights": [weight], "random": (3, (torch.arange(2), None)), "name": "x"}
    copy = copy_to_host(state)
    with torch.no_grad():
        weight.zero_()
    assert copy["weights"][0].tolist() == [1, 1]
    assert not copy["weights"][0].requires_grad
    assert copy["random"][0] == 3
    assert copy["random"][1][0].tolist() == [0, 1]
    assert copy["name"] == "x"
