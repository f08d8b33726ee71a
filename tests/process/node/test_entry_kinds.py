"""What an entry may be, started by a real gang: a function, a command, a shell's text; without torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click import unstyle

import clusterddp
from clusterddp.cli.text.status import status_lines
from clusterddp.errors import ClusterddpError
from clusterddp.run.attempts import read_end
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RankEnd, read_run
from clusterddp.submission.cancel import HOW_TO_STOP, cancel
from clusterddp.submission.submit import submit, wait
from clusterddp.view.status import read_status
from tests.support.launch_runs import git, plan_text, processes_of, wait_for_ranks
from tests.support.waiting import wait_until

REPORT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), sys.path]), flush=True)"


class Submitter:
    """Submits specs from one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs: list[RunDir] = []

    def __call__(self, entry: str, *, more: str = "", nodes: int = 1, procs: int = 2) -> RunDir:
        text = f"name: job\nresources: {{nodes: {nodes}, procs_per_node: {procs}}}\nentry: {entry}\n{more}\n"
        run = RunDir(submit(plan_text(text, self.directory, environ=os.environ)).run_dir)
        self.runs.append(run)
        return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Submitter]:
    submitter = Submitter(tmp_path)
    (tmp_path / "show.py").write_text(REPORT)
    yield submitter
    for run in submitter.runs:
        end_processes(f"{read_run(run).token}.", timeout_s=5)


def output(run: RunDir, rank: int = 0) -> str:
    return run.attempts()[-1].stdout(rank).read_text()


def report(run: RunDir, rank: int = 0) -> tuple[list[str], dict[str, str], str, list[str]]:
    """Return the arguments, the variables, the working directory and the path that a rank has printed."""
    args, environ, cwd, path = json.loads(output(run, rank))
    return args, environ, cwd, path


def completed(run: RunDir) -> RunDir:
    view = wait(run, 120)
    assert view.state == "COMPLETED", (view, run.attempts()[-1].stderr(0).read_text())
    return run


def cause(run: RunDir) -> RankEnd:
    assert wait(run, 120).state == "FAILED"
    end = read_end(run.attempts()[-1])
    assert end is not None
    assert end.root_cause is not None
    return end.root_cause


