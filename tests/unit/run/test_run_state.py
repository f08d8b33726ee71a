"""States, read from run directories made by hand: real files, real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterddp.node.head import may_look_for_file
from clusterddp.places.state import read_state
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.cleanup import end_processes, end_run_here, find_processes, marking
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.run.gang import Entry
from clusterddp.run.leftovers import find_runs
from clusterddp.run.record import ProcessIdentity, RankEnd, RunRecord, write_run
from clusterddp.run.state import RunState
from clusterddp.run.stop import looking_at, request_stop

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that sleeps, with a cookie or without; it is ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start_sleeper(cookie: str | None = None) -> subprocess.Popen[bytes]:
        environment = dict(os.environ) | ({"CLUSTERDDP_COOKIE": cookie} if cookie else {})
        process = subprocess.Popen(SLEEPER, env=environment)
        started.append(process)
        deadline = time.monotonic() + 10
        while cookie and process.pid not in {found.pid for found in find_processes(cookie)}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    yield start_sleeper
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def token() -> str:
    return os.urandom(16).hex()


@pytest.fixture
def run(tmp_path: Path, token: str) -> RunDir:
    """A run whose submitter is dead, and of which nothing else is known."""
    made = RunDir(tmp_path / "brisk-otter-3")
    made.path.mkdir()
    write_run(made, record(token))
    return made


def record(token: str, **changes: object) -> RunRecord:
    plain = RunRecord(
        run="brisk-otter-3", token=token, name="job", launcher="local", created_ns=1, submitter=dead_identity()
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def dead_identity() -> dict[str, object]:
    return dataclasses.asdict(dataclasses.replace(ProcessIdentity.of(), started=-5.0))


def identity_of(process: subprocess.Popen[bytes]) -> dict[str, object]:
    return dataclasses.asdict(ProcessIdentity.of(process.pid))


def make_attempt(run: RunDir, number: int, *, head: dict[str, object] | None = None) -> None:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True)
    if head is not None:
        attempt.start.write_text(json.dumps({"attempt": number, "supervisor": head}))
    os.utime(attempt.path, (1, 1))


def end(run: RunDir, number: int, outcome: str, *, will_restart: bool = False) -> None:
    cause = RankEnd(rank=1, host="h", exit_code=137, error="rank 1 on h was killed by SIGKILL", log=None)
    write_end(
        run.attempt(number),
        AttemptEnd(outcome=outcome, reason="the reason", root_cause=cause, will_restart=will_restart),  # type: ignore[arg-type]
    )


def test_a_run_is_pending_while_its_submitter_lives(run: RunDir, token: str, start: Start) -> None:
    make_attempt(run, 0)
    write_run(run, record(token, submitter=identity_of(start())))
    assert read_state(run).state is RunState.PENDING


def test_a_run_is_pending_while_its_keeper_lives_and_no_rank_was_started(run: RunDir, token: str, start: Start) -> None:
    make_attempt(run, 0)
    write_run(run, record(token, keeper=identity_of(start())))
    assert read_state(run).state is RunState.PENDING


def test_a_run_is_pending_while_a_launcher_without_a_record_carries_its_cookie(
    run: RunDir, token: str, start: Start
) -> None:
    make_attempt(run, 0)
    start(f"{token}.task")
    assert read_state(run).state is RunState.PENDING


def test_a_run_whose_submitter_died_before_the_start_is_lost(run: RunDir) -> None:
    make_attempt(run, 0)
    view = read_state(run)
    assert (view.state, view.attempt) == (RunState.LOST, 0)
    assert "never started" in view.reason


def test_a_run_without_any_attempt_is_lost_without_its_submitter(run: RunDir) -> None:
    assert read_state(run).state is RunState.LOST


def test_a_submitter_that_lives_on_does_not_keep_a_dead_run_alive(run: RunDir, token: str, start: Start) -> None:
    write_run(run, record(token, submitter=identity_of(start()), keeper=dead_identity()))
    make_attempt(run, 0, head=dead_identity())
    assert read_state(run).state is RunState.LOST


def test_a_run_is_running_while_its_head_supervisor_lives(run: RunDir, start: Start) -> None:
    make_attempt(run, 0, head=identity_of(start()))
    view = read_state(run)
    assert (view.state, view.attempt, view.end) == (RunState.RUNNING, 0, None)


@pytest.mark.parametrize("role", ["task", "s1", "g0"])
def test_a_run_is_running_while_a_process_is_left_that_will_record_its_end(
    run: RunDir, token: str, start: Start, role: str
) -> None:
    make_attempt(run, 0, head=dead_identity())
    start(f"{token}.{role}")
    assert read_state(run).state is RunState.RUNNING


def test_a_run_of_which_only_ranks_are_left_is_lost_and_says_how_many(run: RunDir, token: str, start: Start) -> None:
    make_attempt(run, 0, head=dead_identity())
    start(f"{token}.n0")
    start(f"{token}.n1")
    view = read_state(run)
    assert view.state is RunState.LOST
    assert "2 of its processes are left" in view.reason


def test_a_supervisor_whose_pid_was_given_away_counts_as_dead(run: RunDir, start: Start) -> None:
    head = identity_of(start())
    make_attempt(run, 0, head=head | {"started": float(str(head["started"])) - 100.0})
    assert read_state(run).state is RunState.LOST


def test_a_supervisor_of_an_earlier_boot_counts_as_dead(run: RunDir, start: Start) -> None:
    make_attempt(run, 0, head=identity_of(start()) | {"boot": "another"})
    assert read_state(run).state is RunState.LOST


def test_a_zombie_counts_as_dead(run: RunDir, start: Start) -> None:
    process = start()
    make_attempt(run, 0, head=identity_of(process))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_state(run).state is RunState.LOST


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("COMPLETED", RunState.COMPLETED),
        ("FAILED", RunState.FAILED),
        ("CANCELLED", RunState.CANCELLED),
        ("STOPPED", RunState.CANCELLED),
    ],
)
def test_the_recorded_end_is_the_state(run: RunDir, start: Start, outcome: str, state: RunState) -> None:
    make_attempt(run, 0, head=identity_of(start()))
    end(run, 0, outcome)
    view = read_state(run)
    assert (view.state, view.finished) == (state, True)
    assert view.end is not None
    assert view.end.root_cause is not None
    assert view.end.root_cause.rank == 1


def test_a_stopped_run_says_that_resume_continues_it(run: RunDir) -> None:
    make_attempt(run, 0, head=dead_identity())
    end(run, 0, "STOPPED")
    assert read_state(run).reason == "stopped at a checkpoint: the reason; resume continues it"


def test_no_checkpoint_is_claimed_of_a_program_that_may_have_completed(run: RunDir) -> None:
    make_attempt(run, 0, head=dead_identity())
    write_end(run.attempt(0), AttemptEnd(outcome="STOPPED", reason="cancel --save", warning="it may have completed"))
    assert read_state(run).reason == "ended with exit code 0 after the request to stop: cancel --save"


def test_a_run_that_will_restart_is_requeued(run: RunDir, token: str, start: Start) -> None:
    write_run(run, record(token, keeper=identity_of(start())))
    make_attempt(run, 0, head=dead_identity())
    end(run, 0, "FAILED", will_restart=True)
    assert read_state(run).state is RunState.REQUEUED
    make_attempt(run, 1)
    view = read_state(run)
    assert (view.state, view.attempt) == (RunState.REQUEUED, 1)


def test_a_run_whose_keeper_died_before_the_restart_is_lost(run: RunDir) -> None:
    make_attempt(run, 0, head=dead_identity())
    end(run, 0, "FAILED", will_restart=True)
    assert read_state(run).state is RunState.LOST


def test_the_newest_attempt_decides(run: RunDir, start: Start) -> None:
    make_attempt(run, 0, head=dead_identity())
    end(run, 0, "FAILED")
    for number in range(1, 11):
        make_attempt(run, number, head=identity_of(start()) if number == 10 else dead_identity())
    view = read_state(run)
    assert (view.state, view.attempt) == (RunState.RUNNING, 10)


@pytest.mark.parametrize("started", [True, False])
def test_a_run_on_another_machine_is_unknown_and_names_it(run: RunDir, token: str, started: bool) -> None:
    elsewhere = dead_identity() | {"host": "gpu01"}
    write_run(run, record(token, submitter=elsewhere, keeper=elsewhere))
    make_attempt(run, 0, head=elsewhere if started else None)
    view = read_state(run)
    assert view.state is RunState.UNKNOWN
    assert "gpu01" in view.reason


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"run": "x"}', "\xff\xfe"])
def test_a_damaged_record_is_unknown_and_no_crash(run: RunDir, text: str) -> None:
    run.record.write_bytes(text.encode("latin-1"))
    assert read_state(run).state is RunState.UNKNOWN


@pytest.mark.parametrize("text", ["", "{", "[]", '{"outcome": "MELTED", "reason": ""}'])
def test_a_damaged_end_is_unknown_and_no_crash(run: RunDir, text: str) -> None:
    make_attempt(run, 0, head=dead_identity())
    run.attempt(0).end.write_text(text)
    assert read_state(run).state is RunState.UNKNOWN


def test_one_damaged_record_hides_no_other_run(run: RunDir, tmp_path: Path) -> None:
    other = tmp_path / "calm-crane-1"
    other.mkdir()
    (other / "run.json").write_text("{")
    assert [found.name for found in list_runs(tmp_path)] == ["calm-crane-1", "brisk-otter-3"]


def test_a_sweep_ends_one_role_and_no_other(token: str, start: Start) -> None:
    second, twentieth, supervisor = start(f"{token}.n2"), start(f"{token}.n20"), start(f"{token}.s2")
    assert end_processes(f"{token}.n2", timeout_s=5) == []
    assert second.wait(5) == -9
    assert (twentieth.poll(), supervisor.poll()) == (None, None)


def test_a_sweep_of_the_run_ends_every_role_of_it_and_no_other_run(token: str, start: Start) -> None:
    ours = [start(f"{token}.{role}") for role in ("task", "s0", "g0", "n0")]
    stranger = start("f" + token[1:] + "x.n0")
    assert end_processes(f"{token}.", timeout_s=5) == []
    assert [process.wait(5) for process in ours] == [-9] * 4
    assert stranger.poll() is None


def test_a_sweep_finds_what_was_started_by_a_process_that_has_ended(token: str) -> None:
    orphan_maker = f"import subprocess; subprocess.Popen({SLEEPER!r}, start_new_session=True)"
    environment = dict(os.environ) | {"CLUSTERDDP_COOKIE": f"{token}.n0"}
    subprocess.run([sys.executable, "-c", orphan_maker], env=environment, check=True)
    assert len(find_processes(f"{token}.")) == 1
    assert end_processes(f"{token}.", timeout_s=5) == []
    assert find_processes(f"{token}.") == []


def start_marked(mark: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start a process with a mark and without a cookie; return when its environment is there."""
    with marking(mark):
        process = subprocess.Popen(SLEEPER, env={"STARTED": "1", **environment})
    environ = Path(f"/proc/{process.pid}/environ")
    while b"STARTED" not in environ.read_bytes():
        time.sleep(0.01)
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the limit")
def test_a_process_without_a_cookie_is_found_by_the_mark_of_its_node_and_run(token: str) -> None:
    node_2, node_20, stranger = (start_marked(mark) for mark in (f"{token}.n2", f"{token}.x20", f"f{token[1:]}x.n2"))
    try:
        assert [found.pid for found in find_processes(f"{token}.")] == [node_2.pid, node_20.pid]
        assert end_processes(f"{token}.n2", timeout_s=5) == []
        assert node_2.wait(5) == -9
        assert (node_20.poll(), stranger.poll()) == (None, None)
        assert end_processes(f"{token}.", timeout_s=5) == []
        assert (node_20.wait(5), stranger.poll()) == (-9, None)
    finally:
        for process in (node_2, node_20, stranger):
            process.kill()
            process.wait()


