"""The local launcher, whole: real submitit, real supervisors, real ranks that run a small script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clusterddp.errors import SpecError, UsageError
from clusterddp.places.state import read_state
from clusterddp.run.attempts import read_end
from clusterddp.run.cleanup import end_processes, read_cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_ranks, read_run
from clusterddp.run.state import RunState, RunView
from clusterddp.submission.cancel import cancel
from clusterddp.submission.submit import Submitted, resume, submit, wait
from clusterddp.system.processes import Process, read_command
from tests.support.launch_runs import (
    HELLO,
    SLEEP,
    STOPPABLE,
    plan_script,
    plan_text,
    processes_of,
    read_plan,
    wait_for_ranks,
)
from tests.support.lost_children import KINDS, LostChildren
from tests.support.waiting import PATIENCE, wait_until

GONE_S = 5.0
"""What the gang rule allows from a failure to the end of the last process."""


class Submitter:
    """Submits runs and leaves none behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs: list[RunDir] = []

    def __call__(self, code: str, *, more: str = "", resources: str = "{nodes: 2, procs_per_node: 2}") -> RunDir:
        plan = plan_script(self.directory, code, more=more, resources=resources, environ=os.environ)
        return self.known(submit(plan))

    def known(self, submitted: Submitted) -> RunDir:
        self.runs.append(RunDir(submitted.run_dir))
        return self.runs[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Submitter]:
    submitter = Submitter(tmp_path)
    yield submitter
    for run in submitter.runs:
        end_processes(f"{read_run(run).token}.", timeout_s=5)


def kill(process: Process) -> None:
    process.send_signal(signal.SIGKILL)


def assert_all_gone(run: RunDir, since: float) -> RunView:
    """The run has ended and nothing of it is left, within what the gang rule allows."""
    view = wait(run, 30)
    wait_until(lambda: not processes_of(run))
    assert time.monotonic() - since < PATIENCE * GONE_S
    return view


def test_a_script_runs_on_every_rank_of_every_node_and_the_run_is_completed(start: Submitter) -> None:
    run = start(HELLO)
    view = wait(run, 30)
    assert (view.state, view.reason) == (RunState.COMPLETED, "ranks 0-3 exited with code 0")
    attempt = run.attempt(0)
    assert [attempt.stdout(rank).read_text() for rank in range(4)] == [f"rank {rank} of 4\n" for rank in range(4)]
    assert [(rank.rank, rank.node_rank, rank.local_rank) for rank in read_ranks(attempt)] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1),
    ]  # fmt: skip
    wait_until(lambda: not processes_of(run))


def test_the_record_names_submitits_controller_as_job_and_keeper(start: Submitter) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    record = read_run(run)
    assert record.keeper is not None
    assert record.job_id == str(record.keeper["pid"])
    (controller,) = processes_of(run)["controller"]
    assert record.job_id == str(controller.pid)
    assert "submitit.local._local" in read_command(controller.pid)
    (task,) = processes_of(run)["task"]
    assert "submitit.core._submit" in read_command(task.pid)
    cancel(run)


def test_a_run_is_detached_from_the_process_that_submitted_it(start: Submitter) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    for processes in processes_of(run).values():
        for process in processes:
            assert os.getsid(process.pid) != os.getsid(0)
            assert os.getpid() not in {parent.pid for parent in psutil.Process(process.pid).parents()}
    cancel(run)


