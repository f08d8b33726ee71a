"""Whose killed processes are counted: files that look as the kernel's do, in both versions of control groups."""

from pathlib import Path

import pytest

from clusterddp.facts.memory import count_oom_kills, explain_oom_kill

STEP = "slurm/uid_7/job_12/step_0/task_3"


def make_groups(root: Path, version: int, *, of_job: int, of_others: int, of_host: int) -> dict[str, Path]:
    """Write the groups of a job with a task, and of one beside it."""
    files = {"own": root / "cgroup", "root": root / "groups", "vmstat": root / "vmstat"}
    top = files["root"] / "memory" if version == 1 else files["root"]
    files["own"].write_text(f"4:memory:/{STEP}\n" if version == 1 else f"0::/{STEP}\n")
    files["vmstat"].write_text(f"oom_kill {of_host}\n")
    for group, count in ((top / STEP, of_job), (top / "slurm/uid_7/job_13", of_others)):
        group.mkdir(parents=True)
        counted = group if version == 1 else next(each for each in (group, *group.parents) if each.name[:4] == "job_")
        (counted / ("memory.oom_control" if version == 1 else "memory.events")).write_text(f"oom_kill {count}\n")
        (group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(f"{2**29}\n")
    return files


@pytest.mark.parametrize("version", [1, 2])
def test_the_kills_of_another_job_are_not_this_one_s(tmp_path, version):
    files = make_groups(tmp_path, version, of_job=0, of_others=3, of_host=5)
    assert count_oom_kills(**files) == 0
    assert explain_oom_kill(0, own=files["own"], root=files["root"]) is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_in_the_job_is_explained_with_what_it_was_given(tmp_path, version):
    files = make_groups(tmp_path, version, of_job=2, of_others=0, of_host=2)
    assert count_oom_kills(**files) == 2
    words = explain_oom_kill(1, own=files["own"], root=files["root"])
    assert "a process of this job, which has used up its 512 MiB of memory" in words
    assert explain_oom_kill(2, own=files["own"], root=files["root"]) is None


def test_without_a_job_the_host_s_kills_count(tmp_path):
    (tmp_path / "vmstat").write_text("oom_kill 4\n")
    (tmp_path / "cgroup").write_text("0::/user.slice\n")
    assert count_oom_kills(tmp_path / "cgroup", tmp_path, tmp_path / "vmstat") == 4
