"""Runs on a Slurm that confines jobs as sites do: ranks have their cores, GPUs and memory, and what fails is named."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.directory import RunDir
from tests.support.gang_runs import processes_with
from tests.support.paths import ROOT
from tests.support.slurm_person import SlurmPerson
from tests.support.slurm_runs import await_job_state
from tests.support.waiting import wait_until
from tests.testbed.confinement import find_obstacle_to_confinement
from tests.testbed.files import has_own_tmp, slurm_year
from tests.testbed.plan import HEAD, USER, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = """\
name: confined
launcher: slurm
network: {{backend: gloo}}
resources: {{nodes: {nodes}, gpus_per_node: {ranks}, cpus_per_task: 1, memory_gb: {memory_gb}, time: "0:10:00"}}
slurm: {{partition: low{more}}}
snapshot: false
entry: {{script: look.py, args: [{word}]}}
"""
OPENS = """\
import errno, json, os, sys, time
def opens(path):
    try:
        os.open(path, os.O_RDWR)
    except OSError as error:
        return error.errno != errno.EPERM  # what no driver has is not there, but it is allowed
gpus = [opens(os.path.join(os.environ["RACK_DEV"], name)) for name in sorted(os.listdir(os.environ["RACK_DEV"]))]
"""
LOOK = (
    OPENS
    + """\
print(json.dumps({
    "cores": sorted(os.sched_getaffinity(0)),
    "threads": os.environ["OMP_NUM_THREADS"],
    "gpus": gpus,
    "tmp": os.listdir("/tmp"),
    "master": os.environ["MASTER_ADDR"],
    "rank": [int(os.environ.get(f"{name}RANK", -1)) for name in ("", "LOCAL_", "GROUP_")],
    "size": [int(os.environ[f"{name}WORLD_SIZE"]) for name in ("", "LOCAL_")],
}), flush=True)
word = sys.argv[1]
while not os.path.exists(word):
    time.sleep(0.05)
if os.environ["RANK"] == "3" and open(word).read() == "fill":
    filled = []
    while True:
        filled.append(b"x" * 2**20)
while open(word).read() != "end":
    time.sleep(0.05)
"""
)


def demand_confinement() -> None:
    obstacle = find_obstacle_to_confinement()
    if not obstacle and any(str(path).startswith("/tmp/") for path in (ROOT, sys.prefix)):
        obstacle = "each job has a /tmp of its own, and this checkout lies there"
    if obstacle:
        pytest.skip(obstacle)


@pytest.fixture(scope="module")
def confined(needs_rack_accounting: None) -> Iterator[Rack]:
    """Three nodes with the cores of this machine each, 8 GPUs or one, and limits that the accounting enforces."""
    demand_confinement()
    nodes = ["node1", "node2", "node3"]
    plan = RackPlan(nodes=nodes, gpus_of={"node3": 1}, confine=True, accounting=True, cores_per_host=2, memory_mb=4000)
    with running_rack(plan) as rack:
        for what in (["account", "lab"], ["user", USER, "account=lab"]):
            rack.run(HEAD, ["sacctmgr", "-i", "add", *what])
        yield rack


def at(rack: Rack, name: str) -> SlurmPerson:
    place = SlurmPerson.at(rack, name)
    (place.path / "look.py").write_text(LOOK)
    return place


def spec(place: SlurmPerson, *, ranks: int, nodes: int = 2, more: str = "") -> str:
    """Write a run whose ranks, so many a node, print what they see and wait for a word."""
    text = SPEC.format(nodes=nodes, ranks=ranks, memory_gb=ranks / 4, word=place.path / "word", more=more)
    return text + f"env: {{RACK_DEV: {place.rack.dir}/dev}}\n"


def start(rack: Rack, name: str, *, ranks: int = 2, nodes: int = 2, more: str = "") -> tuple[SlurmPerson, RunDir]:
    """Start such a run, and wait until all ranks have printed what they see."""
    place = at(rack, name)
    run = place.submit(spec(place, ranks=ranks, nodes=nodes, more=more))
    place.await_status(run, lambda _: len(seen(run, nodes * ranks)) == nodes * ranks)
    return place, run


def seen(run: RunDir, ranks: int) -> list[dict[str, Any]]:
    logs = [run.attempt(0).stdout(rank) for rank in range(ranks)]
    return [json.loads(log.read_text()) for log in logs if log.exists() and log.read_text().endswith("\n")]


def say(place: SlurmPerson, word: str) -> None:
    """Write a word that the ranks read, in one step."""
    (place.path / "new").write_text(word)
    (place.path / "new").rename(place.path / "word")


def end(place: SlurmPerson, run: RunDir) -> dict[str, Any]:
    """Wait until the run has ended and nothing of it is left, on hosts or in Slurm's queue; return the root cause."""
    status = place.await_status(run, lambda status: status["state"] in {"FAILED", "COMPLETED"})
    wait_until(lambda: place.queue() == [], 60)
    assert place.processes(run) == []
    return dict(status["root_cause"] or {})