def test_a_supervisor_that_dies_before_it_has_joined_is_not_waited_for(
    start: Submitter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = "import os, time\nif os.environ.get('CLUSTERDDP_COOKIE', '').endswith('.s1'): time.sleep(120)\n"
    (tmp_path / "sitecustomize.py").write_text(asleep)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start(SLEEP)
    kill(wait_until(lambda: processes_of(run).get("s1"))[0])
    view = assert_all_gone(run, time.monotonic())
    assert view.state is RunState.FAILED
    assert "supervisor of node 1" in view.reason
    assert "SIGKILL before any rank was started" in view.reason


@pytest.mark.parametrize("role", ["n0", "n1", "s0", "s1", "task", "controller"])
def test_a_kill_of_any_process_ends_the_run_within_five_seconds_and_names_a_rank(start: Submitter, role: str) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    victim = processes_of(run)[role][0]
    begun = time.monotonic()
    kill(victim)
    view = assert_all_gone(run, begun)
    assert view.state is RunState.FAILED
    assert view.end is not None
    cause = view.end.root_cause
    assert cause is not None
    ranks = {record.pid: record.rank for record in read_ranks(run.attempt(0))}
    expected = {"s0": 0, "s1": 2, "task": 0, "controller": 0}.get(role, ranks.get(victim.pid))
    assert cause.rank == expected
    whom = {"n": "rank", "s": "supervisor of node", "t": "the task that carries the run", "c": "the task"}[role[0]]
    assert cause.error.startswith(whom)
    assert "was killed" in cause.error


def test_a_kill_of_supervisor_and_guard_at_once_is_reported_by_the_task(start: Submitter) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    processes = processes_of(run)
    begun = time.monotonic()
    for process in (*processes["g0"], *processes["s0"]):
        process.send_signal(signal.SIGSTOP)
    for process in (*processes["g0"], *processes["s0"]):
        kill(process)
    view = assert_all_gone(run, begun)
    assert view.state is RunState.FAILED
    assert view.end is not None
    assert view.end.root_cause is not None
    assert view.end.root_cause.rank == 0
    assert "supervisor of node 0" in view.reason
    assert "its ranks 0-1 ended with it" in view.reason


@pytest.mark.parametrize("roles", [("s0",), ("s0", "g0"), ("task",), ("s0", "s1", "g0", "g1")], ids="-".join)
def test_no_kill_leaves_a_child_that_lost_its_environment(start: Submitter, roles: tuple[str, ...]) -> None:
    children = LostChildren()
    run = start(SLEEP.replace("time.sleep", f"{children.program}\ntime.sleep"))
    try:
        wait_until(lambda: len(children.alive()) == 4 * KINDS)
        victims = [process for role in roles for process in processes_of(run)[role] if read_cookie(process)[:1] != "#"]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in victims:
                victim.send_signal(number)
        wait_until(lambda: not children.alive() and not processes_of(run), 5.0)
    finally:
        children.end()


def test_a_kill_of_every_process_at_once_is_a_lost_run_that_cancel_and_resume_can_deal_with(start: Submitter) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    processes = [process for role in processes_of(run).values() for process in role]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        kill(process)
    wait_until(lambda: read_state(run).state is RunState.LOST)
    assert "has already ended: LOST" in cancel(run)
    start.known(resume(run))
    wait_for_ranks(run)
    view = read_state(run)
    assert (view.state, view.attempt) == (RunState.RUNNING, 1)
    cancel(run)


def test_a_failing_rank_fails_the_run_and_submitits_own_record_says_so(start: Submitter) -> None:
    code = HELLO + "import time\nif os.environ['RANK'] == '3': raise ValueError('no more')\ntime.sleep(60)\n"
    run = start(code)
    view = wait(run, 30)
    assert view.state is RunState.FAILED
    assert view.end is not None
    assert view.end.root_cause is not None
    assert (view.end.root_cause.rank, view.end.root_cause.exit_code) == (3, 1)
    assert view.end.root_cause.error.endswith("ValueError: no more")
    wait_until(lambda: not processes_of(run))
    assert (run.launcher_dir / "submit.log").read_text() == ""
    logs = "".join(path.read_text() for path in (run.launcher_dir / "submitit").glob("*_log.err"))
    assert "RunFailedError" in logs


def test_a_cancel_from_another_process_ends_the_run_and_a_second_one_is_harmless(
    start: Submitter, tmp_path: Path
) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    code = (
        "import sys; from pathlib import Path; from clusterddp.api import Run; print(Run(Path(sys.argv[1])).cancel())"
    )
    begun = time.monotonic()
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code, str(run.path)], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()
        for _ in range(2)
    )
    assert first == "cancelled"
    assert second.startswith("has already ended: CANCELLED")
    view = assert_all_gone(run, begun)
    assert view.state is RunState.CANCELLED


def test_two_cancels_at_once_both_see_the_end(start: Submitter) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    child = os.fork()
    if child == 0:
        os._exit(0 if "cancel" in cancel(run).lower() else 1)
    assert "cancel" in cancel(run).lower()
    assert os.waitpid(child, 0)[1] == 0
    assert read_state(run).state is RunState.CANCELLED


def test_a_cancel_right_after_the_submit_ends_the_run(start: Submitter) -> None:
    run = start(SLEEP)
    assert cancel(run) == "cancelled"
    wait_until(lambda: not processes_of(run))


def test_a_run_whose_supervisors_do_not_answer_is_ended_from_here(start: Submitter) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    processes = processes_of(run)
    for role in ("s0", "s1", "g0", "g1", "task", "controller"):
        for process in processes[role]:
            process.send_signal(signal.SIGSTOP)
    assert cancel(run) == "cancelled"
    view = read_state(run)
    assert (view.state, view.reason) == (RunState.CANCELLED, "cancelled; its supervisors did not answer")
    assert processes_of(run) == {}


