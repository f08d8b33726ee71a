"""The executor, for people who know submitit's: calls as runs, their handles, and errors that say what to write."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

import clusterddp
from clusterddp.api import Run
from clusterddp.errors import (
    ClusterddpError,
    RankError,
    RunCancelledError,
    RunFailedError,
    RunNotFoundError,
    SpecError,
    UsageError,
)
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.record import read_run
from clusterddp.run.sweep import SweepDir, read_sweep
from tests.support.launch_runs import HELLO


@pytest.fixture(autouse=True)
def _in_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    (tmp_path / "entry.py").write_text(HELLO)
    (tmp_path / "job.yaml").write_text("name: job\nresources: {procs_per_node: 2}\nentry: {script: entry.py}\n")


def divide(number: int, by: int = 1) -> tuple[float, int]:
    return number / by, int(os.environ["RANK"])


def sleep() -> None:
    time.sleep(120)


def test_a_call_is_a_run_whose_handle_is_that_of_a_future(tmp_path: Path) -> None:
    executor = clusterddp.Executor("local", resources={"procs_per_node": 2}, name="mine", runs_dir="elsewhere")
    run = executor.submit(divide, 6, by=3)
    assert run.results(60) == [(2.0, 0), (2.0, 1)]
    assert (run.result(), run.exception(), run.state) == ((2.0, 0), None, "COMPLETED")
    assert (run.done(), run.running(), run.cancelled()) == (True, False, False)
    assert run.path.parent == tmp_path / "elsewhere"
    assert run.job_id == read_run(RunDir(run.path)).job_id
    assert clusterddp.load_spec(run.path / "spec.yaml").job.name == "mine"


def test_a_call_that_raises_gives_its_exception_with_the_traceback_of_the_rank() -> None:
    run = clusterddp.Executor().submit(divide, 1, 0)
    error = run.exception(60)
    assert isinstance(error, RankError)
    assert error.traceback.splitlines()[-1] == "ZeroDivisionError: division by zero"
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run.result()


def test_a_call_that_goes_on_is_running_times_out_and_can_be_cancelled() -> None:
    run = clusterddp.Executor().submit(sleep)
    with pytest.raises(futures.TimeoutError, match=r"is (PENDING|RUNNING) after 0\.1 s"):
        run.result(timeout=0.1)
    with pytest.raises(futures.TimeoutError):
        run.exception(timeout=0)
    while run.state == "PENDING":
        time.sleep(0.05)
    assert (run.running(), run.done()) == (True, False)
    run.cancel()
    assert run.cancelled()
    assert isinstance(run.exception(), RunCancelledError)


def test_standard_output_and_standard_error_are_apart() -> None:
    def speak() -> None:
        print("out")
        print("err", file=sys.stderr)

    run = clusterddp.Executor().submit(speak)
    run.wait(60)
    assert (run.stdout(), run.stderr(), run.logs()) == ("out\n", "err\n", "out\nerr\n")
    with pytest.raises(UsageError, match="has no rank 1; its ranks are 0 to 0"):
        run.stdout(1)


def test_a_map_is_one_sweep_with_a_run_for_each_item() -> None:
    scale = 10

    def scaled(number: int, by: str) -> tuple[int, str]:
        return number * scale, by

    runs = clusterddp.Executor(parallel=2).map(scaled, [1, 2, 3], "a<c")
    assert [run.result(60) for run in runs] == [(10, "a"), (20, "<"), (30, "c")]
    sweep = SweepDir(runs[0].path.parent)
    assert [run.path for run in runs] == [sweep.path / f"{sweep.name}.{index}" for index in range(3)]
    record = read_sweep(sweep)
    assert (record.keys, record.throttle, record.name) == (("number", "by"), 2, "scaled")
    assert read_run(RunDir(runs[1].path)).variant == "number=2 by='<'"
    texts = [clusterddp.load_spec(run.path / "spec.yaml").job.entry for run in runs]
    assert [str(entry and entry.function).partition(":")[2] for entry in texts][1] == "scaled(2, '<')"


def test_a_batch_takes_several_functions_and_starts_at_the_end_of_its_block() -> None:
    executor = clusterddp.Executor()
    with executor.batch():
        first, second = executor.submit(divide, 4, 2), executor.submit(lambda: "second")
        with pytest.raises(RunNotFoundError, match="are submitted at the end of its `with` block"):
            first.wait()
        with pytest.raises(UsageError, match="the calls of a batch share their parameters"):
            executor.update_parameters(name="other")
    assert (first.result(60), second.result(60)) == ((2.0, 0), "second")
    assert first.path.parent == second.path.parent
    with contextlib.suppress(KeyError), executor.batch():
        executor.submit(divide, 1)
        raise KeyError
    with executor.batch():
        pass
    assert executor.map(divide, []) == []
    assert len(Run.list()) == 2


def test_a_call_of_a_map_is_repeated_and_resumed_like_any_run() -> None:
    def third_time(number: int) -> tuple[int, str]:
        attempt = os.environ["CLUSTERDDP_ATTEMPT"]
        if attempt == "0":
            raise ValueError(attempt)
        return number, attempt

    runs = clusterddp.Executor().map(third_time, [7])
    assert isinstance(runs[0].exception(60), RankError)
    assert runs[0].resume({"restarts": 1}).result(60) == (7, "1")
    command = [sys.executable, "-m", "clusterddp", "submit", runs[0].name, "restarts=1"]
    subprocess.run(command, check=True, capture_output=True)
    assert Run.list()[0] == Run.find("@last") != runs[0]
    assert Run.find("@last").result(60) == (7, "1")


def test_futures_of_runs_end_with_them_as_those_of_concurrent_futures() -> None:
    runs = clusterddp.Executor(parallel=3).map(divide, [1, 2], [0, 1])
    told = threading.Event()
    runs[0].add_done_callback(lambda run: told.set() if run == runs[0] and run.done() else None)
    mine = {run.future(): run for run in runs}
    assert not next(iter(mine)).cancel()
    assert {mine[future].name for future in futures.as_completed(mine, timeout=60)} == {run.name for run in runs}
    outcomes = [future.exception() or future.result() for future in mine]
    assert (type(outcomes[0]), outcomes[1]) == (RankError, (2.0, 0))
    assert told.wait(10)
    program = clusterddp.submit("job.yaml")
    assert program.future().result(60) is None


def test_a_program_that_failed_has_an_exception_but_no_result(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("raise ValueError('no luck')\n")
    run = clusterddp.submit("job.yaml")
    error = run.exception(60)
    assert type(error) is RunFailedError
    assert "ValueError: no luck" in str(error)
    with pytest.raises(UsageError, match="has no results"):
        run.result()


def test_parameters_are_updated_key_by_key_and_any_key_of_a_spec_is_one(tmp_path: Path) -> None:
    executor = clusterddp.Executor(resources={"procs_per_node": 2, "time": "1:00:00"}, env={"WORD": "a, {b}"})
    executor.update_parameters(resources={"procs_per_node": 1}, network={"backend": "gloo"}, hang="fail")
    executor.update_parameters(hang=None)
    assert repr(executor).startswith("Executor(resources={'procs_per_node': 1, 'time': '1:00:00'}, env=")
    assert "hang" not in repr(executor)
    run = executor.submit(lambda: os.environ["WORD"])
    assert run.results(60) == ["a, {b}"]
    job = clusterddp.load_spec(run.path / "spec.yaml").job
    assert (job.resources.world_size, str(job.resources.time), job.network.backend) == (1, "1:00:00", "gloo")


def test_the_notes_of_a_plan_are_warnings_also_of_a_map_and_of_a_sweep() -> None:
    memory = {"memory_gb": 1}
    executor = clusterddp.Executor(resources=memory)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runs = [executor.submit(divide, 1), *executor.map(divide, [1])]
        runs += clusterddp.submit_sweep("job.yaml", {"env.SEED": [5]}, {"resources": memory})
    warned = [each for each in warned if each.category is UserWarning]
    assert [str(each.message) for each in warned].count("resources.memory_gb is not enforced on this machine") == 3
    assert {Path(each.filename).name for each in warned} == {Path(__file__).name}
    assert [run.wait(60) for run in runs] == ["COMPLETED"] * 3


@pytest.mark.parametrize(
    "overrides",
    [
        ["resources.procs_per_node=3", "env.A='x, y'"],
        {"resources.procs_per_node": 3, "env.A": "x, y"},
        {"resources": {"procs_per_node": 3}, "env": {"A": "x, y"}},
    ],
)
def test_overrides_are_words_or_a_mapping_dotted_or_nested(overrides: Any) -> None:
    job = clusterddp.load_spec("job.yaml", overrides).job
    assert (job.resources.procs_per_node, dict(job.env)) == (3, {"A": "x, y"})


def test_a_mapping_is_a_spec_and_its_values_may_be_paths_tuples_and_numbers_of_numpy(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    args = ("--lr", numpy.float32(0.5), tmp_path)
    spec = {"name": "own", "resources": {"procs_per_node": numpy.int64(2)}, "entry": {"script": "entry.py"}}
    job = clusterddp.load_spec(spec, {"entry.args": args}).job
    assert (job.resources.procs_per_node, job.entry and job.entry.args) == (2, ("--lr", "0.5", str(tmp_path)))
    assert clusterddp.submit(spec).wait(60) == "COMPLETED"


def test_a_sweep_of_a_spec_is_a_list_of_runs(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("import os; print(os.environ['SEED'])\n")
    runs = clusterddp.submit_sweep("job.yaml", {"env.SEED": [5, 6]}, {"resources.procs_per_node": 1}, parallel=2)
    assert [(run.wait(60), run.logs()) for run in runs] == [("COMPLETED", "5\n"), ("COMPLETED", "6\n")]


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: clusterddp.submit(divide, 0.1), r"overrides is 0\.1, expected .*args=\[\.\.\.\] and kwargs"),  # type: ignore[arg-type]
    (lambda: clusterddp.submit(divide, [5]), r"overrides is \[5\], expected .*args=\[\.\.\.\] and kwargs"),  # type: ignore[list-item]
    (lambda: clusterddp.submit(divide), r"missing a required argument: 'number'; hint: .*args=\[0\.1\]"),
    (lambda: clusterddp.Executor().submit(divide), "missing a required argument"),
    (lambda: clusterddp.load_spec("job.yaml", "name=b"), "overrides is 'name=b', expected"),
    (
        lambda: clusterddp.plan("job.yaml", resources={"nodes": 2}),
        "unexpected keyword argument 'resources'; hint: keys",
    ),  # type: ignore[call-arg]
    (lambda: clusterddp.submit(divide, 5, 7), "too many positional arguments; hint: .*Executor"),  # type: ignore[misc,arg-type]
    (lambda: clusterddp.submit(5), "spec is 5, expected a path, a mapping"),  # type: ignore[arg-type]
    (
        lambda: clusterddp.load_spec("job.yaml", {"env": {"A": print}}),
        "env.A is <built-in function print>, which has no",
    ),
    (lambda: clusterddp.Executor(timeout_min=60), r'timeout_min is submitit\'s name; hint: .*"time": "1:00:00"'),
    (lambda: clusterddp.Executor(slurm_partition="gpu"), r'here it is slurm=\{"partition": \.\.\.\}'),
    (lambda: clusterddp.Executor(slurm_array_parallelism=4), "here it is parallel="),
    (lambda: clusterddp.Executor(folder="logs"), "here it is runs_dir="),
    (lambda: clusterddp.Executor(parallel=0), "parallel is 0, expected at least 1"),
    (lambda: clusterddp.Executor().map(divide, [1, 2], [3]), "the iterables have 2 and 1 items"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words[:30] for _, words in WRONG])
def test_wrong_arguments_get_a_sentence_and_start_nothing(tmp_path: Path, call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()
    assert not (tmp_path / "runs").exists()


def test_the_text_of_an_error_has_every_problem_and_hint() -> None:
    with pytest.raises(SpecError) as raised:
        clusterddp.Executor(resources={"nodez": 2}, slurm={"time": "2h"}).submit(divide, 1)
    lines = str(raised.value).splitlines()
    assert any("resources.nodez: unknown key" in line for line in lines)
    assert len([line for line in lines if "hint: " in line]) == len([1 for each in raised.value.problems if each.hint])
    assert str(UsageError("a", hint="b")) == "a; hint: b"
    assert str(ClusterddpError("a")) == "a"


def test_a_script_and_a_secret_that_are_not_there_are_among_the_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_SECRET", raising=False)
    spec = {"name": "a", "resource": {}, "entry": {"script": "missing.py"}, "secrets": ["NO_SUCH_SECRET"]}
    with pytest.raises(SpecError) as raised:
        clusterddp.plan(spec)
    assert {each.key for each in raised.value.problems} == {"resource", "entry.script", "secrets.0"}


def test_what_a_notebook_shows_is_short_escaped_and_has_no_token(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("<script>alert(1)</script>")

    run = clusterddp.Executor(name="shown").submit(fail)
    run.wait(60)
    page = run._repr_html_()
    assert page.startswith(f"<table><tr><th>run</th><td>{run.name}  shown</td></tr><tr><th>state</th><td>FAILED")
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert repr(run) == f"Run('{run.path}')"
    plan = clusterddp.plan("job.yaml")
    assert repr(plan) == f"<Plan of job: 2 ranks on 1 node, launcher local, run {plan.run}>"
    shown = [repr(value) for value in (plan, plan.gang, read_run(RunDir(run.path)))]
    assert isinstance(plan.gang, Gang)
    assert not [text for text in shown if plan.token in text or read_run(RunDir(run.path)).token in text]
    assert "no such run" in Run(tmp_path / "gone-1")._repr_html_()


def test_a_report_is_written_and_its_path_returned(tmp_path: Path) -> None:
    run = clusterddp.submit("job.yaml")
    run.wait(60)
    assert run.report() == RunDir(run.path).report
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ClusterddpError, match="cannot be written"):
        run.report(tmp_path / "none" / "page.html")
