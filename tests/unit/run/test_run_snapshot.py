"""The snapshot of the code, on real git repositories."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.run.code import (
    SnapshotPlan,
    describe_commit,
    find_root,
    plan_script_snapshot,
    plan_snapshot,
    write_snapshot,
)
from clusterddp.system.file_set import list_files
from tests.support.launch_runs import git


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one file of each kind that matters."""
    root = tmp_path / "repository"
    (root / "package").mkdir(parents=True)
    git(root, "init")
    (root / ".gitignore").write_text("*.log\n")
    (root / "package" / "tracked.py").write_text("tracked = 1\n")
    (root / "deleted.py").write_text("")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link.py").symlink_to("package/tracked.py")
    git(root, "add", "-A")
    git(root, "commit", "-m", "first")
    (root / "package" / "tracked.py").write_text("tracked = 2  # not committed\n")
    (root / "deleted.py").unlink()
    (root / "new file\n.py").write_text("new = 1\n")
    (root / "noise.log").write_text("ignored")
    return root


def take(root: Path, environ: Mapping[str, str], runs_dir: Path, run: str = "one") -> tuple[Path, str]:
    plan = plan_snapshot(root, runs_dir=runs_dir, environ=environ)
    assert plan is not None
    return keep(plan, runs_dir, run)


def keep(plan: SnapshotPlan, runs_dir: Path, run: str = "one") -> tuple[Path, str]:
    (runs_dir / run).mkdir(parents=True)
    link = runs_dir / run / "code"
    return link, write_snapshot(plan, runs_dir / ".code", link)


def names_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or path.is_file())


