"""The plan of a Slurm job: argv of sbatch and srun, the script, and what yields to what."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.text.plan import plan_lines, verdict_lines
from clusterddp.errors import ClusterddpError, PreflightError, RunNotFoundError, UsageError
from clusterddp.places.slurm.launcher import SlurmLauncher, ask_scheduler, write_variables
from clusterddp.places.staging import make_run
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, move_plan, plan_run, rename_plan
from clusterddp.planning.prerequisites import check_trainer
from clusterddp.planning.slurm import _TASK, Options, memory_text, without_waiting
from clusterddp.run.attempts import AttemptEnd, end_run
from clusterddp.run.directory import RunDir
from clusterddp.run.job_tag import job_tag, tag_of
from clusterddp.run.record import read_run, write_run
from clusterddp.spec.load import load_spec
from clusterddp.system.files import read_json
from clusterddp.system.python import module_command
from clusterddp.system.templates import read_template
from clusterddp.system.torch_files import find_package, read_torch_values
from tests.support.launch_runs import plan_text
from tests.support.paths import GOLDEN, ROOT

SPEC = "name: job\nlauncher: slurm\nresources: {nodes: 2, gpus_per_node: 4, cpus_per_task: 3}\n"
CPU = "name: job\nlauncher: slurm\nresources: {nodes: 2, procs_per_node: 2, cpus_per_task: 3}\n"


def plan(
    directory: Path, more: str = "", *, spec: str = SPEC, environ: Mapping[str, str] | None = None, **changes: Any
):  # type: ignore[no-untyped-def]
    return plan_text(f"{spec}{more}\n", directory, environ=environ or {}, **changes)


def sbatch(directory: Path, more: str = "", **how: Any) -> list[str]:
    planned = plan(directory, more, **how)
    assert planned.slurm is not None
    return list(planned.slurm.sbatch)


def named(arguments: list[str], option: str) -> list[str]:
    return [word for word in arguments if word == f"--{option}" or word.startswith(f"--{option}=")]


@pytest.mark.parametrize("name", ["resnet18_2x8", "trainer/slurm_one_node"])
def test_a_shipped_spec_is_submitted_as_its_golden_file_says(tmp_path: Path, name: str) -> None:
    resolved = load_spec(ROOT / "jobs" / f"{name}.yaml", environ={})
    planned = plan_run(
        resolved, Request(runs_dir=tmp_path / "runs", working_dir=tmp_path, environ={"PYTHONPATH": "/checkout"})
    )
    assert planned.slurm is not None
    lines = ["# sbatch", *planned.slurm.sbatch, "# the script and its arguments", "SCRIPT", *planned.slurm.arguments]
    text = "\n".join([*lines, "# srun", *planned.slurm.srun, "# the script", planned.slurm.script])
    for value, word in (
        (str(planned.run_dir), "RUN_DIR"),
        (planned.run, "RUN"),
        (job_tag(planned.token, 0), "TAG"),
        ("\n".join(module_command("clusterddp.places.slurm.task")), "PYTHON\nclusterddp.places.slurm.task"),
        (sys.executable, "PYTHON"),
        (f"/checkout{os.pathsep}{ROOT}", "/checkout"),
    ):
        text = text.replace(value, word)
    golden = GOLDEN / f"slurm_{Path(name).name}.txt"
    if os.environ.get("CLUSTERDDP_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_the_plan_is_the_same_after_a_journey_through_json(tmp_path: Path) -> None:
    planned = plan(tmp_path, "slurm: {exclusive: true, partition: gpu}")
    assert Plan.from_json(json.loads(json.dumps(planned.to_json()))) == planned


def test_a_plan_that_was_stored_before_there_was_slurm_still_reads(tmp_path: Path) -> None:
    stored = plan_text("name: a\n", tmp_path).to_json()
    del stored["slurm"]
    assert Plan.from_json(json.loads(json.dumps(stored))).slurm is None


def test_a_renamed_plan_has_all_its_paths_moved(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    other = rename_plan(planned)
    assert planned.run not in json.dumps(other.to_json()["slurm"])


def test_the_job_of_a_later_attempt_has_a_tag_of_its_own(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    later = move_plan(planned, planned.run_dir, attempt=3)
    assert planned.slurm is not None and later.slurm is not None  # noqa: PT018
    first, third = (named(list(each.slurm.sbatch), "job-name")[0] for each in (planned, later))
    assert tag_of(first) == job_tag(planned.token, 0)
    assert tag_of(third) == job_tag(planned.token, 3)


@pytest.mark.skipif("cuda" in read_torch_values(find_package("torch")), reason="needs a torch for the CPU")
def test_a_torch_for_the_cpu_is_refused_at_submit_where_gpus_are_asked_for(tmp_path: Path) -> None:
    gang = plan(tmp_path).gang
    with pytest.raises(PreflightError, match="is built for the CPU, and GPUs are asked for") as error:
        check_trainer(gang, elsewhere=False)
    assert error.value.hint is not None
    assert "--cpu" in error.value.hint
    check_trainer(gang, elsewhere=True)
    check_trainer(dataclasses.replace(gang, on_cpu=True), elsewhere=False)


def test_the_token_of_the_run_is_in_no_argument(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    assert planned.token not in json.dumps(planned.to_json()["slurm"])


def test_hosts_and_addresses_are_left_to_the_nodes(tmp_path: Path) -> None:
    gang = plan(tmp_path).gang
    assert [node.host for node in gang.nodes] == ["(node 0 of the job)", "(node 1 of the job)"]
    assert (gang.master_addr, gang.interface, gang.time_limit_s, gang.backend) == ("", None, None, "nccl")


@pytest.mark.parametrize(("time", "lead_s"), [("0:01:30", 30.0), ("2:00:00", 120.0)])
def test_the_time_limit_is_slurms_and_the_lead_ours(tmp_path: Path, time: str, lead_s: float) -> None:
    planned = plan(tmp_path, spec=f'name: a\nlauncher: slurm\nresources: {{time: "{time}"}}\n')
    assert (planned.gang.time_limit_s, planned.gang.stop_lead_s) == (None, lead_s)
    assert planned.slurm.sbatch_options["time"] == time


@pytest.mark.parametrize(
    "more", ["", "slurm: {exclusive: user}", "slurm: {cpus_per_gpu: 8}", "slurm: {exclusive: true}"]
)
def test_without_a_number_of_cores_the_ranks_share_those_that_slurm_gives(tmp_path: Path, more: str) -> None:
    planned = plan(tmp_path, more, spec="name: a\nlauncher: slurm\nresources: {gpus_per_node: 4}\n")
    assert named(planned.slurm.sbatch, "cpus-per-task") == named(planned.slurm.srun, "cpus-per-task") == []
    assert named(planned.slurm.srun, "cpu-bind") == ["--cpu-bind=none"]
    assert planned.gang.threads_per_rank is None
    assert "OMP_NUM_THREADS" not in planned.gang.variables_of(0, run_dir="/r", attempt=0, master_port=1)
    assert planned.rank0["OMP_NUM_THREADS"]["value"] == "its share of the job's cores on its node"
    assert any(
        "4 = 4 ranks, one GPU each, sharing the job's cores" in line for line in plan_lines(planned, verbose=False)
    )


FEW_CORES = "one for each rank; workers that load data need more"


@pytest.mark.parametrize(
    ("more", "environ", "cores"),
    [
        ("slurm: {exclusive: true}", {}, "all of its cores"),
        ("", {"SBATCH_EXCLUSIVE": "1"}, "all of its cores"),
        ("slurm: {exclusive: user}", {}, f"those that Slurm gives the job, often {FEW_CORES}"),
    ],
)
def test_the_plan_says_which_cores_the_ranks_share(
    tmp_path: Path, more: str, environ: dict[str, str], cores: str
) -> None:
    planned = plan(tmp_path, more, spec="name: a\nlauncher: slurm\n", environ=environ)
    assert f"resources.cpus_per_task is not set: the ranks of a node share {cores}" in planned.notes


@pytest.mark.parametrize(("option", "bound"), [("cores", ["--cpu-bind=cores"]), ("false", [])])
def test_a_binding_to_cores_that_the_spec_names_holds(tmp_path: Path, option: str, bound: list[str]) -> None:
    planned = plan(tmp_path, f"slurm: {{cpu_bind: {option}}}", spec="name: a\nlauncher: slurm\n")
    assert named(planned.slurm.srun, "cpu-bind") == bound


@pytest.mark.parametrize(
    ("cores", "of_the_job", "of_the_step"),
    [(", cpus_per_task: 3", ["--cpus-per-task=3"], ["--cpus-per-task=12"]), ("", [], [])],
)
def test_a_program_that_starts_its_ranks_gets_the_job_of_ranks_and_one_task_on_each_node(
    tmp_path: Path, cores: str, of_the_job: list[str], of_the_step: list[str]
) -> None:
    spec = f"name: a\nlauncher: slurm\nresources: {{nodes: 2, gpus_per_node: 4{cores}}}\n"
    planned = plan(tmp_path, "entry: {module: http.server, owns_ranks: true}", spec=spec)
    job, step = planned.slurm.sbatch, planned.slurm.srun
    assert (named(job, "ntasks"), named(job, "ntasks-per-node")) == (["--ntasks=8"], ["--ntasks-per-node=4"])
    assert (named(step, "ntasks"), named(step, "ntasks-per-node")) == (["--ntasks=2"], ["--ntasks-per-node=1"])
    assert (named(job, "cpus-per-task"), named(step, "cpus-per-task")) == (of_the_job, of_the_step)


def test_cores_that_the_spec_names_hold_on_whole_nodes_too(tmp_path: Path) -> None:
    planned = plan(tmp_path, "slurm: {exclusive: true}")
    assert named(planned.slurm.srun, "cpus-per-task") == ["--cpus-per-task=3"]


@pytest.mark.parametrize(("gigabytes", "text"), [(64, "64G"), (1.5, "1536M"), (0.3, "308M"), (2.0, "2G")])
def test_memory_is_spelled_exactly(gigabytes: float, text: str) -> None:
    assert memory_text(gigabytes) == text


def test_options_of_the_spec_keep_their_names_and_texts(tmp_path: Path) -> None:
    more = "slurm: {mail-type: END, time_min: 4:00:00, exclusive: true, contiguous: false, nice: null, site_x: a b}"
    words = sbatch(tmp_path, more)
    assert words[-4:] == ["--mail-type=END", "--time-min=4:00:00", "--exclusive", "--site-x=a b"]
    assert named(words, "contiguous") == named(words, "nice") == []


@pytest.mark.parametrize(
    ("more", "gone"),
    [
        ("slurm: {gpus_per_node: false}", "gpus-per-node"),
        ("slurm: {no_requeue: false}", "no-requeue"),
        ("slurm: {no-requeue: null}", "no-requeue"),
        ("slurm: {requeue: true}", "no-requeue"),
        ("restarts: 1\nslurm: {requeue: false}", "requeue"),
        ("after: [7]\nslurm: {kill_on_invalid_dep: false}", "kill-on-invalid-dep"),
    ],
)
def test_a_default_can_be_removed(tmp_path: Path, more: str, gone: str) -> None:
    assert named(sbatch(tmp_path), "gpus-per-node") == ["--gpus-per-node=4"]
    assert named(sbatch(tmp_path, more), gone) == []


def test_a_default_of_memory_can_be_removed_or_replaced(tmp_path: Path) -> None:
    spec = "name: a\nlauncher: slurm\nresources: {memory_gb: 2}\n"
    assert named(sbatch(tmp_path, spec=spec), "mem") == ["--mem=2G"]
    assert named(sbatch(tmp_path, "slurm: {mem: false}", spec=spec), "mem") == []
    assert named(sbatch(tmp_path, "slurm: {mem_per_cpu: 500M}", spec=CPU), "mem-per-cpu") == ["--mem-per-cpu=500M"]


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("gres: 'gpu:a100:4'", "--gres=gpu:a100:4"),
        ("gres: 'nvme,gpu:4'", "--gres=nvme,gpu:4"),
        ("gpus_per_task: 1", "--gpus-per-task=1"),
        ("gpus_per_node: 'a100:4'", "--gpus-per-node=a100:4"),
    ],
)
def test_gpus_asked_for_in_another_way_take_the_place_of_ours(tmp_path: Path, option: str, argument: str) -> None:
    words = sbatch(tmp_path, f"slurm: {{{option}}}")
    assert [word for word in words[8:] if "gpu" in word] == [argument]  # those before hold paths
    assert plan(tmp_path, f"slurm: {{{option}}}").gang.backend == "nccl"


@pytest.mark.parametrize(
    ("nodes", "gpus", "expected"),
    [
        (2, "8", ["--gpus=8", "--gpus-per-node=4"]),
        (2, "a100:8", ["--gpus=a100:8", "--gpus-per-node=a100:4"]),
        (1, "8", ["--gpus=8"]),
    ],
)
def test_a_total_of_gpus_is_the_same_number_on_each_node(
    tmp_path: Path, nodes: int, gpus: str, expected: list[str]
) -> None:
    """Slurm 22.05 gives 7 of 8 GPUs on the first of two nodes."""
    spec = f"name: a\nlauncher: slurm\nresources: {{nodes: {nodes}}}\nslurm: {{gpus: '{gpus}'}}\n"
    planned = plan(tmp_path, spec=spec)
    assert [word for word in planned.slurm.sbatch if word.startswith("--gpus")] == expected
    assert planned.gang.world_size == 8


@pytest.mark.parametrize(
    ("more", "asked", "ranks"),
    [
        ("slurm: {gres: 'gpu:4'}", 8, 8),
        ("slurm: {gres: 'gpu:4'}\nresources: {procs_per_node: 1}", 8, 2),
        ("slurm: {gpus_per_task: 2}\nresources: {procs_per_node: 2}", 8, 4),
        ("resources: {gpus_per_node: 8, procs_per_node: 2}", 16, 4),
        ("resources: {gpus_per_node: 8, procs_per_node: 2}\nentry: {module: http.server, owns_ranks: true}", 16, 4),
        ("device: cpu\nresources: {gpus_per_node: 8, procs_per_node: 2}", 0, 4),
    ],
)
def test_a_plan_that_uses_fewer_gpus_than_it_asks_for_says_so(
    tmp_path: Path, more: str, asked: int, ranks: int
) -> None:
    spec = f"name: a\nlauncher: slurm\n{more}\n"
    spec = (
        spec.replace("resources: {", "resources: {nodes: 2, ")
        if "resources" in more
        else f"{spec}resources: {{nodes: 2}}\n"
    )
    planned = plan(tmp_path, spec=spec)
    assert (planned.num_gpus, planned.gang.num_ranks) == (asked, ranks)
    is_said = f"{asked - ranks} of {asked} GPUs have no rank of their own" in planned.notes[0]
    assert is_said == (asked > ranks)
    first = "\n".join(plan_lines(planned, verbose=False)[:8])
    assert (f"({ranks} of {asked})" in first) == (asked > ranks)
    assert "resources.gpus_per_node" not in first  # as a value that somebody has typed


def test_gpus_of_this_shell_that_no_rank_uses_are_named(tmp_path: Path) -> None:
    planned = plan(tmp_path, spec="name: a\nlauncher: slurm\n", environ={"SBATCH_GRES": "gpu:4"})
    assert "3 of 4 GPUs have no rank of their own" in planned.notes[0]


def test_gpus_asked_for_by_gres_alone_make_the_backend_nccl(tmp_path: Path) -> None:
    assert plan(tmp_path, "slurm: {gres: 'gpu:2'}", spec=CPU).gang.backend == "nccl"


def test_the_cpu_is_meant_where_gres_asks_for_gpus_besides(tmp_path: Path) -> None:
    gang = plan(tmp_path, "device: cpu\nslurm: {gres: 'gpu:2'}", spec=CPU).gang
    assert (gang.backend, gang.on_cpu) == ("gloo", True)


def test_other_resources_leave_the_gpus_as_they_are(tmp_path: Path) -> None:
    assert named(sbatch(tmp_path, "slurm: {gres: nvme}"), "gpus-per-node") == ["--gpus-per-node=4"]


def test_on_the_cpu_no_gpu_is_asked_for(tmp_path: Path) -> None:
    planned = plan(tmp_path, "device: cpu")
    assert named(list(planned.slurm.sbatch), "gpus-per-node") == []
    assert planned.gang.backend == "gloo"


def test_a_job_without_gpus_says_so(tmp_path: Path) -> None:
    assert any("asks for no GPU" in note for note in plan(tmp_path, spec=CPU).notes)


def test_nccl_without_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="nccl needs GPUs, and none are asked for"):
        plan(tmp_path, "network: {backend: nccl}", spec=CPU)


def test_a_comment_of_the_users_is_kept_before_ours(tmp_path: Path) -> None:
    planned = plan(tmp_path, 'slurm: {comment: "grant $(7) \\"a\\""}')
    tag = job_tag(planned.token, 0)
    assert named(list(planned.slurm.sbatch), "comment") == [f'--comment=grant $(7) "a"; clusterddp {planned.run} {tag}']


def test_options_that_only_srun_knows_go_there(tmp_path: Path) -> None:
    planned = plan(tmp_path, "slurm: {cpu_bind: none}")
    assert "--cpu-bind=none" in planned.slurm.srun
    assert "--cpu-bind=none" not in planned.slurm.sbatch


UNBOUND = ["env", "--unset=SLURM_GPUS_PER_TASK", "--unset=SLURM_TRES_PER_TASK", "srun"]


@pytest.mark.parametrize(
    ("more", "environ", "start"),
    [
        ("", {}, ["srun"]),
        ("slurm: {gres: 'gpu:h100:4'}", {}, ["srun"]),
        ("slurm: {gpus_per_task: 1}", {}, UNBOUND),
        ("slurm: {tres_per_task: 'gres/gpu:1'}", {}, UNBOUND),
        ("", {"SBATCH_GPUS_PER_TASK": "1"}, ["srun"]),
        ("slurm: {gpus_per_task: 1, gpu_bind: 'single:1'}", {}, ["srun"]),
        ("slurm: {tres_bind: 'gres/gpu:closest', gpus_per_task: 1}", {}, ["srun"]),
        ("slurm: {gpus_per_task: 1}", {"SBATCH_GPU_BIND": "single:1"}, ["srun"]),
    ],
)
def test_srun_binds_no_gpu_to_a_task_unless_the_user_says_so(
    tmp_path: Path, more: str, environ: dict[str, str], start: list[str]
) -> None:
    srun = list(plan(tmp_path, more, environ=environ).slurm.srun)
    assert srun[: srun.index("srun") + 1] == start


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", "block:block"),
        ("device: cpu", "block:block"),
        ("slurm: {distribution: 'block:cyclic'}", "block:cyclic"),
        ("slurm: {distribution: false}", "block:block"),
    ],
)
def test_ranks_of_a_node_are_neighbours_and_fill_one_socket_after_the_other(
    tmp_path: Path, more: str, expected: str
) -> None:
    assert named(list(plan(tmp_path, more).slurm.srun), "distribution") == [f"--distribution={expected}"]


@pytest.mark.parametrize(
    ("more", "environ"),
    [
        ("slurm: {gpu_bind: 'single:1'}", {}),
        ("slurm: {tres_bind: 'gres/gpu:per_task:1'}", {}),
        ("", {"SBATCH_GPU_BIND": "single:1"}),
    ],
)
def test_a_binding_of_gpus_says_what_it_costs(tmp_path: Path, more: str, environ: dict[str, str]) -> None:
    planned = plan(tmp_path, more, environ=environ)
    assert any("invalid device ordinal" in note and "CLUSTERDDP_GPU" in note for note in planned.notes)


def test_an_exported_distribution_that_would_part_neighbours_is_overridden(tmp_path: Path) -> None:
    planned = plan(tmp_path, environ={"SBATCH_DISTRIBUTION": "cyclic"})
    assert named(list(planned.slurm.srun), "distribution") == ["--distribution=block:block"]
    assert named(list(planned.slurm.sbatch), "distribution") == []
    assert any(note.startswith("SBATCH_DISTRIBUTION in your environment is overridden") for note in planned.notes)


def test_a_run_that_may_restart_is_put_back_into_the_queue(tmp_path: Path) -> None:
    assert named(sbatch(tmp_path, "restarts: 2"), "requeue") == ["--requeue"]


def test_what_the_user_exports_becomes_an_option_with_its_origin(tmp_path: Path) -> None:
    planned = plan(tmp_path, environ={"SBATCH_ACCOUNT": "vision", "SBATCH_EXCLUSIVE": ""})
    assert planned.slurm.sbatch[-2:] == ("--account=vision", "--exclusive")
    assert "--account=vision comes from SBATCH_ACCOUNT in your environment" in planned.notes


def test_what_the_user_exports_yields_to_the_spec_and_says_so(tmp_path: Path) -> None:
    environ = {"SBATCH_PARTITION": "old", "SBATCH_GRES": "gpu:1"}
    planned = plan(tmp_path, "slurm: {partition: gpu}", environ=environ)
    assert named(list(planned.slurm.sbatch), "partition") == ["--partition=gpu"]
    assert named(list(planned.slurm.sbatch), "gres") == []
    for variable in environ:
        assert f"{variable} in your environment is overridden by the spec" in planned.notes


@pytest.mark.parametrize("variable", ["SBATCH_OUTPUT", "SBATCH_EXPORT", "SBATCH_ARRAY_INX", "SBATCH_JOB_NAME"])
def test_what_the_user_exports_for_an_option_of_ours_is_overridden(tmp_path: Path, variable: str) -> None:
    planned = plan(tmp_path, environ={variable: "17"})
    assert not any("17" in word for word in planned.slurm.sbatch[8:])
    assert any(note.startswith(f"{variable} in your environment is overridden: ") for note in planned.notes)


TRAVELLERS = [
    "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHDYNAMO_DISABLE", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_COMPILE_DEBUG", "TRITON_CACHE_DIR", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "MLX5_SINGLE_THREADED",
    "FI_PROVIDER", "OFI_NCCL_PROTOCOL", "UCX_NET_DEVICES", "UCC_TLS", "PSM2_CUDA", "PSM3_NIC", "HFI_UNIT",
    "SHARP_COLL_LOG_LEVEL", "NVSHMEM_DEBUG", "NVCC_PREPEND_FLAGS", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "CUDAHOSTCXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "LD_RUN_PATH", "NUMBA_CACHE_DIR", "KINETO_LOG_LEVEL",
    "GLIBC_TUNABLES", "MALLOC_ARENA_MAX",
]  # fmt: skip
AT_HOME = [
    "MINE",
    "LD_PRELOAD",
    "SSH_AUTH_SOCK",
    "TMPDIR",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "TORCHINDUCTOR_API_KEY",
]


@pytest.mark.parametrize("name", TRAVELLERS)
def test_what_torch_and_its_networks_read_goes_along_to_the_nodes(tmp_path: Path, name: str) -> None:
    assert plan(tmp_path, environ={name: "1"}).slurm.variables == (name,)


@pytest.mark.parametrize("name", AT_HOME)
def test_what_belongs_to_the_submitting_host_stays_there(tmp_path: Path, name: str) -> None:
    assert plan(tmp_path, environ={name: "1"}).slurm.variables == ()


def test_an_exported_time_limit_holds_when_the_spec_has_none(tmp_path: Path) -> None:
    environ = {"SBATCH_TIMELIMIT": "30"}
    assert named(sbatch(tmp_path, environ=environ), "time") == ["--time=30"]
    spec = "name: a\nlauncher: slurm\nresources: {time: 20}\n"
    assert named(sbatch(tmp_path, spec=spec, environ=environ), "time") == ["--time=20"]


@pytest.mark.parametrize(("name", "reason"), [("run%j", "job's ids"), ("a\\b", "removes it"), ("a\nb", "one line")])
def test_a_runs_directory_that_slurm_would_read_otherwise_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        plan(tmp_path, runs_dir=tmp_path / name)


def test_a_path_with_blanks_and_quotes_stays_one_argument(tmp_path: Path) -> None:
    runs_dir = tmp_path / 'it\'s $(here) "now"'
    planned = plan(tmp_path, runs_dir=runs_dir)
    assert f"--chdir={runs_dir}/{planned.run}/launcher" in planned.slurm.sbatch
    assert planned.slurm.arguments[1] == f"{runs_dir}/{planned.run}"


def test_a_runs_directory_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is on tmpfs \(/dev/shm\), in the memory of this machine"):
        plan(tmp_path, runs_dir=Path("/dev/shm/runs"))


def test_a_working_directory_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in the memory of this machine; what ranks work in must be"):
        plan(tmp_path, "entry: {module: train}", working_dir=Path("/dev/shm"))


def test_a_job_that_follows_its_own_does_not_wait_again() -> None:
    options: Options = {
        "begin": "16:00",
        "hold": True,
        "dependency": "afterok:7",
        "kill_on_invalid_dep": "yes",
        "qos": "a",
    }
    assert without_waiting(options) == {"qos": "a"}
    assert without_waiting({"dependency": "singleton"}) == {"dependency": "singleton"}


def test_a_run_that_is_resumed_waits_for_what_has_not_ended_yet(tmp_path: Path) -> None:
    first, second = submitted(tmp_path, "41"), submitted(tmp_path, "42")
    planned = plan(tmp_path, f"after: [{first}, {second}]")
    end_run(RunDir(tmp_path / "runs" / first), AttemptEnd(outcome="COMPLETED", reason="done"))
    assert SlurmLauncher({}).renew(planned).slurm.sbatch_options["dependency"] == "afterok:42"  # type: ignore[union-attr]


def test_a_runs_directory_on_a_disk_gets_a_note(tmp_path: Path) -> None:
    assert any("nodes must see the same directory" in note for note in plan(tmp_path).notes)


def test_a_container_of_pyxis_is_options_of_srun(tmp_path: Path) -> None:
    container = "container: {image: /images/t.sqsh, mounts: [/data, '/a:/b:ro'], workdir: /w}"
    more = f"{container}\ntrain: {{dataset: cifar10, data_dir: /sets}}"
    planned = plan(tmp_path, more)
    srun = planned.slurm.srun
    package = f"{ROOT / 'clusterddp'}:/opt/clusterddp/clusterddp:ro"
    runs = f"{tmp_path}/runs:{tmp_path}/runs,{tmp_path}:{tmp_path},/sets:/sets"
    start = srun.index("--container-image=/images/t.sqsh")
    assert srun[start:] == (
        "--container-image=/images/t.sqsh",
        f"--container-mounts={runs},{package},/data:/data,/a:/b:ro",
        "--no-container-mount-home",
        "--container-workdir=/w",
        "/bin/sh",
        "-c",
        'exec "$0" "$@"',
        "python3",
        "-c",
        _TASK,
        "/opt/clusterddp",
        "clusterddp.places.slurm.task",
        str(planned.run_dir),
    )


def test_a_container_of_apptainer_stands_before_python(tmp_path: Path) -> None:
    planned = plan(tmp_path, "container: {runtime: apptainer, image: t.sif}\npython: /opt/python")
    srun = planned.slurm.srun
    start = srun.index("apptainer")
    assert srun[start : start + 3] == ("apptainer", "exec", "--nv")
    assert f"--bind={tmp_path}/runs:{tmp_path}/runs" in srun
    task = "clusterddp.places.slurm.task"
    words = ("t.sif", "/opt/python", "-c", _TASK, "/opt/clusterddp", task, str(planned.run_dir))
    assert srun[-len(words) :] == words


def test_a_container_mounts_no_directory_that_need_not_be_there(tmp_path: Path) -> None:
    def mounts(more: str) -> str:
        container = "container: {runtime: apptainer, image: a.sif, mounts: [/b:/sets]}"
        return " ".join(plan(tmp_path, f"{container}\n{more}").slurm.srun)

    assert "datasets" not in mounts("train: {dataset: shapes}")
    assert "/sets/c:/sets/c" not in mounts("train: {dataset: cifar10, data_dir: /sets/c}")
    assert "/other:/other" in mounts("train: {dataset: cifar10, data_dir: /other}")


def test_a_container_without_gpus_gets_none(tmp_path: Path) -> None:
    assert "--nv" not in plan(tmp_path, "container: {runtime: apptainer, image: t.sif}", spec=CPU).slurm.srun


@pytest.mark.parametrize(("container", "path"), [("", "/mine"), ("container: {image: a}", "/mine:/opt/clusterddp")])
def test_the_package_is_found_inside_a_container(tmp_path: Path, container: str, path: str) -> None:
    planned = make_run(plan(tmp_path, container), {})
    write_variables(RunDir(planned.run_dir), planned, {"PYTHONPATH": "/mine"})
    variables = read_json(RunDir(planned.run_dir).job_environment)
    assert variables is not None
    assert variables["PYTHONPATH"].removesuffix(f":{ROOT}") == path


def submitted(directory: Path, job_id: str | None, end: AttemptEnd | None = None, spec: str = SPEC) -> str:
    """Make a run as if it had been submitted as this job."""
    planned = make_run(plan(directory, spec=spec), {})
    run = RunDir(planned.run_dir)
    write_run(run, dataclasses.replace(read_run(run), job_id=job_id))
    if end:
        end_run(run, end)
    return planned.run


def test_a_job_waits_for_runs_and_for_job_ids(tmp_path: Path) -> None:
    first = submitted(tmp_path, "41")
    words = sbatch(tmp_path, f"after: [{first}, 'afterany:{first}', 'afternotok:17']")
    assert named(words, "dependency") == ["--dependency=afterok:41,afterany:41,afternotok:17"]
    assert named(words, "kill-on-invalid-dep") == ["--kill-on-invalid-dep=yes"]


def test_a_run_that_has_completed_is_not_waited_for(tmp_path: Path) -> None:
    first = submitted(tmp_path, "41", AttemptEnd(outcome="COMPLETED", reason="done"))
    planned = plan(tmp_path, f"after: [{first}]")
    assert named(list(planned.slurm.sbatch), "dependency") == []
    assert any("has ended already (COMPLETED)" in note for note in planned.notes)


def test_a_run_that_has_failed_is_not_waited_for_in_vain(tmp_path: Path) -> None:
    first = submitted(tmp_path, "41", AttemptEnd(outcome="FAILED", reason="rank 3 died"))
    with pytest.raises(UsageError, match=r"has ended: FAILED \(rank 3 died\)"):
        plan(tmp_path, f"after: [{first}]")


def test_a_run_that_is_not_slurms_or_is_not_there_cannot_be_waited_for(tmp_path: Path) -> None:
    local = submitted(tmp_path, "41", spec="name: a\n")
    with pytest.raises(UsageError, match="for which Slurm cannot wait"):
        plan(tmp_path, f"after: [{local}]")
    with pytest.raises(RunNotFoundError):
        plan(tmp_path, "after: [no-such-run]")
    unknown = submitted(tmp_path, None)
    with pytest.raises(ClusterddpError, match="is not known"):
        plan(tmp_path, f"after: [{unknown}]")


def test_the_script_passes_its_arguments_on_as_they_are(tmp_path: Path) -> None:
    spy = tmp_path / "spy python"
    spy.write_text('#!/bin/sh\nprintf "%s|" "$PYTHONPATH" "$LD_LIBRARY_PATH" "$@"\n')
    spy.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(read_template("slurm_job.sh"))
    odd = "/a b/$(touch x)'\"\n`id`"
    done = subprocess.run(
        ["sh", str(script), str(spy), odd, "/i p", "/l p"],
        env={},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"/i p|/l p|-m|clusterddp.places.slurm.batch|{odd}|"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("article", ["", "a "], ids=["22.05", "26.05"])
def test_the_scheduler_s_estimate_is_read(tmp_path: Path, article: str) -> None:
    """A fake sbatch prints what Slurm 26.05 does, which was not at hand."""
    words = f"Job 7 to start at 2026-11-25T10:00:00 {article}using 64 processors on nodes node[1-2] in partition low"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: {words}' >&2\n")
    (tmp_path / "sbatch").chmod(0o755)
    slurm = plan(tmp_path).slurm
    assert slurm is not None
    verdict = ask_scheduler(slurm, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (verdict.start, verdict.nodes) == ("2026-11-25T10:00:00", "node[1-2]")
    assert verdict_lines(verdict, verbose=False, columns=None)[1].endswith("; 32 cores on each node, 8 for each rank")
