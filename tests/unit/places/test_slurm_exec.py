"""The srun of `exec`; fakes on PATH stand for releases of Slurm, and a container, that are not here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from clusterddp.errors import UsageError
from clusterddp.places.slurm.launcher import SlurmLauncher
from clusterddp.places.staging import make_run
from clusterddp.run.directory import RunDir
from clusterddp.run.job_tag import job_tag
from clusterddp.run.record import RankRecord, read_run, write_run
from tests.support.fake_slurm import squeue_row
from tests.support.launch_runs import plan_text

SPEC = "name: job\nlauncher: slurm\nresources: {gpus_per_node: 4, cpus_per_task: 8}\nentry: {script: entry.py}\n"


def exec_argv(
    place: Path, *, spec: str = SPEC, more: str = "", release: str = "22.05.8", terminal: bool = False
) -> list[str]:
    (place / "entry.py").write_text("")
    plan = make_run(plan_text(f"{spec}{more}", place, environ={}), {})
    run = RunDir(plan.run_dir)
    record = dataclasses.replace(read_run(run), job_id="123", job_tag=job_tag(plan.token, 0))
    write_run(run, record)
    job = squeue_row(id="123", state="RUNNING", nodes="gpu02", name=f"job.{record.job_tag}")
    for command, text in (("squeue", job), ("sacct", ""), ("srun", f"slurm-wlm {release}")):
        (place / command).write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\n")
        (place / command).chmod(0o755)
    rank = RankRecord(
        rank=5, node_rank=1, local_rank=1, host="gpu02", pid=1, interface=None, master_addr="", master_port=1, started=0
    )
    launcher = SlurmLauncher({"PATH": f"{place}:/usr/bin:/bin"})
    return launcher.exec_argv(run, record, rank, ["0", "5", "nvidia-smi"], terminal=terminal)


def test_the_step_is_on_the_ranks_node_and_shares_what_the_job_has(tmp_path: Path) -> None:
    argv = exec_argv(tmp_path)
    assert {"srun", "--jobid=123", "--overlap", "--nodelist=gpu02", "--cpus-per-task=8", "--unbuffered"} <= set(argv)
    assert argv[-3:] == ["0", "5", "nvidia-smi"]
    assert not {"--gres=none", "--pty"} & set(argv)


def test_the_step_has_the_cores_of_a_program_that_starts_its_ranks(tmp_path: Path) -> None:
    spec = SPEC.replace("entry.py}", "entry.py, owns_ranks: true}")
    assert "--cpus-per-task=32" in exec_argv(tmp_path, spec=spec)


def test_before_steps_share_gpus_the_step_asks_for_none(tmp_path: Path) -> None:
    assert "--gres=none" in exec_argv(tmp_path, release="21.08.5")


def test_only_a_terminal_gets_a_pseudoterminal(tmp_path: Path) -> None:
    assert "--pty" in exec_argv(tmp_path, terminal=True)


def test_ranks_in_a_container_are_refused_with_the_step_that_enters_the_image(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its ranks are in a container") as refused:
        exec_argv(tmp_path, more="container: {image: torch.sqsh}\n")
    assert str(refused.value.hint).startswith("srun --jobid=123 --overlap ")