def supervisors(run: RunDir, node_rank: int) -> list[int]:
    token = json.loads(run.record.read_text())["token"]
    return [
        pid for pid, command in processes_with(f"CLUSTERDDP_COOKIE={token}.s{node_rank}\0") if "supervisor" in command
    ]


def test_a_rank_on_a_node_of_its_own_has_all_cores(confined):
    place = at(confined, "whole")
    text = spec(place, ranks=1, more=", exclusive: true").replace("cpus_per_task: 1, ", "")
    run = place.submit(text)
    place.await_status(run, lambda _: len(seen(run, 2)) == 2)
    beside = place.clusterddp("exec", run.name, "--rank", "1", "--", "grep", "Cpus_allowed_list", "/proc/self/status")
    assert beside.stdout.split() == ["Cpus_allowed_list:", "0-1"]
    say(place, "end")
    assert end(place, run) == {}
    assert [(look["cores"], look["threads"]) for look in seen(run, 2)] == [([0, 1], "2")] * 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (", exclusive: true", [([0, 1], "1")] * 2),
        ("", [([0, 1], "1")] * 2),
        (", cpus_per_gpu: 2", [([0, 1], "2")]),
        (", exclusive: true, cpu_bind: cores", [([0], "1"), ([1], "1")]),
    ],
    ids=["whole nodes", "GPUs alone", "cores for each GPU", "bound"],
)
def test_ranks_without_a_number_of_cores_share_those_of_the_job(confined, more, expected, request):
    ranks = len(expected)
    place = at(confined, request.node.callspec.id)
    run = place.submit(spec(place, ranks=ranks, nodes=1, more=more).replace("cpus_per_task: 1, ", ""))
    place.await_status(run, lambda _: len(seen(run, ranks)) == ranks)
    say(place, "end")
    assert end(place, run) == {}
    assert [(look["cores"], look["threads"]) for look in seen(run, ranks)] == expected


def test_cores_that_the_spec_names_stay_a_rank_s_own_on_whole_nodes(confined):
    place, run = start(confined, "whole and named", nodes=1, more=", exclusive: true")
    say(place, "end")
    assert end(place, run) == {}
    assert [(look["cores"], look["threads"]) for look in seen(run, 2)] == [([0], "1"), ([1], "1")]


@pytest.mark.parametrize("cores", ["", "cpus_per_task: 1, "], ids=["shared", "named"])
def test_a_program_that_starts_its_ranks_has_the_cores_of_all_of_them(confined, cores, request):
    place = at(confined, f"owns {request.node.callspec.id}")
    text = spec(place, ranks=2, nodes=1).replace("cpus_per_task: 1, ", cores)
    run = place.submit(text.replace("{script: look.py", "{owns_ranks: true, script: look.py"))
    place.await_status(run, lambda _: len(seen(run, 1)) == 1)
    say(place, "end")
    assert end(place, run) == {}
    assert [(look["cores"], look["threads"]) for look in seen(run, 1)] == [([0, 1], "1")]


