"""Which directories another user could put something else in: by owners, modes and links on the whole way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterddp.system.own_directory import SAFE_DIRECTORIES, find_fault

MALLORY, GROUP = 2002, 2003

pytestmark = pytest.mark.root


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "runs"
    path.mkdir(parents=True)
    return path


def set_mode(path: Path, mode: int, *, owner: int = 0, group: int = 0) -> None:
    os.chown(path, owner, group)
    path.chmod(mode)


@pytest.mark.parametrize(
    ("mode", "group", "is_refused"),
    [
        (0o755, 0, False),
        (0o775, 0, False),  # the group of the owner's own name
        (0o1777, 0, False),
        (0o3770, GROUP, False),
        (0o2755, GROUP, False),
        (0o777, 0, True),
        (0o775, GROUP, True),
        (0o2770, GROUP, True),
    ],
)
@pytest.mark.parametrize("which", ["runs", "parent"])
def test_who_else_may_write_without_the_sticky_bit_is_refused(
    runs: Path, which: str, mode: int, group: int, is_refused: bool
) -> None:
    place = runs if which == "runs" else runs.parent
    set_mode(place, mode, group=group)
    fault = find_fault(runs)
    assert (fault is not None) == is_refused
    if fault is not None:
        assert fault[0].startswith(f"{place} (mode {mode:04o}): ")
        assert fault[1].startswith(f"chmod +t {place}: ")


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_directory_of_another_user_is_refused_wherever_it_is_on_the_way(runs: Path, mode: int) -> None:
    set_mode(runs.parent, mode, owner=MALLORY)
    fault = find_fault(runs)
    assert fault is not None
    assert fault[0].startswith(f"{runs.parent} belongs to uid {MALLORY}, who ")


@pytest.mark.parametrize(
    ("safe", "is_refused"),
    [("{parent}", False), ("{runs}", False), ("/nowhere:{runs}/a", False), ("/nowhere", True), ("project", True)],
)
@pytest.mark.parametrize("owner", [0, MALLORY])
def test_directories_whose_writers_the_user_trusts_pass(
    runs: Path, monkeypatch: pytest.MonkeyPatch, safe: str, is_refused: bool, owner: int
) -> None:
    set_mode(runs.parent, 0o2770, group=GROUP, owner=owner)
    fault = find_fault(runs)
    assert fault is not None
    assert fault[1].endswith(f"export {SAFE_DIRECTORIES}={runs.parent}")
    monkeypatch.setenv(SAFE_DIRECTORIES, safe.format(parent=runs.parent, runs=runs))
    assert (find_fault(runs) is not None) == is_refused


def test_what_the_remedy_types_is_enough(runs: Path) -> None:
    set_mode(runs, 0o2770, group=GROUP)
    fault = find_fault(runs)
    assert fault is not None
    assert os.system(fault[1].partition(":")[0]) == 0
    assert find_fault(runs) is None


def test_a_link_is_followed_and_counts_by_its_owner_and_by_where_it_lies(runs: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    set_mode(shared, 0o1777)
    link = shared / "link"
    link.symlink_to("../project/runs")
    assert find_fault(link) is None
    set_mode(runs.parent, 0o777)
    assert (find_fault(link) or ("",))[0].startswith(str(runs.parent))
    set_mode(runs.parent, 0o755)
    os.chown(link, MALLORY, MALLORY, follow_symlinks=False)
    assert (find_fault(link) or ("",))[0].startswith(f"{link} belongs to")


def test_what_is_not_there_yet_has_no_fault_of_its_own(runs: Path) -> None:
    assert find_fault(runs / "a" / "b") is None
    set_mode(runs, 0o777)
    assert find_fault(runs / "a" / "b") is not None


def test_a_private_directory_is_ours_and_nobody_else_writes_there(runs: Path) -> None:
    assert find_fault(runs, private=True) is None
    set_mode(runs, 0o1777)
    assert find_fault(runs) is None
    fault = find_fault(runs, private=True)
    assert fault is not None
    assert fault[1] == f"chmod go-w {runs}"


def test_a_loop_of_links_is_an_error_and_no_endless_search(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        find_fault(tmp_path / "a" / "runs")
