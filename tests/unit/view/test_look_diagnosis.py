"""The kind of a failure, by the words that the recorders of ends, torch, the kernel, Slurm and others use."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.run.attempts import loss_of_nodes
from clusterddp.run.record import RankEnd
from clusterddp.view.status import Diagnosis, diagnose
from tests.support.gang_runs import make_gang

ROWS = [
    tuple(line.rsplit(" | ", 2))
    for line in Path(__file__).with_name("messages.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
OWN_WORDS = ("was killed", "exited with", "attempt ", "ranks ", "node", "hang: ", "supervisor ", "slurmstepd")
"""How messages begin that are no exception of a rank's."""


def diagnosis(error: str, *, rank: int | None = 1, traceback: str | None = None) -> Diagnosis:
    return diagnose(RankEnd(rank=rank, host="node2", exit_code=1, error=error, log=None, traceback=traceback))


def category(error: str, *, rank: int | None = 1, traceback: str | None = None) -> str:
    return diagnosis(error, rank=rank, traceback=traceback).category


@pytest.mark.parametrize(("message", "expected", "remedy"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_real_message_has_a_category_and_a_remedy(message: str, expected: str, remedy: str) -> None:
    is_exception = not message.startswith(OWN_WORDS)
    who = "rank 1 on nccl-gloo" + (": " if is_exception else " ")
    texts = [message if message.startswith(OWN_WORDS[2:]) else who + message]
    if is_exception:
        texts.append(f"rank 1 on nccl-gloo exited with code 1; the last line of its stderr: {message}")
    for text in texts:
        found = diagnosis(text)
        assert found.category == expected, text
        assert found.hint == "" if remedy == "-" else remedy in found.hint, text


def test_a_setup_line_that_fails_is_told_from_a_program_that_speaks_of_its_setup() -> None:
    error = "node1: setup line 1 (exit code 1): module load cuda/99: ERROR: Unable to locate a modulefile"
    assert diagnosis(error, rank=None).text == "the setup lines of the spec"
    assert category("rank 1 on node1: RuntimeError: setup: the model has no layers") == "code"


def test_the_loss_of_a_supervisor_is_the_loss_of_its_node(tmp_path: Path) -> None:
    gang = make_gang(tmp_path, "")
    cause = loss_of_nodes(gang, gang.nodes[1:], "the supervisor was killed", attempt=None)
    assert diagnose(cause).category == "setup"  # no rank had started
    error = "the supervisor of node 1 was killed; its ranks 2-3 ended with it"
    assert category(error) == "node_lost"


def test_what_failed_before_any_rank_is_the_setup() -> None:
    found = diagnosis("node 0 on node2 could not start its ranks: no such interface", rank=None)
    assert found == Diagnosis("setup", "before any rank ran", "clusterddp doctor SPEC checks the machines")


def test_the_last_line_of_a_traceback_counts_where_the_error_is_only_an_exit_code() -> None:
    traceback = "Traceback (most recent call last):\n  File\nMemoryError"
    assert category("rank 1 on node2 exited with code 1", traceback=traceback) == "memory"


def test_the_error_itself_goes_before_its_traceback() -> None:
    assert category("rank 1 on node2: FileNotFoundError: x", traceback="a\nConnection refused") == "data"
