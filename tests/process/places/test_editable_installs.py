"""A package of the repository that pip has installed as editable: ranks import it from their snapshot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch_runs import git
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE

PROJECT = """\
[project]
name = "toy-models"
version = "1"
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[tool.setuptools]
"""
LAYOUTS = {
    "path": ("src/toymodels", 'package-dir = {"" = "src"}\npackages = ["toymodels"]\n'),
    "finder": ("toymodels", 'packages = ["toymodels"]\n'),
}
"""The two ways in which setuptools makes an editable install: a line in a .pth file, and a finder of modules."""
SHOW = """\
import multiprocessing, toymodels
def show(_):
    return toymodels.__file__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(show(0), *pool.map(show, [0]), flush=True)
"""


def install(place: Path, layout: str) -> Path:
    """Lay out a project in `place`, install it into an environment beside it; return that environment's Python."""
    package, lines = LAYOUTS[layout]
    (place / package).mkdir(parents=True)
    (place / package / "__init__.py").write_text("")
    (place / "pyproject.toml").write_text(PROJECT + lines)
    environment = place.with_name("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    (site / "of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    pip = [sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "-e", place], check=True, capture_output=True, text=True)
    return python


def submit(python: Path, directory: Path, entry: str, *options: str) -> dict[str, Any]:
    """Submit a run of two ranks by the command of that environment; return its answer in JSON."""
    (directory / "job.yaml").write_text(
        f"name: job\ndevice: cpu\nresources: {{procs_per_node: 2}}\nentry: {{{entry}}}\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "CLUSTERDDP_RUNS"}}
    argv = [python, "-m", "clusterddp", "submit", "job.yaml", "-o", "json", *options]
    done = subprocess.run(
        argv, cwd=directory, env=kept, capture_output=True, text=True, timeout=PATIENCE * 30, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1] if "--wait" in options else done.stdout)
    return answer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_their_children_import_an_editable_package_from_the_snapshot(tmp_path: Path, layout: str) -> None:
    project = tmp_path / "project"
    python = install(project, layout)
    git(project, "init")
    (project / ".gitignore").write_text("*.egg-info\nruns/\n")
    (project / "scripts").mkdir()
    (project / "scripts" / "show.py").write_text(SHOW)
    for entry in ("script: scripts/show.py", f"command: [{python}, scripts/show.py]"):
        run = Path(submit(python, project, entry, "--wait")["run_dir"])
        file = str(run / "code" / LAYOUTS[layout][0] / "__init__.py")
        logs = [(run / f"attempts/0/logs/rank-00{rank}.out").read_text() for rank in range(2)]
        assert logs == [f"{file} {file}\n"] * 2


def test_an_editable_package_that_the_snapshot_does_not_hold_is_named_in_the_plan(tmp_path: Path) -> None:
    project = tmp_path / "project"
    python = install(project / "vendored", "path")
    git(project, "init")
    (project / ".gitignore").write_text("vendored/\nenvironment/\n")
    (project / "show.py").write_text(SHOW)
    plan = submit(python, project, "script: show.py", "-n")
    expected = f"toy_models is an editable install of {project}/vendored, which is not in the snapshot"
    assert [note for note in plan["notes"] if note.startswith(expected)] != []


def test_an_editable_package_outside_of_the_code_is_no_matter_of_the_plan(tmp_path: Path) -> None:
    python = install(tmp_path / "other", "path")
    project = tmp_path / "project"
    project.mkdir()
    git(project, "init")
    (project / "show.py").write_text(SHOW)
    plan = submit(python, project, "script: show.py", "-n")
    assert (plan["notes"], plan["gang"]["entry"]["import_paths"]) == ([], [f"{plan['runs_dir']}/{plan['run']}/code"])
