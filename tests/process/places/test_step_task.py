"""A task of a step whose supervisors do not find each other: its program runs, and nobody ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.seal import sealed
from clusterddp.run.steps import StepRecord, new_step
from clusterddp.system.files import read_json, read_jsonl, write_json
from clusterddp.view.events import warn_of_unwatched
from tests.support.gang_runs import processes_with
from tests.support.handmade_runs import make_batch_run
from tests.support.waiting import wait_until

IMPATIENT = "import sys\nfrom clusterddp.places.slurm import step_task\nstep_task._START_TIMEOUT_S = 2.0\n"
TASK = f"{IMPATIENT}sys.exit(step_task.main())\n"
PROGRAM = """\
import sys, time
open("begun-" + sys.argv[1], "a").write("x")
time.sleep(6)
sys.exit(7)
"""
"""It lasts longer than supervisors wait for each other."""


@pytest.fixture
def step(tmp_path: Path) -> RunDir:
    run = make_batch_run(tmp_path, signals="tasks")
    plan = read_json(run.plan)
    assert plan is not None
    plan["gang"] |= {"interface": "lo", "token": f"token-of-{tmp_path.name}"}
    write_json(run.plan, sealed(plan))
    return new_step(run, 0, StepRecord(command=("torchrun",), program=("python",)))


def environment(node: int, *, begins: bool) -> dict[str, str]:
    """Return the variables of the only rank of one of two nodes; `begins`: its rendezvous is known."""
    variables = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": f"node{node}"}
    if begins:
        place = {"RANK": node, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": node}
        variables |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29711"}
    else:
        place = {"RANK": node, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
        place = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
    return {"PATH": os.environ["PATH"], **variables} | {name: str(value) for name, value in place.items()}


@pytest.mark.parametrize("begins", [True, False], ids=["begun", "not-begun"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_program_whose_supervisors_do_not_meet_runs_once_and_to_its_end(
    step: RunDir, tmp_path: Path, node: int, begins: bool
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    launcher = "torchrun" if begins else "mpirun"
    program = [sys.executable, "train.py", str(node)]
    command = [sys.executable, "-c", TASK, launcher, str(step.path), "0", str(step.step), "--", *program]
    done = subprocess.run(command, cwd=tmp_path, env=environment(node, begins=begins), check=False, timeout=120)
    assert done.returncode == 7
    assert (tmp_path / f"begun-{node}").read_text() == "x"
    assert "ranks of step 0 are not watched" in warn_of_unwatched(list(read_jsonl(step.events)), 0)
    wait_until(lambda: not processes_with(f"token-of-{tmp_path.name}"))
