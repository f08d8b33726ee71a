"""The surroundings of a run, captured from this machine and from fakes on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.run.gang import RankPython
from clusterddp.run.surroundings import capture_surroundings, describe_gpus

SMI = """#!/bin/sh
echo "0, NVIDIA H200, GPU-6f2a, 143771 MiB, 570.86.15"
echo "1, NVIDIA H200, GPU-77b0, 143771 MiB, 570.86.15"
"""


def test_packages_python_and_host_are_captured(tmp_path: Path) -> None:
    captured = capture_surroundings(tmp_path, os.environ, RankPython())
    assert captured["packages"]["click"]
    assert captured["python"]["executable"] == sys.executable
    assert captured["git"] is None
    assert json.loads(json.dumps(captured)) == captured


def test_no_value_of_the_environment_is_captured(tmp_path: Path) -> None:
    captured = capture_surroundings(tmp_path, dict(os.environ) | {"API_KEY": "hunter2"}, RankPython())
    assert "hunter2" not in json.dumps(captured)


def test_torch_is_described_without_being_imported(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from clusterddp.run.surroundings import capture_surroundings;"
        "from clusterddp.run.gang import RankPython;"
        "print(capture_surroundings(Path('.'), os.environ, RankPython())['torch']['version']);"
        "assert 'torch' not in sys.modules"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    installed = pytest.importorskip("torch").__version__
    assert answer.stdout.strip() == installed


def test_gpus_and_the_driver_are_what_nvidia_smi_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert [gpu["uuid"] for gpu in describe_gpus(os.environ)] == ["GPU-6f2a", "GPU-77b0"]
    assert describe_gpus(os.environ)[0]["driver_version"] == "570.86.15"


def test_a_broken_nvidia_smi_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert describe_gpus(os.environ) == []
