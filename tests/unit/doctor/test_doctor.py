"""The doctor's judgement of facts: which are red, the fix, how they are shown. No cluster is needed here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from clusterddp.cli.doctor import check_lines
from clusterddp.doctor.cluster import JobAnswer, JobRequest, judge_nodes, sbatch_argv
from clusterddp.facts.checks import Check, Needs, Result, is_healthy, note, ok, red, rows
from clusterddp.facts.judge import judge_clock, judge_directory, judge_here, judge_machine, judge_torch
from clusterddp.facts.machine import (
    Machine,
    read_directory,
    read_machine,
)
from clusterddp.facts.torch import Torch, import_torch
from clusterddp.system.storage import Mount, find_mount
from clusterddp.wire import build
from tests.support.machines import HERE
from tests.support.paths import ROOT
from tests.support.slurm_clusters import fake_commands
from tests.support.storage_faults import disk

WAY = {"name": "n1", "addresses": ["10.0.0.11"], "reached": "10.0.0.11", "source": "10.0.0.12", "interface": "eth0"}


def report(node_rank: int, machine: Machine, **changes: Any) -> dict[str, Any]:
    way = {**WAY, "clock_offset_s": 0.0} if node_rank else None
    data = {"node_rank": node_rank, "node": f"n{node_rank + 1}", "machine": machine}
    return data | {"way": way, "done": True} | changes


def answer(*reports: dict[str, Any], nodes: tuple[str, ...] = ("n1", "n2"), output: tuple[str, ...] = ()) -> JobAnswer:
    by_node = {report["node"]: report for report in reports}
    return JobAnswer(
        job_id="7", num_nodes=2, nodes=nodes, reports=by_node, submitted=999.0, collected=1001.0, output=output
    )


def result_of(checks: list[Check], name: str, host: str) -> Result:
    return next(check for check in checks if check.name == name).results[host]


def doctor(directory: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor where no torch is, whose import would take seconds."""
    (directory / "bare").mkdir()
    (directory / "bare/torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", "doctor", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{directory}/bare:{ROOT}", **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_facts_of_a_machine_survive_json() -> None:
    machine = read_machine(Path.cwd(), {"CUDA_VISIBLE_DEVICES": "0,1"})
    machine = dataclasses.replace(machine, torch=Torch(version="2.10.0"))
    assert build(Machine, json.loads(json.dumps(machine.to_json()))) == machine


def test_alike_nodes_are_healthy() -> None:
    checks = judge_nodes(answer(report(0, HERE), report(1, HERE)), HERE, Needs(trainer=True))
    assert (is_healthy(checks), {check.level for check in checks}) == (True, {"ok"})


def test_another_python_on_a_node_is_red() -> None:
    other = dataclasses.replace(HERE, python="3.12.1")
    checks = judge_nodes(answer(report(0, HERE), report(1, other)), HERE, Needs())
    assert result_of(checks, "Python", "n2").level == "red"
    assert result_of(checks, "Python", "n1").level == "ok"


@pytest.mark.parametrize(
    ("changes", "level"), [({}, "ok"), ({"free_bytes": 2**20}, "red"), ({"in_memory": True}, "red")]
)
def test_the_runs_directory_of_a_node_is_judged_as_it_is_here(changes: dict[str, Any], level: str) -> None:
    there = dataclasses.replace(HERE, directory=dataclasses.replace(HERE.directory, **changes))
    found = result_of(judge_nodes(answer(report(0, there)), HERE, Needs()), "runs directory", "n1")
    assert (found.level, found.found.endswith(", the same as here")) == (level, True)


@pytest.mark.parametrize(
    ("output", "words"),
    [((), "it may not see the runs directory"), (("n2: /shared/runs/.doctor-1: Stale file",), "Stale file")],
)
def test_a_node_that_does_not_see_the_runs_directory_is_red(output: tuple[str, ...], words: str) -> None:
    found = result_of(judge_nodes(answer(report(0, HERE), output=output), HERE, Needs()), "runs directory", "n2")
    assert (found.level, found.found.endswith(words)) == ("red", True)


def test_another_torch_on_a_node_is_red() -> None:
    other = dataclasses.replace(HERE, torch=Torch(version="2.11.0"))
    found = result_of(judge_nodes(answer(report(0, HERE), report(1, other)), HERE, Needs()), "torch", "n2")
    assert (found.level, found.found) == ("red", "2.11.0, here 2.10.0")


def test_no_torch_where_one_submits_is_no_matter_when_the_nodes_have_one() -> None:
    login = dataclasses.replace(HERE, torch=Torch())
    assert is_healthy(judge_nodes(answer(report(0, HERE), report(1, HERE)), login, Needs(trainer=True)))


def test_a_clock_that_is_a_minute_off_the_first_node_is_red() -> None:
    late = report(1, HERE, way={**WAY, "clock_offset_s": 60.0})
    found = result_of(judge_nodes(answer(report(0, HERE), late), HERE, Needs()), "clock", "n2")
    assert (found.level, found.found) == ("red", "60.0 s behind that of n1")


@pytest.mark.parametrize(("time", "words"), [(900.0, "99.0 s behind"), (1100.0, "99.0 s ahead of")])
def test_a_report_from_the_past_or_the_future_shows_a_wrong_clock(time: float, words: str) -> None:
    wrong = dataclasses.replace(HERE, time=time)
    found = result_of(judge_nodes(answer(report(0, wrong), nodes=("n1",)), HERE, Needs()), "clock", "n1")
    assert (found.level, found.found) == ("red", f"{words} the clock here")


def test_a_node_that_was_not_heard_of_is_red_in_the_words_of_srun() -> None:
    words = ("slurmstepd: error: execve(): /env/bin/python: No such file or directory",)
    found = result_of(judge_nodes(answer(report(0, HERE), output=words), HERE, Needs()), "report", "n2")
    assert (found.level, "No such file or directory" in found.found) == ("red", True)


def test_a_report_of_a_node_that_slurm_did_not_name_is_judged() -> None:
    other = dataclasses.replace(HERE, torch=Torch(version="2.11.0"))
    checks = judge_nodes(answer(report(0, HERE), report(1, other), nodes=("n1",)), HERE, Needs())
    assert result_of(checks, "torch", "n2").level == "red"


def test_fewer_nodes_than_the_job_asked_for_are_red() -> None:
    found = result_of(judge_nodes(answer(report(0, HERE), nodes=("n1",)), HERE, Needs()), "nodes", HERE.host)
    assert (found.level, found.found) == ("red", "Slurm and the reports name 1 of 2 nodes: the others are not judged")


def test_too_few_visible_gpus_on_a_node_are_red() -> None:
    one = dataclasses.replace(HERE, gpus=("0",), torch=Torch(version="2.10.0", cuda="12.8", gpus=1))
    found = result_of(judge_nodes(answer(report(0, one), nodes=("n1",)), HERE, Needs(num_gpus=2)), "GPUs", "n1")
    assert (found.level, found.found) == ("red", "2 are asked for, and there is 1")


@pytest.mark.parametrize(
    ("torch", "needs", "has_gpus", "level"),
    [
        (Torch(version="2.10.0", cuda="12.8", gpus=8, torchvision="0.25.0"), Needs(), True, "ok"),
        (Torch(version="2.10.0", cuda="12.8", gpus=0), Needs(), False, "ok"),
        (Torch(version="2.10.0", cuda="12.8", gpus=0), Needs(), True, "red"),
        (Torch(version="2.10.0+cpu"), Needs(), True, "red"),
        (Torch(), Needs(), False, "note"),
        (Torch(), Needs(trainer=True), False, "red"),
        (Torch(error="ImportError: libcudnn.so.9"), Needs(), False, "red"),
        (Torch(version="2.10.0", torchvision_error="RuntimeError: nms"), Needs(trainer=True), False, "note"),
    ],
)
def test_torch_is_judged_by_what_the_machine_and_the_spec_have(
    torch: Torch, needs: Needs, has_gpus: bool, level: str
) -> None:
    assert judge_torch(torch, needs, has_gpus=has_gpus).level == level


def test_a_driver_that_is_too_old_for_torch_is_reported_with_versions() -> None:
    torch = Torch(version="2.13.0", cuda="13.0", gpus=0, driver="535.104.05")
    found = judge_torch(torch, Needs(), has_gpus=True)
    words = "2.13.0, CUDA 13.0, which needs NVIDIA's driver 580 or newer; this host has 535.104.05"
    assert (found.level, found.found) == ("red", words)


def test_what_torch_compile_lacks_is_noted_where_the_trainer_has_gpus() -> None:
    torch = Torch(version="2.10.0", cuda="12.8", gpus=2, compile_obstacle="no Python.h in /usr/include/python3.11")
    machine = dataclasses.replace(HERE, gpus=("0", "1"), torch=torch)
    found = dict(judge_machine(machine, Needs(trainer=True)))["compiler"]
    assert found.level == "note"
    assert found.found.startswith("no Python.h in /usr/include/python3.11: train.compile auto runs uncompiled")
    assert "compiler" not in dict(judge_machine(HERE, Needs(trainer=True)))
    assert "compiler" not in dict(judge_machine(machine, Needs()))


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "ok"),
        ({"file_system": "tmpfs", "in_memory": True}, "red"),
        ({"error": "Permission denied"}, "red"),
        ({"free_bytes": 2**20}, "red"),
        ({"free_bytes": 2**30}, "note"),
    ],
)
def test_a_runs_directory_in_memory_full_or_not_writable_is_red(changes: dict[str, Any], level: str) -> None:
    assert judge_directory(dataclasses.replace(HERE.directory, **changes)).level == level


