"""A sweep before Slurm has it: its plan, its directory, the names of its runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterddp.errors import ClusterddpError, PreflightError, UsageError
from clusterddp.places.slurm.cluster import array_limits, parse_config
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, move_plan, plan_run
from clusterddp.planning.slurm import find_dependency
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.record import read_run, write_run
from clusterddp.run.sweep import SweepDir, find_sweep, read_sweep, sweep_of
from clusterddp.spec.load import load_spec
from clusterddp.submission.sweep_plan import make_sweep
from clusterddp.system.python import module_command
from tests.support.handmade_runs import complete, make_run, start_attempt
from tests.support.launch_runs import git
from tests.support.paths import ROOT
from tests.support.sweep_runs import CONFIG, SPEC, fake_scontrol, plan_one

TWO_BY_TWO = ("env.LR=0.1,0.2", "env.SEED=0,1")


def make(directory: Path, *arguments: str) -> SweepDir:
    plan = plan_one(directory, *(arguments or TWO_BY_TWO))
    make_sweep(plan, fake_scontrol(directory), {"LANG": "C"})
    return SweepDir(plan.path)


def test_the_runs_are_named_after_the_sweep_and_lie_in_it(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    assert [run.path for run in sweep.runs()] == [sweep.path / f"{sweep.name}.{index}" for index in range(4)]


@pytest.mark.parametrize(
    ("text", "swept", "alone"),
    [
        (SPEC, ["env.A=1,2", "env.B=3,4"], ["env.A=2", "env.B=3"]),
        (SPEC, ["entry.args=[--lr, 1],[--lr, 2],[--lr, 3]"], ["entry.args=[--lr, 3]"]),
        ("name: x\nlauncher: slurm\n", ["train.lr=1,2,3,4"], ["train.lr=3"]),
        ("name: x\nlauncher: slurm\n", ["train.data_dir=a,b,c"], ["train.data_dir=c"]),
        (SPEC, ["network.interface=auto,lo,eth7"], ["network.interface=eth7"]),
        (f"{SPEC}snapshot: false\n", ["entry.script=entry.py,two.py", "env.A=1,2"], ["entry.script=two.py", "env.A=1"]),
    ],
)
def test_a_run_has_the_plan_that_it_would_have_alone(
    tmp_path: Path, text: str, swept: list[str], alone: list[str]
) -> None:
    planned = plan_one(tmp_path, *swept, text=text).runs[2]
    expected = plan_run(
        load_spec(text, alone, environ={}),
        Request(runs_dir=tmp_path / "runs", working_dir=tmp_path, environ=fake_scontrol(tmp_path)),
    )
    changes = tuple(
        change | {"origin": "sweep"} if change["origin"] == "command line" else change for change in expected.changes
    )
    gang = dataclasses.replace(expected.gang, token=planned.token)
    expected = dataclasses.replace(expected, token=planned.token, gang=gang, changes=changes)
    assert planned == move_plan(expected, planned.run_dir)


def test_the_plan_on_disk_names_the_sweep_as_origin(tmp_path: Path) -> None:
    changes = json.loads(make(tmp_path).runs()[3].plan.read_text())["changes"]
    assert {change["key"]: change["value"] for change in changes if change["origin"] == "sweep"} == {
        "env.LR": "0.2",
        "env.SEED": "1",
    }


def test_the_plan_and_the_spec_of_a_run_read_back(tmp_path: Path) -> None:
    run = make(tmp_path).runs()[1]
    plan = Plan.from_json(json.loads(run.plan.read_text()))
    assert (plan.run_dir, plan.gang.env) == (run.path, {"LR": "0.1", "SEED": "1"})
    assert load_spec(run.spec, environ={}).job.env == {"LR": "0.1", "SEED": "1"}


def test_each_run_has_a_token_of_its_own_and_the_tag_of_the_array(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    records = [read_run(run) for run in sweep.runs()]
    assert len({record.token for record in records}) == 4
    assert {record.job_tag for record in records} == {read_sweep(sweep).job_tag}
    assert [(record.array_index, record.variant) for record in records] == [
        (0, "LR=0.1 SEED=0"), (1, "LR=0.1 SEED=1"), (2, "LR=0.2 SEED=0"), (3, "LR=0.2 SEED=1"),
    ]  # fmt: skip


def test_what_the_runs_share_is_written_once(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    run = sweep.runs()[0]
    for shared, own in ((sweep.environment, run.environment), (sweep.job_environment, run.job_environment)):
        assert (own.samefile(shared), own.is_symlink()) == (True, False)
    assert len(os.listdir(tmp_path / "runs" / ".code")) == 1


def test_each_run_has_a_copy_of_the_code_of_its_own(tmp_path: Path) -> None:
    first, second = make(tmp_path).runs()[:2]
    assert (first.code / "entry.py").read_text() == "print('hello')\n"
    (first.code / "out.pt").write_text("")
    assert not (second.code / "out.pt").exists()
    assert first.snapshot.resolve() == second.snapshot.resolve() == next((tmp_path / "runs" / ".code").iterdir())


def test_runs_whose_copies_were_too_many_files_share_one(tmp_path: Path) -> None:
    plan = plan_one(tmp_path, *TWO_BY_TWO)
    many = [dataclasses.replace(run, snapshot=(run.snapshot or {}) | {"files": 12_501}) for run in plan.runs]
    plan = dataclasses.replace(plan, runs=tuple(many))
    make_sweep(plan, fake_scontrol(tmp_path), {})
    sweep = SweepDir(plan.path)
    assert plan.notes[-1] == "the 4 runs share one copy of the code, and what they write beside their script"
    first, second = sweep.runs()[:2]
    assert first.code.resolve() == second.code.resolve() == sweep.path.resolve() / "code"
    assert first.snapshot.resolve() == second.snapshot.resolve() == next((tmp_path / "runs" / ".code").iterdir())
    assert (first.code / "entry.py").is_file()


def test_each_run_has_an_output_directory_of_its_own_unless_the_spec_names_one(tmp_path: Path) -> None:
    plan = plan_one(tmp_path, *TWO_BY_TWO)
    assert [run.gang.entry.output_dir for run in plan.runs] == [str(run.run_dir / "output") for run in plan.runs]
    note = plan_one(tmp_path, *TWO_BY_TWO, "entry.output_dir=results").notes[-1]
    assert note.startswith("entry.output_dir: the 4 runs share {output_dir}")


def test_a_container_of_each_run_has_what_git_ignores(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("data/\nruns/\nsub/runs/\n")
    for name in ("data", "sub"):
        (tmp_path / name).mkdir()
    plan = plan_one(tmp_path / "sub", *TWO_BY_TWO)
    assert {run.slurm.mounts for run in plan.runs if run.slurm} == {(str(tmp_path / "sub"), str(tmp_path))}


def test_secrets_lie_in_each_run_which_removes_its_own(tmp_path: Path) -> None:
    environ = fake_scontrol(tmp_path) | {"API": "s3cret"}
    plan = plan_one(tmp_path, "env.A=1,2", text=f"{SPEC}secrets: [API]\n", environ=environ)
    make_sweep(plan, environ, {})
    secrets = [run.job_secrets for run in SweepDir(plan.path).runs()]
    assert [(json.loads(path.read_text()), path.stat().st_mode & 0o777) for path in secrets] == [
        ({"API": "s3cret"}, 0o600)
    ] * 2


def test_the_array_is_asked_for_with_its_throttle_and_a_log_in_each_run(tmp_path: Path) -> None:
    plan = plan_one(tmp_path, *TWO_BY_TWO, "sweep.throttle=3")
    assert "--array=0-3%3" in plan.command
    assert f"--output={plan.path}/{plan.sweep}.%a/launcher/job.log" in plan.command
    assert plan.command[-2 - len(plan.job.arguments[2:]) :][1] == str(plan.path / "tasks.txt")


def test_a_run_of_a_sweep_plans_its_own_further_jobs_without_the_array(tmp_path: Path) -> None:
    slurm = plan_one(tmp_path, *TWO_BY_TWO).runs[1].slurm
    assert slurm is not None
    assert not [word for word in slurm.sbatch if "array" in word]


def test_more_tasks_than_the_cluster_takes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    environ = fake_scontrol(tmp_path, "MaxArraySize = 4\nMaxJobCount = 10000\n")
    plan_one(tmp_path, *TWO_BY_TWO, environ=environ)
    with pytest.raises(PreflightError, match=r"a sweep of 5 runs: .* at most 4 tasks \(MaxArraySize=4\)"):
        plan_one(tmp_path, "env.A=1,2,3,4,5", environ=environ)
    assert not (tmp_path / "runs").exists()


def test_all_limits_of_an_array_are_read() -> None:
    config = f"{CONFIG}SchedulerParameters     = bf_interval=1,max_array_tasks=50,x=1\n"
    assert array_limits(parse_config(config)) == {
        "MaxArraySize=1001": 1001,
        "MaxJobCount=10000": 10_000,
        "SchedulerParameters=max_array_tasks=50": 50,
    }


@pytest.mark.parametrize("launcher", ["launcher=local", "launcher=ssh"])
def test_elsewhere_than_on_slurm_a_queue_is_started(tmp_path: Path, launcher: str) -> None:
    hosts = ["ssh.hosts=[gpu01]", "snapshot=false"] if launcher == "launcher=ssh" else []
    plan = plan_one(tmp_path, *TWO_BY_TWO, launcher, *hosts, environ={"PATH": os.environ["PATH"]})
    assert plan.job is None
    assert plan.command == module_command("clusterddp.submission.sweep_queue", str(plan.path))


def test_programs_that_no_copy_of_the_code_has_together_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "main.py").write_text("")
    with pytest.raises(UsageError, match=r"script=b/main\.py: its code is not in the snapshot"):
        plan_one(tmp_path, "entry.script=a/main.py,b/main.py")


def test_a_name_that_was_taken_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    plan = plan_one(tmp_path, *TWO_BY_TWO)
    (plan.path / "theirs").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        make_sweep(plan, fake_scontrol(tmp_path), {})
    assert sorted(os.listdir(tmp_path / "runs")) == [".code", plan.sweep]
    assert list_runs(tmp_path / "runs") == []


def test_a_file_system_that_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    plan = plan_one(tmp_path, *TWO_BY_TWO)
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(ClusterddpError, match="nothing was submitted: Not a directory"):
        make_sweep(plan, fake_scontrol(tmp_path), {})


def test_runs_of_a_sweep_are_listed_in_the_order_of_their_tasks(tmp_path: Path) -> None:
    sweep = make(tmp_path, f"env.SEED={','.join(map(str, range(12)))}")
    assert [run.name for run in list_runs(tmp_path / "runs")] == [f"{sweep.name}.{index}" for index in range(12)]


def test_a_run_of_a_sweep_is_found_by_its_name(tmp_path: Path) -> None:
    sweep = make(tmp_path, f"env.SEED={','.join(map(str, range(12)))}")
    assert find_run(tmp_path / "runs", f"{sweep.name}.1") == RunDir(sweep.path / f"{sweep.name}.1")
    assert sweep_of(sweep.runs()[3]) == sweep


def test_a_sweep_is_found_by_its_name_its_beginning_its_directory_and_as_the_last(tmp_path: Path) -> None:
    sweep, runs_dir = make(tmp_path), tmp_path / "runs"
    assert [find_sweep(runs_dir, name) for name in (sweep.name, sweep.name[:4], str(sweep.path), "@last")] == [
        sweep
    ] * 4


def test_a_sweep_is_found_by_the_name_of_its_spec_while_that_means_no_other_run(tmp_path: Path) -> None:
    sweep, runs_dir = make(tmp_path), tmp_path / "runs"
    name = read_run(sweep.runs()[0]).name
    assert name is not None
    assert find_sweep(runs_dir, name) == sweep
    alone = make_run(runs_dir, "calm-fox-1")
    write_run(alone, dataclasses.replace(read_run(alone), name=name))
    assert find_sweep(runs_dir, name) is None
    start_attempt(alone)
    complete(alone, alone.newest_attempt())
    assert find_sweep(runs_dir, name) == sweep


def test_the_name_of_a_run_is_no_sweep(tmp_path: Path) -> None:
    sweep, runs_dir = make(tmp_path), tmp_path / "runs"
    assert [find_sweep(runs_dir, name) for name in (f"{sweep.name}.1", "", "zzz", str(sweep.runs()[0].path))] == [
        None
    ] * 4


def test_where_one_run_is_expected_a_sweep_is_refused_as_many(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    with pytest.raises(UsageError, match=f"{sweep.name} matches 4 runs: {sweep.name}.0, "):
        find_run(tmp_path / "runs", sweep.name)


def test_a_job_waits_for_a_sweep_by_its_array_and_for_runs_that_go_on_by_themselves(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    for index, run in enumerate(sweep.runs()):
        job = {"job_id": "99", "array_index": None} if index == 2 else {"job_id": f"7_{index}"}
        write_run(run, dataclasses.replace(read_run(run), **job))
    assert find_dependency([f"afterany:{sweep.name}"], tmp_path / "runs")[0] == "afterany:7,afterany:99"


def test_a_job_does_not_wait_for_the_success_of_a_sweep_that_has_failed(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    write_end(sweep.runs()[0].attempt(0), AttemptEnd(outcome="FAILED", reason="no luck"))
    for run in sweep.runs():
        write_run(run, dataclasses.replace(read_run(run), job_id="7_0"))
    with pytest.raises(UsageError, match=f"{sweep.name}.0 has ended: FAILED"):
        find_dependency([sweep.name], tmp_path / "runs")


def test_a_submit_that_is_killed_leaves_a_whole_sweep_or_none(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom tests.support.sweep_runs import fake_scontrol, plan_one\n"
        "from clusterddp.submission.sweep_plan import make_sweep\n"
        "here = Path(sys.argv[2])\n"
        "plan = plan_one(here, 'env.SEED=' + ','.join(map(str, range(200))))\n"
        "print('ready', flush=True)\nmake_sweep(plan, fake_scontrol(here), {})\n"
    )
    chance = random.Random(3)
    for _ in range(6):
        argv = [sys.executable, "-c", program, str(ROOT), str(tmp_path)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ})
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0, 0.15))
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    sizes = [len(SweepDir(path).runs()) for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]
    assert set(sizes) <= {200}
    assert len(list_runs(tmp_path / "runs")) == sum(sizes)
    make(tmp_path)
    # One that was killed before it could write a name is left for ten minutes, like any other's.
    assert not list((tmp_path / "runs").glob(".staging-*/sweep.json"))
