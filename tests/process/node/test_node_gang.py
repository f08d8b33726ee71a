"""A gang from start to end: the variables of ranks, the records, and the failure that is the root cause."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from clusterddp.run.gang import Entry
from tests.support.gang_runs import make_gang, running, started
from tests.support.waiting import PATIENCE

DUMP = """
import json
(run_dir / f"env-{rank}.json").write_text(json.dumps({"env": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd()}))
print(f"out of {rank}"); print(f"err of {rank}", file=sys.stderr)
"""
OTHERS_RUN = "up()\nwhile rank != 2 or len(list(run_dir.glob('up-*'))) < 4: time.sleep(0.02)\n"
"""Rank 2 goes on once all are up."""


def read_dump(run_dir: Path, rank: int) -> dict[str, str]:
    return json.loads((run_dir / f"env-{rank}.json").read_text())["env"]


def test_a_gang_that_does_its_work_is_completed_and_leaves_nothing(tmp_path):
    with running(tmp_path, DUMP) as gang:
        assert gang.await_end() == [0, 0]
        assert gang.end().outcome == "COMPLETED"
        assert gang.end().root_cause is None
        assert [record.rank for record in gang.ranks()] == [0, 1, 2, 3]
        assert [record.exit_code for record in gang.ranks()] == [0] * 4
        assert [(r.node_rank, r.local_rank, r.host) for r in gang.ranks()] == [
            (0, 0, "host0"),
            (0, 1, "host0"),
            (1, 0, "host1"),
            (1, 1, "host1"),
        ]
        assert gang.attempt().stdout(3).read_text() == "out of 3\n"
        assert gang.attempt().stderr(2).read_text() == "err of 2\n"


def test_each_rank_gets_the_variables_of_its_own_place(tmp_path):
    with running(tmp_path, DUMP) as gang:
        gang.await_end()
        environments = [read_dump(gang.run.path, rank) for rank in range(4)]
        start = json.loads(gang.attempt().start.read_text())
        names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"]
        assert [[environment[name] for name in names] for environment in environments] == [
            ["0", "0", "0", "0", "4", "2", "2"],
            ["1", "1", "0", "0", "4", "2", "2"],
            ["2", "0", "1", "1", "4", "2", "2"],
            ["3", "1", "1", "1", "4", "2", "2"],
        ]
        assert {environment["MASTER_PORT"] for environment in environments} == {str(start["master_port"])}
        assert start["supervisor"]["pid"] == gang.supervisors[0]
        assert start["world_size"] == 4


def test_the_files_that_the_variables_name_are_those_of_the_run_directory(tmp_path):
    with running(tmp_path, DUMP) as gang:
        gang.await_end()
        environment = read_dump(gang.run.path, 3)
        assert environment["TORCHELASTIC_ERROR_FILE"] == str(gang.attempt().error_file(3))
        assert environment["CLUSTERDDP_STOP_FILE"] == str(gang.attempt().stop_file)
        assert "CLUSTERDDP_SUPERVISOR_PID" not in environment


def test_the_users_variables_reach_every_rank_and_beat_what_would_be_chosen(tmp_path):
    with running(tmp_path, DUMP, env={"OMP_NUM_THREADS": "7", "FOO": "bar baz", "RANK": "9"}) as gang:
        gang.await_end()
        environment = read_dump(gang.run.path, 1)
        assert (environment["OMP_NUM_THREADS"], environment["FOO"]) == ("7", "bar baz")
        assert environment["RANK"] == "1"


def test_a_rank_inherits_no_file_of_its_supervisor_but_rank_0_the_listener_and_reads_nothing(tmp_path):
    program = """
import socket
def is_own(file, name):  # the memory and the socket that the rank has opened itself, to answer where it is
    if file.startswith("socket:"):
        with socket.socket(fileno=os.dup(int(name))) as opened:
            return opened.family == socket.AF_UNIX and opened.getsockname().startswith(b"\\0clusterddp-rank-")
    return file.startswith("/memfd:clusterddp-stacks-")
files = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
         if os.path.exists(f"/proc/self/fd/{name}")}
