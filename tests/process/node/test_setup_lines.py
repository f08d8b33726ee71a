"""Setup lines: bash runs them once on each node before the ranks start, with the functions of the site."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.system.torch_files import find_package, read_torch_values
from tests.support.environments import make_conda_home, make_plain_venv, make_venv
from tests.support.gang_runs import processes_with
from tests.support.person import Person
from tests.support.waiting import wait_until

VERSION = sys.version.split()[0]
TORCH = read_torch_values(find_package("torch"))["__version__"]
PROGRAM = """\
import json, os, sys
names = ("OF_LINES", "MORE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GONE", "VIRTUAL_ENV", "CONDA_PREFIX")
values = {name: os.environ.get(name) for name in names}
print(json.dumps(values | {"python": sys.executable, "path": os.environ["PATH"]}))
"""
SPEC = (
    "name: job\ndevice: cpu\nresources: {nodes: 2, procs_per_node: 2}\nentry: {script: program.py}\nsnapshot: false\n"
    "restarts: 0\n"
)


@pytest.fixture
def user(tmp_path: Path) -> Person:
    (tmp_path / "program.py").write_text(PROGRAM)
    return Person(path=tmp_path, environ={"GONE": "not yet", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""})


def run_lines(user: Person, lines: str, *, check: bool = True, more: str = "", **environ: str) -> RunDir:
    """Submit the program with these setup lines, as one text, and wait for its end."""
    text = SPEC + more + "setup: |\n" + "".join(f"  {line}\n" for line in lines.splitlines())
    (user.path / "job.yaml").write_text(text)
    user.clusterddp("submit", "job.yaml", "--wait", check=check, environ=environ)
    return user.run_dir()


def printed_by(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(run.attempt(0).stdout(rank).read_text()) for rank in range(4)]


def test_the_ranks_get_the_environment_after_the_lines_which_run_once_on_each_node(user: Person) -> None:
    lines = """\
