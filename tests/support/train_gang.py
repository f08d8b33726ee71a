"""Real ranks for the trainer's tests: processes that stay up, meet in a new group for each call, and answer."""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import random
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from clusterddp.run.directory import RunDir
from clusterddp.spec.train import TrainSpec
from clusterddp.system.files import read_jsonl
from clusterddp.train.begin import Setting, prepare
from clusterddp.train.checkpoint import Store
from clusterddp.train.data.dataset import load_dataset
from clusterddp.train.device import RankVariables
from clusterddp.train.group import Group, join_group, leave_group
from clusterddp.train.host import ComputeSlot
from clusterddp.train.loop import train
from clusterddp.train.report.reporter import Reporter
from clusterddp.train.state import TrainState, tensors_sha256

TIMEOUT_S = 400  # a machine that is shared may take its time
TINY: dict[str, Any] = {
    "model": "fastnet",
    "width": 0.125,
    "samples": 288,
    "batch_size": 16,
    "epochs": 2,
    "lr": 0.2,
    "precision": "fp32",
    "log_every": 3,
}


class Gang:
    """Up to `size` ranks; `run` starts those that it needs and keeps them for the next call."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []
        self._on_one_host = False
        self._directory = tempfile.TemporaryDirectory(prefix="gang-")

    def on_one_host(self) -> Gang:
        """Return the same ranks, which know that they share a host: gradients go through memory that all see."""
        other = copy.copy(self)
        other._on_one_host = True
        return other

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(group, *args)` on every rank of a new group; return the answers by rank."""
        while len(self._ranks) < world_size:
            self._ranks.append(_start_rank())
        meeting = meeting_place(Path(self._directory.name))
        for rank, (_, pipe) in enumerate(self._ranks[:world_size]):
            place = RankVariables(
                rank=rank,
                local_rank=rank,
                world_size=world_size,
                backend="gloo",
                on_one_host=self._on_one_host,
                init_method=meeting,
            )
            pipe.send((place, function, args))
        pipes = [pipe for _, pipe in self._ranks[:world_size]]
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(answers) < world_size:
            waiting = [pipe for pipe in pipes if pipe not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            received = [(pipe, *_receive(pipe)) for pipe in ready if isinstance(pipe, Connection)]
            errors = [answer for _, kind, answer in received if kind == "error"]
            if errors or not ready:
                self.close()  # the other ranks may wait for the one that failed
                raise AssertionError("\n".join(errors) or f"no answer within {TIMEOUT_S} s")
            answers.update((pipe, answer) for pipe, _, answer in received)
        return [answers[pipe] for pipe in pipes]

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks.clear()

    def clear(self) -> None:
        """Remove what the ranks met by."""
        self._directory.cleanup()


@contextlib.contextmanager
def open_gang() -> Iterator[Gang]:
    gang = Gang()
    try:
        yield gang
    finally:
        gang.close()
        gang.clear()


def meeting_place(directory: Path) -> str:
    """Return where ranks may meet: a new file, for others may take a port that was free just now."""
    return f"file://{directory}/meet-{uuid.uuid4().hex}"


def one_rank() -> Group:
    """A group of this process alone, which leaves the other cores to others."""
    torch.set_num_threads(1)
    return join_group(RankVariables(rank=0, local_rank=0, world_size=1, backend="gloo"))


def make_run(path: Path, **train: Any) -> Path:
    """Make a run directory by hand, with the plan that a submit would have left there."""
    path.mkdir()
    (path / "plan.json").write_text(json.dumps({"spec": {"train": TINY | train}}))
    return path


def metrics_rows(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(path / "metrics.jsonl") if row["kind"] == kind]


def settle(
    group: Group,
    path: Path,
    *,
    attempt: int = 0,
    stop_after: int | None = None,
    slot: ComputeSlot | None = None,
    global_batch: int | None = None,
    **train: Any,
) -> Setting:
    """Prepare a tiny training in `path`; rank 0 asks for a stop when it was asked `stop_after` times before."""
    spec = TrainSpec.from_json(TINY | train)
    torch.manual_seed(spec.seed)
    random.seed(spec.seed)
    asked = iter(range(10**9))
    return prepare(
        spec,
        load_dataset(spec).to(group.device),
        group,
        store=Store(run=RunDir(path), attempt=attempt, keep=spec.keep_checkpoints),
        reporter=Reporter(RunDir(path), attempt=attempt, first=group.is_first),
        slot=slot,
        stop_requested=lambda: stop_after is not None and group.is_first and next(asked) >= stop_after,
        global_batch=global_batch,
    )


def outcome(state: TrainState) -> dict[str, Any]:
    """What must be equal for two trainings to be the same, and how far they came."""
    return {
        "params": tensors_sha256(state.model.named_parameters()),
        "buffers": tensors_sha256(state.model.named_buffers()),
        "momentum": tensors_sha256(
            (str(index), values["momentum_buffer"])
            for index, values in state.optimizer.state_dict()["state"].items()
            if values.get("momentum_buffer") is not None
        ),
        "step": state.step,
        "samples": state.samples,
        "accuracy": None if state.evaluation is None else state.evaluation.accuracy,
    }


def train_once(group: Group, path: Path, **options: Any) -> dict[str, Any]:
    """Train in `path` until the end or the stop."""
    setting = settle(group, path, **options)
    state = train(setting)
    setting.reporter.close()
    return outcome(state) | {"finished": state.finished(setting.schedule)}


def _start_rank() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.train_gang", "torch._dynamo"])  # one import for all ranks
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, answer = pipe.recv()
    except EOFError:
        return "error", "the rank died"
    return kind, answer


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        place, function, args = pipe.recv()
        try:
            group = join_group(place)
            answer = function(group, *args)
            leave_group(group)
        except Exception:  # whatever a test did is the test's answer
            pipe.send(("error", traceback.format_exc()))
        else:
            pipe.send(("answer", answer))
