"""What lives of runs on a machine, and the end of what is left over: real processes, found by what is in /proc.

On this machine gc always gets the name of a run: other tests run here, too. Tests without a name use hosts
of a rack (test_ps_gc_hosts.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterddp.run.cleanup import find_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.leftovers import RunHere, end_left_over, find_runs
from clusterddp.run.record import RunRecord, write_run
from clusterddp.run.seal import sealed
from clusterddp.system.files import write_json
from tests.support.gang_runs import GangRun, processes_with, running
from tests.support.handmade_slurm_runs import placeholder_gang
from tests.support.paths import TESTS
from tests.support.waiting import wait_until

HOST = socket.gethostname()
SLEEPER = ["sleep", "600"]
OVERWRITES_ITS_ENVIRONMENT = """
import ctypes, os, sys, time
while sys.argv[1:] and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
start, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
ctypes.memset(start, 0, end - start)
print("up", flush=True)
time.sleep(600)
"""
STARTS_ONE_THAT_OVERWRITES_ITS_ENVIRONMENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {OVERWRITES_ITS_ENVIRONMENT!r}])
"""
WHILE_GC_ASKS = TESTS / "support/gang/while_gc_asks.py"
ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
OTHER_UID = 65_534
Start = Callable[..., subprocess.Popen[bytes]]