def test_the_cleanup_of_a_step_spares_other_steps_and_that_of_the_run_finds_them_all(token: str) -> None:
    marked = [start_marked(f"{token}.{role}") for role in ("n0", "1.n0", "10.n0", "1.1.n0")]
    of_run, _, step_10, round_1 = marked
    try:
        assert end_processes(f"{token}.1.n0", timeout_s=5) == []
        assert [process.poll() for process in marked] == [None, -9, None, None]
        assert {found.pid for found in find_processes(f"{token}.")} == {of_run.pid, step_10.pid, round_1.pid}
        assert [run.token for run in find_runs(only=[token])] == [token]
        assert len(find_runs(only=[token])[0].processes) == 3
        assert end_run_here(token)[1] == []
        assert [process.wait(5) for process in marked] == [-9] * 4
    finally:
        for process in marked:
            process.kill()
            process.wait()


def test_the_cookie_of_another_run_takes_precedence_over_the_mark_of_this_one(token: str) -> None:
    process = start_marked(f"{token}.n0", CLUSTERDDP_COOKIE=f"{os.urandom(16).hex()}.s0")
    try:
        assert end_processes(f"{token}.", timeout_s=5) == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_of_another_user_with_the_same_mark_is_not_found(token: str) -> None:
    with marking(f"{token}.n0"):
        process = subprocess.Popen(["sleep", "60"], env={}, user=65_534)
    try:
        assert find_processes(f"{token}.") == []
    finally:
        process.kill()
        process.wait()


