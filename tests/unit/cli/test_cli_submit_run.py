"""`submit NAME`: the file of a spec, or an earlier run, never a guess between the two."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.run.directory import RunDir
from tests.support.handmade_runs import make_run

SPEC = 'name: a\ndevice: cpu\nentry: {command: ["true"]}\n'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    run = make_run(tmp_path / "runs", "brisk-otter-3")
    run.spec.write_text(SPEC)
    return run


@pytest.mark.parametrize("name", ["brisk-otter-3", "brisk", "@last", "runs/brisk-otter-3"])
def test_a_run_is_planned_again_by_each_of_its_names(run: RunDir, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", name, "resources.procs_per_node=3", "-n", "-v"]) == 0
    assert "WORLD_SIZE                    3 " in capfd.readouterr().out


def test_a_file_and_a_run_of_one_name_are_not_guessed_between(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / run.name).write_text(SPEC)
    assert main(["submit", run.name, "-n"]) == 2
    assert capfd.readouterr().err == (
        f"error: {run.name} is a file here and a run\n"
        f"hint: {tmp_path / run.name} is the file, runs/{run.name} the run\n"
    )
    assert main(["submit", str(tmp_path / run.name), "-n"]) == 0
    assert main(["submit", f"runs/{run.name}", "-n"]) == 0


def test_a_name_of_neither_is_refused(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "job"]) == 2
    assert capfd.readouterr().err.startswith("error: job: no such file, and no run named job in ")


def test_the_name_of_a_spec_is_no_run(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "test"]) == 2
    assert "test is the name of a spec, not of a file or a run" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--smoke-test", "--sweep"])
def test_what_takes_a_file_refuses_a_run(run: RunDir, option: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", run.name, option]) == 2
    assert f"{option} takes the file of a spec, not a run" in capfd.readouterr().err
