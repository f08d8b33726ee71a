"""The plan of a batch script: what sbatch gets is the user's, but for the answer and a comment."""

import shlex
import subprocess
from pathlib import Path

import pytest

from clusterddp.errors import UsageError
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, plan_run, rename_plan
from clusterddp.run.directory import RunDir
from clusterddp.run.job_tag import tag_of
from clusterddp.spec.batch_script import spec_of
from clusterddp.spec.load import load_spec
from clusterddp.spec.yamlfile import spec_yaml

HEAD = b'#SBATCH --nodes=2\n#SBATCH --comment="my own"\n# caf\xe9\n'


def plan(directory, *overrides, args=(), environ=None, script=b"#!/bin/bash -l\n" + HEAD + b"srun x\n", **changes):
    file = directory / "my train.slurm"
    file.write_bytes(script)
    resolved = load_spec(spec_yaml(spec_of(file, args)), overrides, environ={}, whole=True)
    request = {"runs_dir": directory / "runs", "working_dir": directory, "environ": environ or {}}
    return plan_run(resolved, Request(**request | changes))


def test_sbatch_gets_the_options_of_the_command_line_the_script_and_its_arguments(tmp_path):
    planned = plan(tmp_path, "slurm.time=5", "slurm.mem_per_cpu=2G", args=["--lr", "0.1", "a b"])
    (command,) = planned.commands
    run = RunDir(planned.run_dir)
    comment = next(word for word in command if word.startswith("--comment="))
    file = str(run.launcher_dir / "sbatch" / "my train.slurm")
    ours = {"--parsable", "--time=5", "--mem-per-cpu=2G", comment}
    assert set(command[1 : command.index(file)]) == ours
    assert command[command.index(file) + 1 :] == (str(run.path), "--lr", "0.1", "a b")
    assert comment.startswith("--comment=my own; clusterddp ")
    assert tag_of("train.slurm", comment.partition("=")[2])
    assert planned.slurm.directory == planned.slurm.job_directory == str(tmp_path)


def test_without_slurm_an_option_that_sbatch_may_refuse_is_named(tmp_path):
    script = b"#!/bin/bash\n#SBATCH --ntask-per-node=4 -N2\n#SBATCH -n 2\n#SBATCH --gress gpu:2\nsrun x\n"
    notes = plan(tmp_path, "launcher=local", script=script).notes
    assert [note.partition(": has")[0] for note in notes if "not known" in note] == [
        "#SBATCH --ntask-per-node=4 -N2", "#SBATCH --gress gpu:2"
    ]  # fmt: skip


def test_what_sbatch_gets_is_the_head_of_the_script_byte_for_byte_and_what_starts_our_process(tmp_path):
    script = plan(tmp_path).slurm.script.encode(errors="surrogateescape")
    first, rest = script.split(b"\n", 1)
    assert first == b"#!/bin/bash -p"
    assert rest.startswith(HEAD)
    trap, command = rest.removeprefix(HEAD).decode().splitlines()
    words = shlex.split(command)
    assert (trap.split()[0], words[0], words[-1]) == ("trap", "exec", "$@")
    assert "clusterddp.places.slurm.batch" in words


def test_the_command_after_a_head_without_a_last_line_end_is_a_line_of_its_own(tmp_path):
    script = plan(tmp_path, script=b"#!/bin/sh\n#SBATCH -n1").slurm.script
    assert "\n#SBATCH -n1\ntrap " in script
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "environ", "users"),
    [
        (["slurm.comment=typed"], {"SBATCH_COMMENT": "set"}, "typed"),
        ([], {"SBATCH_COMMENT": "set"}, "set"),
        ([], {}, "my own"),
    ],
)
def test_the_users_comment_comes_before_ours_as_sbatch_chooses_it(tmp_path, overrides, environ, users):
    sbatch = plan(tmp_path, *overrides, environ=environ).slurm.sbatch
    assert next(word for word in sbatch if word.startswith("--comment=")).startswith(f"--comment={users}; clusterddp")


def test_the_job_starts_where_the_script_says(tmp_path):
    script = b"#!/bin/sh\n#SBATCH -D sub\n"
    assert plan(tmp_path, script=script).slurm.job_directory == str(tmp_path / "sub")
    assert plan(tmp_path, "slurm.chdir=/srv", script=script).slurm.job_directory == "/srv"


def test_the_plan_goes_through_json_and_to_another_name(tmp_path):
    planned = plan(tmp_path, args=["x"])
    assert Plan.from_json(planned.to_json()).slurm == planned.slurm
    renamed = rename_plan(planned)
    assert renamed.slurm.arguments == (str(renamed.run_dir), "x")
    assert renamed.gang.entry.target == str(RunDir(renamed.run_dir).batch_script)
    assert renamed.slurm.script == planned.slurm.script


def test_the_text_of_the_script_is_that_of_the_submit(tmp_path):
    planned = plan(tmp_path)
    assert planned.submission == (tmp_path / "my train.slurm").read_bytes()
    assert plan(tmp_path, submission=b"#!/bin/sh\n").submission == b"#!/bin/sh\n"
    assert Path(planned.gang.entry.working_dir) == tmp_path


def test_sbatch_may_not_hold_the_submit(tmp_path):
    with pytest.raises(UsageError, match="until the job has ended"):
        plan(tmp_path, script=b"#!/bin/sh\n#SBATCH -W\n")
