"""The script of docs/entry.md on two gloo ranks: watched, stopped and resumed as a run, and under torchrun alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import clusterddp
from clusterddp import checkpoint
from clusterddp.api import Run
from clusterddp.cli.text.status import status_lines
from clusterddp.run.directory import RunDir, make_attempt_dirs
from clusterddp.run.stop import LOOK_EVERY_S, request_stop
from clusterddp.system.files import read_json, read_jsonl
from clusterddp.train.group import Group
from clusterddp.view.status import read_status
from tests.support.paths import ROOT
from tests.support.train_gang import open_gang
from tests.support.waiting import PATIENCE, wait_until

torch = pytest.importorskip("torch")

SLOWLY = "    import time; time.sleep(0.05)\n    optimizer.zero_grad()\n"
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]
SPEC = "name: job\ndevice: cpu\nresources: {procs_per_node: 2, cpus_per_task: 1}\nentry: {script: train.py}\n"


def documented_script() -> str:
    page = (ROOT / "docs" / "entry.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    (script,) = [block for block in blocks if "checkpoint.load(" in block]
    return script


def parameters(path: Path) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in torch.load(path, weights_only=True).items()}


@pytest.mark.slow
def test_the_documented_script_is_seen_stopped_and_resumed_to_the_parameters_of_torchrun_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run_under_torchrun(tmp_path / "alone")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(documented_script().replace("    optimizer.zero_grad()\n", SLOWLY))
    run = clusterddp.submit(SPEC)
    directory = RunDir(run.path)
    wait_until(lambda: any(row["kind"] == "log" for row in read_jsonl(directory.metrics)), 60)
    status = read_status(directory)
    assert status.progress is not None
    assert status.progress.accuracy is not None
    assert "\n  step " in (text := "\n".join(status_lines(status, directory, address=run.name)))
    assert f"accuracy {status.progress.accuracy:.1%}" in text

    run.cancel(save=True)
    assert run.wait(PATIENCE * 30) == "CANCELLED"
    stopped = stopped_step(run)
    assert 20 <= stopped < 200
    assert run.status()["progress"]["step"] == stopped
    assert "stopped at a checkpoint" in run.status()["reason"]

    subprocess.run([sys.executable, "-m", "clusterddp", "resume", run.name, "--wait"], check=True, cwd=tmp_path)
    steps = [row["step"] for row in read_jsonl(directory.metrics) if row["attempt"] == 1]
    assert min(steps) == stopped + 1
    assert max(steps) == 200
    assert parameters(directory.output / "model.pt") == undisturbed


def save_and_stop(group: Group, path: str) -> tuple[list[int], int | str | None, dict[str, object] | None]:
    """Save by time, then stop at the request of rank 1; each rank has a disk of its own."""
    run = RunDir(Path(path) / str(group.rank))
    make_attempt_dirs(run.attempt(0))
    os.environ |= {"CLUSTERDDP_RUN_DIR": str(run.path), "CLUSTERDDP_ATTEMPT": "0", "RANK": str(group.rank)}
    saved, left = [], None
    assert checkpoint.load() is None
    for step in range(1, 100):
        if step == 7 and group.rank == 1:
            request_stop(run.attempt(0).stop_file, "a test")
            time.sleep(1.2 * LOOK_EVERY_S)
        if checkpoint.due(step, every_s=0):
            saved.append(step)
            try:
                checkpoint.save({"rank": group.rank}, step=step, background=False)
            except SystemExit as end:
                left = end.code
                break
    return saved, left, checkpoint.load()


@pytest.mark.slow
def test_ranks_save_by_time_and_stop_at_the_same_step_without_a_shared_disk(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with open_gang() as gang:
        answers = gang.run(2, save_and_stop, str(tmp_path))
    assert answers == [([2, 4, 6, 8], 0, {"rank": 0, "step": 8})] * 2
    assert not RunDir(tmp_path / "1").checkpoints.exists()


def run_under_torchrun(directory: Path) -> dict[str, list[float]]:
    """Run the script by torchrun alone: it writes into its own directory only."""
    directory.mkdir()
    (directory / "train.py").write_text(documented_script())
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERDDP_")}
    environ = kept | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([*TORCHRUN, "train.py"], check=True, cwd=directory, env=environ, timeout=PATIENCE * 60)
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoints", "output", "train.py"]
    kept_checkpoints = sorted(path.name for path in (directory / "checkpoints").glob("*.pt"))
    assert kept_checkpoints == ["step-00000100-a0.pt", "step-00000200-a0.pt"]
    return parameters(directory / "output" / "model.pt")


def stopped_step(run: Run) -> int:
    stopped = read_json(RunDir(run.path).attempt(0).stopped)
    assert stopped is not None
    return int(stopped["step"])
