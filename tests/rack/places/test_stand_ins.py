"""The stand-in for srun, beside Slurm's own srun in the same job: the same tasks, variables, output and exit codes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from clusterddp.system.python import isolated_command
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
SHOW = (
    "echo $SLURM_PROCID $SLURM_NODEID $SLURM_LOCALID $SLURMD_NODENAME $SLURM_NTASKS $SLURM_NPROCS $SLURM_NNODES "
    "$SLURM_JOB_NUM_NODES $SLURM_STEP_NUM_TASKS $SLURM_STEP_NUM_NODES $SLURM_STEP_TASKS_PER_NODE $SLURM_TASKS_PER_NODE "
    "c=$SLURM_CPUS_PER_TASK n=$SLURM_NTASKS_PER_NODE $SLURM_STEP_NODELIST $SLURM_GTIDS $SLURM_JOB_NAME $PWD"
)
WHO = ("slurm", "stand-in")
FORMS = [
    *(f"$srun {options} sh -c '{SHOW}'" for options in (
        "", "-n3", "-N2 -n4 --cpus-per-task=1", "-N1", "-N1 -n1", "-n2", "-N2", "--ntasks-per-node=1",
        "-N2 --ntasks-per-node=2", "-w node2", "-w node2 -n1", "-w node2 -N1 -n2", "-w node2,node1 -n2",
        "-w node1,node2 -N1 -n1", "-r1 -n1", "-r1 -N1 -n1", "-x node1 -n1 -N1", "-n4 -m cyclic", "-n5 -m block",
        "-n5 -N2 -m plane=2", "-n1 -c4", "-n1 --", "-J other -n1", "-n1 --chdir=/usr", "-n1 --ntasks=2",
        "--nodes=1-2 -n2", "-lu -n2", "-n2 --export=ALL,A=1",
    )),
    "$srun -N3 true",
    "$srun -w node7 true",
    "$srun -n2",
    "$srun -n4 sh -c 'exit $SLURM_PROCID'",
    "$srun -n2 sh -c 'kill -9 $$'",
    "$srun -n2 sh -c 'test $SLURM_PROCID = 0 && kill -TERM $$; sleep 1; echo survived'",
    "$srun -n2 -K sh -c 'test $SLURM_PROCID = 0 && exit 3; exec sleep 9'",
    "$srun -n2 --kill-on-bad-exit=0 sh -c 'test $SLURM_PROCID = 0 && exit 3; sleep 1; echo survived'",
    "$srun -n2 -W1 sh -c 'test $SLURM_PROCID = 0 && exit 0; sleep 9; echo survived'",
    "$srun -n2 nosuchprogram",
    "$srun -n2 /etc/passwd",
    "$srun -n2 --export=NONE true",
    "X=1 Y=2 $srun -n1 --export=X,Z=3 /usr/bin/env | grep ^[XYZ]=",
    "$srun -n4 -l sh -c 'echo out; echo err >&2' 2>&1",
    "$srun -n12 -O -c1 -l echo out",
    "$srun -n2 -o o.%t.%N.%n.%x.%u.%3t sh -c 'echo out; echo err >&2'; tail o.*",
    "$srun -n2 -o o -e e.%t sh -c 'echo out; echo err >&2'; tail o e.*",
    "$srun -n2 -o 1 sh -c 'echo out $SLURM_PROCID'",
    "$srun -n2 -o none echo out",
    r"printf 'a\nb\n' | $srun -n3 -l cat",
    r"printf 'a\nb\n' | $srun -n3 -l -i none cat",
    r"printf 'a\nb\n' | $srun -n3 -l -i 1 cat",
    "echo text >in; $srun -n3 -l -i in cat",
    r"printf 'a\nb\n' | while read -r x; do echo $x; $srun -n1 true; done",
    *(
        f"$srun -n2 sh -c 'trap \"echo got; exit 7\" {name}; sleep 3 & wait' & sleep 1.5; kill -{name} $!; wait $!"
        for name in ("USR1", "USR2", "TERM", "HUP", "INT")
    ),
]  # fmt: skip


def test_the_stand_in_places_tasks_and_ends_as_slurms_srun_does(rack: Rack) -> None:
    place = rack.dir / "shared" / "stand-ins"
    place.mkdir()
    (place / "job.json").write_text(json.dumps({"job_id": 1, "gpus": [], "shown": {}}))
    stand_in = shlex.join(isolated_command("clusterddp.places.local.stand_ins", str(place / "job.json"), "srun"))
    lines = ["#!/bin/bash", "#SBATCH --nodes=2 --ntasks=5 --cpus-per-task=2 --output=/dev/null", "cd /"]
    for number, form in enumerate(FORMS):
        for who in WHO:
            directory = place / f"{number}" / who / "x"
            directory.mkdir(parents=True)
            text = form.replace("$srun", "srun" if who == "slurm" else stand_in)
            (directory.parent / "form").write_text(f"{text}\n")
            lines += [f"cd {directory}", "bash ../form >../out </dev/null 2>../err; echo exit $? >>../out"]
    (place / "job").write_text("\n".join(lines) + "\n")

    rack.run("head", ["sbatch", "--wait", "-o", "/dev/null", "job"], cwd=place)

    found = {form: [_read(place / f"{number}" / who) for who in WHO] for number, form in enumerate(FORMS)}
    assert {form: ours for form, (_, ours) in found.items()} == {form: slurms for form, (slurms, _) in found.items()}


def _read(place: Path) -> list[str]:
    """Return what a form printed, in any order, and its exit code."""
    return sorted((place / "out").read_text().replace(f"/{place.name}/", "/").split("\n"))
