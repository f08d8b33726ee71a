"""The account of an end: one set of functions, whichever process gives it."""

from __future__ import annotations

from pathlib import Path

from clusterddp.run.directory import RunDir
from clusterddp.run.outcome import failed, loss_of_node, read_end, write_end


def test_a_lost_node_names_its_first_rank_and_that_ranks_log(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(2)
    cause = loss_of_node("b is lost", host="b", ranks=(4, 5), ranks_in_words="ranks 4-5", attempt=attempt)
    assert cause.error == "b is lost; its ranks 4-5 ended with it"
    assert (cause.rank, cause.host, cause.log) == (4, "b", "attempts/2/logs/rank-004.err")


def test_a_node_lost_before_the_start_has_no_rank_and_no_log() -> None:
    cause = loss_of_node("b is lost", host="b", ranks=(4, 5), ranks_in_words="ranks 4-5", attempt=None)
    assert (cause.error, cause.rank, cause.log) == ("b is lost before any rank was started", None, None)


def test_the_first_process_to_record_an_end_is_right(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    assert write_end(attempt, failed("the first", host="a"))
    assert not write_end(attempt, failed("the second", host="b"))
    end = read_end(attempt)
    assert end is not None
    assert (end.reason, end.root_cause.host if end.root_cause else None) == ("the first", "a")
