"""A notebook that submits closures and a map, on this machine; tests/rack/places/test_executor_rack.py: on Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import notebook


def check_notebook(given: list[str]) -> None:
    """Check what the cells of `notebook.CELLS` gave."""
    assert given[:3] == ["", "('closure', 5.0)", "[2.0, 4.0]"]
    assert given[3].startswith("html: <table><tr><th>run</th><td>")
    assert "<td>COMPLETED" in given[3]
    assert given[4].startswith("error: RankError: ")
    lines = given[4].splitlines()
    assert "rank 0 on " in lines[0]
    assert any(line.strip().endswith(", in train") for line in lines)
    assert lines[-1] == "ValueError: 2 diverges"


def test_a_notebook_submits_closures_and_a_map_and_shows_results_and_errors(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    command = [sys.executable, str(notebook.__file__), "local"]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    check_notebook(json.loads(done.stdout))
