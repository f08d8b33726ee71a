"""Which Python runs the ranks: clusterddp is installed in one environment, and the user's script belongs to another."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_jsonl
from tests.support.environments import REPORT, activated, make_conda_home, make_plain_venv, make_venv
from tests.support.person import Person

SPEC = "name: job\ndevice: cpu\nresources: {procs_per_node: 2}\nentry: {script: report.py}\nsnapshot: false\n"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with torch, in which clusterddp is not installed."""
    return make_venv(tmp_path_factory.mktemp("environments") / "B")


@pytest.fixture
def user(tmp_path: Path) -> Person:
    (tmp_path / "report.py").write_text(REPORT)
    return Person(path=tmp_path, environ={"PYTHONPATH": "", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""})


def run_and_read(user: Person, text: str, *arguments: str, environ: dict[str, str] | None = None) -> list[Any]:
    """Submit a spec, wait for its end, and return what each rank has printed."""
    (user.path / "job.yaml").write_text(text)
    done = user.clusterddp("submit", "job.yaml", "--wait", "-o", "json", *arguments, environ=environ)
    return printed_by(RunDir(Path(json.loads(done.stdout.splitlines()[0])["run_dir"])))


def printed_by(run: RunDir) -> list[Any]:
    return [json.loads(run.attempts()[-1].stdout(rank).read_text().splitlines()[-1]) for rank in range(2)]


def plan_line(user: Person, text: str, *, environ: dict[str, str] | None = None) -> str:
    """Return what the plan says about the Python, on one line."""
    (user.path / "job.yaml").write_text(text)
    shown = user.clusterddp("submit", "job.yaml", "-n", environ=environ).stdout
    lines = shown[shown.index("\n  python") :].splitlines()[1:]
    rest = [line for line in lines[1:] if line.startswith("     ")]
    more = rest[: next((place for place, line in enumerate(lines[1:]) if not line.startswith("     ")), 0)]
    return " ".join(" ".join((lines[0], *more)).split())


def test_ranks_take_the_python_of_the_activated_environment(user: Person, other: Path) -> None:
    for found in run_and_read(user, SPEC, environ=activated(other)):
        assert found["python"] == f"{other}/bin/python"
        assert (found["prefix"], found["venv"], found["path"]) == (str(other), str(other), f"{other}/bin")
        assert found["torch"].startswith(str(other))
        assert found["others"] == []
    assert [row["loss"] for row in read_jsonl(user.run_dir().metrics)] == [1.0]
    line = plan_line(user, SPEC, environ=activated(other))
    assert f"venv B, {other}/bin/python ({sys.version.split()[0]}, torch 2." in line
    assert line.endswith("activated where you submit; venv:, conda: or python: names another")


def test_without_an_activated_environment_ranks_take_the_python_of_clusterddp(user: Person) -> None:
    assert [found["python"] for found in run_and_read(user, SPEC)] == [sys.executable] * 2
    assert f"{sys.executable} (" in plan_line(user, SPEC)
    assert "clusterddp's own; venv:, conda: or python: names another" in plan_line(user, SPEC)


@pytest.mark.parametrize("key", ["python", "venv", "conda"])
def test_a_key_of_the_spec_names_the_python(user: Person, other: Path, key: str) -> None:
    place = make_conda_home(user.path / "conda", "torch") / "envs" / "torch" if key == "conda" else other
    value = {"python": f"{other}/bin/python", "venv": os.path.relpath(other, user.path), "conda": "torch"}[key]
    environ = {"CONDA_EXE": f"{user.path}/conda/bin/conda", "VIRTUAL_ENV": "/some/where"}
    for found in run_and_read(user, f"{SPEC}{key}: {value}\n", environ=environ):
        assert (found["python"], found["path"]) == (f"{place}/bin/python", f"{place}/bin")
        expected = (None, str(place)) if key == "conda" else (str(place), None)
        assert (found["venv"], found["conda"]) == expected
    line = plan_line(user, f"{SPEC}{key}: {value}\n", environ=environ)
    assert line.startswith(
        f"python {'conda torch, conda/envs/torch' if key == 'conda' else f'venv B, {place}'}/bin/python"
    )
    assert line.endswith(f"{key}: in the spec")


def test_an_activated_environment_without_torch_stops_the_submit(user: Person) -> None:
    place = make_plain_venv(user.path / "C")
    (user.path / "job.yaml").write_text(SPEC)
    refused = user.clusterddp("submit", "job.yaml", check=False, environ=activated(place))
    assert refused.returncode == 3
    assert f"the activated environment C ({place}) cannot run the ranks: it has no torch" in refused.stderr
    assert f"python: {sys.executable} takes clusterddp's own" in refused.stderr
    assert "install" in refused.stderr
    assert not user.runs_dir.exists()


