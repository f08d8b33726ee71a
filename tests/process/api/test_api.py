"""The Python interface: the same runs as the command's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import clusterddp
from clusterddp.api import Run
from clusterddp.errors import RunNotFoundError, SpecError, UsageError
from clusterddp.run.directory import RunDir
from clusterddp.system.files import append_jsonl
from tests.support.launch_runs import HELLO, STOPPABLE, wait_for_ranks

SPEC = "name: job\nresources: {procs_per_node: 2}\nentry: {script: entry.py}\n"


@pytest.fixture(autouse=True)
def _in_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    (tmp_path / "entry.py").write_text(HELLO)
    (tmp_path / "job.yaml").write_text(SPEC)


def test_a_spec_is_submitted_by_its_path_and_waited_for(tmp_path: Path) -> None:
    run = clusterddp.submit("job.yaml")
    assert run.wait(30) == "COMPLETED"
    assert run.path.parent == tmp_path / "runs"
    assert run.logs(1) == "rank 1 of 2\n"
    status = run.status()
    assert (status["run"], status["state"], len(status["ranks"])) == (run.name, "COMPLETED", 2)
    assert run.metrics() == []


def test_a_spec_that_was_loaded_and_a_plan_are_submitted_as_they_are(tmp_path: Path) -> None:
    resolved = clusterddp.load_spec(SPEC, ["resources.procs_per_node=1"])
    plan = clusterddp.plan(resolved, runs_dir=tmp_path / "elsewhere")
    run = clusterddp.submit(plan)
    assert (run.name, run.path.parent) == (plan.run, tmp_path / "elsewhere")
    assert run.wait(30) == "COMPLETED"
    assert len(run.status()["ranks"]) == 1


def test_runs_lie_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "named"))
    assert clusterddp.plan("job.yaml").run_dir.parent == tmp_path / "named"


def test_a_script_learns_that_it_should_stop_and_the_run_is_cancelled(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text(STOPPABLE)
    run = clusterddp.submit("job.yaml")
    wait_for_ranks(RunDir(run.path), 2)
    assert run.wait(0.0) == "RUNNING"
    assert run.cancel(save=True) == "cancelled"
    assert run.wait(5) == "CANCELLED"
    assert run.logs().splitlines()[-1] == "stopped"


def test_outside_of_a_run_no_stop_is_requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CLUSTERDDP_STOP_FILE", raising=False)
    assert clusterddp.should_stop() is False
    monkeypatch.setenv("CLUSTERDDP_STOP_FILE", str(tmp_path / "STOP"))
    assert clusterddp.should_stop() is False
    (tmp_path / "STOP").touch()
    assert clusterddp.should_stop() is True


def test_a_run_of_another_process_is_found_by_its_name(tmp_path: Path) -> None:
    run = clusterddp.submit("job.yaml")
    run.wait(30)
    assert Run.find(run.name) == Run.find("@last") == Run.find(str(run.path)) == run
    with pytest.raises(RunNotFoundError):
        Run.find("no-such-run-1")


def test_metrics_are_rows_and_a_row_that_was_cut_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    append_jsonl(tmp_path / "metrics.jsonl", {"kind": "train", "step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "tr')
    assert Run(tmp_path).metrics() == [{"kind": "train", "step": 1}]


def test_errors_reach_the_caller(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        clusterddp.submit("name: a\nnonsense: 1\n")
    with pytest.raises(SpecError, match="no such file"):
        clusterddp.submit("name: a\nentry: {script: gone.py}\n")
    assert not (tmp_path / "runs").exists()


def test_importing_the_package_loads_nothing_of_it_and_asking_for_a_name_does() -> None:
    code = (
        "import sys, clusterddp; assert not [m for m in sys.modules if m.startswith('clusterddp.')];"
        "assert clusterddp.should_stop() is False; assert clusterddp.__version__;"
        "heavy = {'torch', 'submitit', 'pydantic', 'yaml', 'rich', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ending_a_run_loads_neither_the_spec_nor_submitit() -> None:
    code = (
        "import sys, clusterddp.submission.submit;"
        "heavy = {'torch', 'submitit', 'pydantic', 'yaml', 'rich', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["clusterddp.places.local.task", "clusterddp.places.slurm.batch"])
def test_what_carries_a_run_loads_no_part_that_plans_it(module: str) -> None:
    code = (
        f"import sys, {module}; parts = ('clusterddp.planning', 'clusterddp.spec', 'pydantic', 'yaml', 'submitit');"
        "heavy = [name for name in sys.modules if name.startswith(parts)]; assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        clusterddp.nonsense  # noqa: B018


def test_processes_of_a_run_find_a_package_that_is_not_installed(tmp_path: Path) -> None:
    code = (
        "import sys; from clusterddp.planning.processes import process_environment;"
        "sys.path = [path for path in sys.path if 'site-packages' not in path];"
        "print(process_environment({'PYTHONPATH': 'x'})['PYTHONPATH'])"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    checkout = Path(clusterddp.__file__).parents[1]
    assert answer.stdout.strip() == f"{tmp_path / 'x'}:{checkout}"


def test_hosts_make_it_a_run_over_ssh() -> None:
    plan = clusterddp.plan("job.yaml", ["~entry", "~train"], hosts=["gpu01", "gpu[03-04]"])
    assert plan.launcher == "ssh"
    assert [node.host for node in plan.gang.nodes] == ["gpu01", "gpu03", "gpu04"]


def test_what_would_change_a_plan_or_a_loaded_spec_is_refused() -> None:
    with pytest.raises(UsageError, match="a plan cannot be changed"):
        clusterddp.submit(clusterddp.plan("job.yaml"), ["name=b"])
    with pytest.raises(UsageError, match="a loaded spec cannot be changed"):
        clusterddp.plan(clusterddp.load_spec(SPEC), ["name=b"])
