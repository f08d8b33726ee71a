"""An unchanged batch script whose four ranks on two nodes do what a file asks for: end, raise, be killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from clusterddp.run.directory import RunDir
from tests.support.slurm_person import SlurmPerson
from tests.support.waiting import wait_until
from tests.testbed.plan import SYSTEM_PATH
from tests.testbed.rack import Rack

SRUN = """\
#!/bin/bash
#SBATCH -N2 --ntasks-per-node=2 {options}
srun hostname
srun python train.py
code=$?
echo "ended $code"
exit $code
"""
TORCHRUN = """\
#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 {options}
export HEAD_NODE=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
srun hostname
srun torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29777 train.py
code=$?
echo "ended $code"
exit $code
"""
FORMS = {"srun": SRUN, "torchrun": TORCHRUN}
LINES = {"srun": 4, "torchrun": 5}
TRAIN = """\
import os, signal, time
rank = int(os.environ["RANK"])
with open(f"up-{rank}-{os.environ.get('SLURM_RESTART_COUNT', '0')}", "w") as file:
    file.write(str(os.getpid()))
while not os.path.exists("go"):
    time.sleep(0.05)
how = open("go").read()
if how == "end":
    raise SystemExit
if rank == 3 and how == "raise":
    raise ValueError("no such label")
if rank == 3 and how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.05)
"""


def start(rack: Rack, form: str, name: str, options: str = "") -> tuple[SlurmPerson, RunDir]:
    """Submit the script and wait until its four ranks are up."""
    person, run = begin(rack, form, name, options)
    await_up(person)
    return person, run


def begin(rack: Rack, form: str, name: str, options: str = "") -> tuple[SlurmPerson, RunDir]:
    """Submit the script."""
    person = SlurmPerson.at(rack, f"{name}-{form}")
    (person.path / "train.py").write_text(TRAIN)
    return person, submit(person, FORMS[form].format(options=options))


def submit(person: SlurmPerson, script: str) -> RunDir:
    person.environ["PATH"] = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
    (person.path / "job.slurm").write_text(script)
    return RunDir(Path(json.loads(person.clusterddp("submit", "job.slurm", "-o", "json").stdout)["run_dir"]))


def await_up(person: SlurmPerson, start_number: int = 0) -> None:
    ready = [person.path / f"up-{rank}-{start_number}" for rank in range(4)]
    wait_until(lambda: all(path.exists() for path in ready), 60, what=person.queue)


def role_of(pid: int) -> str:
    """Return the cookie of a process: the run, its step and what the process is."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return ""
    return next((word.decode() for word in variables if word.startswith(b"CLUSTERDDP_COOKIE=")), "")
