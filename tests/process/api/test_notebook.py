"""A notebook that submits closures and a map, on this machine; tests/rack/places/test_executor_rack.py: on Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import notebook


def test_a_notebook_submits_closures_and_a_map_and_shows_results_and_errors(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    command = [sys.executable, str(notebook.__file__), "local"]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    notebook.check_outcomes(json.loads(done.stdout))