def test_cancel_with_save_lets_the_script_stop_by_itself(start: Submitter) -> None:
    run = start(STOPPABLE)
    wait_for_ranks(run)
    assert cancel(run, save=True) == "cancelled"
    end = read_end(run.attempt(0))
    assert end is not None
    assert (end.outcome, end.reason) == ("STOPPED", "cancel --save")
    assert [run.attempt(0).stdout(rank).read_text().splitlines()[-1] for rank in range(4)] == ["stopped"] * 4
    assert cancel(run, save=True).startswith("has already ended: CANCELLED")


@pytest.mark.parametrize(
    ("role", "number"),  # submitit's controller passes on SIGTERM only
    [("task", signal.SIGTERM), ("task", signal.SIGUSR2), ("controller", signal.SIGTERM)],
)
def test_a_signal_to_the_task_asks_all_ranks_to_stop(start: Submitter, role: str, number: signal.Signals) -> None:
    run = start(STOPPABLE)
    wait_for_ranks(run)
    processes_of(run)[role][0].send_signal(number)
    view = wait(run, 20)
    assert view.state is RunState.CANCELLED
    assert view.end is not None
    assert view.end.reason == f"{number.name} to the task that carries the run"


def test_a_stopped_run_is_resumed_as_its_next_attempt(start: Submitter) -> None:
    run = start(STOPPABLE)
    wait_for_ranks(run)
    cancel(run, save=True)
    submitted = resume(run)
    assert submitted.run == run.name
    assert submitted.job_id == read_run(run).job_id
    wait_for_ranks(run)
    assert (read_state(run).state, read_state(run).attempt) == (RunState.RUNNING, 1)
    with pytest.raises(UsageError, match="is RUNNING"):
        resume(run)
    cancel(run)
    assert read_state(run).state is RunState.CANCELLED
    start.known(resume(run))
    wait_for_ranks(run)
    assert (read_state(run).state, read_state(run).attempt) == (RunState.RUNNING, 2)
    cancel(run)


def test_a_completed_run_is_not_resumed_but_submitted_again(start: Submitter) -> None:
    run = start(HELLO, resources="{}")
    wait(run, 30)
    with pytest.raises(UsageError, match="already completed") as refusal:
        resume(run)
    assert f"clusterddp submit {run.name} repeats it" in str(refusal.value.hint)


def test_a_resume_needs_the_secrets_again(start: Submitter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "x")
    run = start("raise SystemExit(3)", more="secrets: [API_KEY]", resources="{}")
    assert wait(run, 30).state is RunState.FAILED
    monkeypatch.delenv("API_KEY")
    with pytest.raises(UsageError, match="API_KEY not set"):
        resume(run)
    assert len(run.attempts()) == 1


def test_a_run_whose_directory_was_moved_is_resumed_where_it_is_now(start: Submitter, tmp_path: Path) -> None:
    run = start("import sys; print(sys.path[0]); raise SystemExit(3)", resources="{}")
    assert wait(run, 30).state is RunState.FAILED
    wait_until(lambda: not processes_of(run))
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = start.known(resume(RunDir(tmp_path / "moved" / run.name)))
    start.runs.remove(run)
    assert wait(moved, 30).attempt == 1
    assert moved.attempt(1).stdout(0).read_text().startswith(str(tmp_path / "moved"))