def test_an_older_python_is_refused_in_one_sentence(user: Person) -> None:
    names = [f"python3.{minor}" for minor in range(6, 10)]
    places = [
        *Path("~/.pyenv/versions").expanduser().glob("3.[6-9].*/bin/python"),
        *filter(None, map(shutil.which, names)),
    ]
    if not places:
        pytest.skip("this machine has no Python from 3.6 to 3.9")
    (user.path / "job.yaml").write_text(f"{SPEC}python: {places[0]}\n")
    refused = user.clusterddp("submit", "job.yaml", check=False)
    assert refused.returncode == 3
    assert f"python: {places[0]} cannot run the ranks: it is Python 3." in refused.stderr
    assert "expected 3.10 or newer" in refused.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python: no-such-python", "no such program on PATH"),
        ("python: no/such/python", "no such program"),
        ("venv: nowhere", "found no "),
        ("conda: nowhere", "found no environment of this name"),
        ("venv: a\npython: b", "the spec has python and venv, expected one of them"),
        ("ssh: {venv: ~/v}", "this key was removed"),
        ("venv: a\ncontainer: {image: b.sqsh}", "is an environment outside of the container"),
    ],
)
def test_what_names_no_python_is_refused(user: Person, line: str, words: str) -> None:
    (user.path / "job.yaml").write_text(f"{SPEC}{line}\n")
    refused = user.clusterddp("submit", "job.yaml", check=False)
    assert refused.returncode in (2, 3)
    assert words in refused.stderr


def test_the_trainer_and_a_command_keep_what_they_have(user: Person, other: Path) -> None:
    trainer = "name: job\ntrain: {dataset: random, epochs: 1}\n"
    line = plan_line(user, trainer, environ=activated(other))
    assert line.startswith(f"python {sys.executable} (")
    assert line.endswith("clusterddp's own")
    command = SPEC.replace("script: report.py", "command: python report.py")
    assert [found["python"] for found in run_and_read(user, command, environ=activated(other))] == [
        f"{other}/bin/python"
    ] * 2
    assert "the command finds on PATH" in plan_line(user, command)


def test_a_module_runs_there_and_a_resumed_run_keeps_its_python_in_another_shell(user: Person, other: Path) -> None:
    text = SPEC.replace("script: report.py", "module: report").replace("procs_per_node: 2", "procs_per_node: 1")
    (user.path / "report.py").write_text(REPORT + "sys.exit(3 * (not os.path.exists('mended')))\n")
    (user.path / "job.yaml").write_text(text)
    failed = user.clusterddp("submit", "job.yaml", "--wait", check=False, environ=activated(other))
    assert failed.returncode == 5
    run = user.run_dir()
    user.clusterddp("resume", run.name, "--wait", check=False)
    (user.path / "mended").touch()
    user.clusterddp("resume", run.name, "--wait", "restarts=1")
    printed = [json.loads(attempt.stdout(0).read_text().splitlines()[-1]) for attempt in run.attempts()]
    assert [found["python"] for found in printed] == [f"{other}/bin/python"] * 3
    again = user.clusterddp("submit", run.name, "-n")
    assert f"ran in {other}/bin/python, these run in {sys.executable}; python={other}/bin/python" in again.stderr


def test_each_run_of_a_sweep_takes_it(user: Person, other: Path) -> None:
    (user.path / "job.yaml").write_text(SPEC + "sweep: {values: {env.A: [1, 2]}}\n")
    user.clusterddp("submit", "job.yaml", "--sweep", "--wait", environ=activated(other))
    runs = sorted(path.parent for path in user.runs_dir.glob("*/*/plan.json"))
    assert len(runs) == 2
    for run in runs:
        assert [found["python"] for found in printed_by(RunDir(run))] == [f"{other}/bin/python"] * 2


def test_doctor_and_the_record_of_the_run_speak_of_the_same_python(user: Person, other: Path) -> None:
    run_and_read(user, SPEC, environ=activated(other))
    written = json.loads(user.run_dir().environment.read_text())
    assert written["python"]["executable"] == f"{other}/bin/python"
    assert "torch" in written["packages"]
    assert "pydantic" not in written["packages"]
    plain = make_plain_venv(user.path / "C")
    found = user.clusterddp("doctor", "job.yaml", check=False, environ=activated(plain))
    assert f"the activated environment C ({plain}) cannot run the ranks: it has no torch" in found.stdout
