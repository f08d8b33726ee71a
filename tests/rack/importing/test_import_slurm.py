"""A batch script, and the spec that it is imported as: a real Slurm is asked for the same."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.environments import make_venv
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

RECORD = """\
import json, os, sys
name = "argv-" + os.environ["WHERE"] + "-" + os.environ["RANK"] + ".json"
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LR")
with open(name, "w") as file:
    json.dump([sys.argv, os.getcwd(), {name: os.environ[name] for name in names}], file)
"""
SHOW = """\
import json, os, sys
names = ("VIRTUAL_ENV", "LOADEDMODULES", "LR")
print(json.dumps({"python": sys.executable} | {name: os.environ.get(name) for name in names}))
"""
SHELL = """\
#!/bin/bash
#SBATCH --job-name=train --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --time=5
export WHERE=srun LR=0.5
launch() { srun "$@"; }
CMD="launch $PYTHON record.py"
for each in one; do eval "$CMD 'a b' {rank} $each"; done
export WHERE=torchrun
exec srun --ntasks-per-node=1 -n 2 $TORCHRUN --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \
  --rdzv-endpoint $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29512 record.py --lr 0.5
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


def test_a_step_that_has_run_is_a_spec_of_the_same_ranks_and_arguments(person: SlurmPerson) -> None:
    (person.path / "record.py").write_text(RECORD)
    torchrun = f"{sys.executable} -m torch.distributed.run"
    script = SHELL.replace("$PYTHON", sys.executable).replace("$TORCHRUN", torchrun)
    (person.path / "train.slurm").write_text(script)
    submitted = person.clusterddp("submit", "train.slurm", "--wait")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    run = person.run_dir()
    several = person.clusterddp("import", run.name)
    last = re.search("--step (.*) takes the last one", several.stderr)
    assert last is not None, several.stderr
    for where, step in (("srun", "0"), ("torchrun", last[1])):
        ran = records(person, where)
        assert len(ran) == 4
        done = person.clusterddp("import", run.name, "--step", step, "-o", "job.yaml", "--force")
        assert done.returncode == 0, done.stderr
        again = person.clusterddp("submit", "job.yaml", "--wait")
        assert again.returncode == 0, again.stdout + again.stderr
        assert records(person, where) == ran


def test_the_environment_and_the_modules_of_a_script_are_keys_of_the_spec(person: SlurmPerson) -> None:
    venv = make_venv(person.path / "venv")
    (venv / "bin" / "activate").write_text(f'export VIRTUAL_ENV="{venv}" PATH="{venv}/bin:$PATH"\n')
    (person.path / "modules").mkdir()
    (person.path / "modules" / "own").write_text("#%Module\nprepend-path PATH /opt/own/bin\n")
    (person.path / "report.py").write_text(SHOW)
    lines = (
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=5",
        *(". /usr/share/modules/init/bash", f"module use {person.path}/modules", "module load own"),
        *(f". {venv}/bin/activate", "export LR=0.5", "srun python report.py"),
    )
    (person.path / "train.slurm").write_text("\n".join(lines) + "\n")
    submitted = person.clusterddp("submit", "train.slurm", "--wait", environ={"PYTHONPATH": ""})
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    done = person.clusterddp("import", "@last", "-o", "job.yaml")
    assert done.returncode == 0, done.stderr
    spec = yaml.safe_load((person.path / "job.yaml").read_text())
    assert (spec["venv"], spec["env"]) == (str(venv), {"LR": "0.5"})
    assert spec["setup"][-1] == "module load own"
    assert 'export PATH=/opt/own/bin:"$PATH"' in done.stderr
    again = person.clusterddp("submit", "job.yaml", "--wait", environ={"PYTHONPATH": ""})
    assert again.returncode == 0, again.stdout + again.stderr
    for rank in range(2):
        assert json.loads(person.run_dir().attempt(0).stdout(rank).read_text()) == {
            "python": f"{venv}/bin/python",
            "VIRTUAL_ENV": str(venv),
            "LOADEDMODULES": "own",
            "LR": "0.5",
        }


def records(person: SlurmPerson, where: str) -> dict[str, Any]:
    """Take what the ranks have written."""
    files = sorted(person.path.glob(f"argv-{where}-*.json"))
    found = {file.name: json.loads(file.read_text()) for file in files}
    for file in files:
        file.unlink()
    return found
