"""rm, and the sizes in list, on runs made by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.ranks.environment import COOKIE
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run, write_run
from clusterddp.run.removal import measure_run
from clusterddp.run.seal import sealed
from clusterddp.run.sweep import SweepDir
from clusterddp.system.files import write_json
from tests.support.handmade_runs import fail, make_run, start_attempt

DAY_S = 86_400.0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def ended(runs: Path, name: str, *, days_ago: float = 0.0, outcome: str = "COMPLETED") -> RunDir:
    run = make_run(runs, name)
    attempt = start_attempt(run)
    write_end(attempt, AttemptEnd(outcome=outcome, reason="x", ended=time.time() - days_ago * DAY_S))  # type: ignore[arg-type]
    write_json(run.plan, sealed({"gang": {"token": "x"}, "spec": {}}))
    return run


def named(run: RunDir, name: str) -> RunDir:
    write_run(run, dataclasses.replace(read_run(run), name=name))
    return run


def sweep_with(runs: Path, *numbers: int) -> SweepDir:
    sweep = SweepDir(runs / "calm-fox-1")
    for number in numbers:
        ended(sweep.path, f"calm-fox-1.{number}")
    write_json(sweep.record, {"sweep": "calm-fox-1"})
    sweep.tasks.write_text("".join(f"calm-fox-1.{number}\n" for number in numbers))
    return sweep


def left(runs: Path) -> list[str]:
    return sorted(os.listdir(runs))


def command(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capfd.readouterr()
    return code, out, err


def test_runs_that_have_ended_are_removed(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("brisk-otter-1", "brisk-otter-2", "brisk-otter-3"):
        ended(runs, name)
    code, out, _ = command(capfd, "rm", "--yes", "brisk-otter-1", "brisk-otter-3")
    assert (code, left(runs)) == (0, ["brisk-otter-2"])
    assert "removed 2 runs, " in out


def test_a_run_that_goes_on_is_refused_and_the_others_are_removed(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended(runs, "brisk-otter-1")
    start_attempt(make_run(runs, "brisk-otter-2"))
    code, _, err = command(capfd, "rm", "--yes", "brisk-otter-2", "brisk-otter-1")
    assert (code, left(runs)) == (2, ["brisk-otter-2"])
    assert "brisk-otter-2 is RUNNING\nhint: clusterddp cancel brisk-otter-2 ends it" in err


def test_without_a_terminal_it_asks_for_yes(runs: Path) -> None:
    ended(runs, "brisk-otter-1")
    argv = [sys.executable, "-m", "clusterddp", "rm", "brisk-otter-1"]
    result = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert (result.returncode, left(runs)) == (2, ["brisk-otter-1"])
    assert "--yes, or -n to look only" in result.stderr


def test_a_dry_run_says_what_and_how_much(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ended(runs, "brisk-otter-1", days_ago=2.5)
    (run.checkpoints / "last.pt").write_bytes(b"x" * 2**20)
    code, out, _ = command(capfd, "rm", "-n", "brisk-otter-1")
    assert (code, left(runs)) == (0, ["brisk-otter-1"])
    assert "COMPLETED  2d 12h ago" in out
    assert "1.0 MiB of checkpoints" in out


def test_nothing_named_is_wrong_usage(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended(runs, "brisk-otter-1")
    code, _, err = command(capfd, "rm", "--yes")
    assert (code, left(runs)) == (2, ["brisk-otter-1"])
    assert "hint: clusterddp rm RUN, or --state, --name, --older-than" in err


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--state", "failed"], {"failed-1"}),
        (["--state", "FAILED", "--state", "CANCELLED"], {"failed-1", "cancelled-1"}),
        (["--older-than", "30d"], {"old-1"}),
        (["--name", "mine"], {"named-1"}),
        (["--state", "FAILED", "old-1"], set()),
    ],
)
def test_options_select_runs(runs: Path, capfd: pytest.CaptureFixture[str], options: list[str], gone: set[str]) -> None:
    ended(runs, "failed-1", outcome="FAILED")
    ended(runs, "cancelled-1", outcome="CANCELLED")
    ended(runs, "old-1", days_ago=31)
    named(ended(runs, "named-1"), "mine")
    start_attempt(named(make_run(runs, "running-1"), "mine"))
    before = set(left(runs))
    code, _, _ = command(capfd, "rm", "--yes", *options)
    assert (code, before - set(left(runs))) == (0, gone)


def test_the_name_of_a_spec_is_not_the_name_of_a_run(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    named(ended(runs, "brisk-otter-1"), "mine")
    code, _, err = command(capfd, "rm", "--yes", "mine")
    assert (code, left(runs)) == (2, ["brisk-otter-1"])
    assert "hint: --name mine removes all its runs" in err


def test_a_sweep_is_removed_by_its_name(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep_with(runs, 0, 1)
    code, out, _ = command(capfd, "rm", "--yes", "calm-fox-1")
    assert (code, left(runs)) == (0, [])
    assert "removed 2 runs, " in out


def test_runs_of_a_sweep_are_removed_one_by_one_and_the_sweep_with_the_last(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_with(runs, 0, 1)
    assert command(capfd, "rm", "--yes", "calm-fox-1.0")[0] == 0
    assert [run.name for run in sweep.runs()] == ["calm-fox-1.1"]
    assert left(runs) == ["calm-fox-1"]
    assert command(capfd, "rm", "--yes", "calm-fox-1.1")[0] == 0
    assert left(runs) == []


def test_a_sweep_with_a_run_that_goes_on_loses_the_others_only(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = sweep_with(runs, 0, 1)
    start_attempt(RunDir(sweep.path / "calm-fox-1.1"), 1)
    code, _, err = command(capfd, "rm", "--yes", "calm-fox-1")
    assert code == 2
    assert "calm-fox-1.1 is RUNNING" in err
    assert [run.name for run in sweep.runs()] == ["calm-fox-1.1"]


def test_a_run_of_which_processes_live_is_refused(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ended(runs, "brisk-otter-1")
    environment = os.environ | {COOKIE: f"{read_run(run).token}.n0"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        code, _, err = command(capfd, "rm", "--yes", "brisk-otter-1")
        process.kill()
    assert (code, left(runs)) == (2, ["brisk-otter-1"])
    assert "hint: clusterddp gc brisk-otter-1 ends them" in err


def test_a_removal_is_reported_to_scripts(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ended(runs, "brisk-otter-1")
    (run.checkpoints / "last.pt").write_bytes(b"x" * 8192)
    start_attempt(make_run(runs, "brisk-otter-2"))
    code, out, _ = command(capfd, "rm", "--yes", "-o", "json", "brisk-otter-1", "brisk-otter-2")
    answer = json.loads(out)
    assert (code, answer["schema"], answer["dry_run"], answer["unfinished"]) == (2, 1, False, 0)
    (row,) = answer["runs"]
    assert (row["run"], row["state"], row["removed"], row["checkpoints"], row["hosts"]) == (
        "brisk-otter-1", "COMPLETED", True, 8192, [],
    )  # fmt: skip
    assert answer["refused"] == [{"run": "brisk-otter-2", "why": "brisk-otter-2 is RUNNING"}]


def test_wide_lists_have_the_size_of_each_run_and_sort_by_it(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small, large = (ended(runs, name) for name in ("brisk-otter-1", "brisk-otter-2"))
    (large.checkpoints / "last.pt").write_bytes(b"x" * 2**20)
    ended(runs, "brisk-otter-3")
    _, out, _ = command(capfd, "list", "--wide", "--sort", "size")
    title, first, *_ = out.splitlines()
    assert first.startswith("brisk-otter-2")
    assert first[title.index("SIZE") :].startswith("1.0 MiB")
    _, out, _ = command(capfd, "list", "--wide", "-o", "json")
    sizes = {row["run"]: row["bytes"] for row in json.loads(out)}
    assert (sizes[large.name], sizes[small.name]) == (measure_run(large).total, measure_run(small).total)
    _, out, _ = command(capfd, "list", "-o", "json")
    assert {row["bytes"] for row in json.loads(out)} == {None}


def test_a_failed_run_is_one_of_the_ended(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs, "brisk-otter-1")
    fail(start_attempt(run))
    assert command(capfd, "rm", "--yes", "@last")[0] == 0
    assert left(runs) == []


@pytest.mark.root
def test_a_run_of_another_user_is_refused_and_not_selected(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.chown(ended(runs, "brisk-otter-1").path, 65534, 65534)
    code, _, err = command(capfd, "rm", "--yes", "brisk-otter-1")
    assert (code, "belongs to another user" in err) == (2, True)
    assert command(capfd, "rm", "--yes", "--state", "COMPLETED")[0] == 0
    assert left(runs) == ["brisk-otter-1"]


def test_a_run_behind_a_link_is_refused_and_not_selected(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    real = ended(tmp_path / "elsewhere", "brisk-otter-1")
    runs.mkdir()
    (runs / "brisk-otter-1").symlink_to(real.path)
    code, _, err = command(capfd, "rm", "--yes", "brisk-otter-1")
    assert (code, "is a symbolic link" in err) == (2, True)
    assert command(capfd, "rm", "--yes", "--state", "COMPLETED")[0] == 0
    assert real.record.is_file()
    assert left(runs) == ["brisk-otter-1"]


def test_what_a_killed_removal_has_left_is_named_and_goes(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended(runs, "brisk-otter-1")
    (runs / ".removed-calm-fox-1-01234567").mkdir()
    words = f"{runs / '.removed-calm-fox-1-01234567'} is left of a removal that was killed, and goes, too"
    assert words in command(capfd, "rm", "-n", "brisk-otter-1")[2]
    assert left(runs) == [".removed-calm-fox-1-01234567", "brisk-otter-1"]
    assert words in command(capfd, "rm", "--yes", "brisk-otter-1")[2]
    assert left(runs) == []


@pytest.mark.parametrize("link", ["code", "snapshot"])
def test_code_goes_with_the_last_run_that_links_to_it(runs: Path, link: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = ended(runs, "brisk-otter-1")
    snapshot = runs / ".code" / ("a" * 64)
    snapshot.mkdir(parents=True)
    (run.path / link).symlink_to(f"../.code/{snapshot.name}")
    if link == "snapshot":
        run.code.mkdir()
    then = time.time() - DAY_S
    os.utime(snapshot, (then, then))
    _, out, _ = command(capfd, "rm", "-n", "brisk-otter-1")
    assert "in all: 1 run and 1 snapshot of code" in out
    _, out, _ = command(capfd, "rm", "--yes", "brisk-otter-1")
    assert "removed 1 run and 1 snapshot of code" in out
    assert not snapshot.exists()
