"""The plan: pure computation from a spec and what the machine offers."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError, PreflightError, SpecError, UsageError
from clusterddp.planning.placement import Machine, Request, assign_gpus, plan_placement
from clusterddp.planning.plan import ADJECTIVES, ANIMALS, Plan, choose_run_name, plan_run, rename_plan
from clusterddp.run.gang import Gang
from clusterddp.spec.load import load_spec
from tests.support.handmade_runs import make_gang
from tests.support.launch_runs import git, plan_script, plan_text

BIG = "name: resnet18_2x8\nresources: {nodes: 2, gpus_per_node: 8}\n"


def machine(*, num_cores: int = 16, num_gpus: int = 0) -> Machine:
    return Machine(
        host="here",
        num_cores=num_cores,
        gpus=tuple(f"GPU-{number}" for number in range(num_gpus)),
        interfaces=("lo", "eth0"),
        loopback="lo",
    )


def place(text: str, **offers: int):  # type: ignore[no-untyped-def]
    return plan_placement(load_spec(text, environ={}).job, machine(**offers))


def test_first_rank_of_each_node_follows_the_last_of_the_node_before() -> None:
    nodes = place("name: a\nresources: {nodes: 3, procs_per_node: 2}\n").nodes
    assert [node.ranks for node in nodes] == [(0, 1), (2, 3), (4, 5)]
    assert [node.node_rank for node in nodes] == [0, 1, 2]


def test_each_fake_node_gets_its_own_slice_of_the_gpus() -> None:
    placement = place("name: a\nresources: {nodes: 2, gpus_per_node: 2}\n", num_gpus=5)
    assert [node.gpus for node in placement.nodes] == [("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")]
    assert placement.backend == "nccl"


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(PreflightError) as refusal:
        place(BIG)
    assert refusal.value.message == (
        "resnet18_2x8 asks for 2 nodes x 8 GPUs = 16 GPUs on one machine; this machine shows 0"
    )
    assert refusal.value.hint == "--cpu starts the same ranks on the CPU with gloo; or submit it to Slurm"


def test_device_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(PreflightError, match="1 node x 1 GPU = 1 GPU on one machine; this machine shows 0"):
        place("name: a\ndevice: cuda\n")


def test_device_cpu_starts_the_same_ranks_without_gpus() -> None:
    placement = place(BIG + "device: cpu\n", num_gpus=8)
    assert [len(node.ranks) for node in placement.nodes] == [8, 8]
    assert {node.gpus for node in placement.nodes} == {()}
    assert placement.backend == "gloo"


def test_a_spec_that_names_no_gpus_takes_one_for_each_rank_if_they_suffice() -> None:
    placement = place("name: a\nresources: {procs_per_node: 2}\n", num_gpus=2)
    assert placement.nodes[0].gpus == ("GPU-0", "GPU-1")


def test_a_spec_that_names_no_gpus_stays_on_the_cpu_where_they_do_not_suffice_and_says_so() -> None:
    placement = place("name: a\nresources: {procs_per_node: 4}\n", num_gpus=2)
    assert (placement.nodes[0].gpus, placement.backend) == ((), "gloo")
    assert placement.notes == ("4 ranks on the CPU: this machine shows 2 GPUs",)


def test_zero_gpus_per_node_means_the_cpu() -> None:
    assert place("name: a\nresources: {gpus_per_node: 0}\n", num_gpus=2).nodes[0].gpus == ()


def test_gloo_may_be_asked_for_on_gpus() -> None:
    placement = place("name: a\nnetwork: {backend: gloo}\n", num_gpus=1)
    assert (placement.backend, placement.on_cpu, placement.nodes[0].gpus) == ("gloo", False, ("GPU-0",))


MIG = {"MIG-a0": "GPU-a", "MIG-a1": "GPU-a", "MIG-b0": "GPU-b"}


def slices(*names: str) -> Machine:
    return dataclasses.replace(machine(), gpus=names, cards={name: MIG[name] for name in names})


def test_nccl_gets_slices_of_different_gpus() -> None:
    job = load_spec("name: a\nresources: {gpus_per_node: 2}\n", environ={}).job
    assert plan_placement(job, slices(*MIG)).nodes[0].gpus == ("MIG-a0", "MIG-b0")


def test_two_slices_of_one_gpu_are_refused_to_nccl_and_given_to_gloo() -> None:
    job = load_spec("name: a\nresources: {gpus_per_node: 2}\n", environ={}).job
    with pytest.raises(
        PreflightError, match="MIG-a0 and MIG-a1 are slices of one GPU, and NCCL allows one rank on each GPU"
    ):
        plan_placement(job, slices("MIG-a0", "MIG-a1"))
    gloo = load_spec("name: a\nresources: {gpus_per_node: 2}\nnetwork: {backend: gloo}\n", environ={}).job
    assert plan_placement(gloo, slices("MIG-a0", "MIG-a1")).nodes[0].gpus == ("MIG-a0", "MIG-a1")
    alone = load_spec("name: a\nresources: {gpus_per_node: 1}\n", environ={}).job
    assert plan_placement(alone, slices("MIG-a0", "MIG-a1")).backend == "nccl"


def test_each_rank_sees_its_own_slice_alone() -> None:
    """CUDA shows a process no more than one."""
    node = dataclasses.replace(make_gang().nodes[0], gpus=("MIG-a0", "MIG-b0"))
    gang = dataclasses.replace(make_gang(), nodes=(node,))
    seen = [gang.variables_of(rank, run_dir="/r", attempt=0, master_port=1) for rank in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"].value for each in seen] == ["MIG-a0", "MIG-b0"]
    assert [each["CLUSTERDDP_GPU"].value for each in seen] == ["0", "0"]


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(PreflightError, match="nccl needs GPUs; this machine shows 0 for 1 rank"):
        place("name: a\nnetwork: {backend: nccl}\n")


def test_cores_are_shared_among_all_ranks_of_the_machine() -> None:
    placement = place("name: a\nresources: {nodes: 2, procs_per_node: 4}\n", num_cores=16)
    assert (placement.threads_per_rank, placement.notes) == (2, ())


def test_every_rank_has_a_thread_however_few_cores_there_are() -> None:
    assert place("name: a\nresources: {nodes: 2, procs_per_node: 4}\n", num_cores=2).threads_per_rank == 1


def test_more_cores_per_rank_than_there_are_become_the_share_and_a_note() -> None:
    placement = place("name: a\nresources: {procs_per_node: 4, cpus_per_task: 8}\n", num_cores=8)
    assert placement.threads_per_rank == 2
    assert placement.notes == ("resources.cpus_per_task is 8, and 4 ranks share 8 cores here: 2 threads each",)


def test_a_crowd_of_ranks_is_a_note() -> None:
    placement = place("name: a\nresources: {procs_per_node: 500}\n", num_cores=2)
    assert placement.notes == ("500 ranks share 2 cores here: each step waits for all of them",)


def test_fewer_cores_per_rank_than_there_are_stay_as_asked() -> None:
    assert place("name: a\nresources: {cpus_per_task: 3}\n", num_cores=8).threads_per_rank == 3


def test_all_nodes_on_one_machine_talk_over_the_loopback() -> None:
    assert place("name: a\n").interface == "lo"


def test_an_interface_that_the_machine_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(PreflightError, match=r"network\.interface ib0: this machine has lo, eth0"):
        place("name: a\nnetwork: {interface: ib0}\n")
    assert place("name: a\nnetwork: {interface: eth0}\n").interface == "eth0"


def test_gpus_that_are_still_there_are_kept_on_resume_and_others_taken_if_not() -> None:
    nodes = place("name: a\nresources: {nodes: 2, gpus_per_node: 1}\n", num_gpus=2).nodes
    assert assign_gpus("a", nodes, machine(num_gpus=4)) == nodes
    moved = dataclasses.replace(machine(), gpus=("7", "9", "11"))
    assert [node.gpus for node in assign_gpus("a", nodes, moved)] == [("7",), ("9",)]
    with pytest.raises(PreflightError, match="a runs on 2 GPUs; this machine shows 1"):
        assign_gpus("a", nodes, machine(num_gpus=1))


def test_the_plan_is_the_same_after_a_journey_through_json(tmp_path: Path) -> None:
    plan = plan_script(tmp_path, more="env: {A: b}\nnetwork: {master_port: 23456}")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_planning_writes_nothing(tmp_path: Path) -> None:
    plan_script(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["entry.py"]


def test_rank_zeros_variables_are_in_the_plan_with_their_origins(tmp_path: Path) -> None:
    plan = plan_script(tmp_path, more="env: {OMP_NUM_THREADS: 3}")
    values = {name: variable["value"] for name, variable in plan.rank0.items()}
    assert (values["RANK"], values["WORLD_SIZE"], values["MASTER_ADDR"]) == ("0", "4", "127.0.0.1")
    assert values["MASTER_PORT"] == "a free port, chosen at the start"
    assert plan.rank0["OMP_NUM_THREADS"] == {"value": "3", "origin": "env in the spec"}
    assert values["CLUSTERDDP_RUN_DIR"] == str(plan.run_dir)


def test_a_named_master_port_is_in_the_plan(tmp_path: Path) -> None:
    plan = plan_text("name: a\nnetwork: {master_port: 23456}\n", tmp_path)
    assert (plan.gang.master_port, plan.rank0["MASTER_PORT"]["value"]) == (23456, "23456")


def test_nodes_of_a_local_run_are_on_this_host(tmp_path: Path) -> None:
    assert {node.host for node in plan_script(tmp_path).gang.nodes} == {socket.gethostname()}


def test_what_is_no_default_is_listed_with_its_origin(tmp_path: Path) -> None:
    resolved = load_spec("name: a\ntrain: {epochs: 3}\n", ["train.lr=0.2"], environ={}, flags={"device": "cpu"})
    plan = plan_run(resolved, Request(runs_dir=tmp_path / "runs", working_dir=tmp_path, environ={}))
    changes = {change["key"]: change for change in plan.changes}
    assert changes.keys() == {"name", "device", "train.epochs", "train.lr"}
    assert changes["train.lr"]["value"] == 0.2
    assert changes["train.lr"]["default"] == 0.1
    assert "command line" in changes["train.lr"]["origin"]


def test_a_data_directory_is_taken_from_where_the_spec_is_submitted(tmp_path: Path) -> None:
    plan = plan_text("name: a\ntrain: {data_dir: sets/here}\n", tmp_path)
    assert plan.spec["train"]["data_dir"] == str(tmp_path / "sets/here")
    assert load_spec(plan.spec_text, environ={}).job.train.data_dir == str(tmp_path / "sets/here")  # type: ignore[union-attr]


def test_a_data_directory_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    assert plan_text("name: a\ntrain: {data_dir: ~/sets}\n", tmp_path).spec["train"]["data_dir"] == "/home/ana/sets"


def test_the_data_directory_is_the_users_cache_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/ana")
    assert plan_text("name: a\n", tmp_path).spec["train"]["data_dir"] == "/var/cache/ana/clusterddp/datasets"


def test_a_secret_that_is_not_set_is_refused_and_one_that_is_set_is_stored_nowhere(tmp_path: Path) -> None:
    text = "name: a\nsecrets: [API_KEY]\n"
    with pytest.raises(SpecError, match="API_KEY is not set in this environment"):
        plan_text(text, tmp_path, environ={})
    plan = plan_text(text, tmp_path, environ={"API_KEY": "hunter2"})
    assert plan.secrets == ("API_KEY",)
    assert "hunter2" not in json.dumps(plan.to_json())


@pytest.mark.parametrize(("time", "lead_s"), [("0:01:30", 30.0), ("2:00:00", 120.0)])
def test_ranks_are_asked_to_stop_a_third_of_the_time_limit_ahead_but_no_more_than_two_minutes(
    tmp_path: Path, time: str, lead_s: float
) -> None:
    gang = plan_text(f'name: a\nresources: {{time: "{time}"}}\n', tmp_path).gang
    assert gang.stop_lead_s == lead_s


@pytest.mark.parametrize(
    ("network", "timeouts_s"),
    [
        ("{}", (62.0, 30.0, 60.0)),
        ('{start_timeout: "3:00", host_silence: "0:10", heartbeat_timeout: "0:20"}', (180.0, 10.0, 20.0)),
        ('{host_silence: "2:00"}', (62.0, 120.0, 120.0)),
    ],
)
def test_how_long_others_may_be_silent_is_in_the_gang(
    tmp_path: Path, network: str, timeouts_s: tuple[float, float, float]
) -> None:
    gang = plan_text(f"name: a\nresources: {{nodes: 2}}\nnetwork: {network}\n", tmp_path).gang
    assert (gang.start_timeout_s, gang.host_silence_s, gang.heartbeat_timeout_s) == timeouts_s


@pytest.mark.parametrize(
    ("stop", "lead_grace_s"),
    [("{}", (120.0, 120.0)), ('{lead: "10:00", grace: "15:00"}', (600.0, 900.0))],
)
def test_a_spec_may_give_its_ranks_more_time_to_stop(
    tmp_path: Path, stop: str, lead_grace_s: tuple[float, float]
) -> None:
    gang = plan_text(f'name: a\nresources: {{time: "2:00:00"}}\nstop: {stop}\n', tmp_path).gang
    assert (gang.stop_lead_s, gang.stop_grace_s) == lead_grace_s


def test_on_slurm_nodes_have_the_time_to_pull_an_image(tmp_path: Path) -> None:
    gang = plan_text("name: a\nlauncher: slurm\nresources: {nodes: 2}\n", tmp_path).gang
    assert gang.start_timeout_s == 602.0


def test_memory_is_not_enforced_here_and_the_plan_says_so(tmp_path: Path) -> None:
    assert "resources.memory_gb is not enforced on this machine" in (
        plan_text("name: a\nresources: {memory_gb: 4}\n", tmp_path).notes
    )


def test_a_runs_directory_whose_path_submitit_would_rewrite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="%j"):
        plan_text("name: a\n", tmp_path, runs_dir=tmp_path / "run%j")


def test_a_script_that_is_not_there_is_refused_with_the_place_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(f"entry.script: {tmp_path}/gone.py: no such file")):
        plan_text("name: a\nentry: {script: gone.py}\n", tmp_path)


NOTHING_ELSE: dict[str, Any] = {"ignored": [], "left_out": None}


def test_a_script_in_a_repository_runs_from_the_snapshot(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    plan = plan_text("name: a\nentry: {script: src/train.py, args: [--lr, 0.1]}\n", tmp_path)
    entry = plan.gang.entry
    assert entry.target == str(plan.run_dir / "code/src/train.py")
    assert entry.import_paths == (str(plan.run_dir / "code/src"),)
    assert (entry.args, entry.working_dir, entry.stop_aware) == (("--lr", "0.1"), str(tmp_path), False)
    assert plan.snapshot == {"source": "git", "root": str(tmp_path), "files": 1, "bytes": 0} | NOTHING_ELSE


def test_a_script_that_git_ignores_is_kept_with_the_code_beside_it(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("scratch\n")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "try.py").write_text("")
    plan = plan_text("name: a\nentry: {script: scratch/try.py}\n", tmp_path)
    assert plan.gang.entry.target == str(plan.run_dir / "code/try.py")


def test_a_script_without_a_repository_runs_from_a_copy_of_the_python_files_around_it(tmp_path: Path) -> None:
    plan = plan_script(tmp_path)
    assert plan.gang.entry.target == str(plan.run_dir / "code/entry.py")
    assert plan.snapshot is not None
    assert plan.snapshot["source"] == str(tmp_path / "entry.py")


def test_a_module_without_a_repository_runs_in_place(tmp_path: Path) -> None:
    plan = plan_text("name: a\nentry: {module: package.train}\n", tmp_path)
    assert (plan.gang.entry.target, plan.gang.entry.import_paths) == ("package.train", (str(tmp_path),))
    assert plan.snapshot is None
    assert "in no git repository" in plan.notes[-1]


def test_a_script_beside_too_much_data_runs_where_it_lies_and_the_note_says_why(tmp_path: Path) -> None:
    with open(tmp_path / "train.npz", "wb") as file:
        file.truncate(60_000_000)
    (tmp_path / "entry.py").write_text("")
    plan = plan_script(tmp_path)
    assert (plan.gang.entry.target, plan.snapshot) == (str(tmp_path / "entry.py"), None)
    (note,) = plan.notes
    assert "1 file, 60.0 MB (largest: train.npz (60.0 MB))" in note
    assert "runs where it is" in note
    assert "git init" in note


def test_what_git_ignores_is_linked_and_the_plan_says_so(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("data/\n*.so\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "ext.so").write_text("")
    plan = plan_script(tmp_path)
    assert plan.snapshot is not None
    assert plan.snapshot["ignored"] == ["data", "ext.so"]
    assert plan.notes == ("git ignores data, ext.so: linked, not copied",)


def test_a_repository_within_the_repository_is_not_called_ignored(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "vendored").mkdir()
    git(tmp_path / "vendored", "init")
    note = "vendored: in a git repository of its own within this one: linked, not copied"
    assert plan_script(tmp_path).notes == (note,)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("[--seed, $seed, --out, 'ckpt/$SLURM_JOB_ID', --data, ~/data]", "$seed, ckpt/$SLURM_JOB_ID, ~/data"),
        ("['--out=${OUT}/a', '--root=~/a', '$(hostname)']", "--out=${OUT}/a, --root=~/a, $(hostname)"),
        ("['$5', 'a$', 'a~/b', 'path=${hydra:runtime.cwd}', 'width=${model.width}', '{rank}']", None),
    ],
)
def test_what_a_shell_would_replace_in_arguments_is_named(tmp_path: Path, args: str, named: str | None) -> None:
    (tmp_path / "entry.py").write_text("")
    notes = plan_text(f"name: a\nentry: {{script: entry.py, args: {args}}}\n", tmp_path).notes
    expected = f"entry: no shell reads {named}: the program gets this text as it is"
    assert [note for note in notes if "no shell" in note] == ([expected] if named else [])


SPAWNS = "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print, nprocs=4)\n"


def test_a_script_that_starts_ranks_in_each_rank_is_named(tmp_path: Path) -> None:
    note = (
        "entry.py:3 calls mp.spawn: if each of the 4 ranks does, entry.owns_ranks: true starts the script once on each "
        "node instead"
    )
    assert plan_script(tmp_path, SPAWNS).notes == (note,)


@pytest.mark.parametrize(
    ("code", "resources"),
    [
        (SPAWNS, "{}"),
        (SPAWNS.replace("    mp.spawn", "    if spawns:\n        mp.spawn"), "{procs_per_node: 2}"),
        ("import subprocess\nsubprocess.spawn()\n", "{procs_per_node: 2}"),
        ("this is no Python\n", "{procs_per_node: 2}"),
    ],
)
def test_a_script_that_may_start_no_ranks_is_not_named(tmp_path: Path, code: str, resources: str) -> None:
    assert plan_script(tmp_path, code, resources=resources).notes == ()


def test_settings_of_this_shell_that_reach_the_ranks_are_named(tmp_path: Path) -> None:
    settings = {
        "NCCL_P2P_DISABLE": "1",
        "TORCH_LOGS": "all",
        "NCCL_HOME": "/opt/nccl",
        "OMP_NUM_THREADS": "3",
        "A": "1",
    }
    environ = {"PATH": os.environ["PATH"]} | settings
    note = "of this shell, the ranks get NCCL_P2P_DISABLE and TORCH_LOGS too; env: sets them in the spec"
    (tmp_path / "entry.py").write_text("")
    for launcher in ("local", "slurm"):
        text = f"name: a\nlauncher: {launcher}\nentry: {{script: entry.py}}\n"
        assert note in plan_text(text, tmp_path, environ=environ).notes
    others = plan_text(f"{text}env: {{NCCL_P2P_DISABLE: 1, TORCH_LOGS: all}}\n", tmp_path, environ=environ)
    assert not [each for each in others.notes if "this shell" in each]


def test_snapshot_false_runs_the_code_in_place(tmp_path: Path) -> None:
    plan = plan_script(tmp_path, more="snapshot: false")
    assert (plan.gang.entry.target, plan.snapshot) == (str(tmp_path / "entry.py"), None)


def test_directories_of_pythonpath_in_the_repository_are_taken_from_the_snapshot(tmp_path: Path) -> None:
    git(tmp_path, "init")
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"lib{os.pathsep}/opt/elsewhere"}
    plan = plan_script(tmp_path, environ=environ)
    assert plan.gang.entry.import_paths == (str(plan.run_dir / "code"), str(plan.run_dir / "code/lib"))


def test_the_trainer_works_where_no_code_of_the_user_lies(tmp_path: Path) -> None:
    plan = plan_text("name: a\n", tmp_path)
    entry = plan.gang.entry
    assert (entry.target, entry.import_paths, entry.stop_aware) == ("clusterddp.train.main", (), True)
    assert entry.working_dir == str(plan.run_dir / "launcher")


def test_code_too_large_to_keep_is_refused_for_a_script_and_noted_for_the_trainer(tmp_path: Path) -> None:
    git(tmp_path, "init")
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(201_000_000)
    with pytest.raises(ClusterddpError, match=r"weights\.bin \(201\.0 MB\)") as refusal:
        plan_script(tmp_path)
    assert "snapshot: false" in str(refusal.value.hint)
    assert "weights.bin" in plan_text("name: a\n", tmp_path).notes[-1]


def test_a_renamed_plan_differs_in_its_name_alone(tmp_path: Path) -> None:
    plan = plan_script(tmp_path)
    other = rename_plan(plan)
    old, new = str(plan.run_dir), str(other.run_dir)
    text = json.dumps(plan.to_json()).replace(old, new).replace(f'"{plan.run}"', f'"{other.run}"')
    assert json.loads(text) == other.to_json() | {
        "changes": list(other.changes), "notes": list(other.notes), "secrets": [], "files": list(other.files),
        "commands": [list(command) for command in other.commands], "gang": json.loads(json.dumps(other.gang.to_json())),
    }  # fmt: skip


def test_a_name_that_is_taken_is_never_chosen(tmp_path: Path) -> None:
    for number in range(1, 100):
        if number != 42:
            (tmp_path / f"brisk-otter-{number}").mkdir()
    assert choose_run_name(tmp_path, adjectives=("brisk",), animals=("otter",)) == "brisk-otter-42"


def test_names_are_made_of_as_many_words_as_it_says() -> None:
    assert (len(set(ADJECTIVES)), len(set(ANIMALS))) == (64, 64)


def test_a_gang_without_nodes_is_none() -> None:
    data = make_gang().to_json()
    with pytest.raises(ValueError, match=r"gang\.nodes is empty"):
        Gang.from_json(data | {"nodes": []})
