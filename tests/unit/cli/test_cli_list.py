"""What `list` selects, counts and sorts, on runs made by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.run.directory import RunDir
from clusterddp.system.files import write_json
from tests.support.handmade_runs import complete, fail, make_run, opens_of, start_attempt, train


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three failed runs and two completed ones; the completed ones are of another spec."""
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "runs"))
    for number in range(3):
        fail(start_attempt(make_run(tmp_path / "runs", f"failed-{number}")))
    for number in range(2):
        run = make_run(tmp_path / "runs", f"done-{number}")
        train(run, steps=50 + 50 * number)
        complete(run, start_attempt(run))
        write_json(run.record, json.loads(run.record.read_text()) | {"name": "mine"})
    return tmp_path / "runs"


def listed(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], str]:
    """Return the names of the runs that `list` shows, and what it says besides."""
    assert main(["list", *arguments]) == 0
    out, err = capfd.readouterr()
    return [line.split()[0] for line in out.splitlines()[1:]], err


def test_the_runs_that_are_not_shown_are_counted_as_selected(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert listed(capfd, "--state", "FAILED", "--limit", "1") == (
        ["failed-2"],
        "the newest 1 of 3 FAILED runs; --limit 3 shows all\n",
    )
    assert listed(capfd, "--limit", "4")[1] == "the newest 4 of 5 runs; --limit 5 shows all\n"
    assert listed(capfd, "--state", "failed", "--state", "completed", "--limit", "4")[1].startswith(
        "the newest 4 of 5 FAILED or COMPLETED runs"
    )
    assert listed(capfd, "--state", "FAILED")[1] == ""


def test_runs_of_one_spec_are_selected_by_its_name(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert listed(capfd, "--name", "mine") == (["done-1", "done-0"], "")
    assert (
        listed(capfd, "--name", "mine", "--limit", "1")[1] == "the newest 1 of 2 runs named mine; --limit 2 shows all\n"
    )
    assert main(["list", "--name", "mine", "-o", "json"]) == 0
    assert [run["name"] for run in json.loads(capfd.readouterr().out)] == ["mine", "mine"]


def test_no_run_of_a_state_is_said_with_the_state(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert listed(capfd, "--state", "LOST") == ([], f"no LOST runs in {runs_dir}\n")


def test_a_state_that_does_not_exist_is_a_wrong_usage(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--state", "DONE"]) == 2
    assert "'DONE' is not one of 'pending', 'running'" in capfd.readouterr().err


def test_sorted_runs_are_chosen_from_all_of_them(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names, said = listed(capfd, "--sort", "accuracy", "--limit", "1")
    assert (names, said) == (["done-1"], "the first 1 of 5 runs; --limit 5 shows all\n")


def test_runs_are_sorted_by_the_time_that_is_shown(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    for name, created, started, ended in (("done-0", 900, 10, 0), ("done-1", 500, 400, 0), ("failed-0", 300, 200, 100)):
        run = RunDir(runs_dir / name)
        attempt = run.attempt(0)
        for path, values in (
            (run.record, {"created_ns": int((now - created) * 1e9)}),
            (attempt.start, {"started": now - started}),
            (attempt.end, {"ended": now - ended}),
        ):
            write_json(path, json.loads(path.read_text()) | values)
    assert listed(capfd, "--sort", "time")[0][:3] == ["done-1", "failed-0", "done-0"]


def test_runs_that_are_only_counted_are_not_read_whole(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    opened = opens_of(lambda: listed(capfd, "--state", "COMPLETED", "--limit", "1"), runs_dir)
    assert [path for path in opened if path.endswith("metrics.jsonl")] == [str(runs_dir / "done-1/metrics.jsonl")]


def test_the_name_column_is_there_when_names_differ(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capfd.readouterr().out.splitlines()[0].split()[:3] == ["RUN", "NAME", "STATE"]
    write_json(
        RunDir(runs_dir / "done-0").record,
        json.loads(RunDir(runs_dir / "done-0").record.read_text()) | {"name": "a\x1b[30mb"},
    )
    assert main(["list", "--name", "a\x1b[30mb"]) == 0
    assert "\x1b" not in capfd.readouterr().out
