"""Runs that version 0.1 made, before its modules had other names: they are listed, explained, resumed, cancelled.

`golden/runs_0_1.tar.gz` holds runs of a script on each launcher and one sweep, with the paths of another machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from clusterddp.system.files import read_json
from tests.support.waiting import PATIENCE

ARCHIVE = Path(__file__).parents[2] / "golden/runs_0_1.tar.gz"
THERE = b"/scratch/work"
"""Where the runs were submitted."""
STATES = {
    "amber-fox-97": ("slurm", "FAILED"),
    "archive-7d593c": ("none", "COMPLETED"),
    "hazel-falcon-74": ("slurm", "COMPLETED"),
    "kind-camel-86": ("ssh", "FAILED"),
    "misty-newt-34": ("ssh", "COMPLETED"),
    "nimble-camel-73": ("local", "COMPLETED"),
    "rapid-dolphin-44.0": ("local", "COMPLETED"),
    "rapid-dolphin-44.1": ("local", "COMPLETED"),
    "rustic-wombat-8": ("local", "CANCELLED"),
    "solar-kestrel-82": ("local", "FAILED"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, as if the runs had been submitted here."""
    here = tmp_path_factory.mktemp("older")
    with tarfile.open(ARCHIVE) as archive:
        # Python 3.10 and 3.11 have the filter since a security release, and 3.12 warns where none is named.
        archive.extractall(here, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
    for path in here.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(path.read_bytes().replace(THERE, bytes(here)))
    return here / "runs"


def clusterddp(runs: Path, *arguments: str, code: int = 0) -> Any:
    """Run a command on these runs; return what it prints as JSON, or its text."""
    command = [sys.executable, "-m", "clusterddp", *arguments, "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * PATIENCE)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if "json" in arguments else done.stdout + done.stderr


def test_all_of_them_are_listed_with_their_states(runs: Path) -> None:
    listed = clusterddp(runs, "list", "-o", "json")
    assert {row["run"]: (row["launcher"], row["state"]) for row in listed} == STATES


def test_a_root_cause_is_shown_as_it_was(runs: Path) -> None:
    status = clusterddp(runs, "status", "amber-fox-97", "-o", "json")
    assert status["root_cause"] == {
        "rank": 1,
        "host": "node2",
        "exit_code": 1,
        "error": "rank 1 on node2: ValueError: the data are broken at step 5",
        "log": "attempts/0/logs/rank-001.err",
    }
    assert "the data are broken at step 5" in clusterddp(runs, "logs", "amber-fox-97", "--rank", "1")


def test_one_that_has_ended_is_left_alone_by_cancel(runs: Path) -> None:
    assert "has already ended: COMPLETED" in clusterddp(runs, "cancel", "nimble-camel-73")


def test_one_that_was_stopped_is_resumed_from_its_checkpoint(runs: Path) -> None:
    run = runs / "rustic-wombat-8"
    saved = [run / "checkpoints" / f"steps-{rank}.json" for rank in range(2)]
    for path in saved:
        assert 0 < read_json(path) < 1_990
        path.write_text("1990")  # the script has 2,000 steps of 20 ms
    clusterddp(runs, "resume", run.name)
    clusterddp(runs, "wait", run.name)
    assert (run / "attempts/1/logs/rank-000.out").read_text() == "begins at 1990\nends at 2000\n"
