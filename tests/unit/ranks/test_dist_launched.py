"""Which launcher started this process, and as which rank: read from variables recorded from each launcher."""

import pytest

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.ranks.launched import Launched, find_place
from tests.support.launcher_variables import HAND, HYDRA, OPEN_MPI, STEP, TORCHRUN


def numbers(launched: Launched) -> tuple[int | None, ...]:
    return (
        launched.rank,
        launched.world_size,
        launched.local_rank,
        launched.local_world_size,
        launched.node_rank,
        launched.num_nodes,
    )


def refusal(environ: dict[str, str]) -> ClusterddpError:
    with pytest.raises(ClusterddpError) as caught:
        find_place(environ)
    return caught.value


def test_torchrun_sets_everything() -> None:
    assert numbers(find_place(TORCHRUN)) == (3, 4, 1, 2, 1, 2)


def test_the_master_port_of_torchrun_is_its_agents() -> None:
    assert find_place(TORCHRUN).port_is_taken
    assert not find_place(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).port_is_taken


def test_torchruns_restarts_keep_the_identity() -> None:
    first, second = (
        find_place(TORCHRUN | {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": n}) for n in "01"
    )
    assert (first.identity, first.start, second.start) == (second.identity, 0, 1)


def test_torchruns_run_id_none_identifies_nothing() -> None:
    place = find_place(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"})
    assert place.identity == f"torchrun at {place.master_addrs[0]}:{place.master_port}"


def test_srun_sets_everything_for_its_step() -> None:
    assert numbers(find_place(STEP)) == (2, 3, 0, 1, 1, 2)


def test_the_ranks_of_a_step_meet_at_its_first_host() -> None:
    assert find_place(STEP).master_addrs == ("gpu07",)


def test_the_step_counts_and_not_the_allocation_around_it() -> None:
    assert find_place(STEP | {"SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "gpu[01-16]"}).world_size == 3


def test_open_mpi_sets_no_node_rank() -> None:
    assert numbers(find_place(OPEN_MPI)) == (1, 2, 0, 1, None, None)


def test_rank_0_of_open_mpi_is_looked_for_on_all_its_hosts() -> None:
    hosts = ("gpu07.lan", "192.0.2.2", "10.0.0.2", "fd00::2", "gpu08.lan", "gpu12.lan")
    assert find_place(OPEN_MPI).master_addrs == hosts


def test_rank_0_of_open_mpi_5_is_looked_for_in_the_allocation() -> None:
    version_5 = {name: value for name, value in OPEN_MPI.items() if "orte" not in name}
    assert find_place(version_5 | {"SLURM_JOB_NODELIST": "gpu[07-08]"}).master_addrs == ("gpu07", "gpu08")
    assert "MASTER_ADDR" in refusal(version_5).message


def test_hydra_sets_ranks_and_local_ranks() -> None:
    assert numbers(find_place(HYDRA)) == (1, 2, 1, 2, None, None)


def test_on_one_host_ranks_meet_over_loopback() -> None:
    assert find_place(HYDRA).master_addrs == ("127.0.0.1",)


def test_over_several_hosts_mpich_needs_the_address_but_for_an_allocation() -> None:
    elsewhere = HYDRA | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    assert "-genv MASTER_ADDR HOST" in str(refusal(elsewhere).hint)
    assert find_place(elsewhere | {"SLURM_JOB_NODELIST": "gpu[07-08]"}).master_addrs == ("gpu07", "gpu08")


def test_by_hand_only_rank_and_world_size_are_needed() -> None:
    assert numbers(find_place(HAND)) == (1, 2, None, None, None, None)


def test_the_default_port_is_torchruns() -> None:
    assert find_place({**HAND, "MASTER_PORT": ""}).master_port == 29500


def test_every_number_has_the_variable_that_it_came_from() -> None:
    variables = find_place(STEP).variables
    assert (variables["RANK"].origin, variables["WORLD_SIZE"].origin) == ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def test_without_any_variable_there_is_one_rank() -> None:
    launched = find_place({"HOME": "/root"})
    assert (launched.launcher, numbers(launched)) == (None, (0, 1, 0, 1, 0, 1))


@pytest.mark.parametrize("around", [STEP, OPEN_MPI, STEP | {"SLURM_PROCID": "1", "SLURM_NODEID": "0"}])
def test_what_surrounds_torchrun_is_no_disagreement(around: dict[str, str]) -> None:
    assert find_place(around | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize("inner", [OPEN_MPI, HYDRA])
def test_what_surrounds_mpirun_is_no_disagreement(inner: dict[str, str]) -> None:
    assert find_place(STEP | inner).world_size == 2


def test_pyxis_and_srun_that_agree_are_one() -> None:
    filled = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
    launched = find_place(STEP | filled)
    assert (launched.launcher, launched.master_addrs, launched.master_port) == ("srun", ("gpu07",), 29500)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (STEP | {"RANK": "1"}, "SLURM_PROCID is 2 and RANK is 1"),
        (STEP | {"WORLD_SIZE": "8"}, "SLURM_STEP_NUM_TASKS is 3 and WORLD_SIZE is 8"),
        (STEP | {"PMI_RANK": "0", "PMI_SIZE": "3"}, "SLURM_PROCID is 2 and PMI_RANK is 0"),
        (OPEN_MPI | {"RANK": "0"}, "OMPI_COMM_WORLD_RANK is 1 and RANK is 0"),
        (OPEN_MPI | {"PMIX_RANK": "0"}, "OMPI_COMM_WORLD_RANK is 1 and PMIX_RANK is 0"),
        (HYDRA | {"LOCAL_RANK": "0"}, "MPI_LOCALRANKID is 1 and LOCAL_RANK is 0"),
        (HAND | {"GROUP_RANK": "0", "NODE_RANK": "1"}, "GROUP_RANK is 0 and NODE_RANK is 1"),
        (HAND | {"PET_NODE_RANK": "0", "PET_NNODES": "2"}, "RANK is 1 and PET_NODE_RANK is 0"),
    ],
)
def test_two_sources_that_disagree_are_an_error_that_prints_both(environ: dict[str, str], words: str) -> None:
    assert words in refusal(environ).message


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (HAND | {"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
        (HAND | {"RANK": "one"}, "RANK is 'one'"),
        (HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"PMIX_RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    ],
)
def test_an_invalid_variable_is_named_with_its_value(environ: dict[str, str], words: str) -> None:
    assert words in refusal(environ).message


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291", "-5", "-6"])
def test_the_shell_of_an_allocation_is_none_of_its_tasks(step: str) -> None:
    error = refusal({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": step})
    assert isinstance(error, UsageError)
    assert error.hint == "srun clusterddp worker SPEC"


def test_a_pod_in_which_torchrun_is_to_start_ranks_is_none_of_them() -> None:
    assert "torchrun -m clusterddp worker" in str(refusal(HAND | {"PET_NPROC_PER_NODE": "4"}).hint)
