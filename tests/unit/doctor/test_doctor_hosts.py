"""The judgement of the facts of hosts: what is red, and the fix."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from clusterddp.doctor.hosts import judge_machine_size, judge_offset
from clusterddp.facts.checks import Needs, Result
from clusterddp.facts.judge import judge_hosts, judge_locked_memory
from clusterddp.facts.machine import Data, Logout, Machine, read_data, read_host, read_logout
from clusterddp.facts.memory import read_cpu_limit, read_memory_limit
from clusterddp.facts.torch import Torch, install_command
from clusterddp.wire import build
from tests.support.machines import HERE
from tests.support.paths import ROOT

TORCH = Torch(executable="/env/bin/python", version="2.10.0+cu128", cuda="12.8", nccl="2.27.5", driver="570.133.20")
FACTS = dataclasses.replace(
    HERE,
    gpus=("0", "1"),
    torch=TORCH,
    logout=Logout(user="ana", in_session=True, kills=False, lingers=False),
)
TRAINER = Needs(trainer=True, num_gpus=2, nccl=True)


def judge(facts: Machine, *others: Machine, needs: Needs = TRAINER) -> dict[str, Result]:
    """Judge a host beside others that are as they should be; return what was found on it."""
    machines = {"bad": facts, **{f"good{number}": other for number, other in enumerate(others)}}
    checks = judge_hosts(machines, dict.fromkeys(machines, needs))
    return {check.name: check.results["bad"] for check in checks if "bad" in check.results}


def with_torch(**changes: str | bool | None) -> Machine:
    return dataclasses.replace(FACTS, torch=dataclasses.replace(TORCH, **changes))


def with_directory(**changes: int | str | bool) -> Machine:
    return dataclasses.replace(FACTS, directory=dataclasses.replace(HERE.directory, in_memory=False, **changes))


def test_hosts_that_are_alike_are_fine() -> None:
    assert {result.level for result in judge(FACTS, FACTS).values()} == {"ok"}


def test_facts_of_a_host_survive_json(tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    facts = read_host(tmp_path, environ, executable="python3", data_dir=tmp_path, with_driver=False)
    assert build(Machine, json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("changes", "trainer", "level"),
    [
        ({"version": None}, True, "red"),
        ({"version": None}, False, "note"),
        ({"version": "2.9.1+cu128"}, True, "red"),
        ({"version": "2.9.1+cu128"}, False, "note"),
        ({"version": "2.10.1+cu128"}, True, "note"),
        ({"version": "2.10.0+cpu", "cuda": None, "nccl": None}, False, "red"),
        ({"cuda": None, "nccl": None}, True, "red"),
        ({"nccl": "2.21.5"}, True, "red"),
    ],
)
def test_torch_is_judged_by_what_the_run_needs_and_what_most_hosts_have(
    changes: dict[str, str | None], trainer: bool, level: str
) -> None:
    needs = dataclasses.replace(TRAINER, trainer=trainer)
    assert judge(with_torch(**changes), FACTS, FACTS, needs=needs)["torch"].level == level


def test_a_torch_for_the_cpu_is_replaced_by_the_build_that_other_hosts_have() -> None:
    found = judge(with_torch(version="2.10.0+cpu", cuda=None, nccl=None), FACTS, FACTS)["torch"]
    assert (found.level, found.found) == ("red", "2.10.0+cpu is built for the CPU, and GPUs are asked for")
    assert found.fix is not None
    assert found.fix.startswith("/env/bin/python -m pip install --force-reinstall torch==2.10.0 --index-url")


def test_a_host_without_a_compiler_is_noted() -> None:
    assert judge(with_torch(compile_obstacle="no C compiler"))["compiler"].level == "note"


def test_another_nccl_does_not_matter_to_gloo() -> None:
    needs = Needs(trainer=True, use_gpus=False)
    assert judge(with_torch(nccl="2.21.5"), FACTS, FACTS, needs=needs)["torch"].level == "ok"


def test_another_python_is_a_note() -> None:
    found = judge(dataclasses.replace(FACTS, python="3.12.1"), FACTS, FACTS)["Python"]
    assert (found.level, found.found) == ("note", "3.12.1, /env/bin/python; elsewhere 3.11.7")


def test_a_driver_that_is_too_old_for_the_cuda_of_torch_is_red() -> None:
    found = judge(with_torch(driver="470.82.01"), FACTS)["driver"]
    words = "torch for CUDA 12.8, which needs NVIDIA's driver 525 or newer; this host has 470.82.01"
    assert (found.level, found.found) == ("red", words)
    assert found.fix is not None
    assert found.fix.startswith("a newer driver, or a torch for CUDA 11 or older: ")


@pytest.mark.parametrize(
    ("torch", "pip", "command"),
    [
        ("2.10.0", True, "/env/bin/python -m pip install torch==2.10.0"),
        (
            "2.10.0+cu128",
            True,
            "/env/bin/python -m pip install torch==2.10.0 --index-url https://download.pytorch.org/whl/cu128",
        ),
        ("2.10.0", False, "uv pip install --python /env/bin/python torch==2.10.0"),
        (None, True, "/env/bin/python -m pip install torch"),
        ("2.12.0a0+gitabc; rm -rf /", True, "/env/bin/python -m pip install torch==2.12.0a0"),
        ("$(id)", True, "/env/bin/python -m pip install torch"),
    ],
)
def test_the_command_that_installs_torch_is_for_the_same_python(torch: str | None, pip: bool, command: str) -> None:
    assert install_command(Torch(executable="/env/bin/python", pip=pip), torch) == command


@pytest.mark.parametrize(
    ("pip", "installer"),
    [
        (True, "/env/python -m pip install --force-reinstall"),
        (False, "uv pip install --python /env/python --reinstall"),
    ],
)
def test_another_build_of_the_version_that_is_there_is_installed_over_it(pip: bool, installer: str) -> None:
    torch = Torch(executable="/env/python", version="2.10.0+cpu", pip=pip)
    assert install_command(torch, "2.10.0+cu128").startswith(f"{installer} torch==2.10.0 --index-url")


@pytest.mark.parametrize(
    ("gpus", "busy", "level"),
    [
        (("0",), {}, "red"),
        (("0", "1"), {"1": "run calm-owl-1"}, "red"),
        (("0", "1", "2"), {"1": "run calm-owl-1"}, "ok"),
    ],
)
def test_gpus_that_are_too_few_are_red(gpus: tuple[str, ...], busy: dict[str, str], level: str) -> None:
    facts = dataclasses.replace(FACTS, gpus=gpus, busy_gpus=busy)
    assert judge(facts)["GPUs"].level == level


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "ok"),
        ({"free_bytes": 2**20}, "red"),
        ({"free_bytes": 2**30}, "note"),
        ({"error": "Read-only file system"}, "red"),
    ],
)
def test_the_disk_of_our_directory_is_judged(changes: dict[str, int | str], level: str) -> None:
    assert judge(with_directory(**changes))["disk"].level == level


def test_data_that_does_not_fit_is_reported_before_it_is_sent() -> None:
    needs = dataclasses.replace(TRAINER, sent_bytes=20 * 2**30)
    found = judge(with_directory(free_bytes=10 * 2**30), needs=needs)["disk"]
    assert (found.level, "20 GiB are sent" in found.found) == ("note", True)


def test_a_directory_mounted_noexec_is_a_note() -> None:
    found = judge(with_directory(no_exec=True))["disk"]
    assert (found.level, "noexec" in found.found) == ("note", True)


@pytest.mark.parametrize(
    ("state", "download", "level"),
    [("there", False, "ok"), ("missing", True, "note"), ("empty", False, "red"), ("not readable", True, "red")],
)
def test_data_is_red_when_the_run_can_neither_read_nor_download_it(state: str, download: bool, level: str) -> None:
    facts = dataclasses.replace(FACTS, data=Data(path="/data", state=state))  # type: ignore[arg-type]
    assert judge(facts, needs=dataclasses.replace(TRAINER, download=download))["data"].level == level


def test_the_state_of_a_data_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    states = [read_data(path).state for path in (tmp_path, tmp_path / "empty", tmp_path / "none")]
    assert states == ["there", "empty", "missing"]


@pytest.mark.parametrize(
    ("in_session", "kills", "level"), [(True, True, "red"), (True, False, "ok"), (False, True, "ok")]
)
def test_a_logind_that_ends_what_a_session_leaves_is_red(in_session: bool, kills: bool, level: str) -> None:
    logout = Logout(user="ana", in_session=in_session, kills=kills, lingers=True)
    found = judge(dataclasses.replace(FACTS, logout=logout))["log out"]
    assert (found.level, "KillExcludeUsers=root ana" in (found.fix or "")) == (level, level == "red")


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, False),
        ({"etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=yes\n"}, False),
        ({"etc/systemd/logind.conf": "[Login]\nKillUserProcesses = yes\nKillExcludeUsers=\n"}, True),
        (
            {
                "usr/lib/systemd/logind.conf.d/a.conf": "[Login]\nKillUserProcesses=yes\nKillExcludeUsers=\n",
                "etc/systemd/logind.conf.d/a.conf": "[Login]\nKillUserProcesses=no\n",
            },
            False,
        ),
        ({"etc/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\nKillOnlyUsers=nobody-else\n"}, False),
    ],
)
def test_the_settings_of_logind_are_read_as_it_reads_them(tmp_path: Path, files: dict[str, str], kills: bool) -> None:
    files = files | {"proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_logout(tmp_path)
    assert (found.kills, found.in_session) == (kills, True)


def test_the_limits_of_all_control_groups_above_count(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/user.slice/a.scope\n")
    (root / "user.slice/a.scope").mkdir(parents=True)
    (root / "user.slice/cpu.max").write_text("150000 100000\n")
    (root / "user.slice/a.scope/cpu.max").write_text("max 100000\n")
    (root / "user.slice/memory.max").write_text("max\n")
    (root / "user.slice/a.scope/memory.max").write_text("1048576\n")
    assert (read_cpu_limit(own, root), read_memory_limit(own, root)) == (1.5, 1048576)


def test_the_limits_of_version_one_are_read(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n")
    for name, text in {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        "memory/job/memory.limit_in_bytes": "9223372036854771712",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert (read_cpu_limit(own, root), read_memory_limit(own, root)) == (2.0, None)


def test_a_control_group_that_allows_less_than_the_machine_is_a_note() -> None:
    found = judge_machine_size(dataclasses.replace(HERE, cpu_limit=1.5))
    assert (found.level, "1.5 cores' worth" in found.found) == ("note", True)


@pytest.mark.parametrize(
    ("infiniband", "nccl", "level"), [(True, True, "red"), (True, False, "note"), (False, True, "ok")]
)
def test_little_locked_memory_matters_with_infiniband(infiniband: bool, nccl: bool, level: str) -> None:
    machine = dataclasses.replace(HERE, locked_memory=2**16, infiniband=infiniband)
    found = judge_locked_memory(machine, "ulimit -l", nccl=nccl)
    assert (found.level, "ibv_reg_mr" in found.found) == (level, infiniband)
    assert judge_locked_memory(dataclasses.replace(machine, locked_memory=-1), "ulimit -l", nccl=nccl).level == "ok"


@pytest.mark.parametrize(("offset_s", "level"), [(0.2, "ok"), (-3.0, "note"), (86_400.0, "note")])
def test_a_clock_that_is_off_is_no_more_than_a_note(offset_s: float, level: str) -> None:
    assert judge_offset(offset_s).level == level


def test_a_clock_that_is_ahead_is_called_so() -> None:
    assert judge_offset(3.0).found == "3.0 s ahead of the clock here: times in logs differ"