@pytest.mark.root
def test_a_file_system_without_hard_links_is_noted(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "exfat") as plain:
        result = judge_directory(dataclasses.replace(read_directory(plain.path / "runs"), free_bytes=10**11))
    assert result.level == "note"
    assert "on fuseblk" in result.found
    assert "only locks protect the files of a run" in result.found
    assert judge_directory(dataclasses.replace(read_directory(tmp_path), free_bytes=10**11)).level == "ok"


@pytest.mark.parametrize(("limit", "level"), [(-1, "ok"), (65_536, "ok"), (512, "note"), (64, "red")])
def test_few_open_files_are_reported(limit: int, level: str) -> None:
    results = dict(judge_machine(dataclasses.replace(HERE, open_files=limit), Needs()))
    assert results["open files"].level == level


def test_interfaces_of_containers_are_named_as_never_used() -> None:
    assert dict(judge_here(HERE))["interfaces"].found == "eth0 10.0.0.1 (by route); never used: docker0"


def test_a_host_name_that_is_the_loopback_is_reported() -> None:
    debian = dataclasses.replace(HERE, own_addresses=("127.0.1.1",))
    found = dict(judge_here(debian))["host name"]
    assert (found.level, found.found.startswith("login is 127.0.1.1 here")) == ("note", True)


