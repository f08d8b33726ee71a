"""A relay of a real run that goes on, with the real TensorBoard: killed once, and called again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import clusterddp
from clusterddp.cli.main import main
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

STEPS = 60
SCRIPT = f"""import time, clusterddp
for step in range(1, {STEPS + 1}):
    clusterddp.log({{"loss": 1 / step}}, step=step)
    time.sleep(0.1)
"""
SPEC = (
    "name: job\ndevice: cpu\nresources: {procs_per_node: 1, cpus_per_task: 1}\n"
    f"entry: {{command: {sys.executable} train.py}}\nenv: {{PYTHONPATH: {ROOT}}}\n"
)


def rows_relayed(run: RunDir) -> int:
    return max([(read_json(path) or {})["sending"]["rows"] for path in run.relay.glob("*.json")], default=0)


def test_a_relay_that_is_killed_and_called_again_has_each_row_of_a_running_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = RunDir(clusterddp.submit(SPEC).path)
    arguments = ["relay", str(run.path), "--to", "tensorboard", "--follow"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    relay = subprocess.Popen([sys.executable, "-m", "clusterddp", *arguments], env=environ)
    wait_until(lambda: rows_relayed(run) > 3, 60)
    relay.send_signal(signal.SIGKILL)
    relay.wait()
    assert main(arguments) == 0
    assert f"{run.name} COMPLETED" in capfd.readouterr().err
    events = EventAccumulator(str(tmp_path / "tensorboard" / "job" / f"job {run.name}"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))
    assert "PYTHONPATH" not in next(iter((tmp_path / "tensorboard").rglob("events*"))).read_bytes().decode("latin-1")