def test_a_function_of_a_module_is_called_with_values_of_any_kind(start: Submitter, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/train.py").write_text("def fit(*args, **kwargs):\n    print([args, kwargs], flush=True)\n")
    run = start(
        '{function: "package.train:fit", args: [1, "1", 0.1, null], kwargs: {rank: "{rank}", sizes: [2, {a: 3}]}}'
    )
    assert eval(output(completed(run), 1)) == [(1, "1", 0.1, None), {"rank": "1", "sizes": [2, {"a": 3}]}]


def test_a_function_of_a_file_is_called_without_running_its_main_part(start: Submitter, tmp_path: Path) -> None:
    code = "import helper\ndef fit():\n    print(helper.WORD, __name__)\nif __name__ == '__main__':\n    1 / 0\n"
    (tmp_path / "src").mkdir()
    (tmp_path / "src/my-train.py").write_text(code)
    (tmp_path / "src/helper.py").write_text("WORD = 'here'\n")
    assert output(completed(start('{function: "src/my-train.py:fit"}'))) == "here my-train\n"


def test_processes_that_a_function_of_a_file_spawns_find_it(start: Submitter, tmp_path: Path) -> None:
    code = (
        "import multiprocessing\ndef square(x): return x * x\n"
        "def fit():\n    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(square, [3]))\n"
    )
    (tmp_path / "train.py").write_text(code)
    assert output(completed(start('{function: "train.py:fit"}', procs=1))) == "[9]\n"


def test_a_function_that_is_not_there_is_the_root_cause(start: Submitter, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def fit(): pass\n")
    error = cause(start('{function: "train:fitt"}', procs=1)).error
    assert error.endswith("entry.function: train has no fitt")


def test_the_exception_of_a_function_has_no_frames_of_ours(start: Submitter, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def fit(lr):\n    raise ValueError(lr)\n")
    found = cause(start('{function: "train.py:fit", args: [0.5]}', procs=1))
    assert found.error.endswith(": ValueError: 0.5")
    assert found.traceback is not None
    assert "clusterddp" not in found.traceback.replace(str(tmp_path), "")


def test_a_command_gets_its_arguments_as_they_are_and_the_ranks_variables(start: Submitter) -> None:
    run = completed(
        start(f'{{command: [{sys.executable}, show.py, "a b", "$HOME", "{{rank}}/{{world_size}}"], args: ["*"]}}')
    )
    args, environ, cwd, _ = report(run, 1)
    assert args == ["a b", "$HOME", "1/2", "*"]
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["CLUSTERDDP_RUN_DIR"]) == ("1", "2", str(run.path))
    assert cwd == str(start.directory)


def test_a_text_is_split_into_words_and_no_shell_reads_it(start: Submitter) -> None:
    run = completed(start(f"{{command: \"{sys.executable} show.py 'a b' *.py c\"}}"))
    assert report(run)[0] == ["a b", "*.py", "c"]


def test_a_shell_reads_text_that_asks_for_it(start: Submitter) -> None:
    command = '"echo $RANK ${WORLD_SIZE} \\"$1\\" && echo $CLUSTERDDP_INIT_METHOD"'
    run = completed(start(f'{{command: {command}, shell: true, args: ["{{rank}} b"]}}'))
    first, second = output(run, 1).splitlines()
    assert first == "1 2 1 b"
    assert second.startswith("tcp://127.0.0.1:")


def test_the_program_of_a_command_and_code_dir_are_the_kept_copy(start: Submitter, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    script = tmp_path / "go.sh"
    script.write_text('#!/bin/sh\necho "$0" "$1"\n')
    script.chmod(0o755)
    run = start('{command: [./go.sh, "{code_dir}"]}', procs=1)
    assert output(completed(run)).split() == [str(run.code / "go.sh"), str(run.code)]


@pytest.mark.parametrize(
    ("command", "exit_code", "error"),
    [
        (
            '"echo before >&2; echo no such label >&2; exit 3"',
            3,
            "exited with code 3; the last line of its stderr: no such label",
        ),
        ('"exit 4"', 4, "exited with code 4"),
        ('"kill -SEGV $$"', 139, "was killed by SIGSEGV"),
        ('"kill -9 $$"', 137, "was killed by SIGKILL"),
    ],
)
def test_a_command_without_an_error_file_has_a_root_cause(
    start: Submitter, command: str, exit_code: int, error: str
) -> None:
    found = cause(start(f"{{command: {command}, shell: true}}", procs=1))
    assert (found.exit_code, found.error.partition(" on ")[2].partition(" ")[2]) == (exit_code, error)


def test_the_last_lines_of_a_commands_standard_error_are_kept(start: Submitter) -> None:
    found = cause(start('{command: "echo first >&2; echo second >&2; exit 3", shell: true}', procs=1))
    assert found.traceback == "first\nsecond"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("no-such-program", "entry.command: no-such-program: no such program on PATH"),
        ("./gone.sh", "entry.command: ./gone.sh: no such file in "),
        ("./show.py", "not executable (chmod +x "),
    ],
)
def test_a_program_that_cannot_be_started_is_named(start: Submitter, program: str, error: str) -> None:
    assert error in cause(start(f"{{command: [{program}]}}", procs=1)).error


def test_a_command_that_takes_a_signal_for_a_stop_ends_well_and_the_run_has_stopped(start: Submitter) -> None:
    command = "trap 'echo saved; exit 0' USR1; echo up; while :; do sleep 0.1; done"
    run = start(f'{{command: "{command}", shell: true, stop_signal: USR1}}')
    wait_for_ranks(run, 2)
    assert cancel(run, save=True) == "cancelled"
    assert output(run, 1).splitlines() == ["up", "saved"]


def test_a_command_that_is_ended_by_the_signal_for_a_stop_has_not_failed(start: Submitter) -> None:
    run = start('{command: "echo up; sleep 600", shell: true, stop_signal: TERM}')
    wait_for_ranks(run, 2)
    assert cancel(run, save=True) == "cancelled"
    end = read_end(run.attempts()[-1])
    assert (end and end.outcome) == "STOPPED"


def test_nothing_of_a_command_is_left_when_the_run_is_cancelled(start: Submitter) -> None:
    run = start('{command: "trap : TERM; setsid sleep 601 & echo up; while :; do sleep 0.1; done", shell: true}')
    wait_for_ranks(run, 2)
    cancel(run)
    wait_until(lambda: not processes_of(run))


def test_a_program_that_owns_its_ranks_gets_the_numbers_of_the_machines(start: Submitter) -> None:
    command = f"[{sys.executable}, show.py, '{{node_rank}}/{{num_nodes}}', '{{rank}}/{{world_size}}']"
    entry = f"{{command: {command}, owns_ranks: true}}"
    run = completed(start(entry, nodes=2, procs=3))
    args, environ, _, _ = report(run, 1)
    assert args == ["1/2", "1/2"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")
    assert [environ[name] for name in names] == ["1", "2", "3", "2", "3", "1"]
    assert not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ROLE_RANK"} & environ.keys()
    text = unstyle("\n".join(status_lines(read_status(run), run, address=run.name)))
    assert "2 programs, 6 ranks of their own" in text
    assert [line.split()[:2] for line in text.splitlines() if "COMPLETED" in line][1:] == [["0", "0-2"], ["1", "3-5"]]
    end = read_end(run.attempt(0))
    assert end is not None
    assert end.reason == "ranks 0-5 exited with code 0"


def test_a_program_that_owns_its_ranks_may_count_processes(start: Submitter) -> None:
    entry = (
        f"{{command: [{sys.executable}, show.py, '{{rank}}/{{world_size}}'], owns_ranks: true, world_size: processes}}"
    )
    args, environ, _, _ = report(completed(start(entry, nodes=2, procs=3)), 1)
    assert (args, environ["RANK"], environ["WORLD_SIZE"]) == (["3/6"], "3", "6")


def test_placeholders_may_count_machines_while_variables_count_ranks(start: Submitter) -> None:
    entry = f"{{command: [{sys.executable}, show.py, '{{rank}}/{{world_size}}'], world_size: machines}}"
    args, environ, _, _ = report(completed(start(entry, nodes=2, procs=2)), 3)
    assert (args, environ["RANK"], environ["WORLD_SIZE"]) == (["1/2"], "3", "4")


def test_the_output_directory_of_the_spec_is_made(start: Submitter, tmp_path: Path) -> None:
    run = start(f"{{command: [{sys.executable}, show.py, '{{output_dir}}'], output_dir: results/one}}", procs=1)
    assert report(completed(run))[0] == [str(tmp_path / "results/one")]
    assert (tmp_path / "results/one").is_dir()


def test_what_the_plan_shows_of_rank_0s_variables_is_what_it_finds(start: Submitter) -> None:
    run = completed(start(f"{{command: [{sys.executable}, show.py], owns_ranks: true}}", nodes=2))
    plan: dict[str, Any] = json.loads(run.plan.read_text())
    environ = report(run)[1]
    unknown = {"MASTER_PORT", "PET_MASTER_PORT", "CLUSTERDDP_INIT_METHOD"}
    shown = {name: variable["value"] for name, variable in plan["rank0"].items() if name not in unknown}
    assert {name: environ.get(name) for name in shown} == shown


def test_should_stop_is_seen_by_python_within_a_command(start: Submitter) -> None:
    code = "import time, clusterddp; print('up', flush=True)\nwhile not clusterddp.should_stop(): time.sleep(0.05)"
    (start.directory / "loop.py").write_text(code)
    run = start(f"{{command: [{sys.executable}, loop.py]}}")
    wait_for_ranks(run, 2)
    reports: list[str] = []
    assert cancel(run, save=True, report=reports.append) == "cancelled"
    assert not any("has not asked" in text for text in reports)
    assert run.attempts()[-1].asked.exists()
    assert clusterddp.Run(run.path).wait(20) == "CANCELLED"


def test_cancel_save_of_a_program_that_never_asks_warns_at_once_and_ends_in_an_error(start: Submitter) -> None:
    (start.directory / "deaf.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    run = start("{script: deaf.py}", more='stop: {grace: "00:00:04"}')
    wait_for_ranks(run, 2)
    messages, seen = [], []

    def report(text: str) -> None:
        messages.append(text)
        seen.append(read_status(run))

    with pytest.raises(ClusterddpError, match=r"ended without a checkpoint: ranks 0-1 did not stop within 4 s") as info:
        cancel(run, save=True, report=report)
    assert (info.value.exit_code, info.value.hint) == (1, HOW_TO_STOP)
    assert "the program has not asked clusterddp.should_stop() so far" in messages[0]
    stopping = seen[0].stopping
    assert stopping is not None
    assert (stopping.reason, stopping.asks, stopping.until - stopping.since) == ("cancel --save", False, 4.0)
    page = unstyle("\n".join(status_lines(seen[0], run, address=run.name)))
    assert "STOPPING" in page.splitlines()[0]
    assert "and save nothing: the program has not asked clusterddp.should_stop()" in page
    end = read_end(run.attempts()[-1])
    assert end is not None
    assert (end.outcome, end.root_cause) == ("CANCELLED", None)
    assert "; the program never asked clusterddp.should_stop()" in end.reason
    assert read_status(run).stopping is None
