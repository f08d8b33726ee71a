"""The GPUs that the ranks of a node get, for every way in which Slurm shows GPUs to tasks."""

import pytest

from clusterddp.places.slurm.tasks import GpuChoice, choose_gpus, read_gpus
from clusterddp.train.device import RankVariables


@pytest.mark.parametrize(
    ("lists", "bound", "choice"),
    [
        ([None, None], False, GpuChoice()),
        (["", ""], False, GpuChoice()),
        (["0,1", "0,1"], False, GpuChoice()),  # --gpus-per-node=2, --gres=gpu:2
        (["2,3", "2,3"], False, GpuChoice()),
        (["3", "5"], True, GpuChoice(visible=("3", "5"))),  # --gpus-per-task=1
        (["0,1", "2,3"], True, GpuChoice(visible=("0", "2", "1", "3"))),
        (["0", "0"], True, GpuChoice(device=0)),  # the same, and every task confined to its own device
        (["0,1", "0,1", "0,1"], True, GpuChoice(device=0)),
        (["0", "0"], False, GpuChoice()),  # one GPU for two ranks: the trainer refuses it
        (["MIG-a", "MIG-b"], True, GpuChoice(device=0)),
        (["MIG-a,MIG-b", "MIG-a,MIG-b"], False, GpuChoice(visible=("MIG-a", "MIG-b"), one_each=True)),
        (["0"], False, GpuChoice()),
    ],
)
def test_local_rank_is_the_index_of_a_rank_s_own_gpu_or_its_gpu_is_set(lists, bound, choice):
    assert choose_gpus([read_gpus(visible) for visible in lists], bound=bound) == choice


def test_the_trainer_takes_the_gpu_that_is_set():
    assert RankVariables.from_environment({"LOCAL_RANK": "3", "CLUSTERDDP_GPU": "0"}).gpu == 0


def test_the_trainer_counts_by_its_local_rank_otherwise():
    assert RankVariables.from_environment({"LOCAL_RANK": "3"}).gpu is None
