"""The account of an end: one set of functions, whichever process gives it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clusterddp.run.attempts import failed, loss_of_nodes, read_end, write_end
from clusterddp.run.directory import RunDir
from clusterddp.system.files import write_json
from tests.support.gang_runs import make_gang


def test_a_lost_node_names_its_first_rank_and_that_ranks_log(tmp_path: Path) -> None:
    attempt, gang = RunDir(tmp_path).attempt(2), make_gang(tmp_path, "")
    cause = loss_of_nodes(gang, gang.nodes[1:], "host1 is lost", attempt=attempt)
    assert cause.error == "host1 is lost; its ranks 2-3 ended with it"
    assert (cause.rank, cause.host, cause.log) == (2, "host1", "attempts/2/logs/rank-002.err")


def test_a_node_lost_before_the_start_has_no_rank_and_no_log(tmp_path: Path) -> None:
    gang = make_gang(tmp_path, "")
    cause = loss_of_nodes(gang, gang.nodes[1:], "host1 is lost", attempt=None)
    assert (cause.error, cause.rank, cause.log) == ("host1 is lost before any rank was started", None, None)


def test_the_first_process_to_record_an_end_is_right(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    assert write_end(attempt, failed("the first", host="a"))
    assert not write_end(attempt, failed("the second", host="b"))
    end = read_end(attempt)
    assert end is not None
    assert (end.reason, end.root_cause.host if end.root_cause else None) == ("the first", "a")


def with_secrets(tmp_path: Path, *, attempts: int) -> RunDir:
    """Make a run that has secrets, and attempts without an end."""
    run = RunDir(tmp_path)
    run.launcher_dir.mkdir()
    write_json(run.job_secrets, {"WANDB_API_KEY": "k"})
    for number in range(attempts):
        run.attempt(number).path.mkdir(parents=True)
    return run


def test_the_secrets_of_a_run_are_removed_as_its_end_is_recorded(tmp_path: Path) -> None:
    run = with_secrets(tmp_path, attempts=1)
    write_end(run.attempt(0), failed("no more"))
    assert not run.job_secrets.exists()


def test_a_run_that_goes_on_keeps_its_secrets(tmp_path: Path) -> None:
    run = with_secrets(tmp_path, attempts=2)
    write_end(run.attempt(0), failed("late"))
    assert run.job_secrets.exists(), "the newest attempt needs them"
    write_end(run.attempt(1), dataclasses.replace(failed("a node is lost"), will_restart=True))
    assert run.job_secrets.exists(), "the restart needs them"