@pytest.mark.parametrize(("offset_s", "level"), [(0.0, "ok"), (-2.0, "note"), (5.0, "red")])
def test_clocks_may_differ_by_a_second(offset_s: float, level: str) -> None:
    assert judge_clock(offset_s, "that of n1").level == level


def test_the_last_of_several_mounts_on_one_point_is_the_one_that_is_seen(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:5 / {tmp_path} rw - nfs4 server:/a rw\n"
        f"3 2 0:6 / {tmp_path} rw shared:1 - tmpfs tmpfs rw\n"
    )
    assert find_mount(tmp_path, table) == Mount(kind="tmpfs", point=str(tmp_path))


def test_a_mount_point_with_a_space_is_read(tmp_path: Path) -> None:
    place = tmp_path / "my data"
    place.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {tmp_path}/my\\040data rw - lustre x rw\n")
    assert find_mount(place, table) == Mount(kind="lustre", point=str(place))


def test_a_directory_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    found = read_directory(tmp_path / "runs")
    assert (found.error, (tmp_path / "runs").exists(), list(tmp_path.iterdir())) == (None, False, [])


def test_torch_is_imported_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_torch() == Torch(error="the import ends with exit code -6")


def test_hosts_that_found_the_same_share_a_row_and_red_comes_first() -> None:
    checks = [
        Check(name="a", results={"n1": ok("1"), "n2": ok("1"), "n3": note("2")}),
        Check(name="b", results={"n1": red("3", "mend it")}),
    ]
    seen = [(row.check, row.hosts, row.result.level) for row in rows(checks)]
    assert seen == [("b", ("n1",), "red"), ("a", ("n3",), "note"), ("a", ("n1", "n2"), "ok")]


