"""Runs made by hand: the files that a submit, the supervisors and the trainer would have written."""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.run.record import ProcessIdentity, RankEnd, RankRecord, RunRecord, read_run, write_rank, write_run
from clusterddp.run.seal import sealed
from clusterddp.run.steps import StepRecord, new_step
from clusterddp.system.files import append_jsonl, write_json

HOST = socket.gethostname()


def make_gang(nodes: int = 1, per_node: int = 2) -> Gang:
    entry = Entry(kind="script", target="train.py", working_dir="/tmp")
    slots = tuple(
        Node(node_rank=node, host=HOST, ranks=tuple(range(node * per_node, (node + 1) * per_node)))
        for node in range(nodes)
    )
    return Gang(
        run="x", token="t0ken", nodes=slots, entry=entry, threads_per_rank=1, backend="gloo", master_addr="127.0.0.1"
    )


def make_run(
    runs_dir: Path, name: str = "brisk-otter-3", *, nodes: int = 1, per_node: int = 2, created_ns: int | None = None
) -> RunDir:
    """Make a run that has been submitted and not started; this process is its submitter, so it is PENDING."""
    run = RunDir(runs_dir / name)
    run.path.mkdir(parents=True)
    run.checkpoints.mkdir()
    gang = make_gang(nodes, per_node)
    write_json(run.plan, sealed({"run": name, "gang": gang.to_json(), "spec": {}}))
    record = RunRecord(
        run=name,
        token="t0ken-of-" + name,
        name="test",
        launcher="local",
        created_ns=time.time_ns() if created_ns is None else created_ns,
        job_id="4711",
        submitter=dataclasses.asdict(ProcessIdentity.of()),
    )
    write_run(run, record)
    return run


def make_batch_run(runs_dir: Path, name: str = "brisk-otter-3", **facts: Any) -> RunDir:
    """Make the run of a batch script whose job has started; it has no step yet."""
    run = make_run(runs_dir, name)
    run.launcher_dir.mkdir()
    run.batch_script.write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    write_json(attempt.claim, {"job_id": "4711", "time": time.time(), **facts})
    return run


def start_step(
    run: RunDir, *command: str, line: int = 3, ranks: int = 2, inside: str | None = None, has_ranks: bool = True
) -> RunDir:
    """Start a command of the script, and its ranks; return the run as the step sees it."""
    record = StepRecord(
        command=command or ("srun",), program=("python", "train.py"), line=line, started=time.time(), inside=inside
    )
    step = new_step(run, 0, record)
    if has_ranks:
        gang = dataclasses.replace(make_gang(1, ranks), token=f"{read_run(run).token}.{step.step}")
        write_json(step.attempt(0).gang, gang.to_json())
        start_attempt(step, ranks=ranks)
    return step


def start_attempt(run: RunDir, number: int = 0, *, ranks: int = 2, per_node: int = 2) -> AttemptDir:
    """Start all ranks of an attempt; this process stands for its supervisor, so it is RUNNING."""
    attempt = run.attempt(number)
    attempt.ranks.mkdir(parents=True)
    attempt.logs.mkdir()
    write_json(
        attempt.start,
        {
            "attempt": number,
            "started": time.time(),
            "world_size": ranks,
            "master_addr": "127.0.0.1",
            "master_port": 12345,
            "backend": "gloo",
            "supervisor": dataclasses.asdict(ProcessIdentity.of()),
        },
    )
    for rank in range(ranks):
        write_rank(attempt, rank_record(rank, per_node=per_node))
    return attempt


def rank_record(rank: int, *, per_node: int = 2, **ended: Any) -> RankRecord:
    return RankRecord(
        rank=rank,
        node_rank=rank // per_node,
        local_rank=rank % per_node,
        host=HOST,
        pid=1000 + rank,
        interface="lo",
        master_addr="127.0.0.1",
        master_port=12345,
        started=time.time(),
        **ended,
    )


def complete(run: RunDir, attempt: AttemptDir, *, ranks: int = 2, per_node: int = 2) -> None:
    for rank in range(ranks):
        write_rank(attempt, rank_record(rank, per_node=per_node, ended=time.time(), exit_code=0))
    write_end(attempt, AttemptEnd(outcome="COMPLETED", reason="all ranks ended with exit code 0"))


def fail(attempt: AttemptDir, *, rank: int = 1, ranks: int = 2, per_node: int = 2, will_restart: bool = False) -> None:
    """End the attempt as the gang rule does: `rank` raised, the others were ended by SIGTERM."""
    for other in range(ranks):
        how = (
            {"exit_code": 1, "error": "ValueError: the loss is nan"}
            if other == rank
            else {"exit_code": 143, "signal": "SIGTERM"}
        )
        write_rank(attempt, rank_record(other, per_node=per_node, ended=time.time(), **how))
    log = attempt.stderr(rank)
    log.write_text(
        "\x1b]0;evil title\x07epoch 1\nTraceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\nValueError: the loss is nan\n'
    )
    cause = RankEnd(
        rank=rank,
        host=HOST,
        exit_code=1,
        error=f"rank {rank} on {HOST}: ValueError: the loss is nan",
        log=str(log.relative_to(next(each for each in attempt.path.parents if each.name == "attempts").parent)),
    )
    write_end(
        attempt,
        AttemptEnd(outcome="FAILED", reason=f"rank {rank} failed", root_cause=cause, will_restart=will_restart),
    )


def train(run: RunDir, *, steps: int, of_steps: int = 100, epochs: int = 4, attempt: int = 0) -> None:
    """Write the metrics of a training that did ten steps a second."""
    for step in range(1, steps + 1):
        row = {
            "kind": "train",
            "attempt": attempt,
            "epoch": 1 + (step - 1) * epochs // of_steps,
            "step": step,
            "loss": 2.0 / step,
            "images_per_s": 12800.0,
            "lr": 0.1,
            "time": 1e9 + step / 10,
            "steps_total": of_steps,
            "epochs_total": epochs,
        }
        append_jsonl(run.metrics, row)
        if step * epochs % of_steps == 0:
            keep = {"attempt", "epoch", "step", "time", "steps_total", "epochs_total"}
            evaluation = {key: value for key, value in row.items() if key in keep}
            append_jsonl(run.metrics, evaluation | {"kind": "eval", "loss": 1.0, "accuracy": 0.5 + step / 1000})


def opens_of(action: Callable[[], object], directory: Path) -> list[str]:
    """Return the files below a directory that an action opens."""
    opened, is_on = [], True

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if is_on and event == "open" and str(arguments[0]).startswith(str(directory)):
            opened.append(str(arguments[0]))

    sys.addaudithook(hear)
    action()
    is_on = False
    return opened