def test_a_mark_is_a_soft_limit_which_a_program_may_lift_and_a_start_may_drop(token: str) -> None:
    program = f"""
import subprocess
from clusterddp.run.cleanup import marking
show = ["bash", "-c", "grep locks /proc/self/limits; ulimit -x unlimited; grep locks /proc/self/limits"]
with marking({token!r} + ".n0"):
    subprocess.run(show, check=True)
    with marking(None):
        subprocess.run(show, check=True)
subprocess.run(show, check=True)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=-1, text=True)
    soft = [line.split()[3] for line in done.stdout.splitlines()]
    assert (soft[0].isdigit(), soft[1:]) == (True, ["unlimited"] * 5)


def test_where_the_system_limits_the_number_itself_a_process_starts_without_a_mark(token: str) -> None:
    program = f"""
import resource, subprocess
from clusterddp.run.cleanup import marking, read_mark
resource.setrlimit(10, (100, 1000))
with marking({token!r} + ".n0"):
    process = subprocess.Popen(["sleep", "60"])
print(read_mark(process.pid), resource.getrlimit(10))
process.kill()
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "None (100, 1000)\n"


def test_the_stop_file_is_looked_for_by_time_not_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    now = [10.0]
    requested = looking_at(tmp_path / "STOP", clock=lambda: now[0])
    assert not requested()
    request_stop(tmp_path / "STOP", "SIGUSR2 to rank 0")
    now[0] += 0.2
    assert not requested()
    now[0] += 0.1
    assert requested()


