"""What can go from a host's disk: real directories, made old by their times."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterddp.run.attempts import AttemptEnd
from clusterddp.run.directory import RunDir
from clusterddp.run.removal import Storage, find_stored, keep_package, remove_stored
from tests.support.stored_runs import COMPLETED, DAY_S, RUN, TOKEN, age, make_run
from tests.support.waiting import wait_until

MONTH_S = 30 * DAY_S


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Everything that is ours on a host: nothing yet."""
    for name in ("runs", "code", "packages"):
        (tmp_path / name).mkdir()
    return tmp_path


def make_shared(root: Path, place: str, *, age_days: float = 40) -> Path:
    """Make a snapshot or a package of one file."""
    path = root / place
    path.mkdir(mode=0o700)
    (path / "train.py").write_text("print(1)\n")
    age(path, age_days)
    return path


def places(storage: Storage) -> list[str]:
    return [each.place for each in storage.removable]


@contextmanager
def process_of_a_run(**environment: str) -> Iterator[None]:
    process = subprocess.Popen(["sleep", "600"], env={"CLUSTERDDP_COOKIE": f"{TOKEN}.s0", **environment})
    try:
        # Popen returns when the old program's files are closed, a moment before the new one's variables can be read.
        wait_until(lambda: b"CLUSTERDDP_COOKIE" in Path(f"/proc/{process.pid}/environ").read_bytes())
        yield
    finally:
        process.kill()
        process.wait()


def test_a_run_that_ended_long_ago_can_go(root):
    make_run(root, end=COMPLETED)
    assert places(find_stored(root, older_than_s=MONTH_S)) == [f"runs/{RUN}"]


def test_checkpoints_that_go_with_a_run_are_weighed(root):
    make_run(root, end=COMPLETED)
    (stored,) = find_stored(root, older_than_s=MONTH_S).removable
    assert (stored.checkpoints, stored.size > 8192) == (8192, True)


def test_a_run_that_ended_lately_stays(root):
    make_run(root, end=COMPLETED, age_days=29)
    assert places(find_stored(root, older_than_s=MONTH_S)) == []


def test_a_run_without_an_end_stays_and_is_named(root):
    make_run(root, end=None)
    storage = find_stored(root, older_than_s=MONTH_S)
    assert (places(storage), storage.unfinished) == ([], (RUN,))


def test_a_run_that_was_to_restart_stays(root):
    make_run(root, end=AttemptEnd(outcome="FAILED", reason="rank 3 failed", will_restart=True))
    assert places(find_stored(root, older_than_s=MONTH_S)) == []


def test_a_run_of_which_a_process_lives_stays(root):
    make_run(root, end=COMPLETED)
    with process_of_a_run():
        assert places(find_stored(root, older_than_s=MONTH_S)) == []


def test_an_old_run_that_was_started_again_stays(root):
    path = make_run(root, end=COMPLETED)
    RunDir(path).attempt(1).path.mkdir()
    assert places(find_stored(root, older_than_s=MONTH_S)) == []


def test_a_snapshot_stays_that_a_run_which_stays_has_links_to(root):
    snapshot = make_shared(root, "code/aa")
    run = make_run(root, end=COMPLETED, age_days=1)
    (run / "code").mkdir()
    (run / "code" / "train.py").hardlink_to(snapshot / "train.py")
    assert places(find_stored(root, older_than_s=MONTH_S)) == []


def test_a_snapshot_goes_with_the_last_run_that_has_links_to_it(root):
    snapshot = make_shared(root, "code/aa")
    run = make_run(root, end=COMPLETED)
    (run / "code").mkdir()
    (run / "code" / "train.py").hardlink_to(snapshot / "train.py")
    age(run, 40)
    assert places(find_stored(root, older_than_s=MONTH_S)) == [f"runs/{RUN}", "code/aa"]


def test_a_snapshot_that_came_lately_stays(root):
    make_shared(root, "code/aa", age_days=1)
    assert places(find_stored(root, older_than_s=MONTH_S)) == []


def test_the_package_that_looks_stays(root):
    make_shared(root, "packages/aa")
    assert places(find_stored(root, older_than_s=MONTH_S, in_use=["aa"])) == []


def test_a_package_from_which_a_process_of_a_run_imports_stays(root):
    package = make_shared(root, "packages/aa")
    with process_of_a_run(PYTHONPATH=f"/usr/lib:{package}"):
        assert places(find_stored(root, older_than_s=MONTH_S)) == []


def test_what_a_transfer_left_that_was_cut_off_can_go(root):
    make_shared(root, "packages/.package-x1")
    (stored,) = find_stored(root, older_than_s=MONTH_S).removable
    assert (stored.place, stored.kind) == ("packages/.package-x1", "remnant")


def test_what_may_be_a_transfer_under_way_stays(root):
    make_shared(root, "packages/.package-x1", age_days=0.5)
    assert places(find_stored(root, older_than_s=3600.0)) == []


def test_a_link_to_elsewhere_is_not_ours(root, tmp_path):
    elsewhere = make_run(tmp_path / "elsewhere", end=COMPLETED)
    (root / "runs" / RUN).symlink_to(elsewhere)
    assert places(find_stored(root, older_than_s=MONTH_S)) == []


def test_what_a_link_in_a_run_points_to_survives(root, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.bin").touch()
    run = make_run(root, end=COMPLETED)
    (run / "data").symlink_to(data)
    age(run, 40)
    remove_stored(root, [f"runs/{RUN}"], older_than_s=MONTH_S)
    assert (run.exists(), (data / "train.bin").exists()) == (False, True)


def test_a_snapshot_that_cannot_be_written_is_removed(root):
    snapshot = make_shared(root, "code/aa")
    snapshot.chmod(0o500)
    remove_stored(root, ["code/aa"], older_than_s=MONTH_S)
    assert list((root / "code").iterdir()) == []


def test_nothing_is_removed_that_was_not_found(root, tmp_path):
    stranger = tmp_path / "thesis"
    stranger.mkdir()
    (removed,) = remove_stored(root, ["runs/../thesis"], older_than_s=MONTH_S)
    assert (stranger.exists(), removed.error) == (True, "is in use again")


def test_what_was_removed_meanwhile_is_no_error(root):
    (removed,) = remove_stored(root, [f"runs/{RUN}"], older_than_s=MONTH_S)
    assert (removed.size, removed.error) == (0, None)


def test_a_package_stays_that_jobs_may_import_when_they_start(root: Path) -> None:
    keep_package(make_shared(root, "packages/aa11"))
    make_shared(root, "packages/bb22")
    assert places(find_stored(root, older_than_s=MONTH_S)) == ["packages/bb22"]
