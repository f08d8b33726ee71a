"""The run's own copy of its code, on real files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.run.code import CodeCopy, plan_copy, plan_snapshot, replace_link, run_git, write_snapshot
from clusterddp.run.directory import RunDir
from clusterddp.run.removal import measure_run
from clusterddp.system.file_set import has_digest
from tests.support.launch_runs import bare_repository, git


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with ignored data, and links within it and out of it."""
    root = tmp_path / "project"
    for name in ("src/train.py", "src/ext.so", "data/train.csv", "ckpt/.gitkeep", "ckpt/last.pt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "words.txt").write_text("words")
    (root / "src" / "shared").symlink_to("../../shared")
    (root / "src" / "up").symlink_to("../ckpt")
    (root / ".gitignore").write_text("data/\n*.so\nckpt/*\n!ckpt/.gitkeep\n")
    git(root, "init")
    git(root, "add", "-A")
    return root


def copy_of(project: Path) -> tuple[Path, Path]:
    """Write a run's copy of the code; return the copy and the snapshot in the store."""
    runs_dir = project.parent / "runs"
    environ = {"PATH": os.environ["PATH"], "HOME": str(project.parent)}
    plan = plan_snapshot(project, runs_dir=runs_dir, environ=environ)
    assert plan is not None
    code = runs_dir / "one" / "code"
    code.parent.mkdir(parents=True)
    digest = write_snapshot(plan, runs_dir / ".code", code)
    replace_link(code, plan)
    return code, runs_dir / ".code" / digest


def test_a_copy_is_a_directory_of_the_run_whose_files_resolve_within_it(project: Path) -> None:
    code, _ = copy_of(project)
    assert (code / "src" / "train.py").resolve() == code.resolve() / "src" / "train.py"
    assert (code / "src" / "train.py").read_text() == "src/train.py"


def test_what_is_written_beside_the_code_never_reaches_the_store(project: Path) -> None:
    code, stored = copy_of(project)
    (code / "src" / "train.py").resolve().with_name("out.pt").write_text("")
    (code / "src" / "__pycache__").mkdir()
    if os.geteuid() == 0:  # root may write to a read-only file
        (code / "src" / "train.py").write_text("changed")
    assert has_digest(stored, stored.name)


def test_what_git_ignores_is_a_link_to_the_original(project: Path) -> None:
    code, stored = copy_of(project)
    assert {name: (code / name).readlink() for name in ("src/ext.so", "data", "ckpt")} == {
        name: project / name for name in ("src/ext.so", "data", "ckpt")
    }
    (code / "ckpt" / "next.pt").write_text("")
    assert (project / "ckpt" / "next.pt").exists()
    assert not (stored / "data").exists()


def test_a_link_that_leads_out_of_the_repository_still_leads_there(project: Path) -> None:
    code, stored = copy_of(project)
    assert (code / "src" / "shared" / "words.txt").read_text() == "words"
    assert (code / "src" / "up").readlink() == Path("../ckpt")
    assert (stored / "src" / "shared").readlink() == Path("../../shared")


def test_a_run_with_a_copy_has_a_link_that_names_its_snapshot(project: Path) -> None:
    code, stored = copy_of(project)
    assert RunDir(code.parent).snapshot.readlink() == Path("../.code") / stored.name


def test_the_disk_usage_of_a_run_is_without_its_hard_links_to_the_snapshot(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.code.mkdir(parents=True)
    (tmp_path / "stored.py").write_text("x" * 5000)
    os.link(tmp_path / "stored.py", run.code / "stored.py")
    assert measure_run(run).total == 0
    (run.code / "out.pt").write_text("x" * 5000)
    assert measure_run(run).total >= 5000


def test_copies_of_one_snapshot_are_apart(project: Path) -> None:
    code, stored = copy_of(project)
    plan = plan_snapshot(project, runs_dir=project.parent / "runs", environ=os.environ)
    assert plan is not None
    other = code.parent / "other"
    plan_copy(stored, plan).write(other)
    (code / "src" / "out.pt").write_text("")
    assert not (other / "src" / "out.pt").exists()


def test_another_user_than_root_gets_hard_links() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as name:  # tmp_path is root's alone
        stored, copy = Path(name, "stored"), Path(name, "copy")
        stored.mkdir()
        (stored / "train.py").write_text("")
        for path in (stored.parent, stored, stored / "train.py"):
            os.chown(path, 12345, 12345)
        child = os.fork()
        if child == 0:
            os.setuid(12345)
            CodeCopy(stored=stored, links={}).write(copy)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (copy / "train.py").samefile(stored / "train.py")


def test_git_starts_no_program_that_a_repository_names(tmp_path: Path) -> None:
    """A bare one, whose remote is a program; and one whose monitor of the file system is one, too."""
    pwned = tmp_path / "pwned"
    bare_repository(tmp_path / "g", f"touch {pwned}")
    with pytest.raises(ClusterddpError):
        run_git(["ls-tree", "-r", "a" * 40], tmp_path / "g", os.environ)
    git(tmp_path, "init")
    git(tmp_path, "config", "extensions.partialClone", "origin")
    git(tmp_path, "config", "core.repositoryFormatVersion", "1")
    git(tmp_path, "config", "remote.origin.url", ".")
    git(tmp_path, "config", "remote.origin.promisor", "true")
    git(tmp_path, "config", "remote.origin.uploadpack", f"touch {pwned}; false")
    git(tmp_path, "config", "core.fsmonitor", f"touch {pwned}")
    with pytest.raises(ClusterddpError):
        run_git(["ls-tree", "-r", "a" * 40], tmp_path, os.environ)
    run_git(["status"], tmp_path, os.environ)
    assert not pwned.exists()
