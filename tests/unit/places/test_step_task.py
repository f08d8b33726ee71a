"""The place of a rank that another launcher than srun has started, by its environment."""

from __future__ import annotations

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.places.slurm.step_task import find_place_of

JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[01-02]"}


def torchrun(rank: int, *, agent: int, host: str, size: int = 2, agents: int = 2) -> dict[str, str]:
    return JOB | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size * agents),
        "LOCAL_RANK": str(rank % size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(agent),
        "MASTER_ADDR": "node01",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "SLURMD_NODENAME": host,
    }


def test_torchrun_s_ranks_are_on_the_hosts_of_their_agents() -> None:
    place = find_place_of("torchrun", torchrun(3, agent=1, host="node02"))
    assert (place.rank, place.local_rank, place.node_rank) == (3, 1, 1)
    assert place.ranks == ((0, 1), (2, 3))
    assert place.hosts == ("node01", "node02")


def test_an_agent_on_another_host_than_its_number_says_names_its_own_host() -> None:
    place = find_place_of("torchrun", torchrun(0, agent=0, host="node02"))
    assert place.hosts == ("node02", "(node 1)")


def test_ranks_inside_a_rank_of_another_step_have_a_place() -> None:
    assert find_place_of("torchrun", torchrun(3, agent=1, host="node02") | {"CLUSTERDDP_RUN": "outer"}).rank == 3


def test_ranks_that_are_no_blocks_are_not_watched() -> None:
    with pytest.raises(ClusterddpError, match="placed rank 1 of 4 as number 0 of 2"):
        find_place_of("torchrun", torchrun(1, agent=0, host="node01") | {"LOCAL_RANK": "0"})