def test_each_red_row_has_its_fix_below() -> None:
    lines = [click.unstyle(line) for line in check_lines([Check(name="b", results={"n1": red("3", "mend it")})])]
    assert lines == ["     CHECK  HOST  FOUND", "red  b      n1    3", "      fix: mend it"]


def test_the_job_takes_over_where_a_spec_may_run_and_not_what_it_takes() -> None:
    request = JobRequest(
        num_nodes=3,
        gpus_per_node=2,
        options={"partition": "gpu", "mail_type": "END", "mem": "500G", "account": False, "time": "9"},
        python="python",
    )
    argv = sbatch_argv(request, "tag")
    assert {"--partition=gpu", "--nodes=3", "--gpus-per-node=2", "--time=1", "--job-name=doctor.tag"} <= set(argv)
    assert not [word for word in argv if "mail" in word or "500G" in word or "account" in word]


def test_the_nodes_locked_memory_is_looked_at_with_the_spec_s_own_limits() -> None:
    little = dataclasses.replace(HERE, locked_memory=2**16, infiniband=True)
    checks = judge_nodes(answer(report(0, little), nodes=("n1",)), HERE, Needs(num_gpus=0))
    found = result_of(checks, "locked memory", "n1")
    assert (found.level, "slurm.propagate=NONE" in str(found.fix)) == ("note", True)
    with_gpus = dataclasses.replace(little, gpus=("0",))
    checks = judge_nodes(answer(report(0, with_gpus), nodes=("n1",)), HERE, Needs(num_gpus=1))
    assert result_of(checks, "locked memory", "n1").level == "red"
    argv = sbatch_argv(JobRequest(num_nodes=1, python="python", options={"propagate": "NONE"}), "doctor.tag")
    assert "--propagate=NONE" in argv


def test_without_slurm_its_absence_is_a_note(tmp_path: Path) -> None:
    done = doctor(tmp_path, "-o", "json", PATH=str(tmp_path))
    found = next(check for check in json.loads(done.stdout)["checks"] if check["check"] == "Slurm")
    assert (found["level"], found["found"]) == ("note", "none of its commands is here")


def test_a_runs_directory_in_memory_makes_the_exit_code_three(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--runs", "/dev/shm/runs", PATH=str(tmp_path))
    assert (done.returncode, "in the memory of this machine" in done.stdout) == (3, True)


@pytest.mark.parametrize(
    ("overrides", "check", "words"),
    [
        (["slurm.partition=gpus"], "partition", "the cluster has no partition gpus"),
        (["slurm.partition=gpu-long"], "partition", "gpu-long takes none of your jobs: it is DOWN"),
        (["resources.time=3-00:00:00"], "partition", "gpu allows 2-00:00:00, the spec asks for 3-00:00:00"),
        (["resources.gpus_per_node=8"], "partition", "gpu has 0 nodes with 8 GPUs, the spec asks for 1"),
        (["resources.nodes=17"], "partition", "gpu has 12 nodes with 4 GPUs, the spec asks for 17"),
        (["slurm.account=elsewhere"], "account", "elsewhere is not an account of"),
        (["slurm.account=vision"], "account", "vision"),
    ],
)
def test_requests_that_the_cluster_cannot_meet_are_reported(
    overrides: list[str], check: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: job\nlauncher: slurm\nresources: {gpus_per_node: 4}\nslurm: {partition: gpu}\nentry: {script: a.py}\n"
    )
    environ = fake_commands("mixed_24_05", tmp_path / "commands")
    for name in ("sbatch", "srun", "squeue", "scancel"):
        (tmp_path / "commands" / name).touch(0o755)
    done = doctor(tmp_path, "job.yaml", *overrides, "-o", "json", PATH=environ["PATH"])
    found = next(entry for entry in json.loads(done.stdout)["checks"] if entry["check"] == check)
    assert words in found["found"]
