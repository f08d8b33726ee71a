"""Scripts that read and write beside themselves, in git and outside, on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterddp.places.state import read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.state import RunState
from clusterddp.submission.submit import resume, submit, wait
from clusterddp.system.file_set import has_digest
from tests.support.launch_runs import git, plan_script
from tests.support.waiting import PATIENCE

BESIDE = """\
import os
from pathlib import Path

import helper

here = Path(__file__).resolve().parent
print((here / "data" / "train.csv").read_text(), helper.__name__)
(here / f"out-{os.environ['RANK']}.txt").write_text("result")
(here / "data" / f"cache-{os.environ['RANK']}").write_text("")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("1,2,3")
    (tmp_path / "helper.py").write_text("")
    return tmp_path


def completed(project: Path) -> RunDir:
    plan = plan_script(project, BESIDE, resources="{procs_per_node: 2}", environ=os.environ)
    run = RunDir(submit(plan).run_dir)
    assert wait(run, 30 * PATIENCE).state is RunState.COMPLETED, read_state(run).root_cause
    assert run.attempt(0).stdout(1).read_text() == "1,2,3 helper\n"
    assert (run.code / "out-1.txt").read_text() == "result"
    assert not (project / "out-1.txt").exists()
    (stored,) = (project / "runs" / ".code").iterdir()  # a second entry would be one that was damaged
    assert has_digest(stored, stored.name)
    return run


def test_outside_git_a_script_has_its_own_copy_of_what_lies_beside_it(project: Path) -> None:
    run = completed(project)
    assert (run.code / "data" / "cache-1").exists()
    assert not (project / "data" / "cache-1").exists()


def test_in_git_a_script_has_what_git_ignores_by_links(project: Path) -> None:
    git(project, "init")
    (project / ".gitignore").write_text("data/\n")
    run = completed(project)
    assert (run.code / "data").is_symlink()
    assert (project / "data" / "cache-1").exists()


ONCE = """\
import sys
from pathlib import Path

mark = Path(__file__).with_name("mark")
if not mark.exists():
    mark.touch()
    sys.exit(3)
"""


def test_a_resumed_run_finds_what_it_wrote_even_where_a_submit_would_run_in_place_by_now(project: Path) -> None:
    run = RunDir(submit(plan_script(project, ONCE, resources="{}", environ=os.environ)).run_dir)
    assert wait(run, 30 * PATIENCE).state is RunState.FAILED
    with open(project / "big.bin", "wb") as file:
        file.truncate(60_000_000)
    resume(run, overrides=["entry.args=[--again]"])
    assert wait(run, 30 * PATIENCE).state is RunState.COMPLETED
