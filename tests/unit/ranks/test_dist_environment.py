"""The variables of a rank: torchrun's names, the run's files, what the user may change and what not."""

from pathlib import Path

from clusterddp.ranks.environment import Variable, cookie, exec_environment, inherited_environment
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry, Gang, Node


def variables(*, gpus=("0", "1"), master_port=12345, restart=0, **changes):
    """Return the variables of rank 11 of 16 on two nodes."""
    nodes = (
        Node(node_rank=0, host="node0", ranks=tuple(range(8))),
        Node(node_rank=1, host="node1", ranks=tuple(range(8, 16)), gpus=gpus),
    )
    options = {
        "run": "brisk-otter-3",
        "restarts": 3,
        "master_addr": "10.0.0.7",
        "threads_per_rank": 4,
        "interface": "eth1",
        "backend": "nccl",
        "token": "abc",
        "entry": Entry(kind="module", target="m", working_dir="/"),
    }
    gang = Gang(nodes=nodes, **(options | changes))
    return gang.variables_of(11, run_dir="/runs/brisk-otter-3", attempt=2, master_port=master_port, restart=restart)


def values(**changes):
    return {key: variable.value for key, variable in variables(**changes).items()}


def test_every_variable_of_torchrun_is_set():
    expected = {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "ROLE_RANK": "11",
        "ROLE_WORLD_SIZE": "16",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "12345",
        "TORCHELASTIC_RUN_ID": "brisk-otter-3",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert {key: value for key, value in values(restart=1).items() if key in expected} == expected


def test_the_files_are_in_the_run_directory():
    attempt = RunDir(Path("/runs/brisk-otter-3")).attempt(2)
    assert values()["TORCHELASTIC_ERROR_FILE"] == str(attempt.error_file(11))
    assert values()["CLUSTERDDP_STOP_FILE"] == str(attempt.stop_file)


def test_the_interface_is_exact_for_nccl_and_bare_for_gloo():
    assert (values()["GLOO_SOCKET_IFNAME"], values()["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    assert "NCCL_SOCKET_IFNAME" not in values(interface="lo")
    assert "GLOO_SOCKET_IFNAME" not in values(interface=None)


def test_the_user_overrides_choices_but_not_the_ranks_place():
    user = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "ib0", "LOCAL_RANK": "0", "MASTER_PORT": "1", "MINE": "x"}
    user |= {"CLUSTERDDP_COOKIE": "none"}
    found = variables(env=user)
    assert found["OMP_NUM_THREADS"] == Variable("1", "env in the spec")
    assert found["GLOO_SOCKET_IFNAME"].value == "ib0"
    assert found["MINE"] == Variable("x", "env in the spec")
    assert (found["LOCAL_RANK"].value, found["MASTER_PORT"].value) == ("3", "12345")
    assert found["CLUSTERDDP_COOKIE"].value == "abc.n1" == cookie("abc", "n1")


def test_no_gpu_means_that_ranks_see_none():
    assert values(gpus=())["CUDA_VISIBLE_DEVICES"] == ""


def test_accelerate_gets_a_variable_where_ranks_compute_on_the_cpu():
    assert values(on_cpu=True)["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in values()


def test_a_plan_may_have_a_text_for_a_port_that_is_not_known_yet():
    assert values(master_port="chosen at the start")["MASTER_PORT"] == "chosen at the start"


def test_child_processes_inherit_the_environment_without_clusterddps_variables(monkeypatch):
    monkeypatch.setenv("SOMETHING", "1")
    monkeypatch.setenv("CLUSTERDDP_COOKIE", "another run")
    assert inherited_environment()["SOMETHING"] == "1"
    assert "CLUSTERDDP_COOKIE" not in inherited_environment()


def test_a_command_beside_a_rank_reads_its_variables_by_other_names() -> None:
    rank = {
        "RANK": "5",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "a",
        "TORCHELASTIC_ERROR_FILE": "/run/error",
        "SLURM_PROCID": "5",
        "CLUSTERDDP_RUN_DIR": "/run",
        "CLUSTERDDP_COOKIE": "t.n1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": "/run/attempts/0/logs/rank-005.nccl",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MY_OWN": "value",
    }
    assert exec_environment(rank, {"RANK": 5, "NODE_RANK": 1}, "t") == {
        "CLUSTERDDP_EXEC_RANK": "5",
        "CLUSTERDDP_EXEC_NODE_RANK": "1",
        "CLUSTERDDP_EXEC_MASTER_PORT": "29500",
        "CLUSTERDDP_EXEC_RUN_DIR": "/run",
        "CLUSTERDDP_COOKIE": "t.x1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MY_OWN": "value",
    }
    users = {"CLUSTERDDP_RUN_DIR": "/run", "NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/home/ana/nccl.log"}
    assert exec_environment(users, {"NODE_RANK": 0}, "t").items() >= {("NCCL_DEBUG", "WARN")}