def test_ranks_have_the_cores_and_gpus_of_their_job_alone(confined):
    place, run = start(confined, "see")
    looks = seen(run, 4)
    assert [look["cores"] for look in looks] == [[0], [1], [0], [1]]
    assert [look["gpus"] for look in looks] == [[True] * 2 + [False] * 6] * 4
    assert not has_own_tmp() or [look["tmp"] for look in looks] == [[]] * 4
    assert {look["master"] for look in looks} == {confined.plan.address("node1")}
    code = OPENS + "print(json.dumps(gpus))"
    beside = place.clusterddp("exec", run.name, "--rank", "3", "--", sys.executable, "-c", code)
    # Before Slurm 22.05 no step shares the GPUs of another one.
    assert json.loads(beside.stdout) == (looks[3]["gpus"] if slurm_year() > 21 else [False] * 8)
    say(place, "end")
    assert end(place, run) == {}


@pytest.mark.parametrize("option", ['gres: "gpu:2"', "gpus: 4"], ids=["gres", "total"])
def test_the_ranks_are_as_many_as_the_gpus_that_an_option_of_slurm_asks_for(confined, option, request):
    place = at(confined, f"gpus by {request.node.callspec.id}")
    run = place.submit(spec(place, ranks=2, more=f", {option}").replace("gpus_per_node: 2, ", ""))
    place.await_status(run, lambda _: len(seen(run, 4)) == 4)
    say(place, "end")
    assert end(place, run) == {}
    assert [(look["size"], look["gpus"]) for look in seen(run, 4)] == [([4, 2], [True] * 2 + [False] * 6)] * 4


def test_the_cause_of_a_rank_that_wants_more_memory_than_its_job_has_names_the_limit(confined):
    place, run = start(confined, "fill")
    say(place, "fill")
    cause = end(place, run)
    assert (cause["rank"], cause["host"], cause["exit_code"]) == (3, "node2", 137)
    assert "a process of this job, which has used up its 512 MiB of memory" in cause["error"]


def test_a_killed_supervisor_takes_its_ranks_along(confined):
    place, run = start(confined, "supervisor")
    for pid in supervisors(run, 1):
        os.kill(pid, signal.SIGKILL)
    cause = end(place, run)
    assert cause["host"] == "node2"


def test_memory_that_another_user_s_job_fills_beside_a_killed_rank_is_not_its_cause(confined):
    place, run = start(confined, "beside", ranks=1)
    hog = ["sbatch", "--parsable", "-w", "node2", "-n1", "--mem=100M", "-o", "/dev/null", "--wrap", "tail /dev/zero"]
    job = confined.run(HEAD, hog, user=USER).stdout.strip()
    await_job_state(confined, job, "OUT_OF_MEMORY")
    os.kill(host_pid(run, 1), signal.SIGKILL)
    cause = end(place, run)
    assert (cause["rank"], cause["host"]) == (1, "node2")
    assert "memory" not in cause["error"]


def test_a_submit_beyond_the_limit_of_the_user_is_refused_in_slurm_s_words(confined):
    place, run = start(confined, "first", ranks=1)
    limit = ["sacctmgr", "-i", "modify", "user", "root", "set"]
    confined.run(HEAD, [*limit, "MaxSubmitJobs=1"])
    try:
        done = place.clusterddp("submit", "job.yaml", check=False)
    finally:
        confined.run(HEAD, [*limit, "MaxSubmitJobs=-1"])
    assert done.returncode == 3
    assert "limit" in done.stderr.lower()
    say(place, "end")
    assert end(place, run) == {}


def test_a_run_beyond_what_its_association_may_use_waits_and_says_so(confined):
    limit = ["sacctmgr", "-i", "modify", "user", "root", "set"]
    confined.run(HEAD, [*limit, "GrpTRES=cpu=3"])
    try:
        place, run = start(confined, "first of two", ranks=1)
        later = at(confined, "second of two")
        waiting = later.submit(spec(later, ranks=1))
        status = later.await_status(waiting, lambda status: "limit of the account" in str(status["reason"]))
        assert status["state"] == "PENDING"
        later.clusterddp("cancel", waiting.name)
        say(place, "end")
        assert end(place, run) == {}
    finally:
        confined.run(HEAD, [*limit, "GrpTRES=cpu=-1"])


