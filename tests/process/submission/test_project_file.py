"""A run whose values come from a project file, on this machine: it is resumed with the values that it began with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import plan_run
from clusterddp.run.directory import RunDir
from clusterddp.run.state import RunState
from clusterddp.spec.load import load_spec
from clusterddp.submission.submit import resume, submit, wait
from tests.support.waiting import PATIENCE

PROGRAM = "import os, sys\nprint(os.environ['FROM'], os.environ.get('LATER'))\nsys.exit(3)\n"


def test_a_changed_project_file_does_not_change_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "fails.py").write_text(PROGRAM)
    (tmp_path / "jobs" / "a.yaml").write_text("name: a\nentry: {script: fails.py}\nsnapshot: false\n")
    shared = tmp_path / "clusterddp.yaml"
    shared.write_text("env: {FROM: first}\nruns_dir: kept\n")
    shared.chmod(0o644)
    request = Request(runs_dir=tmp_path / "kept", working_dir=tmp_path, environ=os.environ)
    run = RunDir(submit(plan_run(load_spec(tmp_path / "jobs" / "a.yaml", environ={}), request)).run_dir)
    assert wait(run, 30 * PATIENCE).state is RunState.FAILED
    shared.write_text("env: {FROM: second, LATER: 'yes'}\nresources: {procs_per_node: 2}\nruns_dir: kept\n")
    resume(run, overrides=["restarts=0"])
    assert wait(run, 30 * PATIENCE).state is RunState.FAILED
    assert [run.attempt(number).stdout(0).read_text() for number in (0, 1)] == ["first None\n"] * 2
    monkeypatch.chdir(tmp_path / "jobs")  # runs_dir is found from below, too
    assert main(["list"]) == 0
    assert run.name in capfd.readouterr().out
