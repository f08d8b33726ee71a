"""Configs of GluonCV and Accelerate, hostfiles and .deepspeed_env as specs; and the command that writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import SpecError, UsageError
from clusterddp.importing.reading import Imported, import_files
from clusterddp.spec.model import JobSpec

GLUON = """\
DDP_CONFIG:
  AUTO_RANK_MATCH: True
  WORLD_SIZE: 2 # Total Number of machines
  WORLD_RANK: 0 # Rank of this machine
  DIST_URL: 'tcp://10.0.0.11:23456'
  WOLRD_URLS: ['10.0.0.11', '10.0.0.12']
  GPU_WORLD_SIZE: 16 # Total Number of GPUs, will be assigned automatically
  GPU_WORLD_RANK: 0
  DIST_BACKEND: 'nccl'
  GPU: 0
  DISTRIBUTED: True
CONFIG: {TRAIN: {EPOCH_NUM: 196}}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0
main_process_ip: 192.168.1.10
main_process_port: 29500
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
use_cpu: false
"""


def written(tmp_path: Path, name: str, text: str, **options: Any) -> Imported:
    (tmp_path / name).write_text(text)
    return import_files([tmp_path / name], **options)


def job(tmp_path: Path, name: str, text: str) -> JobSpec:
    return written(tmp_path, name, text).resolved.job


def test_gluons_machines_become_hosts_in_their_order(tmp_path: Path) -> None:
    spec = job(tmp_path, "ddp.yaml", GLUON)
    assert (spec.launcher, [host.host for host in spec.ssh.hosts]) == ("ssh", ["10.0.0.11", "10.0.0.12"])
    assert (spec.resources.nodes, spec.resources.gpus_per_node) == (2, 8)
    assert (spec.network.master_port, spec.network.backend) == (23456, "nccl")


def test_gluons_script_reads_the_rest_of_its_file(tmp_path: Path) -> None:
    found = written(tmp_path, "ddp.yaml", GLUON)
    entry = found.resolved.job.entry
    assert entry is not None
    assert (entry.script, list(entry.args)) == ("train_ddp_pytorch.py", ["--config-file", str(tmp_path / "ddp.yaml")])
    assert "CONFIG: ..." in [each.text for each in found.left]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("WORLD_SIZE: 2", "WORLD_SIZE: 3", "WORLD_SIZE is 3, and WOLRD_URLS names 2 machines: 10.0.0.11, 10.0.0.12"),
        ("tcp://10.0.0.11", "tcp://10.0.0.12", "DIST_URL is at 10.0.0.12, and the first of WOLRD_URLS is 10.0.0.11"),
        ("WORLD_SIZE: 2", "WORLD_SIZE: two", "DDP_CONFIG.WORLD_SIZE is 'two', expected a number from 1"),
    ],
)
def test_a_config_of_gluons_that_contradicts_itself_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        written(tmp_path, "ddp.yaml", GLUON.replace(old, new, 1))
    assert message in caught.value.message


def test_one_machine_of_gluons_needs_no_list(tmp_path: Path) -> None:
    spec = job(tmp_path, "ddp.yaml", "DDP_CONFIG:\n  WORLD_SIZE: 1\n  DIST_URL: 'tcp://127.0.0.1:10001'\n")
    assert [host.host for host in spec.ssh.hosts] == ["127.0.0.1"]


def test_sizes_and_precision_of_accelerate_are_imported(tmp_path: Path) -> None:
    spec = job(tmp_path, "acc.yaml", ACCELERATE)
    assert (spec.resources.nodes, spec.resources.gpus_per_node) == (2, 8)
    assert dict(spec.env) == {"ACCELERATE_MIXED_PRECISION": "bf16"}


def test_what_an_accelerate_config_lacks_is_listed(tmp_path: Path) -> None:
    found = written(tmp_path, "acc.yaml", ACCELERATE + "fsdp_config: {}\ndynamo_config: {a: 1}\n")
    lost = {each.text.partition(":")[0] for each in found.left if each.fate == "lost"}
    assert lost == {"main_process_ip", "fsdp_config", "dynamo_config", "entry.script"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (ACCELERATE.replace("MULTI_GPU", "FSDP"), "distributed_type is FSDP"),
        (ACCELERATE.replace("MULTI_GPU", "DEEPSPEED"), "distributed_type is DEEPSPEED"),
        (ACCELERATE.replace("MULTI_GPU", "MEGATRON_LM"), "distributed_type is MEGATRON_LM"),
        (ACCELERATE + "fsdp_config: {fsdp_version: 2}\n", "it has fsdp_config"),
        (ACCELERATE + "deepspeed_config: {zero_stage: 3}\n", "it has deepspeed_config"),
        (ACCELERATE + "parallelism_config: {parallelism_config_tp_size: 2}\n", "it has parallelism_config"),
        ('{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 3}\n}\n', "it has zero_optimization"),
    ],
)
def test_a_config_that_shards_the_model_never_becomes_plain_ddp(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        written(tmp_path, "fsdp.yaml", text)
    assert f"fsdp.yaml: {what}: " in caught.value.message
    how = "args: [--deepspeed_config, " if "zero" in what else "[accelerate, launch, --config_file, "
    assert how in str(caught.value.hint)


def test_a_hostfile_and_deepspeeds_variables_make_one_spec(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-1 slots=4\nworker-2 slots=2 # small\n")
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\nHF_TOKEN=mum-4711\nMASTER_PORT=1\nX=a 'b'\n")
    found = import_files([tmp_path / "hostfile", tmp_path / ".deepspeed_env"])
    spec = found.resolved.job
    assert [(host.host, host.gpus) for host in spec.ssh.hosts] == [("worker-1", 4), ("worker-2", 2)]
    assert (dict(spec.env), spec.secrets) == ({"NCCL_IB_DISABLE": "1", "X": "a 'b'"}, ("HF_TOKEN",))
    assert "mum-4711" not in found.text
    assert "export MASTER_PORT=1" in [each.text for each in found.left if each.fate == "ours"]


@pytest.mark.parametrize("text", ["a:4\nb:4\n", "a slots=4\nb slots=4\n", "# lab\na slots=4 # x\n\nb:4\n"])
def test_hostfiles_of_all_kinds_give_the_same_hosts(tmp_path: Path, text: str) -> None:
    assert [(host.host, host.gpus) for host in job(tmp_path, "hosts", text).ssh.hosts] == [("a", 4), ("b", 4)]


def test_a_wrong_line_of_a_hostfile_is_shown_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        written(tmp_path, "hosts", "a slots=4\nb slots=x\n")
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (2, 3)


def test_a_file_of_an_unknown_kind_is_refused_unless_its_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        written(tmp_path, "hosts", "a\nb\n")
    assert caught.value.hint == "--from names its kind: slurm, gluoncv, accelerate, hostfile, env"
    assert len(written(tmp_path, "hosts", "a\nb\n", kind="hostfile").resolved.job.ssh.hosts) == 2


def test_the_command_writes_a_spec_and_lists_what_it_cannot_express(tmp_path: Path) -> None:
    (tmp_path / "train.slurm").write_text("#SBATCH -N 1 -o x.out\nmodule load a\ncd b\nsrun python t.py\n")
    command = [sys.executable, "-m", "clusterddp", "import", "train.slurm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "\nentry:\n  script: t.py\n" in done.stdout
    assert '\nsetup: ["module load a"]\n' in done.stdout
    assert "train.slurm:3: cd b  (submit from there" in done.stderr
    subprocess.run([*command, "-o", "job.yaml"], cwd=tmp_path, capture_output=True, check=True)
    assert (tmp_path / "job.yaml").read_text() == done.stdout
    to_stdout = subprocess.run([*command, "-o", "-"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (to_stdout.stdout, (tmp_path / "-").exists()) == (done.stdout, False)
    again = subprocess.run([*command, "-o", "job.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (again.returncode, "exists, and is left as it is" in again.stderr) == (2, True)
