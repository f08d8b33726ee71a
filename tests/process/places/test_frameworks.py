"""The specs of jobs/frameworks on two CPU ranks of this machine: stopped, resumed, and one group in the end."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import clusterddp
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json, read_jsonl
from tests.support.frameworks import put_torchvision_beside
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

PACKAGES = {
    "fsdp2": "torch",
    "lightning_ddp": "lightning",
    "accelerate_ddp": "accelerate",
    "transformers_trainer": "transformers",
    "deepspeed_zero": "deepspeed",
}


def submit(place: Path, spec: str, *, slowly: bool) -> clusterddp.Run:
    frameworks = place / "jobs" / "frameworks"
    shutil.copytree(ROOT / "jobs" / "frameworks", frameworks)
    put_torchvision_beside(frameworks)
    if slowly:
        script = frameworks / f"{spec}.py"
        call = r"( +)(clusterddp\.(log\(\{|progress\())"
        text, count = re.subn(call, r"\1__import__('time').sleep(0.1)\n\1\2", script.read_text())
        assert count == 1
        script.write_text(text)
    return clusterddp.submit(f"jobs/frameworks/{spec}.yaml")


def test_there_is_a_test_for_each_framework() -> None:
    assert {path.stem for path in (ROOT / "jobs" / "frameworks").glob("*.yaml")} == PACKAGES.keys()


@pytest.mark.parametrize("spec", PACKAGES)
def test_a_framework_stops_resumes_and_is_one_group(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(PACKAGES[spec]) is None:
        pytest.skip(f"{PACKAGES[spec]} is not installed")
    monkeypatch.chdir(tmp_path)
    run = submit(tmp_path, spec, slowly=True)
    directory = RunDir(run.path)
    stop_at_a_checkpoint(run)
    stopped = run.status()["progress"]["step"]
    subprocess.run([sys.executable, "-m", "clusterddp", "resume", run.name, "--wait"], check=True, cwd=tmp_path)
    steps = [row["step"] for row in read_jsonl(directory.metrics) if row["attempt"] == 1 and "step" in row]
    assert min(steps) > stopped
    assert len(printed_weights(run)) == 1  # both ranks have the same one


def stop_at_a_checkpoint(run: clusterddp.Run) -> None:
    metrics = RunDir(run.path).metrics
    wait_until(lambda: metrics.exists() and bool(list(read_jsonl(metrics))), 120)
    run.cancel(save=True)
    assert run.wait(PATIENCE * 60) == "CANCELLED"
    assert "stopped at a checkpoint" in run.status()["reason"]


def printed_weights(run: clusterddp.Run) -> set[str]:
    logs = sorted(RunDir(run.path).newest_attempt().logs.glob("rank-*.out"))
    lines = [line for log in logs for line in log.read_text().splitlines()]
    found = [match for line in lines if (match := re.fullmatch(r"rank (\d) of 2: (\S+)", line))]
    assert [match[1] for match in found] == ["0", "1"], lines
    return {match[2] for match in found}


def test_fsdp2_goes_on_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finals = []
    for name in ("stopped", "undisturbed"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        run = submit(tmp_path / name, "fsdp2", slowly=name == "stopped")
        if name == "stopped":
            stop_at_a_checkpoint(run)
            subprocess.run([sys.executable, "-m", "clusterddp", "resume", run.name], check=True)
        assert run.wait(PATIENCE * 120) == "COMPLETED"
        finals.append(shards_of(RunDir(run.path), step=200))
    assert finals[0] == finals[1]
    assert len(finals[0]) == 2


def shards_of(run: RunDir, step: int) -> list[dict[Any, Any]]:
    """Return the tensors of each shard of a run's checkpoint."""
    (manifest,) = run.checkpoints.glob(f"step-{step:08d}-a*.json")
    files = [shard["file"] for shard in (read_json(manifest) or {})["shards"]]
    loaded = [torch.load(run.checkpoints / file, weights_only=True) for file in files]
    return [{key: tensor.tolist() for key, tensor in shard.items()} for shard in loaded]


def test_the_empty_parameters_of_zero_3_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "jobs" / "frameworks", tmp_path / "jobs" / "frameworks")
    script = tmp_path / "jobs" / "frameworks" / "deepspeed_zero.py"
    text = script.read_text().replace('{"stage": 3}', '{"stage": 3, "stage3_param_persistence_threshold": 0}')
    script.write_text(text.replace("checkpoint.save({}", 'checkpoint.save({"model": engine.module.state_dict()}'))
    run = clusterddp.submit("jobs/frameworks/deepspeed_zero.yaml")
    assert run.wait(PATIENCE * 300) == "FAILED"
    assert (
        "state['model']['weight'] is DeepSpeed's, and each rank has a part of it" in run.status()["root_cause"]["error"]
    )
