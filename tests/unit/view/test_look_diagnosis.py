"""The kind of a failure, by the words that the recorders of ends, torch and Slurm use."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.run.attempts import loss_of_nodes
from clusterddp.run.record import RankEnd
from clusterddp.view.status import diagnose
from tests.support.gang_runs import make_gang


def category(error: str, *, rank: int | None = 1, traceback: str | None = None) -> str:
    cause = RankEnd(rank=rank, host="node2", exit_code=1, error=error, log=None, traceback=traceback)
    return diagnose(cause).category


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("rank 1 on node2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu_memory"),
        (
            "rank 1 on node2 was killed by SIGKILL (the kernel has killed a process on this host for lack of memory)",
            "memory",
        ),
        ("rank 1 on node2: RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "memory"),
        ("attempt 0 on node2 recorded no end; Slurm's accounting reports OUT_OF_MEMORY", "memory"),
        ("rank 1 on node2: OSError: [Errno 28] No space left on device: 'a.pt'", "storage"),
        ("ranks 0-1 did not stop before the time limit of 60 s", "time_limit"),
        ("attempt 0 on node2 recorded no end; Slurm's accounting reports TIMEOUT", "time_limit"),
        ("hang: no progress for 61 s: rank 1 waits for rank 0", "hang"),
        ("node2 is lost: slurmstepd: error: *** NODE FAILURE ***", "node_lost"),
        ("rank 1 on node2: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer", "network"),
        ("rank 1 on node2: ConnectionRefusedError: [Errno 111] Connection refused", "network"),
        ("rank 1 on node2: RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1970, ncclRemoteError", "network"),
        ("rank 1 on node2: OSError: [Errno 98] Address already in use", "network"),
        ("rank 1 on node2: FileNotFoundError: [Errno 2] No such file or directory: '/data/train'", "data"),
        ("rank 1 on node2: RuntimeError: DataLoader worker (pid 12) exited unexpectedly", "data"),
        ("rank 1 on node2 was killed by SIGKILL", "killed"),
        ("rank 1 on node2 was killed by SIGSEGV", "code"),
        ("rank 1 on node2: ValueError: bad value", "code"),
        ("rank 1 on node2 exited with code 3", "code"),
    ],
)
def test_a_failure_has_a_category(error: str, expected: str) -> None:
    assert category(error) == expected


def test_the_loss_of_a_supervisor_is_the_loss_of_its_node(tmp_path: Path) -> None:
    gang = make_gang(tmp_path, "")
    cause = loss_of_nodes(gang, gang.nodes[1:], "the supervisor was killed", attempt=None)
    assert diagnose(cause).category == "setup"  # no rank had started
    error = "the supervisor of node 1 was killed; its ranks 2-3 ended with it"
    assert category(error) == "node_lost"


def test_what_failed_before_any_rank_is_the_setup() -> None:
    assert category("node 0 on node2 could not start its ranks: no such interface", rank=None) == "setup"


def test_the_last_line_of_a_traceback_counts_where_the_error_is_only_an_exit_code() -> None:
    traceback = "Traceback (most recent call last):\n  File\nMemoryError"
    assert category("rank 1 on node2 exited with code 1", traceback=traceback) == "memory"


def test_the_error_itself_goes_before_its_traceback() -> None:
    assert category("rank 1 on node2: FileNotFoundError: x", traceback="a\nConnection refused") == "data"