def test_a_snapshot_holds_tracked_and_new_files_as_they_are_on_disk(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    code, _ = take(repository, environ, tmp_path / "runs")
    assert names_below(code.resolve()) == [".gitignore", "link.py", "new file\n.py", "package/tracked.py", "run.sh"]
    assert (code / "package" / "tracked.py").read_text() == "tracked = 2  # not committed\n"


def test_links_stay_links_and_programs_stay_executable(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    code, _ = take(repository, environ, tmp_path / "runs")
    assert (code / "link.py").readlink() == Path("package/tracked.py")
    assert (code / "run.sh").stat().st_mode & stat.S_IXUSR
    assert not (code / "package" / "tracked.py").stat().st_mode & stat.S_IXUSR


def test_a_snapshot_is_for_its_owners_eyes_and_not_to_be_edited(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    code, _ = take(repository, environ, tmp_path / "runs")
    assert stat.S_IMODE((code / "package" / "tracked.py").stat().st_mode) == 0o400
    assert stat.S_IMODE((code / "package").stat().st_mode) == 0o700


def test_the_link_to_a_snapshot_moves_along_with_the_runs_directory(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    code, digest = take(repository, environ, tmp_path / "runs")
    assert code.readlink() == Path(f"../.code/{digest}")


def test_equal_code_is_kept_once_and_other_code_beside_it(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    runs_dir = tmp_path / "runs"
    first, second = take(repository, environ, runs_dir, "one")[1], take(repository, environ, runs_dir, "two")[1]
    (repository / "run.sh").chmod(0o644)
    third = take(repository, environ, runs_dir, "three")[1]
    assert first == second != third
    assert sorted(os.listdir(runs_dir / ".code")) == sorted({first, third})


def test_a_kept_snapshot_that_was_changed_by_hand_is_replaced_and_set_aside(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    code, digest = take(repository, environ, tmp_path / "runs", "one")
    tracked = code.resolve() / "package" / "tracked.py"
    tracked.chmod(0o600)
    tracked.write_text("something else\n")
    assert take(repository, environ, tmp_path / "runs", "two")[1] == digest
    assert list_files(tmp_path / "runs" / ".code" / digest).digest() == digest
    assert len(os.listdir(tmp_path / "runs" / ".code")) == 2


def test_a_runs_directory_inside_the_repository_is_left_out(repository: Path, environ: Mapping[str, str]) -> None:
    runs_dir = repository / "runs"
    first = take(repository, environ, runs_dir, "one")[1]
    assert take(repository, environ, runs_dir, "two")[1] == first


def test_a_repository_that_is_the_runs_directory_leaves_out_the_runs(
    repository: Path, environ: Mapping[str, str]
) -> None:
    (repository / "zero").mkdir()
    (repository / "zero" / "run.json").write_text("{}")
    (repository / ".staging-1").mkdir()
    (repository / ".staging-1" / "run.json").write_text("{}")
    plan = plan_snapshot(repository, runs_dir=repository, environ=environ)
    assert plan is not None
    assert plan.files == (".gitignore", "link.py", "new file\n.py", "package/tracked.py", "run.sh")


def test_a_repository_below_the_runs_directory_is_kept(repository: Path, environ: Mapping[str, str]) -> None:
    plan = plan_snapshot(repository, runs_dir=repository.parent, environ=environ)
    assert plan is not None
    assert len(plan.files) == 5


def test_repositories_within_the_repository_are_linked(repository: Path, environ: Mapping[str, str]) -> None:
    (repository / "vendored").mkdir()
    git(repository / "vendored", "init")
    (repository / "vendored" / "x.py").write_text("")
    plan = plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)
    assert plan is not None
    assert (plan.ignored, plan.repositories, plan.notes) == (("vendored", "noise.log"), ("vendored",), ())


def add_submodule(root: Path, name: str, *files: str, origin: Path | None = None) -> None:
    """Add a submodule with these files, which are committed; *.so are ignored there."""
    origin = origin or root.parent / "origin"
    for file in ("x.py", *files):
        (origin / file).parent.mkdir(parents=True, exist_ok=True)
        (origin / file).write_text("1\n")
    git(origin, "init")
    (origin / ".gitignore").write_text("*.so\n")
    git(origin, "add", "-A")
    git(origin, "commit", "-m", "first")
    git(root, "-c", "protocol.file.allow=always", "submodule", "add", str(origin), name)


def test_the_files_of_submodules_are_files_of_the_snapshot(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    add_submodule(repository, "third/party", "deep/y.py")
    add_submodule(repository / "third/party", "nested", origin=tmp_path / "nested")
    (repository / "third/party/deep/y.py").write_text("changed\n")
    (repository / "third/party/new.py").write_text("")
    (repository / "third/party/ext.so").write_text("")
    plan = plan_snapshot(repository, runs_dir=tmp_path / "runs", environ=environ)
    assert plan is not None
    assert [name for name in plan.files if name.startswith("third/")] == [
        *("third/party/.gitignore", "third/party/.gitmodules", "third/party/deep/y.py"),
        *("third/party/nested/.gitignore", "third/party/nested/x.py", "third/party/new.py", "third/party/x.py"),
    ]
    assert (plan.ignored, plan.notes) == (("noise.log", "third/party/ext.so"), ())
    code, _ = keep(plan, tmp_path / "runs")
    assert (code / "third/party/deep/y.py").read_text() == "changed\n"


def test_submodules_too_large_for_a_snapshot_are_linked(repository: Path, environ: Mapping[str, str]) -> None:
    add_submodule(repository, "large")
    with open(repository / "large" / "weights.bin", "wb") as file:
        file.truncate(201_000_000)
    plan = plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)
    assert plan is not None
    assert (plan.repositories, "large" in plan.ignored, "large/x.py" in plan.files) == (("large",), True, False)


def test_a_submodule_that_git_cannot_read_is_linked(repository: Path, environ: Mapping[str, str]) -> None:
    add_submodule(repository, "party")
    (repository / "party" / ".git").write_text("gitdir: ../nowhere\n")
    plan = plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)
    assert plan is not None
    assert (plan.repositories, "party" in plan.ignored) == (("party",), True)


def test_a_submodule_that_is_not_checked_out_is_named(repository: Path, environ: Mapping[str, str]) -> None:
    add_submodule(repository, "third/party")
    git(repository, "submodule", "deinit", "-f", "third/party")
    plan = plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)
    assert plan is not None
    hint = "`git submodule update --init third/party` brings its files"
    assert plan.notes == (f"third/party: a submodule that is not checked out; {hint}",)


def test_a_submodule_starts_no_program_that_it_names(repository: Path, environ: Mapping[str, str]) -> None:
    add_submodule(repository, "third/party")
    git(repository / "third/party", "config", "core.fsmonitor", f"touch {repository}/started")
    assert plan_snapshot(repository, runs_dir=repository / "runs", environ=environ) is not None
    assert not (repository / "started").exists()


def test_a_fifo_is_left_out_with_a_note(repository: Path, environ: Mapping[str, str], tmp_path: Path) -> None:
    (repository / "run.sh").unlink()
    os.mkfifo(repository / "run.sh")
    plan = plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)
    assert plan is not None
    assert plan.notes == ("run.sh: neither a file nor a link, not in the snapshot of the code",)


def test_more_than_two_hundred_megabytes_are_refused_and_the_largest_files_named(
    repository: Path, environ: Mapping[str, str]
) -> None:
    for name, size in (("a.bin", 150_000_000), ("b.bin", 60_000_000), ("c.bin", 1000)):
        with open(repository / name, "wb") as file:
            file.truncate(size)
    with pytest.raises(ClusterddpError) as refusal:
        plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)
    assert "would hold 210 MB, more than 200 MB; largest: a.bin (150.0 MB), b.bin (60.0 MB)" in refusal.value.message
    assert "`snapshot: false`" in str(refusal.value.hint)


def test_variables_of_a_git_hook_do_not_lead_astray(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init")
    led = dict(environ) | {"GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other), "GIT_INDEX_FILE": "/nowhere"}
    assert find_root(repository / "package", led) == repository
    plan = plan_snapshot(repository, runs_dir=repository / "runs", environ=led)
    assert plan is not None
    assert len(plan.files) == 5


def test_a_program_that_the_repository_names_as_its_monitor_is_not_run(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    monitor.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(monitor))
    plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)
    describe_commit(repository, environ)
    assert not (tmp_path / "was-run").exists()


def test_a_directory_in_no_repository_has_no_snapshot(tmp_path: Path, environ: Mapping[str, str]) -> None:
    assert plan_snapshot(tmp_path, runs_dir=tmp_path / "runs", environ=environ) is None


def test_a_repository_without_git_is_refused_with_the_reason(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterddpError, match="git cannot be run"):
        plan_snapshot(repository, runs_dir=tmp_path / "runs", environ={"PATH": str(tmp_path)})


def test_a_repository_that_git_distrusts_is_refused_with_gits_words(
    repository: Path, environ: Mapping[str, str]
) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to give a repository to another user")
    subprocess.run(["chown", "-R", "12345:12345", str(repository)], check=True)
    with pytest.raises(ClusterddpError, match="dubious ownership"):
        plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)


def test_the_files_around_a_script_are_its_snapshot_where_there_is_no_repository(tmp_path: Path) -> None:
    code = ["conf.yaml", "data/train.csv", "entry", "other.py", "package/inner.py"]
    others = [".hidden", ".venv/lib.py", "env/pyvenv.cfg", "env/lib.py", "__pycache__/other.pyc", "runs/one/run.json"]
    for name in (*code, *others, "old/two/run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "elsewhere").symlink_to("data")
    plan = plan_script_snapshot(tmp_path / "entry", runs_dir=tmp_path / "runs")
    assert sorted(plan.files) == sorted([*code, "elsewhere"])
    assert (plan.left_out, plan.notes) == (None, ())


def test_more_bytes_beside_a_script_than_fit_are_left_out_largest_first(tmp_path: Path) -> None:
    for name, size in (("entry.py", 10), ("big.py", 100), ("a.bin", 51_000_000), ("b.bin", 30_000_000), ("c.csv", 5)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    plan = plan_script_snapshot(tmp_path / "entry.py", runs_dir=tmp_path / "runs")
    assert sorted(plan.files) == ["b.bin", "big.py", "c.csv", "entry.py"]
    assert plan.total_bytes == 30_000_115
    assert str(plan.left_out) == "1 file, 51.0 MB (largest: a.bin (51.0 MB))"


def test_more_files_beside_a_script_than_fit_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("")
    for number in range(2_001):
        os.mknod(tmp_path / f"{number:04}.txt")
    plan = plan_script_snapshot(tmp_path / "entry.py", runs_dir=tmp_path / "runs")
    assert len(plan.files) == 2_000
    assert str(plan.left_out).startswith("2 files, ")


def test_a_key_beside_a_script_is_named_and_left_out(tmp_path: Path) -> None:
    for name in ("entry.py", "conf.yaml", "keys.py", "aws.pem", "deep/id_rsa"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")

    plan = plan_script_snapshot(tmp_path / "entry.py", runs_dir=tmp_path / "runs")

    assert sorted(plan.files) == ["conf.yaml", "entry.py", "keys.py"]
    assert plan.notes == ("aws.pem and 1 more: a key by its name, not in the snapshot of the code",)


def test_a_script_in_a_vast_directory_takes_only_the_python_files_beside_it(tmp_path: Path) -> None:
    for name in ("entry.py", "other.py", "data.csv"):
        (tmp_path / name).write_text("")
    (tmp_path / "many").mkdir()
    for number in range(10_001):
        os.mknod(tmp_path / "many" / str(number))
    plan = plan_script_snapshot(tmp_path / "entry.py", runs_dir=tmp_path / "runs")
    assert plan.files == ("entry.py", "other.py")
    assert str(plan.left_out).startswith("more than 10,002 files, 0.0 kB (largest: ")


def ignoring(repository: Path, environ: Mapping[str, str], pattern: str, *names: str) -> SnapshotPlan:
    """Plan a snapshot of the repository with further ignored files."""
    (repository / ".gitignore").write_text(f"{pattern}\n")
    (repository / "noise.log").unlink()
    for name in names:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(name)
    plan = plan_snapshot(repository, runs_dir=repository / "runs", environ=environ)
    assert plan is not None
    return plan


def test_ignored_directories_and_files_are_named_without_caches_and_environments(
    repository: Path, environ: Mapping[str, str]
) -> None:
    names = ["data/x/1", "assets/data/2", "package/ext.so", "all/a.so", "all/b.so"]
    caches = [".venv/lib/x", ".cache.so", "package/__pycache__/a.pyc", "env/pyvenv.cfg", "runs/a/run.json"]
    patterns = "data/\n*.so\n__pycache__/\n.venv\nenv\nruns\nold"
    plan = ignoring(repository, environ, patterns, *names, *caches, "old/b/run.json")
    assert (plan.ignored, plan.unlinked) == (("all", "assets", "data", "package/ext.so"), ())


def test_a_directory_that_is_kept_by_a_hidden_file_alone_counts_as_ignored(
    repository: Path, environ: Mapping[str, str]
) -> None:
    names = [f"data/{number}.npz" for number in range(300)]
    plan = ignoring(repository, environ, "data/*\n!data/.gitkeep", "data/.gitkeep", *names)
    assert (plan.ignored, plan.unlinked) == (("data",), ())


def test_of_too_many_ignored_files_in_one_directory_none_is_linked(
    repository: Path, environ: Mapping[str, str]
) -> None:
    names = [f"mixed/{number}.npz" for number in range(201)]
    plan = ignoring(repository, environ, "*.npz\n*.so", "mixed/read.me", "top.so", *names)
    assert (plan.ignored, plan.unlinked) == (("top.so",), ("mixed/ (201 files)",))


def test_a_file_deleted_after_the_plan_is_left_out(
    repository: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    plan = plan_snapshot(repository, runs_dir=tmp_path / "runs", environ=environ)
    assert plan is not None
    (repository / "run.sh").unlink()
    code, _ = keep(plan, tmp_path / "runs")
    assert "run.sh" not in names_below(code.resolve())


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    plan = SnapshotPlan(source="git", root=tmp_path, files=("directory",), total_bytes=0)
    (tmp_path / "directory").mkdir()
    with pytest.raises(ClusterddpError, match="directory: the snapshot of the code failed: Is a directory"):
        keep(plan, tmp_path / "runs")
    assert os.listdir(tmp_path / "runs" / "one") == []


def test_the_commit_is_described_with_what_was_changed_since(repository: Path, environ: Mapping[str, str]) -> None:
    described = describe_commit(repository / "package", environ)
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert described == {"root": str(repository), "commit": commit, "branch": "main", "dirty": True}


def test_a_clean_work_tree_is_not_dirty(repository: Path, environ: Mapping[str, str]) -> None:
    git(repository, "add", "-A")
    git(repository, "commit", "-m", "second")
    described = describe_commit(repository, environ)
    assert described is not None
    assert described["dirty"] is False


def test_a_repository_without_a_commit_has_none(tmp_path: Path, environ: Mapping[str, str]) -> None:
    git(tmp_path, "init")
    described = describe_commit(tmp_path, environ)
    assert described is not None
    assert described["commit"] is None