def test_a_submit_that_is_interrupted_leaves_no_run_going(tmp_path: Path) -> None:
    plan = plan_script(tmp_path, SLEEP, environ=os.environ)
    pid = os.fork()
    if pid == 0:
        try:
            submit(plan)
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(0)
    run = RunDir(plan.run_dir)
    wait_until((run.launcher_dir / "submit.log").exists)
    os.kill(pid, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert processes_of(run) == {}
    view = read_state(run)
    assert (view.state, view.reason) == (RunState.CANCELLED, "interrupted while it was being started")


def test_restarts_are_attempts_of_the_same_run(start: Submitter) -> None:
    run = start(HELLO + "raise SystemExit(os.environ['CLUSTERDDP_ATTEMPT'] != '2')", more="restarts: 5", resources="{}")
    view = wait(run, 30)
    assert (view.state, view.attempt) == (RunState.COMPLETED, 2)


def test_what_another_launcher_left_in_the_environment_does_not_reach_the_ranks(
    start: Submitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SUBMITIT_EXECUTOR", "MASTER_ADDR", "CLUSTERDDP_ATTEMPT"):
        monkeypatch.setenv(name, "wrong")
    monkeypatch.setenv("KEPT", "yes")
    run = start("import json, os; print(json.dumps(dict(os.environ)))", resources="{}")
    assert wait(run, 30).state is RunState.COMPLETED
    environment = json.loads(run.attempt(0).stdout(0).read_text())
    assert "wrong" not in environment.values()
    assert environment["KEPT"] == "yes"
    assert not [name for name in environment if name.startswith(("SUBMITIT_", "SLURM_"))]
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_files_that_shadow_pythons_modules_do_not_harm_a_run(start: Submitter, tmp_path: Path) -> None:
    for name in ("json.py", "signal.py", "psutil.py", "submitit.py"):
        (tmp_path / name).write_text("raise RuntimeError('shadow')")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        plan = plan_text(
            "name: a\nentry: {module: shadowed.main}\nsnapshot: false\n", tmp_path, working_dir=tmp_path / "elsewhere"
        )
        (tmp_path / "elsewhere" / "shadowed").mkdir(parents=True)
        (tmp_path / "elsewhere" / "shadowed" / "main.py").write_text("print('ran')")
        run = start.known(submit(plan))
    finally:
        os.chdir(before)
    assert wait(run, 30).state is RunState.COMPLETED


def test_a_runs_directory_with_awkward_characters_works(tmp_path: Path) -> None:
    directory = tmp_path / "a b'c\"$HOME;é"
    directory.mkdir()
    run = Submitter(directory)(HELLO, resources="{}")
    assert wait(run, 30).state is RunState.COMPLETED


def test_a_relative_pythonpath_means_where_it_was_submitted(
    start: Submitter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "helper.py").write_text("word = 'found'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "library")
    run = start("import helper; print(helper.word)", more="snapshot: false", resources="{}")
    assert wait(run, 30).state is RunState.COMPLETED
    assert run.attempt(0).stdout(0).read_text() == "found\n"


def test_edits_after_the_submit_do_not_reach_the_run(start: Submitter, tmp_path: Path) -> None:
    run = start("import other", resources="{}", more="")
    assert wait(run, 30).state is RunState.FAILED
    (tmp_path / "other.py").write_text("")
    submitted = resume(run)
    assert wait(RunDir(submitted.run_dir), 30).state is RunState.FAILED


def test_wait_gives_up_after_its_time(start: Submitter) -> None:
    run = start(SLEEP, resources="{}")
    begun = time.monotonic()
    assert not wait(run, 0.5).finished
    assert 0.4 < time.monotonic() - begun < PATIENCE * 2
    cancel(run)


def test_the_gang_in_the_plan_is_what_runs(start: Submitter) -> None:
    run = start(SLEEP)
    wait_for_ranks(run)
    gang = read_plan(run)["gang"]
    roles = processes_of(run)
    assert {f"s{node['node_rank']}" for node in gang["nodes"]} == {role for role in roles if role.startswith("s")}
    assert sum(len(roles[f"n{node['node_rank']}"]) for node in gang["nodes"]) == 4
    cancel(run)


def test_a_run_goes_on_with_other_values_and_the_code_of_its_first_submit(start: Submitter) -> None:
    run = start("import os, sys; print(sys.argv[1:], os.environ['WORLD_SIZE'])")
    wait(run, 30)
    code, token = run.code.resolve(), read_run(run).token
    for refused in ("launcher=slurm", "entry.script=other.py", "name=other"):
        with pytest.raises((UsageError, SpecError), match=r"resume goes on with the same|no such file"):
            resume(run, overrides=[refused])
    with pytest.raises(UsageError, match="already completed"):
        resume(run)
    assert len(run.attempts()) == 1
    resume(run, overrides=["entry.args=[--lr, 0.1]", "resources={nodes: 1, procs_per_node: 3}"])
    view = wait(run, 30)
    assert (view.state, view.attempt) == (RunState.COMPLETED, 1)
    assert [run.attempt(1).stdout(rank).read_text() for rank in range(3)] == ["['--lr', '0.1'] 3\n"] * 3
    assert (run.code.resolve(), read_run(run).token) == (code, token)
    assert "procs_per_node: 3" in run.spec.read_text()
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    resumed = [event["overrides"] for event in events if event["event"] == "resumed"]
    assert resumed == [["entry.args=[--lr, 0.1]", "resources={nodes: 1, procs_per_node: 3}"]]
