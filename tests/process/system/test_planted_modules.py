"""Modules that somebody has planted in the directories that commands start in: none is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

CLUSTERDDP = Path(sys.executable).with_name("clusterddp")
NAMES = ("json", "torch", "runpy", "subprocess", "pathlib", "importlib", "clusterddp", "submitit", "pip", "socket")
"""Modules that processes of ours import early."""
SPEC = "name: planted\nlauncher: local\ndevice: cpu\nresources: {}\nentry: {command: [sh, -c, 'exit 3']}\n"


def plant(folder: Path, marks: Path) -> None:
    """Write modules that leave a mark when they are imported."""
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"import os\nos.close(os.open({str(marks)!r} + '/{folder.name}-{name}', os.O_CREAT))\nraise SystemExit(9)\n"
        )


class Place:
    """A directory to type commands in, full of planted modules."""

    def __init__(self, tmp_path: Path) -> None:
        self.marks, self.here, self.runs = (tmp_path / name for name in ("marks", "here", "runs"))
        for path in (self.marks, self.here):
            path.mkdir()
        (self.here / "job.yaml").write_text(SPEC)
        plant(self.here, self.marks)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(CLUSTERDDP), *arguments],
            cwd=self.here,
            env=os.environ | {"CLUSTERDDP_RUNS": str(self.runs)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    @property
    def imported(self) -> list[str]:
        return sorted(os.listdir(self.marks))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    "arguments", [["doctor"], ["submit", "job.yaml", "--wait"], ["submit", "-n", "job.yaml"], ["worker", "job.yaml"]]
)
def test_a_command_imports_nothing_from_the_directory_it_is_typed_in(place: Place, arguments: list[str]) -> None:
    done = place.run(*arguments)
    assert place.imported == [], done.stderr
    assert done.returncode != 9


def test_a_run_that_goes_on_imports_nothing_from_its_own_directories(place: Place) -> None:
    assert place.run("submit", "job.yaml", "--wait").returncode == 5
    (run,) = (path for path in place.runs.iterdir() if (path / "run.json").exists())
    for folder in (run, run / "launcher", run / "attempts", place.runs):
        plant(folder, place.marks)
    done = place.run("resume", run.name, "--wait")
    assert (run / "attempts/1/end.json").exists(), done.stderr
    assert place.imported == []


def test_exec_imports_nothing_from_where_it_is_typed_or_where_its_rank_works(place: Place) -> None:
    (place.here / "job.yaml").write_text(
        SPEC.replace("exit 3", f"until [ -e {place.here / 'go'} ]; do sleep 0.1; done")
    )
    assert place.run("submit", "job.yaml").returncode == 0
    (run,) = (path for path in place.runs.iterdir() if (path / "run.json").exists())
    for folder in (run, run / "launcher"):
        plant(folder, place.marks)
    deadline = time.monotonic() + 60 * PATIENCE
    while (done := place.run("exec", run.name, "--", "echo", "beside")).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
    (place.here / "go").touch()
    assert (done.stdout, place.imported) == ("beside\n", [])
    assert place.run("wait", run.name).returncode == 0


def test_a_script_imports_what_lies_beside_it(place: Place, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "helper.py").write_text("ANSWER = 42\n")
    (beside / "train.py").write_text("import helper, sys\nprint(helper.ANSWER, sys.path[0])\n")
    shutil.copy(place.here / "job.yaml", beside)
    spec = SPEC.replace("{command: [sh, -c, 'exit 3']}", f"{{script: {beside / 'train.py'}}}")
    (place.here / "job.yaml").write_text(spec + "snapshot: false\n")
    done = place.run("submit", "job.yaml", "--wait")
    assert done.returncode == 0, done.stderr
    (run,) = (path for path in place.runs.iterdir() if (path / "run.json").exists())
    assert (run / "attempts/0/logs/rank-000.out").read_text().strip() == f"42 {beside}"