def test_nodes_that_differ_take_the_runs_that_fit(confined):
    place, run = start(confined, "differ", ranks=1, nodes=3)
    looks = seen(run, 3)
    assert [(look["rank"], look["size"]) for look in looks] == [([rank, 0, rank], [3, 1]) for rank in range(3)]
    # Slurm confines to what a node has: of the files that pose as GPUs node3 has one.
    assert [look["gpus"] for look in looks[:2]] == [[True] + [False] * 7] * 2
    assert looks[2]["gpus"][0]
    say(place, "end")
    assert end(place, run) == {}
    (place.path / "job.yaml").write_text(spec(place, ranks=2, nodes=3))
    done = place.clusterddp("submit", "job.yaml", check=False)
    assert done.returncode == 3
    assert "Requested node configuration is not available" in done.stderr
    assert "hint: " in done.stderr


def test_a_reservation_holds_nodes_for_the_run_that_names_it(confined):
    hold = "reservationname=ours starttime=now duration=60 users=root nodes=node1,node2,node3"
    confined.run(HEAD, ["scontrol", "create", "reservation", *hold.split()])
    try:
        outside = at(confined, "outside")
        waiting = outside.submit(spec(outside, ranks=1))
        status = outside.await_status(waiting, lambda status: "reserved" in str(status["reason"]))
        assert status["state"] == "PENDING"
        place, run = start(confined, "inside", ranks=1, more=", reservation: ours")
        outside.clusterddp("cancel", waiting.name)
        say(place, "end")
        assert end(place, run) == {}
    finally:
        confined.run(HEAD, ["scontrol", "delete", "ReservationName=ours"])


@pytest.fixture(scope="module")
def wide() -> Iterator[Rack]:
    """Two nodes with eight GPUs each and more cores than this machine has."""
    if os.environ.get("CLUSTERDDP_TEST_SLURM") != "all":
        pytest.skip("two minutes of sixteen ranks: make test-slurm runs them")
    demand_confinement()
    with running_rack(RackPlan(nodes=["node1", "node2"], confine=True, configless=True)) as rack:
        yield rack


def test_sixteen_ranks_see_what_they_must_and_one_that_is_killed_is_named(wide):
    place, run = start(wide, "kill", ranks=8)
    looks = seen(run, 16)
    assert [look["rank"] for look in looks] == [[rank, rank % 8, rank // 8] for rank in range(16)]
    assert [look["size"] for look in looks] == [[16, 8]] * 16
    assert [look["gpus"] for look in looks] == [[True] * 8] * 16
    assert not has_own_tmp() or [look["tmp"] for look in looks] == [[]] * 16
    assert {look["master"] for look in looks} == {wide.plan.address("node1")}
    os.kill(host_pid(run, 13), signal.SIGKILL)
    cause = end(place, run)
    assert (cause["rank"], cause["host"], cause["exit_code"]) == (13, "node2", 137)
    assert "memory" not in cause["error"]


def test_one_of_sixteen_ranks_that_fills_the_memory_is_named(wide):
    place, run = start(wide, "fill", ranks=8)
    say(place, "fill")
    cause = end(place, run)
    assert (cause["rank"], cause["host"], cause["exit_code"]) == (3, "node1", 137)
    assert "has used up its 2.0 GiB of memory" in cause["error"]


def test_a_node_of_sixteen_ranks_that_loses_power_is_named(wide):
    place, run = start(wide, "power", ranks=8)
    wide.power_off("node2")
    cause = end(place, run)
    assert (cause["rank"], cause["host"]) == (8, "node2")
    assert "ranks 8-15" in cause["error"]
    wide.power_on("node2")
    wide.await_idle()


def host_pid(run: RunDir, rank: int) -> int:
    """Find a rank by its number on this machine."""
    token = json.loads(run.record.read_text())["token"]
    environs = {pid: Path("/proc", str(pid), "environ").read_bytes() for pid, _ in processes_with(f"{token}.n")}
    return next(pid for pid, environ in environs.items() if f"\0RANK={rank}\0".encode() in environ)