@pytest.mark.parametrize(
    ("name", "text", "may"),
    [
        ("train.py", "print('trains')", False),
        ("train.py", "os.environ['CLUSTERDDP_STOP_FILE']", True),
        ("lib/deep/loop.py", "os.environ['CLUSTERDDP_STOP_FILE']", True),
        ("data.bin", "x", False),
    ],
)
def test_a_program_may_look_for_the_stop_file_when_its_code_names_the_variable(
    tmp_path: Path, name: str, text: str, may: bool
) -> None:
    code = tmp_path / "code"
    (code / name).parent.mkdir(parents=True)
    (code / name).write_text(text)
    os.mkfifo(code / "pipe")
    entry = Entry(kind="script", target=str(code / "train.py"), working_dir=str(tmp_path), code_dir=str(code))
    assert may_look_for_file(entry) is may


def test_a_command_may_look_for_the_stop_file_when_its_words_or_the_file_that_they_name_do(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text('while [ ! -e "$CLUSTERDDP_STOP_FILE" ]; do ./step; done')
    for target, words, may in (
        ("bash", ("train.sh",), True),
        ("bash", ("other.sh",), False),
        ("until [ -e $CLUSTERDDP_STOP_FILE ]; do ./step; done", (), True),
        ("./step " * 1000, (), False),
    ):
        entry = Entry(kind="command", target=target, words=words, working_dir=str(tmp_path))
        assert may_look_for_file(entry) is may, target


def test_code_that_is_too_much_to_read_may_look_for_the_stop_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterddp.node.head._MAX_FILES", 3)
    for number in range(5):
        (tmp_path / f"{number}.py").touch()
    assert may_look_for_file(Entry(kind="script", target="0.py", working_dir="/", code_dir=str(tmp_path))) is True