files = {int(name): file for name, file in files.items() if not is_own(file, name)}
(run_dir / f"files-{rank}").write_text(repr(files))
assert os.getsid(0) == os.getpid() == os.getpgid(0)
"""
    with running(tmp_path, program) as gang:
        assert gang.await_end() == [0, 0]
        files = [eval((gang.run.path / f"files-{rank}").read_text()) for rank in range(4)]
        assert [sorted(each)[:3] for each in files] == [[0, 1, 2]] * 4
        assert [[name.partition(":")[0] for name in list(each.values())[3:]] for each in files] == [
            ["socket"],
            [],
            [],
            [],
        ]
        assert {each[0] for each in files} == {"/dev/null"}


@pytest.mark.parametrize(
    ("failure", "exit_code", "error"),
    [
        ("raise ValueError('no such\\nlabel')", 1, "rank 2 on host1: ValueError: no such label"),
        ("sys.exit(3)", 3, "rank 2 on host1 exited with code 3"),
        ("sys.exit('bad data')", 1, "rank 2 on host1: SystemExit: bad data"),
        ("os._exit(7)", 7, "rank 2 on host1 exited with code 7"),
        ("os.kill(os.getpid(), 9)", 137, "rank 2 on host1 was killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", 139, "rank 2 on host1 was killed by SIGSEGV"),
        ("exec('1 +')", 1, 'rank 2 on host1: File "<string>", line 1 1 + ^ SyntaxError: invalid syntax'),
    ],
)
def test_the_rank_that_failed_is_the_root_cause(tmp_path, failure, exit_code, error):
    with running(tmp_path, OTHERS_RUN + failure) as gang:
        assert gang.await_end() == [1, 1]
        cause = gang.end().root_cause
        assert gang.end().outcome == "FAILED"
        assert (cause.rank, cause.host, cause.exit_code, cause.error) == (2, "host1", exit_code, error)
        assert cause.log == "attempts/0/logs/rank-002.err"
        assert [record.error for record in gang.ranks() if record.rank != 2] == ["ended with the others"] * 3


def test_a_raised_exception_is_reported_with_its_traceback_and_without_our_frames(tmp_path):
    with running(tmp_path, OTHERS_RUN + "def load():\n    raise KeyError('label')\nload()\n") as gang:
        gang.await_end()
        cause = gang.end().root_cause
        assert "in load\n" in cause.traceback
        assert cause.traceback.rstrip().endswith("KeyError: 'label'")
        assert "runpy" not in cause.traceback
        assert "clusterddp" not in cause.traceback
        assert gang.attempt().stderr(2).read_text() == cause.traceback


def test_what_a_script_wrote_into_the_error_file_itself_is_kept(tmp_path):
    program = """
import json
if rank == 2:
    message = {"message": "CustomError: from @record", "extraInfo": {"py_callstack": "a\\nb", "timestamp": "1"}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))
    os._exit(1)
forever()
"""
    with running(tmp_path, program) as gang:
        gang.await_end()
        assert gang.end().root_cause.error == "rank 2 on host1: CustomError: from @record"
        assert gang.end().root_cause.traceback == "a\nb"


def test_a_script_that_is_gone_is_the_root_cause(tmp_path):
    gang = make_gang(tmp_path, "")
    Path(gang.entry.target).unlink()
    with started(tmp_path, gang) as gang_run:
        assert gang_run.await_end() == [1, 1]
        assert "FileNotFoundError: [Errno 2] No such file or directory" in gang_run.end().root_cause.error


def test_a_rank_that_left_early_is_the_cause_of_the_others_connection_losses(tmp_path):
    program = """
up()
if rank == 1:
    sys.exit(0)
while not (run_dir / "attempts/0/ranks/001.json").exists(): time.sleep(0.01)
while '"exit_code": 0' not in (run_dir / "attempts/0/ranks/001.json").read_text(): time.sleep(0.01)
time.sleep(0.01 * rank)
raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12003.")
"""
    with running(tmp_path, program) as gang:
        gang.await_end()
        cause = gang.end().root_cause
        assert (cause.rank, cause.exit_code) == (1, 0)
        assert cause.error.startswith("rank 1 on host0 exited with code 0 while others still needed it; then rank ")


@pytest.mark.parametrize(
    "failure", ["os.kill(os.getpid(), 9)", "raise ValueError('mine')", "os._exit(7)"], ids=["killed", "raised", "left"]
)
def test_a_connection_loss_that_is_seen_first_waits_for_its_cause(tmp_path, failure):
    program = f"""
up()
if rank == 3:
    while len(list(run_dir.glob("lost-*"))) < 3: time.sleep(0.002)
    time.sleep(0.02)
    {failure}
