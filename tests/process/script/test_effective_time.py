"""Where the time of real runs goes when ranks are killed, start again, and are resumed by hand."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

import clusterddp
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_ranks
from clusterddp.system.files import read_json, read_jsonl
from clusterddp.view.effective import Effective
from clusterddp.view.status import read_status
from tests.support.waiting import PATIENCE, wait_until

SCRIPT = """
import os, time, clusterddp
for step in range(1, 31):
    time.sleep(0.1)
    clusterddp.log({"loss": 1 / step}, step=step, total=30)
"""
SPEC = "name: job\ndevice: cpu\nresources: {procs_per_node: 2, cpus_per_task: 1}\n"
TRAINER = (
    "train: {model: fastnet, width: 0.125, dataset: shapes, samples: 256, batch_size: 32, epochs: 12, log_every: 1}\n"
)


def effective_of(run: RunDir) -> Effective:
    effective = read_status(run).effective
    assert effective is not None
    assert sum(effective.parts.values()) == pytest.approx(effective.seconds)
    return effective


def kill_a_rank(run: RunDir, attempt: int = 0) -> None:
    """Kill rank 1 by SIGKILL once four rows of the attempt are written."""
    wait_until(lambda: sum(row["attempt"] == attempt for row in read_jsonl(run.metrics)) >= 4, 60)
    os.kill(read_ranks(run.attempt(attempt))[1].pid, signal.SIGKILL)


def test_a_script_whose_rank_is_killed_twice_starts_again_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = clusterddp.submit(f"{SPEC}restarts: 1\nentry: {{script: train.py}}\n")
    directory = RunDir(run.path)
    kill_a_rank(directory)
    kill_a_rank(directory, 1)
    going = effective_of(directory)
    assert (going.faults, going.parts["waited"] + going.parts["started"] > 0) == (1, True)
    assert run.wait(PATIENCE * 30) == "FAILED"
    run.resume()
    assert run.wait(PATIENCE * 30) == "COMPLETED"
    effective, rows = effective_of(directory), list(read_jsonl(directory.metrics))
    since_s = directory.attempt(2).end.stat().st_mtime - rows[0]["time"]
    assert effective.seconds == pytest.approx(since_s, abs=0.2)
    newest = max(row["step"] for row in rows if row["attempt"] < 2)
    again_s = [row["time"] for row in rows if row["attempt"] == 2]
    assert effective.parts["steps"] >= again_s[-1] - again_s[newest - 1] - 0.01
    assert effective.parts["repeated"] >= again_s[newest - 1] - again_s[0] - 0.01
    assert effective.faults == 2
    times = [[row["time"] for row in rows if row["attempt"] == attempt] for attempt in range(3)]
    gaps_s = [after[0] - before[-1] for before, after in itertools.pairwise(times)]
    assert max(gaps_s) - 1 < effective.worst_s["total"] <= max(gaps_s) + 0.01


def test_the_trainers_start_evaluations_and_checkpoints_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    run = clusterddp.submit(f"{SPEC}restarts: 1\n{TRAINER}")
    kill_a_rank(RunDir(run.path))
    assert run.wait(PATIENCE * 60) == "COMPLETED"
    effective = effective_of(RunDir(run.path))
    assert {part for part, seconds in effective.parts.items() if seconds > 0} >= {
        *("steps", "ended", "started", "imported", "loaded", "evaluated", "checkpointed"),
    }
    summary = read_json(RunDir(run.path).summary)
    assert summary is not None
    assert effective.parts["steps"] <= summary["train_seconds"] + 0.1
    assert effective.faults == 1
