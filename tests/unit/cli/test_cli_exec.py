"""The commands exec and shell where no command starts: wrong usage, and runs without running ranks."""

from __future__ import annotations

from clusterddp.cli.main import main
from tests.support.handmade_runs import fail, make_run, start_attempt


def test_exec_without_a_command_is_a_usage_error_with_an_example(tmp_path, capsys):
    run = make_run(tmp_path)
    assert main(["exec", run.name, "--rank", "1", "--runs", str(tmp_path), "--no-color"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no command is given",
        f"hint: clusterddp exec {run.name} --rank 1 -- nvidia-smi",
    ]


def test_of_a_run_that_has_ended_the_state_is_named_and_what_to_do(tmp_path, capsys):
    run = make_run(tmp_path)
    fail(start_attempt(run))
    assert main(["exec", run.name, "--runs", str(tmp_path), "--no-color", "--", "true"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {run.name} has no running rank: it is FAILED",
        f"hint: clusterddp logs {run.name} shows what it wrote; clusterddp rerun {run.name} starts it again",
    ]


def test_a_shell_without_a_terminal_is_refused_and_exec_is_named(tmp_path, capsys):
    run = make_run(tmp_path)
    assert main(["shell", run.name, "--runs", str(tmp_path), "--no-color"]) == 2
    assert f"hint: clusterddp exec {run.name} -- CMD runs a command" in capsys.readouterr().err


def test_a_shell_has_one_place(tmp_path, capsys):
    run = make_run(tmp_path)
    assert main(["shell", run.name, "--rank", "1", "--node", "1", "--runs", str(tmp_path)]) == 2
    assert "expected one of them" in capsys.readouterr().err
