"""The command exec where no command starts: runs without running ranks."""

from __future__ import annotations

from clusterddp.cli.main import main
from tests.support.handmade_runs import fail, make_run, start_attempt


def test_of_a_run_that_has_ended_the_state_is_named_and_what_to_do(tmp_path, capsys):
    run = make_run(tmp_path)
    fail(start_attempt(run))
    assert main(["exec", run.name, "--runs", str(tmp_path), "--no-color", "--", "true"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {run.name} has no running rank: it is FAILED",
        f"hint: clusterddp logs {run.name} shows what it wrote; clusterddp submit {run.name} starts it again",
    ]
