"""What people type who do not know clusterddp yet, and what is printed: the words that take them on."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import click
import pytest

from clusterddp.cli.main import main
from clusterddp.run.record import read_run, write_run
from tests.support.handmade_runs import complete, fail, make_run, start_attempt

SPEC = """\
name: fit
launcher: local
device: cpu
resources: {procs_per_node: 2}
entry:
  script: train.py
  args: [--epochs, 3]
"""
BROKEN = """\
name: fit
launcher: local
device: cpu
resource: {nodes: 1}
entry:
  script: missing.py
  arg: []
secrets: [NO_SUCH_SECRET]
"""
FILES = {
    "job.yaml": SPEC,
    "trainer.yaml": "name: built-in\nlauncher: local\ndevice: cpu\ntrain: {dataset: shapes}\n",
    "broken.yaml": BROKEN,
    "modules.yaml": SPEC.partition("  script")[0] + "  command: module load cuda && python train.py\n",
    "function.yaml": SPEC.partition("  script")[0] + "  function: train:fit\n",
    "train.py": "import torch, torch.distributed as dist\n\n\ndef fit(lr: float = 0.1) -> float:\n    return lr\n",
    "train.slurm": "#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n",
    "clusterddp.yaml": "ssh: {hosts: [gpu07, gpu08]}\n",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory with a spec, scripts and four runs, one of them of a job of Slurm, one of an array."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    monkeypatch.chdir(tmp_path)
    for name in ("CLUSTERDDP_RUNS", "NO_SUCH_SECRET"):
        monkeypatch.delenv(name, raising=False)
    runs = tmp_path / "runs"
    for name, job_id in (("brisk-otter-3", "4711"), ("calm-fox-1", "12345"), ("dewy-owl-2", "777_3")):
        run = make_run(runs, name)
        write_run(run, dataclasses.replace(read_run(run), job_id=job_id, launcher="local"))
        fail(start_attempt(run))
    done = make_run(runs, "eager-hare-4")
    complete(done, start_attempt(done))
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        # Commands that other tools have.
        ("run job.yaml", 2, 'no such command "run" | clusterddp submit SPEC starts a run'),
        ("start job.yaml", 2, 'no such command "start" | clusterddp submit SPEC'),
        ("launch job.yaml", 2, "clusterddp submit SPEC"),
        ("train job.yaml", 2, "clusterddp submit SPEC"),
        ("ls", 2, 'no such command "ls" | clusterddp list'),
        ("drain node3", 2, 'no such command "drain" | clusterddp nodes'),
        ("nodes", 0, "no node is left out"),
        ("queue", 2, 'no such command "queue" | clusterddp list'),
        ("squeue", 2, "clusterddp list"),
        ("stop brisk-otter-3", 2, 'no such command "stop" | clusterddp cancel RUN ends a run'),
        ("kill brisk-otter-3", 2, "clusterddp cancel RUN"),
        ("scancel 12345", 2, "clusterddp cancel RUN"),
        ("delete brisk-otter-3", 2, "clusterddp rm RUN"),
        ("clean", 2, "clusterddp rm | clusterddp gc"),
        ("top", 2, "clusterddp status RUN | --watch | clusterddp dash"),
        ("watch", 2, "clusterddp status RUN | --watch"),
        ("attach brisk-otter-3", 2, "clusterddp logs RUN --follow | clusterddp exec RUN"),
        ("ssh brisk-otter-3", 2, "clusterddp exec RUN"),
        ("shell brisk-otter-3", 2, "clusterddp exec RUN opens a shell"),
        ("show brisk-otter-3", 2, "clusterddp status RUN"),
        ("info brisk-otter-3", 2, "clusterddp status RUN"),
        ("log brisk-otter-3", 2, 'no such command "log" | clusterddp logs RUN'),
        ("tail brisk-otter-3", 2, "clusterddp logs RUN --follow"),
        ("restart brisk-otter-3", 2, "clusterddp resume RUN | clusterddp submit RUN"),
        ("config", 2, "clusterddp help spec"),
        ("version", 2, "clusterddp --version"),
        ("explain job.yaml", 2, "clusterddp submit SPEC -n -v"),
        ("du", 2, "clusterddp list --wide"),
        ("rerun @last", 2, "clusterddp submit RUN"),
        ("join job.yaml", 2, "clusterddp worker SPEC on each machine of ssh.hosts"),
        ("relay @last", 2, "your script calls W&B, MLflow or Trackio"),
        ("share @last", 2, "chgrp and chmod open a run to a group"),
        ("hosts trust gpu01", 2, "ssh HOST once"),
        ("sumbit job.yaml", 2, 'no such command "sumbit". Did you mean "submit"?'),
        ("frobnicate", 2, 'no such command "frobnicate" | clusterddp --help'),
        # Files in place of a command, and of a spec.
        ("job.yaml", 2, "clusterddp submit job.yaml"),
        ("train.slurm", 2, "clusterddp submit train.slurm"),
        ("train.py", 2, "clusterddp init --script train.py"),
        ("submit train.py", 2, "a Python script, expected a spec | clusterddp init --script train.py"),
        ("submit jobs.yaml", 2, 'No such file or directory. Did you mean "job.yaml"?'),
        ("submit jib -n", 2, 'no such file, and no run | Did you mean "job.yaml"?'),
        ("submit job.yaml trainer.yaml", 2, "trainer.yaml | one spec"),
        ("submit", 2, "SPEC|SCRIPT|RUN"),
        ("import nofile", 4, "nofile: no such file"),
        ("import nofile.yaml", 2, "nofile.yaml has 1 problem, nothing was imported"),
        ("manifest nofile.yaml --image x", 2, "nofile.yaml has 1 problem\n"),
        ("help slurm", 0, "Options of sbatch"),
        ("help entry", 0, "entry.script"),
        # Options that other tools have.
        ("submit job.yaml --gpus 4", 2, "no such option --gpus | resources.gpus_per_node=4"),
        ("submit job.yaml --gpus=4", 2, "resources.gpus_per_node=4"),
        ("submit job.yaml --nodes 2", 2, "no such option --nodes | resources.nodes=2"),
        ("submit job.yaml --nnodes 2", 2, "resources.nnodes=2"),
        ("submit job.yaml --time 2:00:00", 2, "resources.time=2:00:00"),
        ("submit job.yaml --partition gpu", 2, "slurm.partition=gpu"),
        ("submit job.yaml --set resources.nodes=2", 2, "no such option --set | clusterddp submit SPEC KEY=VALUE"),
        ("submit job.yaml -n --json", 2, "no such option --json | -o json"),
        ("list --json", 2, "no such option --json | -o json"),
        ("schema --json", 2, "no such option --json | prints a JSON Schema"),
        ("submit job.yaml --lr 0.1", 2, "entry.args.lr=0.1 sets --lr of your program"),
        ("submit job.yaml -- --lr 0.1", 2, "entry.args.lr=0.1"),
        ("submit job.yaml --hosts gpu01 gpu02", 2, "gpu02 | --hosts gpu01,gpu02"),
        ("list -n 5", 2, "no such option -n | --limit 5"),
        ("logs -n 5", 2, "no such option -n | --tail 5"),
        ("init --yes other.yaml", 2, "no such option --yes | asks nothing"),
        # Values of a spec.
        ("submit job.yaml lr=0.1", 2, "entry.args.lr=0.1 sets --lr of your program"),
        ("submit job.yaml train.lr=0.1", 2, "entry.args.lr=0.1 sets --lr of your program"),
        ("submit job.yaml lr=0.1,0.2 --sweep", 2, "entry.args.lr=0.1 sets --lr of your program"),
        ("submit function.yaml lr=0.1", 2, "entry.kwargs.lr=0.1"),
        ("submit trainer.yaml lr=0.1", 2, "It belongs under train:"),
        ("submit job.yaml resources.gpu=4", 2, 'unknown key. Did you mean "gpus_per_node"?'),
        ("submit job.yaml gpus=4", 2, 'Did you mean "resources.gpus_per_node"?'),
        ("submit job.yaml launcher=slrum", 2, 'Did you mean "slurm"?'),
        ("submit job.yaml resources.time=2h", 2, '2h is "2:00:00"'),
        ("submit resources.nodes=1 job.yaml -n", 0, "fit"),
        ("submit train.lr=0.2 calm-fox-1 -n", 2, "calm-fox-1/spec.yaml"),
        ("submit resources.nodes=1 -n", 2, "is a value for a spec | submit SPEC|SCRIPT|RUN resources.nodes=1"),
        ("resume restarts=1 nosuch", 4, "no run named nosuch"),
        ("submit broken.yaml", 2, "4 problems | resource | missing.py: no such file | arg | NO_SUCH_SECRET"),
        ("submit modules.yaml", 2, "&& would be an argument of module | setup: | shell: true"),
        # Runs.
        ("status 12345", 0, "calm-fox-1"),
        ("status 777_3", 0, "dewy-owl-2"),
        ("logs 12345", 0, "calm-fox-1"),
        ("cancel 12345", 0, "calm-fox-1"),
        ("status 99999", 4, "no run named 99999 in runs, and none of such a job"),
        ("status brisk-oter-3", 4, 'no run named brisk-oter-3 in runs. Did you mean "brisk-otter-3"?'),
        ("status @lst", 4, 'Did you mean "@last"?'),
        ("cancel", 2, "names no run | --all"),
        ("cancel --all", 0, "no run to cancel"),
        ("cancel --name nosuch", 0, "no run to cancel"),
        ("hosts", 0, "gpu07 | gpu08 | clusterddp.yaml | clusterddp hosts check HOST"),
        ("init other.yaml", 0, "wrote other.yaml: its ranks run train.py"),
        ("init --script none other.yaml", 0, "wrote other.yaml: its ranks run the built-in trainer"),
    ],
)  # fmt: skip
def test_what_is_typed_is_answered(typed: str, code: int, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = main(shlex.split(typed))
    shown = click.unstyle("".join(capfd.readouterr()))
    assert (found, [each for each in words.split(" | ") if each not in shown]) == (code, []), shown
