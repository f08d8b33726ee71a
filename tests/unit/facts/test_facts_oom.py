"""Counts of killed processes, and free memory, from files that look as the kernel's do, in both versions of groups."""

from pathlib import Path

import pytest

from clusterddp.facts.memory import count_oom_kills, explain_oom_kill, free_bytes

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


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/user/job\n", {}, 3000 * 1024),
        ("0::/user/job\n", {"user/job/memory.max": "max", "user/job/memory.current": "9"}, 3000 * 1024),
        (
            "0::/user/job\n",
            {
                "user/memory.max": "1000000",
                "user/memory.current": "900000",
                "user/memory.stat": "anon 500000\nactive_file 1000\ninactive_file 300000\n",
                "user/job/memory.max": "2000000",
                "user/job/memory.current": "100000",
            },
            1000000 - 900000 + 301000,
        ),
        (
            "4:memory:/job\n3:cpu:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": "800000",
                "memory/job/memory.usage_in_bytes": "500000",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 200000\ntotal_active_file 5\n",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "7",
            },
            800000 - 500000 + 200005,
        ),
    ],
    ids=["no group", "no limit", "version two", "version one"],
)
def test_free_memory_is_what_the_machine_and_all_its_control_groups_leave(
    tmp_path: Path, own: str, files: dict[str, str], expected: int
) -> None:
    (tmp_path / "own").write_text(own)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_bytes(tmp_path / "meminfo", tmp_path / "own", tmp_path / "cgroup") == expected


def test_free_memory_is_known_on_this_machine() -> None:
    free = free_bytes()
    assert free is not None
    assert 0 < free < 2**50