while not (run_dir / "up-0-3").exists(): time.sleep(0.002)
(run_dir / f"lost-{{rank}}").touch()
raise RuntimeError("Connection closed by peer [127.0.0.1]:12003. This is typically caused by a remote worker crashing.")
"""
    with running(tmp_path, program) as gang:
        gang.await_end()
        assert gang.end().root_cause.rank == 3


def test_a_rank_killed_from_outside_is_named_and_the_gang_is_gone_at_once(tmp_path):
    with running(tmp_path, "forever()") as gang:
        gang.await_up()
        os.kill(gang.ranks()[1].pid, signal.SIGKILL)
        killed = time.monotonic()
        gang.await_end()
        assert time.monotonic() - killed < PATIENCE * 5
        assert gang.end().root_cause.error == "rank 1 on host0 was killed by SIGKILL"


def test_a_stopped_sibling_that_ignores_everything_is_ended_too(tmp_path):
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nforever()"
    with running(tmp_path, program) as gang:
        gang.await_up()
        os.kill(gang.ranks()[3].pid, signal.SIGSTOP)
        os.kill(gang.ranks()[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        gang.await_end()
        assert time.monotonic() - killed < PATIENCE * 5
        assert gang.end().root_cause.rank == 0


@pytest.mark.parametrize("end", ["pass", "os._exit(1)"], ids=["work done", "failed"])
def test_a_daemon_that_a_rank_left_behind_is_ended_with_the_gang(tmp_path, end):
    with running(tmp_path, "leave_daemon(); up()\nwhile len(list(run_dir.glob('up-*'))) < 4: pass\n" + end) as gang:
        gang.await_end()
        assert len(gang.daemons()) == 4
        assert [pid for pid in gang.daemons() if Path(f"/proc/{pid}").exists()] == []


def test_a_daemon_that_lost_its_environment_is_found_by_descent(tmp_path):
    with running(tmp_path, "leave_daemon({'PATH': os.environ['PATH']})") as gang:
        gang.await_end()
        assert len(gang.daemons()) == 4
        assert [pid for pid in gang.daemons() if Path(f"/proc/{pid}").exists()] == []


def test_a_restart_runs_the_gang_again_and_keeps_both_attempts(tmp_path):
    program = """
print("attempt", attempt, "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
up()
if attempt == 4 and rank == 3: raise ValueError("first time")
if attempt == 4: time.sleep(60)
"""
    with running(tmp_path, program, order={"attempt": 4}, restarts=2) as gang:
        assert gang.await_end() == [0, 0]
        first, second = gang.end(4), gang.end(5)
        assert (first.outcome, first.will_restart, first.root_cause.rank) == ("FAILED", True, 3)
        assert (second.outcome, second.will_restart) == ("COMPLETED", False)
        assert gang.attempt(4).stdout(1).read_text() == "attempt 4 restart 0 2\n"
        assert gang.attempt(5).stdout(1).read_text() == "attempt 5 restart 1 2\n"
        ports = {json.loads(gang.attempt(number).start.read_text())["master_port"] for number in (4, 5)}
        assert len(ports) == 2
        events = [json.loads(line)["event"] for line in gang.run.events.read_text().splitlines()]
        assert events == ["attempt_started", "rank_failed", "attempt_ended", "attempt_started", "attempt_ended"]


def test_restarts_come_to_an_end(tmp_path):
    with running(tmp_path, "os._exit(9 if rank == 1 else 0)", restarts=1) as gang:
        assert gang.await_end() == [1, 1]
        assert [gang.end(number).will_restart for number in (0, 1)] == [True, False]
        assert not gang.attempt(2).path.exists()


def test_a_named_master_port_serves_every_attempt(tmp_path):
    program = """
import socket
up()
if rank == 0:
    server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", int(os.environ["MASTER_PORT"]))); server.listen()
    connection, _ = server.accept(); connection.close()
if rank == 1:
    while True:
        try: socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).recv(1); break
        except ConnectionRefusedError: time.sleep(0.01)
    if attempt == 0: os._exit(1)
"""
    command = Entry(kind="command", target=sys.executable, args=("program.py",), working_dir=str(tmp_path))
    with running(tmp_path, program, restarts=1, master_port=18734, entry=command) as gang:
        assert gang.await_end() == [0, 0], gang.end()
        assert gang.end(1).outcome == "COMPLETED"