export OF_LINES="a b
c" MORE=é OMP_NUM_THREADS=7 CUDA_VISIBLE_DEVICES=5
unset GONE
if false; then exit 1; fi
echo once >>"$HERE/times"
PATH=/of/the/lines:$PATH
"""
    run = run_lines(user, lines, HERE=str(user.path))
    for printed in printed_by(run):
        assert (printed["OF_LINES"], printed["MORE"], printed["GONE"]) == ("a b\nc", "é", None)
        assert printed["OMP_NUM_THREADS"] == "7"
        assert printed["CUDA_VISIBLE_DEVICES"] == ""  # the GPUs are those of the run
        assert printed["path"].startswith("/of/the/lines:")
    assert (user.path / "times").read_text() == "once\nonce\n"


def test_env_of_the_spec_overrides_the_lines_and_they_see_it(user: Person) -> None:
    run = run_lines(user, "export MORE=$OF_LINES-more OF_LINES=lines", more="env: {OF_LINES: spec}\n")
    assert [(each["OF_LINES"], each["MORE"]) for each in printed_by(run)] == [("spec", "spec-more")] * 4


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ("true\nls /not/there\ntrue", "setup line 2 (exit code 2): ls /not/there: ls: cannot access '/not/there'"),
        ("not_a_program here", "setup line 1 (exit code 127): not_a_program here: not_a_program: command not found"),
        ("true\n\nif true; then\n", "setup line 5 (exit code 2)"),
        ("f() { echo inside >&2; return 4; }\nf", "setup line 2 (exit code 4): f: inside"),
        ("echo why; exit 9", "setup: the lines (exit code 9): why"),
        ("exit 0", "setup: the lines (exit code 0)"),
        ("kill -9 $$", "setup: the lines (SIGKILL)"),
        ("module load cuda/99", "setup line 1 (exit code "),
    ],
)
def test_a_line_that_fails_ends_the_run_before_any_rank_starts(user: Person, lines: str, cause: str) -> None:
    run = run_lines(user, lines, check=False)
    end = user.end(run)
    assert end is not None
    assert end.outcome == "FAILED"
    assert end.root_cause is not None
    assert cause in end.root_cause.error
    assert not list(run.attempt(0).logs.glob("rank-*"))
    assert end.root_cause.log is not None
    assert (run.path / end.root_cause.log).is_file()
    assert cause in user.clusterddp("status", run.name, check=False).stdout.replace("\n", " ").replace("    ", "")


def test_no_node_starts_while_the_lines_of_another_one_run_and_a_cancel_ends_them(user: Person) -> None:
    lines = f'if mkdir "{user.path}/first"; then true; else sleep 600; fi'
    text = SPEC + f"setup: ['{lines}']\n"
    run = user.submit(text)
    token = user.record(run).token
    wait_until(lambda: any("sleep 600" in command for _, command in processes_with(token)), 60)
    time.sleep(1.0)
    assert not list(run.attempt(0).logs.glob("rank-*"))
    user.clusterddp("cancel", run.name)
    wait_until(lambda: not processes_with(token), 30)
    end = user.end(run)
    assert end is not None
    assert end.outcome == "CANCELLED"


def test_conda_works_in_the_lines_and_chooses_the_python(user: Person) -> None:
    home = make_conda_home(user.path / "conda", "torch")
    hooks = home / "envs" / "torch" / "etc" / "conda" / "activate.d"
    run = run_lines(user, "conda activate torch", CONDA_EXE=f"{home}/bin/conda")
    prefix = f"{home}/envs/torch"
    for printed in printed_by(run):
        assert (printed["python"], printed["CONDA_PREFIX"]) == (f"{prefix}/bin/python", prefix)
    failed = run_lines(user, "conda activate tork", check=False, CONDA_EXE=f"{home}/bin/conda")
    end = user.end(failed)
    assert end is not None
    assert end.root_cause is not None
    assert (
        "conda activate tork: EnvironmentNameNotFound: Could not find conda environment: tork" in end.root_cause.error
    )
    # The hooks of an environment that the spec names run, too; the key wins over the lines.
    hooks.mkdir(parents=True)
    (hooks / "own.sh").write_text("export OF_LINES=of-the-hook\n")
    run = run_lines(user, "PATH=/nowhere:$PATH", more="conda: torch\n", CONDA_EXE=f"{home}/bin/conda")
    for printed in printed_by(run):
        assert (printed["python"], printed["OF_LINES"]) == (f"{prefix}/bin/python", "of-the-hook")
        assert printed["path"].startswith(f"{prefix}/bin:/nowhere:")


def test_status_shows_the_python_that_the_lines_have_chosen(user: Person) -> None:
    venv = make_venv(user.path / "torch")
    for lines, executable in (
        ("export OF_LINES=1", user.command()[0]),
        (f"PATH={venv}/bin:$PATH", f"{venv}/bin/python"),
    ):
        run = run_lines(user, lines)
        shown = f"  python: {executable} ({VERSION}, torch {TORCH})"
        assert shown in user.clusterddp("status", run.name).stdout.splitlines()
        ranks = json.loads(user.clusterddp("status", run.name, "-o", "json").stdout)["ranks"]
        assert [rank["python"] for rank in ranks] == [
            {"executable": executable, "version": VERSION, "torch": TORCH}
        ] * 4


def test_status_says_which_nodes_run_another_python(user: Person) -> None:
    names = [make_venv(user.path / "torch"), make_plain_venv(user.path / "plain")]
    first, second = (f"PATH={name}/bin:$PATH" for name in names)
    run = run_lines(user, f'if mkdir "{user.path}/first"; then {first}; else {second}; fi')
    shown = user.clusterddp("status", run.name).stdout
    for text in (f"{names[0]}/bin/python ({VERSION}, torch {TORCH})", f"{names[1]}/bin/python ({VERSION}, no torch)"):
        assert re.search(rf"(?m)^  python differs: \S+: {re.escape(text)}$", shown), shown


def test_a_python_of_the_lines_that_cannot_run_ranks_ends_the_run(user: Person) -> None:
    program = user.path / "old" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho it is Python 3.8, expected 3.10 or newer >&2; exit 1\n")
    program.chmod(0o755)
    run = run_lines(user, f"PATH={program.parent}:$PATH", check=False)
    end = user.end(run)
    assert end is not None
    assert end.root_cause is not None
    assert f"setup: {program}, which the lines put first on PATH, cannot run the ranks" in end.root_cause.error
    assert "it is Python 3.8, expected 3.10 or newer" in end.root_cause.error


def test_lines_that_leave_the_python_alone_leave_that_of_the_ranks(user: Person) -> None:
    run = run_lines(user, "export OF_LINES=1")
    assert {os.path.realpath(each["python"]) for each in printed_by(run)} == {os.path.realpath(user.command()[0])}
