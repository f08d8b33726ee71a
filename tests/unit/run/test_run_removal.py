"""Removing runs from a runs directory: nothing else goes, nothing is left half, code stays that a run needs."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.places.staging import remove_abandoned
from clusterddp.run.code import SnapshotPlan, write_snapshot
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.run.removal import find_unused_snapshots, fingerprint, measure_run, remove_place, remove_snapshots
from clusterddp.system import directories
from clusterddp.system.directories import finish_removals
from clusterddp.system.files import write_json
from clusterddp.system.units import parse_age
from tests.support.handmade_runs import complete, make_run, start_attempt

DAY_S = 86_400.0


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def run(runs: Path) -> RunDir:
    return ended(runs, "brisk-otter-3")


def ended(runs: Path, name: str) -> RunDir:
    run = make_run(runs, name)
    complete(run, start_attempt(run))
    return run


def remove(run: RunDir, runs: Path) -> None:
    remove_place(run.path, runs, seen=fingerprint(run.path))


def snapshot(runs: Path, run: RunDir, text: str, *, age_s: float = DAY_S) -> Path:
    source = runs.parent / "source"
    source.mkdir(exist_ok=True)
    (source / "train.py").write_text(text)
    plan = SnapshotPlan(source="git", root=source, files=("train.py",), total_bytes=len(text))
    digest = write_snapshot(plan, runs / ".code", run.code)
    old = time.time() - age_s
    os.utime(runs / ".code" / digest, (old, old))
    return runs / ".code" / digest


def unused(runs: Path, **options: Any) -> list[Path]:
    return [each.path for each in find_unused_snapshots(runs, **options)]


def test_a_run_is_removed_whole(run: RunDir, runs: Path) -> None:
    locked = run.output / "read-only"
    locked.mkdir(parents=True)
    (locked / "result").write_text("x")
    locked.chmod(0o500)
    remove(run, runs)
    assert os.listdir(runs) == []


def test_what_a_link_in_a_run_points_at_stays(run: RunDir, runs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_text("x")
    outside.chmod(0o500)
    run.output.symlink_to(outside)
    (run.path / "file").symlink_to(outside / "data")
    remove(run, runs)
    assert (outside / "data").read_text() == "x"
    assert outside.stat().st_mode & 0o777 == 0o500
    assert not run.path.exists()


def test_a_run_that_is_a_link_is_refused(runs: Path, tmp_path: Path) -> None:
    real = ended(tmp_path / "elsewhere", "brisk-otter-3")
    runs.mkdir()
    (runs / "linked").symlink_to(real.path)
    with pytest.raises(UsageError, match="is a symbolic link"):
        remove_place(runs / "linked", runs, seen=fingerprint(real.path))
    assert real.record.is_file()


def test_a_run_of_another_runs_directory_is_refused(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    with pytest.raises(UsageError, match="is not in") as caught:
        remove(run, tmp_path / "others")
    assert caught.value.hint == f"--runs {run.path.parent} names its directory"
    assert run.record.is_file()


def test_a_runs_directory_behind_a_link_works(run: RunDir, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runs)
    remove(RunDir(tmp_path / "link" / run.name), tmp_path / "link")
    assert os.listdir(runs) == []


def test_a_run_that_was_resumed_meanwhile_stays(run: RunDir, runs: Path) -> None:
    seen = fingerprint(run.path)
    start_attempt(run, 1)
    with pytest.raises(UsageError, match="has been started again"):
        remove_place(run.path, runs, seen=seen)
    assert [each.name for each in list_runs(runs)] == [run.name]
    assert run.attempt(1).start.is_file()


def test_a_removal_that_was_killed_shows_no_run_and_the_next_one_deletes_it(
    run: RunDir, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        shutil.rmtree(path / "attempts")
        raise KeyboardInterrupt

    monkeypatch.setattr(directories, "_delete", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(run, runs)
    assert list_runs(runs) == []
    assert len(os.listdir(runs)) == 1
    monkeypatch.undo()
    finish_removals(runs)
    assert os.listdir(runs) == []


def test_a_removal_that_another_process_checks_is_left_to_it(runs: Path) -> None:
    (runs / ".removing-brisk-otter-3-1234").mkdir(parents=True)
    finish_removals(runs)
    assert os.listdir(runs) == [".removing-brisk-otter-3-1234"]


@pytest.mark.parametrize(("mode", "left"), [(0o755, 0), (0o1777, 0), (0o777, 2)])
def test_a_hidden_name_proves_no_removal_where_others_can_rename_a_run(
    run: RunDir, runs: Path, mode: int, left: int
) -> None:
    make_run(runs, "calm-fox-1").path.rename(runs / ".staging-0123456789abcdef")
    write_json(runs / ".staging-0123456789abcdef" / "run.json", {"submitter": {}})
    os.utime(runs / ".staging-0123456789abcdef", (1, 1))
    run.path.rename(runs / ".removed-x-01234567")
    runs.chmod(mode)
    finish_removals(runs)
    remove_abandoned(runs)
    assert len(os.listdir(runs)) == left


def test_a_file_system_that_refuses_is_named(run: RunDir, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(39, "Directory not empty", str(path / "checkpoints"))

    monkeypatch.setattr(directories, "_delete", refuse)
    with pytest.raises(ClusterddpError, match="checkpoints: Directory not empty"):
        remove(run, runs)


def test_code_is_unused_when_no_run_links_to_it(run: RunDir, runs: Path) -> None:
    other = ended(runs, "calm-fox-1")
    first, second = snapshot(runs, run, "one"), snapshot(runs, other, "two")
    assert unused(runs) == []
    assert unused(runs, without=[run.path]) == [first]
    remove(run, runs)
    remove_snapshots(find_unused_snapshots(runs), runs)
    assert (first.exists(), second.exists()) == (False, True)


def test_code_of_a_sweep_stays_while_a_run_of_it_does(runs: Path) -> None:
    sweep = ended(runs, "brisk-otter-4")
    member = ended(sweep.path, "brisk-otter-4.0")
    kept = snapshot(runs, sweep, "one")
    sweep.code.rename(member.code)
    assert unused(runs) == []
    assert unused(runs, without=[member.path]) == [kept]


def test_code_that_was_just_used_stays(run: RunDir, runs: Path) -> None:
    kept = snapshot(runs, run, "one", age_s=60.0)
    remove(run, runs)
    assert unused(runs) == []
    assert kept.exists()


def test_a_submit_that_takes_code_from_the_store_keeps_it(run: RunDir, runs: Path) -> None:
    kept = snapshot(runs, run, "one")
    found = find_unused_snapshots(runs, without=[run.path])
    remove(run, runs)
    staging = RunDir(runs / ".staging-1234")
    staging.path.mkdir()
    source = runs.parent / "source"
    write_snapshot(
        SnapshotPlan(source="git", root=source, files=("train.py",), total_bytes=3), kept.parent, staging.code
    )
    assert remove_snapshots(found, runs) == []
    assert (staging.code / "train.py").read_text() == "one"


def test_sizes_are_by_what_they_are_for(run: RunDir) -> None:
    before = measure_run(run)
    (run.checkpoints / "step-1.pt").write_bytes(b"x" * 100_000)
    os.link(run.checkpoints / "step-1.pt", run.checkpoints / "last.pt")
    run.attempt(0).stdout(0).write_bytes(b"x" * 50_000)
    run.output.mkdir()
    (run.output / "a").write_bytes(b"x" * 20_000)
    after = measure_run(run)
    assert 100_000 <= after.checkpoints - before.checkpoints < 110_000
    assert 50_000 <= after.logs - before.logs < 60_000
    assert 20_000 <= after.output - before.output < 30_000
    assert after.other == before.other
    assert after.total == after.checkpoints + after.logs + after.output + after.tensorboard + after.other


@pytest.mark.parametrize(
    ("text", "expected"), [("12h", 43_200.0), ("30d", 2_592_000.0), ("2w", 1_209_600.0), ("0d", None), ("3", None)]
)
def test_an_age_has_a_unit(text: str, expected: float | None) -> None:
    assert parse_age(text) == expected
