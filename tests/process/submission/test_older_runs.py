"""Runs of earlier versions, made on another machine: they are listed, explained, resumed by --trust, removed.

`golden/runs_0_1.tar.gz` holds runs of a script on each launcher and one sweep, by 0.1 before its modules had other
names. `golden/runs_0_2.tar.xz` holds a run with each feature that was removed after commit 803cec3, in use.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from clusterddp.system.files import read_json
from tests.support.waiting import PATIENCE

GOLDEN = Path(__file__).parents[2] / "golden"
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
STATES_WITH_REMOVED = {
    "comm-auto-1": ("local", "COMPLETED"),
    "exec-1": ("local", "CANCELLED"),
    "function-1": ("local", "COMPLETED"),
    "image-folder-1": ("local", "COMPLETED"),
    "joined-1": ("join", "COMPLETED"),
    "joined-stopped-1": ("join", "CANCELLED"),
    "notified-1": ("local", "COMPLETED"),
    "notified-stopped-1": ("local", "CANCELLED"),
    "powersgd-1": ("local", "COMPLETED"),
    "powersgd-stopped-1": ("local", "CANCELLED"),
    "relayed-1": ("local", "COMPLETED"),
    "shared-1": ("local", "COMPLETED"),
    "slurm-stopped-1": ("slurm", "CANCELLED"),
    "slurm-torchrun-1": ("slurm", "COMPLETED"),
    "ssh-stopped-1": ("ssh", "CANCELLED"),
    "ssh-wait-1": ("ssh", "COMPLETED"),
    "torchrun-done-1": ("local", "COMPLETED"),
    "torchrun-stopped-1": ("local", "CANCELLED"),
}
"""The run of a sent spec, `.login/remote-1.json`, is on a cluster."""


def unpack(archive: str, here: Path) -> Path:
    """Unpack runs as if they had been submitted here."""
    with tarfile.open(GOLDEN / archive) as file:
        # Python 3.10 and 3.11 have the filter since a security release, and 3.12 warns where none is named.
        file.extractall(here, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
    for path in here.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(path.read_bytes().replace(THERE, bytes(here)))
    return here / "runs"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("runs_0_1.tar.gz", tmp_path_factory.mktemp("older"))


@pytest.fixture(scope="module")
def runs_with_removed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("runs_0_2.tar.xz", tmp_path_factory.mktemp("removed"))


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
    refused = clusterddp(runs, "resume", run.name, code=2)
    assert "rustic-wombat-8 is unsealed, so nothing of it is started, asked or ended" in refused
    assert "hint: clusterddp resume rustic-wombat-8 --trust shows what it starts, and seals it" in refused
    said = clusterddp(runs, "resume", run.name, "--trust")
    assert "launcher  local" in said
    assert "runs      " in said
    clusterddp(runs, "wait", run.name)
    assert (run / "attempts/1/logs/rank-000.out").read_text() == "begins at 1990\nends at 2000\n"
    assert clusterddp(runs, "status", run.name, "-o", "json")["mark"] == ""


def test_runs_with_removed_features_are_listed_with_their_states(runs_with_removed: Path) -> None:
    listed = clusterddp(runs_with_removed, "list", "-o", "json")
    assert {row["run"]: (row["launcher"], row["state"]) for row in listed} == STATES_WITH_REMOVED


@pytest.mark.parametrize("name", STATES_WITH_REMOVED)
def test_a_run_with_a_removed_feature_is_read(runs_with_removed: Path, name: str) -> None:
    launcher, state = STATES_WITH_REMOVED[name]
    status = clusterddp(runs_with_removed, "status", name, "-o", "json")
    assert (status["launcher"], status["state"], len(status["ranks"])) == (launcher, state, 2)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("comm-auto-1", "comm auto: exact"),
        ("exec-1", "begins at 0"),
        ("function-1", "sum 3.5"),
        ("joined-1", "begins at 0"),
        ("slurm-torchrun-1", "begins at 0"),
        ("ssh-wait-1", "begins at 0"),
        ("torchrun-stopped-1", "begins at 0"),
    ],
)
def test_what_a_run_with_a_removed_feature_printed_is_shown(runs_with_removed: Path, name: str, printed: str) -> None:
    assert printed in clusterddp(runs_with_removed, "logs", name)


@pytest.mark.parametrize("name", ["comm-auto-1", "joined-1", "notified-stopped-1", "slurm-torchrun-1"])
def test_a_run_with_a_removed_feature_has_a_report(runs_with_removed: Path, tmp_path: Path, name: str) -> None:
    page = tmp_path / "report.html"
    clusterddp(runs_with_removed, "report", name, "--out", str(page))
    assert f"<title>{name}" in page.read_text()


def test_runs_with_removed_features_are_compared(runs_with_removed: Path) -> None:
    names = ["relayed-1", "powersgd-1", "joined-1", "torchrun-done-1"]
    compared = clusterddp(runs_with_removed, "compare", *names, "-o", "json")
    assert [run["run"] for run in compared["runs"]] == names


@pytest.mark.parametrize("name", ["exec-1", "notified-stopped-1", "torchrun-stopped-1"])
def test_one_with_a_removed_feature_is_resumed(runs_with_removed: Path, name: str) -> None:
    run = runs_with_removed / name
    for rank in range(2):
        path = run / "output" / f"steps-{rank}.json"
        assert 0 < read_json(path) < 1_990
        path.write_text("1990")
    clusterddp(runs_with_removed, "resume", name, "--trust")
    clusterddp(runs_with_removed, "wait", name)
    assert (run / "attempts/1/logs/rank-000.out").read_text() == "begins at 1990\nends at 2000\n"


def test_a_value_that_was_removed_is_refused_and_another_one_goes_on(runs_with_removed: Path) -> None:
    run = runs_with_removed / "powersgd-stopped-1"
    before = sorted(path for path in run.rglob("*"))
    refused = clusterddp(runs_with_removed, "resume", run.name, "--trust", code=2)
    assert 'error: powersgd-stopped-1: train.comm: found the text "powersgd:2", expected exact' in refused
    assert "hint: clusterddp resume powersgd-stopped-1 train.comm=VALUE goes on with another value" in refused
    assert sorted(path for path in run.rglob("*")) == before
    clusterddp(runs_with_removed, "resume", run.name, "train.comm=exact", "train.epochs=1")
    clusterddp(runs_with_removed, "wait", run.name)


def test_one_that_machines_joined_is_resumed_on_each_of_them(runs_with_removed: Path) -> None:
    refused = clusterddp(runs_with_removed, "resume", "joined-stopped-1", "--trust", code=2)
    assert re.search(r"hint: .*clusterddp (join|worker) SPEC --resume joined-stopped-1", refused)


@pytest.mark.parametrize("name", ["relayed-1", "shared-1", "joined-1", "torchrun-done-1", "notified-1", "comm-auto-1"])
def test_one_with_a_removed_feature_is_removed(tmp_path: Path, name: str) -> None:
    runs = unpack("runs_0_2.tar.xz", tmp_path)
    clusterddp(runs, "rm", name, "--yes")
    assert not (runs / name).exists()
    assert len(clusterddp(runs, "list", "-o", "json")) == len(STATES_WITH_REMOVED) - 1
