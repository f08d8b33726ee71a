"""A batch script, and the spec that it is imported as: a real Slurm is asked for the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm_person import SlurmPerson
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

TORCHRUN = """\
#!/bin/bash
#SBATCH --job-name=train --partition=low --hold
#SBATCH -N 2 --ntasks-per-node=1 --cpus-per-task=8
#SBATCH --gres=gpu:4          # all of them
#SBATCH --mem=16G -t 1:30:00 --exclusive=user
srun torchrun --nnodes=2 --nproc_per_node=4 entry.py
"""
SRUN = """\
#!/bin/bash
#SBATCH -J train -H --ntasks-per-node=4 --nodes=2 -c 2 --gpus-per-node=4 --mem-per-cpu=1G --time=30
export A=1
srun python entry.py --nodes $SLURM_NNODES
"""


@pytest.fixture
def person(rack: Rack) -> Iterator[SlurmPerson]:
    place = Path(tempfile.mkdtemp(dir=rack.dir / "shared"))
    person = SlurmPerson(rack=rack, checks=False, path=place)
    (place / "entry.py").write_text("print('hello')\n")
    yield person
    rack.run(HEAD, ["scancel", "--user=root"], check=False)


@pytest.mark.parametrize("script", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_slurm_is_asked_for_the_same(person: SlurmPerson, script: str) -> None:
    (person.path / "train.slurm").write_text(script)
    original = person.job(person.slurm("sbatch", "--parsable", "train.slurm").strip())
    done = person.clusterddp("import", "train.slurm", "-o", "job.yaml")
    assert done.returncode == 0, done.stderr
    submitted = person.clusterddp("submit", "job.yaml")
    assert submitted.returncode == 0, submitted.stderr
    ours = person.job(str(person.record().job_id))
    same = ("Partition", "NumNodes", "NumCPUs", "TRES", "TresPerNode", "TimeLimit", "OverSubscribe", "Priority")
    assert {name: ours.get(name) for name in same} == {name: original.get(name) for name in same}
