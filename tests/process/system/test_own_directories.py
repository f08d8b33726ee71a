"""Directories in which another user could put something else: nothing is started from them, and nothing removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.person import Person
from tests.support.waiting import PATIENCE

MALLORY, GROUP = 2002, 2003
SPEC = "name: mine\nlauncher: local\ndevice: cpu\nresources: {}\nrestarts: 1\nentry: {command: [sh, -c, 'exit 3']}\n"

pytestmark = pytest.mark.root


class Place:
    """The runs directory of a user, root here, in a directory that others share."""

    def __init__(self, tmp_path: Path) -> None:
        self.here, self.shared = tmp_path / "here", tmp_path / "shared"
        self.here.mkdir()
        self.shared.mkdir()
        self.runs = self.shared / "runs"
        self.write()

    def write(self, spec: str = SPEC) -> None:
        (self.here / "job.yaml").write_text(spec)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        person = Person(path=self.here, environ={"CLUSTERDDP_RUNS": str(self.runs)}, checks=False)
        return person.clusterddp(*arguments)

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.runs.iterdir() if (path / "run.json").exists())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


OPENINGS: dict[str, Callable[[Path], object]] = {
    "another user's": lambda path: os.chown(path, MALLORY, MALLORY),
    "everybody's": lambda path: path.chmod(0o777),
    "a group's": lambda path: (os.chown(path, 0, GROUP), path.chmod(0o2770)),
}


@pytest.mark.parametrize("whose", OPENINGS)
@pytest.mark.parametrize("which", ["runs", "shared"])
def test_nothing_is_started_where_another_user_can_replace_the_run(place: Place, whose: str, which: str) -> None:
    assert place.run("submit", "job.yaml", "--wait").returncode == 5
    (name,) = place.names
    opened = place.runs if which == "runs" else place.shared
    OPENINGS[whose](opened)
    attempts = place.runs / name / "attempts"
    for words in (["submit", "job.yaml"], ["resume", name], ["rm", name, "--yes"], ["exec", name, "--", "true"]):
        done = place.run(*words)
        assert done.returncode not in (0, 5), words
        assert str(opened) in done.stderr, (words, done.stderr)
        assert "chmod +t" in done.stderr or "--runs DIR" in done.stderr, words
    assert (place.names, sorted(os.listdir(attempts))) == ([name], ["0", "1"])
    for words in (["status", name], ["list"], ["logs", name]):
        assert place.run(*words).returncode == 0, words


def test_the_remedy_of_the_refusal_is_enough_for_a_group(place: Place) -> None:
    place.runs.mkdir()
    OPENINGS["a group's"](place.runs)
    done = place.run("submit", "job.yaml", "--wait")
    assert f"hint: chmod +t {place.runs}" in done.stderr
    place.runs.chmod(0o3770)
    assert place.run("submit", "job.yaml", "--wait").returncode == 5


def test_a_runs_directory_of_ours_is_made_for_us_alone_to_write(place: Place) -> None:
    before = os.umask(0o002)
    try:
        assert place.run("submit", "job.yaml", "--wait").returncode == 5
    finally:
        os.umask(before)
    assert place.runs.stat().st_mode & 0o777 == 0o755


def test_a_restart_starts_nothing_from_a_directory_that_somebody_has_put_there(place: Place) -> None:
    first, go, mark = (place.here / name for name in ("first", "go", "mark"))
    waits = (
        f"if [ -e {first} ]; then touch {mark}; else touch {first}; until [ -e {go} ]; do sleep 0.1; done; fi; exit 3"
    )
    place.write(SPEC.replace("exit 3", waits))
    place.runs.mkdir()
    assert place.run("submit", "job.yaml").returncode == 0
    (name,) = place.names
    deadline = time.monotonic() + 60 * PATIENCE
    while not first.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    place.runs.chmod(0o777)
    go.touch()
    done = place.run("wait", name)
    assert not mark.exists()
    assert done.returncode == 5
    assert f"{place.runs} (mode 0777): every user can replace" in place.run("status", name).stdout


def test_the_store_of_code_is_never_a_directory_that_another_user_has_made(place: Place) -> None:
    place.runs.mkdir()
    place.runs.chmod(0o1777)
    (place.here / "train.py").write_text("print('mine')\n")
    place.write(SPEC.replace("{command: [sh, -c, 'exit 3']}", "{script: train.py}"))
    for name in (".code", ".code-0"):
        (place.runs / name).mkdir()
        (place.runs / name).chmod(0o777)
        os.chown(place.runs / name, MALLORY, MALLORY)
    done = place.run("submit", "job.yaml", "--wait")
    assert done.returncode == 1
    assert f"{place.runs / '.code-0'} belongs to uid {MALLORY}" in done.stderr
    assert (place.names, list((place.runs / ".code-0").iterdir())) == ([], [])
    shutil.rmtree(place.runs / ".code-0")
    assert place.run("submit", "job.yaml", "--wait").returncode == 0
    assert (place.runs / ".code-0").stat().st_uid == 0


def test_what_another_user_has_left_under_a_hidden_name_stays(place: Place) -> None:
    place.runs.mkdir()
    place.runs.chmod(0o1777)
    for name in (".staging-0123456789abcdef", ".removed-x-01234567"):
        (place.runs / name).mkdir()
        (place.runs / name / "precious").write_text("x")
        os.chown(place.runs / name, MALLORY, MALLORY)
        os.utime(place.runs / name, (0, 0))
    assert place.run("submit", "job.yaml", "--wait").returncode == 5
    assert place.run("rm", place.names[0], "--yes").returncode == 0
    assert sorted(path.parent.name for path in place.runs.rglob("precious")) == [
        ".removed-x-01234567",
        ".staging-0123456789abcdef",
    ]
