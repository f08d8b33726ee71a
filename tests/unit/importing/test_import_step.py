"""A step of a batch script that has run, as a spec: the same program, ranks and variables."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterddp.errors import UsageError
from clusterddp.importing.reading import import_step
from clusterddp.planning.slurm import choose_options
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Node
from clusterddp.run.steps import StepRecord, new_step, next_round
from clusterddp.spec.load import load_spec
from clusterddp.system.files import write_json
from tests.support.handmade_runs import make_gang, make_run

SCRIPT = (
    "#!/bin/bash\n#SBATCH -p gpu --time=60 --mem=4G\n#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-node=4 -c 8\nrun\n"
)
PROGRAM = ("python", "-u", "train.py", "--format", "{rank}", "a b")


def make_script_run(tmp_path: Path, *, script: str = SCRIPT) -> RunDir:
    run = make_run(tmp_path)
    run.spec.write_text("name: x\nlauncher: slurm\nslurm: {qos: high}\nentry: {script: x.py}\n")
    run.launcher_dir.mkdir(exist_ok=True)
    run.batch_script.write_text(script)
    run.attempt(0).path.mkdir(parents=True)
    return run


def add_step(run: RunDir, *, nodes: int = 2, per_node: int = 4, has_ranks: bool = True, **values: object) -> RunDir:
    record = StepRecord(command=("srun", "-l"), program=PROGRAM, line=4, working_dir="/work/x y")
    record = dataclasses.replace(record, **values)  # type: ignore[arg-type]
    step = new_step(run, 0, record)
    if has_ranks:
        write_gang(step, record.program, nodes, per_node)
    return step


def write_gang(step: RunDir, program: tuple[str, ...], nodes: int, per_node: int) -> None:
    gang = make_gang(nodes, per_node)
    entry = dataclasses.replace(gang.entry, kind="command", target=program[0], words=program[1:])
    write_json(step.attempt(0).gang, dataclasses.replace(gang, entry=entry).to_json())


def test_the_spec_plans_the_ranks_and_the_program_of_the_step(tmp_path: Path) -> None:
    run = make_script_run(tmp_path)
    add_step(
        run, environment={"LR": "0.1", "PATH": "/a:/b", "SLURM_X": "1", "MASTER_ADDR": "h", "HF_TOKEN": "mum-4711"}
    )
    found = import_step(run, None)
    job = load_spec(found.text, environ={}).job
    assert (job.resources.nodes, job.resources.ranks_per_node, job.resources.cpus_per_task) == (2, 4, 8)
    options = choose_options(job, {}).sbatch
    wanted = {
        "partition": "gpu",
        "qos": "high",
        "mem": "4G",
        "nodes": "2",
        "ntasks_per_node": "4",
        "gpus_per_node": "4",
    }
    assert {name: options[name] for name in wanted} == wanted
    assert job.resources.time is not None
    assert job.resources.time.seconds == 3600
    assert job.entry is not None
    assert job.entry.command == tuple(word.replace("{rank}", "{{rank}}") for word in PROGRAM)
    assert (dict(job.env), job.secrets) == ({"LR": "0.1"}, ("HF_TOKEN",))
    assert [each.text for each in found.left if each.fate == "before"] == [
        "export PATH=/a:/b",
        "export HF_TOKEN=(not shown)",
        "cd '/work/x y'",
    ]
    assert "4711" not in found.text


OF_MODULES = {
    "LOADEDMODULES": "$LOADEDMODULES:cuda/12.4:nccl",
    "MODULEPATH": "/opt/extra:$MODULEPATH",
    "_LMFILES_": "/opt/extra/cuda/12.4",
    "MODULESHOME": "/usr/share/modules",
    "__MODULES_SHARE_PATH": "/a:2",
    "PATH_modshare": "/a:2",
    "LMOD_CMD": "/x",
    "_ModuleTable001_": "X1==",
    "BASH_FUNC_module%%": "() { true; }",
}
OF_VENV = {"VIRTUAL_ENV": "{home}/venv", "VIRTUAL_ENV_PROMPT": "venv", "PS1": "(venv) $ "}
OF_CONDA = {
    "CONDA_PREFIX": "{home}/conda",
    "CONDA_DEFAULT_ENV": "b",
    "CONDA_SHLVL": "1",
    "CONDA_EXE": "/c/bin/conda",
    "_CE_M": "",
    "HOST_CONDA_BACKUP": "a",
}


@pytest.mark.parametrize(
    ("environment", "wanted", "lost"),
    [
        ({**OF_VENV, "PATH": "{home}/venv/bin:$PATH"}, {"venv": "{home}/venv"}, []),
        ({**OF_CONDA, "PATH": "{home}/conda/bin:/c/condabin:$PATH"}, {"conda": "{home}/conda"}, []),
        (
            {**OF_CONDA, **OF_VENV, "PATH": "{home}/venv/bin:{home}/conda/bin:$PATH"},
            {"venv": "{home}/venv", "setup": ['export PATH={home}/conda/bin:"$PATH"']},
            [],
        ),
        (
            {"VIRTUAL_ENV": "/tmp/of/the/node", "PATH": "/tmp/of/the/node/bin:$PATH"},
            {"setup": ['export PATH=/tmp/of/the/node/bin:"$PATH"']},
            [],
        ),
        (
            {"PATH": "/a b:$PATH:/z", "LD_LIBRARY_PATH": "/l:$LD_LIBRARY_PATH"},
            {"setup": ["export PATH='/a b':\"$PATH\":/z", 'export LD_LIBRARY_PATH=/l:"$LD_LIBRARY_PATH"']},
            [],
        ),
        (
            {**OF_MODULES, **OF_VENV, "PATH": "{home}/venv/bin:/cuda/bin:$PATH", "CUDA_HOME": "/cuda"},
            {"venv": "{home}/venv", "setup": ["module use /opt/extra", "module load cuda/12.4 nccl"]},
            ['export PATH=/cuda/bin:"$PATH"', "export CUDA_HOME=/cuda"],
        ),
    ],
)
def test_environments_and_modules_of_the_script_are_keys_and_none_of_their_variables_is_written(
    tmp_path: Path, environment: dict[str, str], wanted: dict[str, object], lost: list[str]
) -> None:
    for name, mark in (("venv", "pyvenv.cfg"), ("conda", "conda-meta/history")):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / mark).parent.mkdir(exist_ok=True)
        (tmp_path / name / mark).touch()
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    run = make_script_run(tmp_path)
    values = {name: value.replace("{home}", str(tmp_path)) for name, value in environment.items()}
    add_step(run, environment={"LR": "0.1", **values})
    found = import_step(run, None)
    written = parsed(found.text)
    keys = {key: written[key] for key in ("venv", "conda", "setup") if key in written}
    assert keys == json.loads(json.dumps(wanted).replace("{home}", str(tmp_path)))
    assert written["env"] == {"LR": "0.1"}
    assert [each.text for each in found.left if each.fate == "lost"] == lost
    assert [each.text for each in found.left if each.fate == "before"] == ["cd '/work/x y'"]


def parsed(text: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def test_a_torchrun_in_srun_has_the_cores_of_the_srun(tmp_path: Path) -> None:
    run = make_script_run(tmp_path, script="#SBATCH -N 2 --gres=gpu:4\nsrun -n 2 -c 32 torchrun train.py\n")
    outer = add_step(run, command=("srun", "-n", "2", "-c", "32"), program=("torchrun", "t.py"), has_ranks=False)
    inner = new_step(run, 0, StepRecord(command=("torchrun",), program=PROGRAM, inside=outer.step))
    again = next_round(inner, 0, 1)
    write_gang(inner, PROGRAM, 2, 2)
    write_gang(again, PROGRAM, 2, 4)
    resources = import_step(run, None).resolved.job.resources
    assert (resources.nodes, resources.ranks_per_node, resources.cpus_per_task) == (2, 4, 8)
    assert import_step(run, inner.step).resolved.job.resources.ranks_per_node == 4


def test_of_several_steps_one_has_to_be_named(tmp_path: Path) -> None:
    run = make_script_run(tmp_path)
    add_step(run, program=("python", "prepare.py"), nodes=1, per_node=1)
    add_step(run)
    with pytest.raises(UsageError, match=r"2 steps have started ranks.*0: python prepare.py; 1: python -u") as caught:
        import_step(run, None)
    assert caught.value.hint == "--step 1 takes the last one"
    first = import_step(run, "0").resolved.job
    assert (first.resources.nodes, first.resources.ranks_per_node) == (1, 1)
    with pytest.raises(UsageError, match="no step 7 of its newest attempt has started ranks"):
        import_step(run, "7")


@pytest.mark.parametrize("has_ranks", [True, False])
def test_a_step_that_cannot_be_a_spec_is_refused(tmp_path: Path, has_ranks: bool) -> None:
    run = make_script_run(tmp_path)
    step = add_step(run, has_ranks=has_ranks)
    message = "no step of its newest attempt has started ranks"
    if has_ranks:
        nodes = (Node(node_rank=0, host="a", ranks=(0, 1)), Node(node_rank=1, host="b", ranks=(2,)))
        write_json(step.attempt(0).gang, dataclasses.replace(make_gang(), nodes=nodes).to_json())
        message = "the nodes of step 0 have different numbers of ranks"
    with pytest.raises(UsageError, match=message):
        import_step(run, None)


def test_a_program_with_a_hidden_secret_and_a_run_of_a_spec_are_refused(tmp_path: Path) -> None:
    run = make_script_run(tmp_path)
    add_step(run, program=("python", "t.py", "--token", "mum-4711"))
    with pytest.raises(UsageError, match="an argument of step 0 is a secret"):
        import_step(run, None)
    with pytest.raises(UsageError, match="is not a run of a batch script"):
        import_step(make_run(tmp_path, "calm-otter-4"), None)
