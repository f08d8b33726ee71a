"""The threads of gloo at the end of a group: two real ranks whose threads get to run when nothing else wants to."""

import os
import subprocess
import sys

import pytest

from tests.support.slow_gloo import STARVE_GLOO

SLOW_GLOO = (
    STARVE_GLOO
    + """
import sys
import torch, torch.distributed as dist
from clusterddp.train.group import join_group, leave_group
from clusterddp.train.device import RankVariables
def main():
    group = join_group(
        RankVariables(rank=int(sys.argv[2]), local_rank=0, world_size=2, backend="gloo", init_method=f"file://{sys.argv[1]}")
    )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    dist.all_reduce(torch.ones(1))
    starve_gloo()
    dist.all_reduce(torch.ones(1))
    leave_group(group)
    del model  # the last to hold the group
main()
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="sets the scheduler of single threads")
@pytest.mark.slow
def test_a_model_that_is_freed_after_its_group_is_left_does_not_hang(tmp_path):
    """Its end is the group's, which waits for a thread that waits for the interpreter: 11 of 12 ranks never ended."""
    for meeting in range(2):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SLOW_GLOO, str(tmp_path / f"meet{meeting}"), str(rank)],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        try:
            assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
