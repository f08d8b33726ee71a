"""A batch script without Slurm: real bash, the stand-ins for Slurm's commands, real ranks with torch's gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from clusterddp.importing.reading import import_step
from clusterddp.run.attempts import final_end
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.run.steps import read_step, steps_of
from clusterddp.submission.cancel import cancel
from tests.support.environments import make_venv
from tests.support.launch_runs import processes_of
from tests.support.waiting import wait_until

REDUCE = """\
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
row = {"rank": dist.get_rank(), "world": dist.get_world_size(), "sum": value.item(), "argv": sys.argv[1:]}
row |= {"node": os.environ["SLURMD_NODENAME"], "local": os.environ["LOCAL_RANK"]}
os.write(1, (json.dumps(row) + "\\n").encode())
dist.barrier()
"""
HEAD = """\
#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --output=out.txt
set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=$((20000 + $$ % 10000))
"""
RENDEZVOUS = '--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id $SLURM_JOB_ID'


class Laptop:
    """Submits batch scripts where there is no Slurm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        bin_dir = Path(sys.executable).parent
        self.environ = {**os.environ, "PATH": f"{bin_dir}:/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        (directory / "train.py").write_text(REDUCE)

    def submit(self, text: str, *words: str, head: str = HEAD) -> RunDir:
        """Submit a script and return its run; `words` without `--` are its arguments."""
        (self.directory / "train.slurm").write_text(head + text)
        options, arguments = (words[:-1], ()) if words[-1:] == ("--",) else ((), words)
        argv = [sys.executable, "-m", "clusterddp", "submit", "train.slurm", "--launcher", "local", "--cpu", *options]
        done = subprocess.run(
            [*argv, "--", *arguments], cwd=self.directory, env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return RunDir(self.directory / "runs" / done.stdout.strip())

    def run(self, text: str, *words: str, head: str = HEAD) -> RunDir:
        """Submit a script and wait for its end."""
        run = self.submit(text, *words, head=head)
        wait_until(lambda: final_end(run) is not None, 60.0)
        wait_until(lambda: not processes_of(run))
        return run

    @property
    def output(self) -> str:
        return (self.directory / "out.txt").read_text()

    @property
    def rows(self) -> list[dict[str, object]]:
        """What the ranks printed, by rank."""
        rows = [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]
        return sorted(rows, key=lambda row: (row["world"], row["rank"]))


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    yield Laptop(tmp_path)
    for record in tmp_path.glob("runs/*/run.json"):
        end_processes(f"{read_run(RunDir(record.parent)).token}.", timeout_s=5)


FORMS = {
    "srun": 'srun python train.py "$@"',
    "srun with options": 'srun --ntasks=4 -N 2 --cpu-bind=none --kill-on-bad-exit=1 -u python -u train.py "$@"',
    "srun bash": """srun bash -c 'python train.py "$@"' name "$@" """,
    "heredoc": 'cp train.py t.py; srun bash -c \'python - "$@"\' x "$@" <t.py',
    "function": 'start() { local program=$1; shift; srun python "$program" "$@"; }\nstart train.py "$@"',
    "eval": 'LAUNCH="srun --ntasks $SLURM_NTASKS"\neval "$LAUNCH python train.py \\"\\$@\\""',
    "background": 'srun python train.py "$@" &\nwait $!',
    "torchrun in srun": f'srun -n2 torchrun --nnodes 2 --nproc-per-node 2 {RENDEZVOUS} train.py "$@"',
    "torchrun module in srun": (
        f'srun -n2 python -m torch.distributed.run --nnodes $SLURM_NNODES --nproc_per_node 2 {RENDEZVOUS} train.py "$@"'
    ),
    "srun on each node": """\
number=0
for node in $(scontrol show hostnames); do
    srun -w $node -N1 -n1 torchrun --nnodes 2 --node-rank $number --nproc-per-node 2 \\
        --master-addr $MASTER_ADDR --master-port $MASTER_PORT train.py "$@" &
    number=$((number + 1))
done
wait""",
}


@pytest.mark.parametrize("form", FORMS)
def test_ranks_on_two_pretended_nodes_find_each_other(laptop: Laptop, form: str) -> None:
    run = laptop.run(FORMS[form], "--lr", "0.1", "two words")

    assert [(row["rank"], row["world"], row["sum"], row["argv"]) for row in laptop.rows] == [
        (rank, 4, 10.0, ["--lr", "0.1", "two words"]) for rank in range(4)
    ], laptop.output
    assert sorted(row["node"] for row in laptop.rows) == 2 * ["127.0.0.1"] + 2 * ["127.0.0.2"]
    end = final_end(run)
    assert end is not None
    assert (end.outcome, end.root_cause) == ("COMPLETED", None)
    assert steps_of(run, 0)


def test_torchrun_alone_runs_on_the_first_node(laptop: Laptop) -> None:
    laptop.run("torchrun --standalone --nproc-per-node 3 train.py")

    assert [(row["rank"], row["sum"], row["node"]) for row in laptop.rows] == [
        (rank, 6.0, "127.0.0.1") for rank in range(3)
    ]


def test_a_login_shell_finds_the_stand_ins_too(laptop: Laptop) -> None:
    head = HEAD.replace("/bin/bash", "/bin/bash -l").replace("set -eu", "set -e")

    laptop.run(f"srun {sys.executable} train.py", head=head)

    assert [row["sum"] for row in laptop.rows] == 4 * [10.0], laptop.output


def test_steps_are_recorded_with_their_lines_and_a_failure_names_its_step(laptop: Laptop) -> None:
    run = laptop.run(
        "srun -n2 python -c 'print(1)'\nsrun python -c 'raise SystemExit(int(__import__(\"os\").environ[\"RANK\"]))'"
    )

    records = [read_step(step.attempt(0)) for step in steps_of(run, 0)]
    assert [(record.command[0], record.line) for record in records if record] == [("srun", 8), ("srun", 9)]
    end = final_end(run)
    assert end is not None
    assert end.outcome == "FAILED"
    assert "step 1 (srun, line 9)" in end.reason


SLURMS = """\
env | grep ^SLURM_ | sort
module load cuda
sbatch --parsable --dependency=afterok:$SLURM_JOB_ID next.slurm
scontrol show job $SLURM_JOB_ID
if squeue -h -j $SLURM_JOB_ID; then false; fi
srun -n1 hostname
"""


def test_a_script_sees_the_variables_of_its_job_and_nothing_is_queued(laptop: Laptop) -> None:
    run = laptop.run(SLURMS)

    lines = laptop.output.splitlines()
    job_id = read_run(run).job_id
    expected = {
        f"SLURM_JOB_ID={job_id}", "SLURM_JOB_NAME=demo", "SLURM_JOB_NUM_NODES=2", "SLURM_NTASKS=4",
        "SLURM_NTASKS_PER_NODE=2", "SLURM_TASKS_PER_NODE=2(x2)", "SLURM_JOB_NODELIST=127.0.0.[1-2]",
        f"SLURM_SUBMIT_DIR={laptop.directory}", "SLURM_JOB_CPUS_PER_NODE=2(x2)", str(int(str(job_id)) + 1),
        "clusterddp: there are no environment modules here: module load cuda does nothing",
        f"   Command={laptop.directory}/train.slurm", f"   WorkDir={laptop.directory}", "   NumNodes=2",
    }  # fmt: skip
    assert expected - set(lines) == set(), laptop.output
    end = final_end(run)
    assert end is not None
    assert end.outcome == "COMPLETED"


def test_the_line_of_the_command_sizes_the_job(laptop: Laptop) -> None:
    laptop.run("srun python train.py", "slurm.nodes=3", "slurm.ntasks-per-node=1", "--")

    assert [(row["sum"], row["node"]) for row in laptop.rows] == [(6.0, f"127.0.0.{number}") for number in (1, 2, 3)]


def test_a_cancelled_script_has_its_trap_and_leaves_nothing(laptop: Laptop) -> None:
    run = laptop.submit(
        "trap 'echo saved >trap; exit 3' TERM\nsrun sleep 600 &\nsrun python -c 'input(open(\"up\", \"w\"))' & wait"
    )
    wait_until((laptop.directory / "up").exists, 20.0)
    time.sleep(1)

    cancel(run)

    wait_until(lambda: not processes_of(run))
    end = final_end(run)
    assert end is not None
    assert end.outcome == "CANCELLED"
    assert (laptop.directory / "trap").read_text() == "saved\n"
    assert list(run.launcher_dir.glob("submitit/*_result.pkl"))  # the task that ended the job was not ended with it


def test_an_environment_that_the_script_activates_is_a_key_of_the_spec_that_its_run_becomes(laptop: Laptop) -> None:
    venv = make_venv(laptop.directory / "venv")
    activate = f"export VIRTUAL_ENV={venv} PATH={venv}/bin:$PATH"
    run = laptop.run(f"bash -c '{activate}; bash -c \"srun python train.py\"'\n")
    found = import_step(run, None)
    spec = yaml.safe_load(found.text)
    assert spec["venv"] == str(venv)
    assert "setup" not in spec
    assert "env" not in spec
    assert [each.text for each in found.left if "PATH" in each.text] == []