def needs_root(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs as another user for a while, or in a PID namespace of its own."""
    return pytest.mark.root(pytest.mark.skipif(os.geteuid() != 0, reason="needs root")(test))


@pytest.fixture
def token() -> str:
    return os.urandom(16).hex()


@pytest.fixture
def start(token: str) -> Iterator[Start]:
    """Start a process with a role in the run `token`; it is ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(
        role: str, command: list[str] = SLEEPER, *, of: str = token, user: int | None = None
    ) -> subprocess.Popen[bytes]:
        cookie = f"CLUSTERDDP_COOKIE={of}.{role}\0"
        environment = {"PATH": os.defpath, "CLUSTERDDP_COOKIE": f"{of}.{role}", "CLUSTERDDP_RUN": "brisk-otter-3"}
        process = subprocess.Popen(command, env=environment, user=user, start_new_session=True, cwd="/")
        started.append(process)
        wait_until(lambda: process.pid in {pid for pid, _ in processes_with(cookie)}, what="the environment is there")
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def run(tmp_path: Path, token: str) -> RunDir:
    """The record of a run; nothing of it lives until a test starts it."""
    return make_record(tmp_path / "runs" / "brisk-otter-3", token)


def make_record(path: Path, token: str) -> RunDir:
    made = RunDir(path)
    made.path.mkdir(parents=True)
    write_run(made, RunRecord(run=path.name, token=token, name="job", launcher="local", created_ns=1))
    write_json(made.plan, sealed({"run": path.name, "gang": placeholder_gang(), "spec": {}}))
    return made


def clusterddp(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clusterddp", *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, cwd="/"
    )


def gc(run: RunDir, *arguments: str) -> subprocess.CompletedProcess[str]:
    return clusterddp("gc", run.path, "--yes", *arguments)


def look(token: str) -> RunHere | None:
    return next(iter(find_runs(only={token})), None)


def kill_those_who_answer(gang: GangRun) -> None:
    """Kill the supervisor and its guard so that neither can see to the other's end."""
    (supervisor,), (guard,) = gang.pids("s0"), gang.pids("g0")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (supervisor, guard):
            os.kill(pid, number)
    wait_until(lambda: not gang.pids("s0") and not gang.pids("g0"), what="both are gone")


@pytest.fixture
def left_over_gang(tmp_path: Path) -> Iterator[GangRun]:
    """A gang whose supervisor and guard were killed together; each rank had left a daemon."""
    with running(tmp_path, "leave_daemon()\nforever()", nodes=1) as gang:
        write_run(
            gang.run,
            RunRecord(run="brisk-otter-3", token=gang.gang.token, name="job", launcher="local", created_ns=1),
        )
        gang.await_up()
        kill_those_who_answer(gang)
        yield gang


def test_a_run_whose_supervisor_and_guard_were_killed_together_is_left_over(left_over_gang):
    wait_until(lambda: len(left_over_gang.left()) == 2, what=left_over_gang.left)
    here = look(left_over_gang.gang.token)
    assert (here.label, here.answered_by) == ("brisk-otter-3", None)
    assert {process.pid for process in here.processes} == set(left_over_gang.daemons())


def test_gc_ends_a_grandchild_in_a_session_of_its_own(left_over_gang):
    done = gc(left_over_gang.run)
    assert left_over_gang.left() == []
    assert (done.returncode, done.stderr) == (0, "")


def test_gc_prints_how_many_processes_of_which_run_ended_where(run, start):
    start("n0")
    start("n0")
    start("n1")
    assert gc(run).stdout.splitlines()[-1] == f"3 processes of brisk-otter-3 ended on {HOST}"


def test_gc_reports_to_scripts(run, start, token):
    rank = start("n0")
    done = gc(run, "-o", "json")
    (host,) = json.loads(done.stdout)["hosts"]
    assert host["ended"] == [{"run": "brisk-otter-3", "key": token[:8], "ended": 1, "left": [], "answered_by": None}]
    assert [process["pid"] for process in host["left_over"][0]["processes"]] == [rank.pid]


def test_ps_reports_to_scripts(run, start, token):
    supervisor, rank = start("s0"), start("n0")
    (host,) = json.loads(clusterddp("ps", run.path, "-o", "json").stdout)["hosts"]
    (found,) = host["runs"]
    assert (found["run"], found["left_over"], found["answered_by"]) == (
        "brisk-otter-3",
        False,
        f"supervisor {supervisor.pid}",
    )
    assert {(process["pid"], process["role"]) for process in found["processes"]} == {
        (supervisor.pid, "s0"),
        (rank.pid, "n0"),
    }


def test_the_token_of_a_run_is_not_shown(run, start, token):
    start("n0")
    assert token not in clusterddp("ps", run.path, "-o", "json").stdout + clusterddp("ps", run.path).stdout


def test_the_start_of_a_process_is_reported_in_seconds_since_the_epoch(run, start):
    before = time.time()
    start("n0")
    (host,) = json.loads(clusterddp("ps", run.path, "-o", "json").stdout)["hosts"]
    assert before - 2 < host["runs"][0]["processes"][0]["started"] < time.time() + 2


@pytest.mark.parametrize("role", ["s1", "g1", "task"])
def test_a_run_for_which_anybody_answers_is_not_swept(run, start, role):
    rank = start("n0")
    start(role)
    gc(run)
    assert rank.poll() is None


def test_a_run_that_has_a_supervisor_again_is_not_ended(start, token):
    rank, guard = start("n0"), start("g0")
    assert end_left_over(token).answered_by == f"guard {guard.pid}"
    assert rank.poll() is None


def test_another_run_of_the_same_user_survives_gc(run, start):
    start("n0")
    other = start("n0", of=os.urandom(16).hex())
    gc(run)
    assert other.poll() is None


def test_another_run_of_the_same_user_survives_cancel(run, start):
    mine, other = start("n0"), start("n0", of=os.urandom(16).hex())
    clusterddp("cancel", run.path)
    mine.wait(10)
    assert other.poll() is None


@needs_root
@pytest.mark.parametrize("command", ["gc", "cancel"])
def test_a_process_of_another_user_with_the_same_command_and_environment_survives(run, start, command):
    mine, theirs = start("n0"), start("n0", user=OTHER_UID)
    clusterddp(command, run.path, *(["--yes"] if command == "gc" else []))
    mine.wait(10)
    assert theirs.poll() is None


@needs_root
def test_a_process_of_another_user_is_not_shown_as_ours(start, token):
    start("n0", user=OTHER_UID)
    assert look(token) is None


def test_a_process_that_has_overwritten_its_environment_and_has_no_mark_is_out_of_reach(run, start, token, tmp_path):
    process = start("n0", [sys.executable, "-c", OVERWRITES_ITS_ENVIRONMENT, str(tmp_path / "go")])
    (tmp_path / "go").touch()
    wait_until(lambda: not find_processes(f"{token}."), what="it has overwritten its environment")
    gc(run)
    assert process.poll() is None


def test_gc_names_what_a_run_has_started_that_carries_no_cookie(run, start, token):
    parent = start("n0", [sys.executable, "-c", STARTS_ONE_THAT_OVERWRITES_ITS_ENVIRONMENT])
    wait_until(lambda: look(token).unmarked, what="the child has overwritten its environment")
    (child,) = look(token).unmarked
    try:
        done = gc(run)
        assert f"do not carry the run's variable, so gc does not end them: kill {child}" in done.stderr
        assert parent.wait(10) == -signal.SIGKILL
    finally:
        os.kill(child, signal.SIGKILL)


def test_gc_does_not_end_the_run_that_it_was_started_in(run, start):
    """A user may have started tmux in a rank: its shells carry the cookie, too."""
    command = [sys.executable, "-m", "clusterddp", "gc", str(run.path), "--yes"]
    shell = start("n0", ["sh", "-c", '"$@"; exec sleep 600', "sh", *command])
    wait_until(lambda: b"sleep" in Path(f"/proc/{shell.pid}/cmdline").read_bytes()[:5], what="gc has ended")
    assert shell.poll() is None


@needs_root
def test_a_process_that_was_given_the_pid_of_a_left_over_one_survives():
    found = while_gc_asks("pid")
    assert (found["same_pid"], found["alive"]) == (True, True), found["said"]


@needs_root
def test_a_run_that_is_started_again_while_gc_asks_survives():
    found = while_gc_asks("supervisor")
    assert (found["alive"], "is supervised again, by supervisor" in found["said"]) == (True, True), found["said"]


@needs_root
def test_the_exit_code_reports_a_process_that_does_not_end(token):
    """No process can kill the first of its PID namespace; it stands for one that waits for a disk for ever."""
    init = ["env", f"CLUSTERDDP_COOKIE={token}.n0", "CLUSTERDDP_RUN=brisk-otter-3", "sleep", "600"]
    process = subprocess.Popen([*ALONE, *init])
    try:
        wait_until(lambda: look(token), what="the first process is up")
        (first,) = (found.pid for found in look(token).processes)
        gc_inside = ["nsenter", "-t", str(first), "-p", "-m", sys.executable, "-m", "clusterddp", "gc", "--yes"]
        done = subprocess.run(gc_inside, check=False, capture_output=True, text=True, timeout=240)
        assert (done.returncode, "brisk-otter-3 cannot be ended: 1 (sleep 600)" in done.stderr) == (1, True)
    finally:
        process.kill()
        process.wait()


def while_gc_asks(what: str) -> dict[str, object]:
    command = [*ALONE, sys.executable, str(WHILE_GC_ASKS), what]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    return dict(json.loads(done.stdout))


def test_gc_asks_for_a_terminal_before_it_ends_anything(run, start):
    rank = start("n0")
    done = clusterddp("gc", run.path)
    assert (done.returncode, rank.poll()) == (2, None)


def test_a_dry_run_ends_nothing(run, start):
    rank = start("n0")
    done = clusterddp("gc", run.path, "-n")
    assert (done.returncode, str(rank.pid) in done.stdout, rank.poll()) == (0, True, None)


def test_gc_has_nothing_to_ask_where_nothing_is_left_over(run):
    assert clusterddp("gc", run.path).returncode == 0


def test_a_run_that_has_no_name_is_shown_by_the_beginning_of_its_token(token):
    process = subprocess.Popen(SLEEPER, env={"CLUSTERDDP_COOKIE": f"{token}.n0"})
    try:
        wait_until(lambda: look(token), what="it is found")
        assert look(token).label == f"run {token[:8]}"
    finally:
        process.kill()
        process.wait()


def test_the_name_of_a_run_is_found_in_the_directory_where_its_supervisor_works(run, token):
    (run.path / "launcher").mkdir()
    process = subprocess.Popen(SLEEPER, env={"CLUSTERDDP_COOKIE": f"{token}.s0"}, cwd=run.path / "launcher")
    try:
        wait_until(lambda: look(token), what="it is found")
        assert look(token).run == "brisk-otter-3"
    finally:
        process.kill()
        process.wait()


def test_gpus_are_those_that_the_ranks_were_given(token):
    environment = {"CLUSTERDDP_COOKIE": f"{token}.n0", "CUDA_VISIBLE_DEVICES": "2,10"}
    process = subprocess.Popen(SLEEPER, env=environment)
    try:
        wait_until(lambda: look(token), what="it is found")
        assert look(token).gpus == ("2", "10")
    finally:
        process.kill()
        process.wait()


def test_a_run_on_slurm_is_not_looked_for_on_this_machine(tmp_path, token):
    run = RunDir(tmp_path / "calm-fox-1")
    run.path.mkdir()
    write_run(run, RunRecord(run="calm-fox-1", token=token, name="job", launcher="slurm", created_ns=1))
    assert clusterddp("ps", run.path).returncode == 2
