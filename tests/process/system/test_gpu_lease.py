"""Leases on GPUs: real sockets, processes and runs; the GPUs are those of a fake nvidia-smi on PATH."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.errors import PreflightError
from clusterddp.planning.placement import read_machine
from clusterddp.run.attempts import read_end
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.run.state import RunState
from clusterddp.submission.cancel import cancel
from clusterddp.submission.submit import resume, submit, wait
from clusterddp.system.devices import list_gpus
from clusterddp.system.gpu_lease import Lease, busy_gpus, read_leases, spell_busy, take_leases
from tests.support.fake_gpus import FakeGpus
from tests.support.gang_runs import GangRun, make_gang, started
from tests.support.launch_runs import HELLO, SLEEP, plan_script, processes_of, read_plan, wait_for_ranks
from tests.support.waiting import wait_until

ONE_GPU = "{nodes: 1, gpus_per_node: 1}"
HOLD = "import sys; sys.stdin.read()"


@pytest.fixture
def gpus(tmp_path: Path) -> FakeGpus:
    return FakeGpus(tmp_path / "bin")


@pytest.fixture
def leases() -> Iterator[list[Lease]]:
    kept: list[Lease] = []
    yield kept
    for lease in kept:
        lease.close()


def take(gpus: FakeGpus, *names: str, run: str = "brisk-otter-3") -> Lease | None:
    return take_leases(names, run, list_gpus(gpus.environ))


def busy(gpus: FakeGpus) -> dict[str, str]:
    return busy_gpus(gpus.environ)


def test_a_leased_gpu_is_named_with_its_run(gpus: FakeGpus, leases: list[Lease]) -> None:
    leases.append(take(gpus, "1"))
    assert busy(gpus) == {"1": "run brisk-otter-3"}


@pytest.mark.parametrize("by", ["index", "uuid", "beginning"])
def test_a_gpu_has_one_lease_whichever_way_it_is_named(gpus: FakeGpus, leases: list[Lease], by: str) -> None:
    name = {"index": "1", "uuid": gpus.uuids[1], "beginning": gpus.uuids[1][:20]}[by]
    leases.append(take(gpus, name))
    assert [take(gpus, each) for each in ("1", gpus.uuids[1], gpus.uuids[1][:20])] == [None] * 3


def test_slices_of_a_gpu_are_leased_apart(tmp_path: Path, leases: list[Lease]) -> None:
    gpus = FakeGpus(tmp_path / "bin", slices=2)
    leases.append(take(gpus, gpus.slice_uuids[0]))
    leases.append(take(gpus, gpus.slice_uuids[1], run="shy-lynx-1"))
    assert busy(gpus) == {gpus.slice_uuids[0]: "run brisk-otter-3", gpus.slice_uuids[1]: "run shy-lynx-1"}


def test_a_gpu_in_slices_stands_for_all_of_them(tmp_path: Path, leases: list[Lease]) -> None:
    gpus = FakeGpus(tmp_path / "bin", slices=2)
    leases.append(take(gpus, gpus.slice_uuids[1]))
    assert take(gpus, "0") is None


def test_a_name_that_nvidia_smi_does_not_know_is_leased_as_it_is(leases: list[Lease]) -> None:
    name = f"MIG-GPU-{os.getpid()}/7/0"
    leases.append(take_leases([name], "brisk-otter-3", ()))
    assert read_leases([name], ())[name].run == "brisk-otter-3"


def test_a_run_in_a_hold_leases_what_the_hold_has_and_nothing_else(gpus: FakeGpus, leases: list[Lease]) -> None:
    listed = list_gpus(gpus.environ)
    assert take_leases(["0"], "brisk-otter-3", listed, hold="calm-fox-7") is None  # there is no such hold
    leases += [take_leases(["0"], "calm-fox-7", listed, hold="calm-fox-7")]
    assert take_leases(["1"], "brisk-otter-3", listed, hold="calm-fox-7") is None
    assert take_leases(["0"], "brisk-otter-3", listed, hold="shy-lynx-1") is None
    leases += [take_leases(["0"], "brisk-otter-3", listed, hold="calm-fox-7")]
    assert take_leases(["0"], "calm-wren-2", listed, hold="calm-fox-7") is None
    assert busy_gpus(gpus.environ, hold="calm-fox-7") == {"0": "run brisk-otter-3", "1": "not in hold calm-fox-7"}
    assert busy(gpus) == {"0": "run calm-fox-7"}


def test_a_gpu_of_a_hold_that_has_ended_is_free_when_the_last_run_in_it_is_gone(gpus: FakeGpus) -> None:
    listed = list_gpus(gpus.environ)
    hold = take_leases(["0"], "calm-fox-7", listed, hold="calm-fox-7")
    run = take_leases(["0"], "brisk-otter-3", listed, hold="calm-fox-7")
    hold.close()
    assert busy(gpus) == {"0": "run brisk-otter-3"}
    assert take(gpus, "0", run="shy-lynx-1") is None
    assert busy_gpus(gpus.environ, hold="calm-fox-7")["1"] == "hold calm-fox-7 has ended"
    run.close()
    take(gpus, "0", run="shy-lynx-1").close()


def test_all_are_leased_or_none(gpus: FakeGpus, leases: list[Lease]) -> None:
    leases.append(take(gpus, "1"))
    assert take(gpus, "0", "1", run="shy-lynx-1") is None
    assert busy(gpus) == {"1": "run brisk-otter-3"}


def test_a_lease_lasts_as_long_as_any_process_that_inherited_it(gpus: FakeGpus) -> None:
    lease = take(gpus, "0")
    heirs = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, pass_fds=lease.descriptors)
        for _ in range(2)
    ]
    lease.close()
    heirs[0].kill()
    heirs[0].wait()
    assert busy(gpus) == {"0": "run brisk-otter-3"}
    heirs[1].kill()
    heirs[1].wait()
    assert busy(gpus) == {}
    for heir in heirs:
        heir.stdin.close()


def test_what_inherits_nothing_does_not_hold_a_lease(gpus: FakeGpus) -> None:
    lease = take(gpus, "0")
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, close_fds=False) as stranger:
        lease.close()
        assert busy(gpus) == {}
        stranger.stdin.close()


def test_of_many_that_want_a_gpu_at_once_one_gets_it(gpus: FakeGpus) -> None:
    program = (
        "import sys; from clusterddp.system.gpu_lease import take_leases\n"
        "sys.stdin.readline(); lease = take_leases([sys.argv[1]], 'a', ()); print(bool(lease), flush=True)\n"
        "sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program, gpus.uuids[0]]
    takers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for taker in takers:
        taker.stdin.write("\n")
        taker.stdin.flush()
    assert sorted(taker.stdout.readline() for taker in takers) == ["False\n"] * 3 + ["True\n"]
    for taker in takers:
        taker.communicate()


@pytest.mark.root
def test_a_lease_of_another_user_is_named_with_the_user(gpus: FakeGpus, tmp_path: Path) -> None:
    program = (
        "import os, sys; from clusterddp.system.gpu_lease import take_leases\n"
        "os.setuid(65534); lease = take_leases([sys.argv[1]], 'shy-lynx-1', ()); print(flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program, gpus.uuids[0]]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as nobody:
        nobody.stdout.readline()
        assert busy(gpus) == {"0": "run shy-lynx-1 of nobody"}
        assert take(gpus, "0") is None
        nobody.stdin.close()


@pytest.mark.root
def test_a_lease_is_named_with_the_user_who_has_it_whatever_its_name_says(gpus: FakeGpus, leases: list[Lease]) -> None:
    program = (
        "import os, socket, sys; os.setuid(65534); kept = [socket.socket(socket.AF_UNIX) for _ in sys.argv[1:]]\n"
        "for sock, name in zip(kept, sys.argv[1:]): sock.bind(chr(0) + 'clusterddp-gpu/' + name)\n"
        "print(flush=True); sys.stdin.read()"
    )
    leases.append(take(gpus, "1"))
    first, second = gpus.uuids
    names = [first, f"{first}/0/root-run", f"{second}/65534/shy-lynx-1"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as nobody:
        nobody.stdout.readline()
        assert busy(gpus) == {"0": "run root-run of nobody", "1": "run brisk-otter-3"}
        nobody.stdin.close()
    with subprocess.Popen(
        [sys.executable, "-c", program, first], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as nobody:
        nobody.stdout.readline()
        assert busy(gpus) == {"0": "a process of nobody", "1": "run brisk-otter-3"}
        nobody.stdin.close()


def test_a_process_that_computes_without_a_lease_is_named_with_its_user(gpus: FakeGpus) -> None:
    gpus.compute({1: os.getpid()})
    assert busy(gpus) == {"1": f"pid {os.getpid()} of {_user()}"}


def test_a_process_that_cannot_be_seen_makes_its_gpu_busy_all_the_same(gpus: FakeGpus) -> None:
    gpus.compute({0: "[Insufficient Permissions]", 1: 2**22 + 1})
    assert busy(gpus) == {"0": "a process that cannot be seen from here", "1": f"pid {2**22 + 1}"}


def test_the_processes_of_a_leased_gpu_are_its_runs(gpus: FakeGpus, leases: list[Lease]) -> None:
    leases.append(take(gpus, "0"))
    gpus.compute({0: os.getpid()})
    assert busy(gpus) == {"0": "run brisk-otter-3"}


def test_the_server_of_mps_does_not_make_a_gpu_busy(gpus: FakeGpus, tmp_path: Path) -> None:
    server = tmp_path / "nvidia-cuda-mps-server"
    server.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([server, "60"]) as process:
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text().startswith("nvidia-cuda-mps"))
        gpus.compute({0: process.pid})
        assert busy(gpus) == {}
        process.kill()


def test_unlike_gpus_are_named_by_uuid_for_cuda_counts_them_otherwise(tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path / "bin", models=("NVIDIA T4", "NVIDIA H200"))
    assert read_machine(gpus.environ).gpus == tuple(gpus.uuids)
    assert read_machine(gpus.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).gpus == ("0", "1")


def test_users_of_gpus_are_spelled_once_each() -> None:
    users = {"0": "run a", "1": "pid 3 of ana", "2": "run a"}
    assert spell_busy(users) == "GPUs 0 and 2: run a; GPU 1: pid 3 of ana"


def test_supervisor_and_guard_hold_the_leases_of_their_node_and_no_rank_does(gang: GangRun, gpus: FakeGpus) -> None:
    gang.await_up()
    roles = ("s0", "g0", "n0", "s1", "g1", "n1")
    holding = {role for role in roles if any(_holds_lease(pid) for pid in gang.pids(role))}
    assert holding == {"s0", "g0", "s1", "g1"}
    assert busy(gpus) == {"0": "run brisk-otter-3", "1": "run brisk-otter-3"}


def test_leases_end_with_their_run(gang: GangRun, gpus: FakeGpus) -> None:
    gang.await_up()
    gang.run.cancel_file.write_text("{}")
    gang.await_end()
    assert busy(gpus) == {}


def test_a_guard_holds_the_leases_of_a_killed_supervisor_until_its_ranks_are_gone(
    gang: GangRun, gpus: FakeGpus
) -> None:
    gang.await_up()
    for pid in gang.pids("g1"):
        os.kill(pid, signal.SIGSTOP)
    os.kill(gang.pids("s1")[0], signal.SIGKILL)
    wait_until(lambda: not gang.pids("s1"))
    assert "1" in busy(gpus)
    for pid in gang.pids("g1"):
        os.kill(pid, signal.SIGCONT)
    gang.await_end(after_kill=True)
    wait_until(lambda: busy(gpus) == {}, 5)


@pytest.fixture
def gang(tmp_path: Path, gpus: FakeGpus) -> Iterator[GangRun]:
    """Two nodes of two ranks each, which run until they are ended; each node has the lease of one GPU."""
    leases = [take(gpus, str(node)) for node in range(2)]
    with started(tmp_path, make_gang(tmp_path, "forever()"), hold=[lease.descriptors for lease in leases]) as gang:
        for lease in leases:
            lease.close()
        yield gang


class Here:
    """Submits runs to this machine, which has the GPUs of the test, and leaves none behind."""

    def __init__(self, directory: Path, gpus: FakeGpus) -> None:
        self.directory = directory
        self.environ = dict(os.environ) | gpus.environ
        self.runs: list[RunDir] = []

    def plan(self, code: str = SLEEP, resources: str = ONE_GPU, **variables: str):  # type: ignore[no-untyped-def]
        return plan_script(self.directory, code, resources=resources, environ=self.environ | variables)

    def submit(self, plan) -> RunDir:  # type: ignore[no-untyped-def]
        self.runs.append(RunDir(plan.run_dir))
        submit(plan)
        return self.runs[-1]


@pytest.fixture
def here(tmp_path: Path, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setenv("PATH", gpus.path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = Here(tmp_path, gpus)
    yield here
    for run in here.runs:
        if run.record.exists():
            end_processes(f"{read_run(run).token}.", timeout_s=5)


def test_two_local_runs_get_different_gpus_and_a_third_is_refused(here: Here, gpus: FakeGpus) -> None:
    first, second = here.submit(here.plan()), here.submit(here.plan())
    assert busy(gpus) == {"0": f"run {first.name}", "1": f"run {second.name}"}
    with pytest.raises(PreflightError) as refusal:
        here.plan()
    assert refusal.value.message == (
        f"job needs 1 GPU, and 0 of 2 on this machine are free: GPU 0: run {first.name}; GPU 1: run {second.name}"
    )


def test_a_local_run_holds_its_gpus_until_it_has_ended(here: Here, gpus: FakeGpus) -> None:
    run = here.submit(here.plan())
    wait_for_ranks(run, 1)
    assert busy(gpus) == {"0": f"run {run.name}"}
    cancel(run)
    wait_until(lambda: not processes_of(run))
    assert busy(gpus) == {}


def test_ranks_see_the_gpus_that_their_run_has_leased(here: Here) -> None:
    here.submit(here.plan())
    run = here.submit(here.plan(HELLO + "print(os.environ['CUDA_VISIBLE_DEVICES'])\n"))
    assert wait(run, 30).state is RunState.COMPLETED
    assert run.attempt(0).stdout(0).read_text().splitlines()[-1] == "1"


def test_a_run_takes_another_gpu_when_its_own_was_taken_since_it_was_planned(here: Here) -> None:
    plans = [here.plan(), here.plan()]
    runs = [here.submit(plan) for plan in plans]
    assert [plan.gang.nodes[0].gpus for plan in plans] == [("0",), ("0",)]
    assert [read_plan(run)["gang"]["nodes"][0]["gpus"] for run in runs] == [["0"], ["1"]]
    assert read_plan(runs[1])["rank0"]["CUDA_VISIBLE_DEVICES"]["value"] == "1"


def test_a_run_whose_gpus_were_all_taken_since_it_was_planned_is_refused(here: Here) -> None:
    late = here.plan()
    first = here.submit(here.plan(resources="{nodes: 2, gpus_per_node: 1}"))
    with pytest.raises(PreflightError, match=f"GPUs 0 and 1: run {first.name}"):
        here.submit(late)
    end = read_end(here.runs[-1].attempt(0))
    assert end is not None
    assert end.outcome == "FAILED"


def test_killing_every_process_of_a_local_run_frees_its_gpus(here: Here, gpus: FakeGpus) -> None:
    run = here.submit(here.plan())
    wait_for_ranks(run, 1)
    pids = [process.pid for role in processes_of(run).values() for process in role]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    wait_until(lambda: busy(gpus) == {})


def test_a_resumed_run_keeps_its_gpu_if_it_is_free(here: Here, gpus: FakeGpus) -> None:
    first, second = here.submit(here.plan()), here.submit(here.plan())
    for run in (first, second):
        wait_for_ranks(run, 1)
    cancel(second)
    resume(second)
    assert busy(gpus) == {"0": f"run {first.name}", "1": f"run {second.name}"}


def test_a_resumed_run_is_refused_when_its_gpus_are_taken(here: Here) -> None:
    run = here.submit(here.plan())
    wait_for_ranks(run, 1)
    cancel(run)
    wait_until(lambda: not processes_of(run))
    other = here.submit(here.plan(resources="{nodes: 2, gpus_per_node: 1}"))
    with pytest.raises(PreflightError, match=f"GPUs 0 and 1: run {other.name}"):
        resume(run)


def test_a_gpu_that_others_compute_on_is_avoided(here: Here, gpus: FakeGpus) -> None:
    gpus.compute({0: os.getpid()})
    assert here.plan().gang.nodes[0].gpus == ("1",)


def test_a_gpu_that_others_compute_on_is_taken_by_who_names_it(here: Here, gpus: FakeGpus) -> None:
    gpus.compute({0: os.getpid()})
    assert here.plan(CUDA_VISIBLE_DEVICES="0").gang.nodes[0].gpus == ("0",)


def test_a_leased_gpu_is_refused_to_who_names_it(here: Here, gpus: FakeGpus) -> None:
    run = here.submit(here.plan())
    with pytest.raises(PreflightError, match=f"GPU 0: run {run.name}"):
        here.plan(CUDA_VISIBLE_DEVICES="0")


def test_a_run_without_gpus_has_no_leases(here: Here, gpus: FakeGpus) -> None:
    run = here.submit(here.plan(resources="{nodes: 1, gpus_per_node: 0}"))
    wait_for_ranks(run, 1)
    assert busy(gpus) == {}


def _holds_lease(pid: int) -> bool:
    names = {line.split()[6]: line for line in Path("/proc/net/unix").read_text().splitlines()}
    inodes = [str(entry.readlink()).partition("[")[2].rstrip("]") for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return any("@clusterddp-gpu/" in names.get(inode, "") for inode in inodes)


def _user() -> str:
    return subprocess.check_output(["id", "-un"], text=True).strip()


@pytest.mark.parametrize(
    "name",
    [
        b"x\n\ny",
        b"\n",
        b"clusterddp-gpu/GPU-none/4294967295/x",
        b"clusterddp-gpu/GPU-none/" + b"9" * 80 + b"/x",
        b"clusterddp-gpu/\xff\xfe",
        b"x" * 107,
    ],
    ids=repr,
)
def test_no_name_that_a_stranger_binds_stops_a_submit(gpus: FakeGpus, name: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(b"\0" + name)
        assert busy(gpus) == {}
        read_leases(["GPU-none"], list_gpus(gpus.environ))
