"""A process that runs Python is started by system/python.py, which lets it import nothing from where it starts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import clusterddp
from clusterddp.system import python

HOME = Path(clusterddp.__file__).parent
OWN_WAY = {"system/python.py", "places/slurm/step_launcher.py"}  # the latter runs the Python of the user


def is_executable(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and (node.attr, ast.unparse(node.value)) == ("executable", "sys")


def starts_python(node: ast.List | ast.Tuple) -> bool:
    """Return whether a list of words is a command that runs Python: with its path and an option, or our module."""
    words = [word.value for word in node.elts if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    ours = any(word.startswith("clusterddp.") for word in words)
    options = any(word.startswith("-") for word in words)
    return (options and any(map(is_executable, node.elts))) or ("-m" in words and ours)


def test_no_other_file_writes_a_command_that_runs_python() -> None:
    found = []
    for path in HOME.rglob("*.py"):
        name = path.relative_to(HOME).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List | ast.Tuple) and name not in OWN_WAY and starts_python(node):
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


@pytest.mark.parametrize("interpreter", [None, sys.executable], ids=["this Python", "one of any release"])
def test_a_module_is_run_with_its_arguments_and_imports_nothing_from_where_it_starts(
    tmp_path: Path, interpreter: str | None
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "shown.py").write_text("import sys, json\nprint(sys.argv[1:], __name__, __spec__.name)\n")
    for name in ("json", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')\n")
    argv = python.module_command("shown", "a b", "-m", python=interpreter)
    environment = {"PYTHONPATH": str(library)}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['a b', '-m'] __main__ shown\n", done.stderr


def test_code_imports_nothing_from_where_it_starts(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('planted')\n")
    argv = python.code_command("import json, sys; print(json.dumps(sys.argv[1:]))", "x")
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == '["x"]\n', done.stderr


def test_an_isolated_module_is_found_whatever_python_variables_the_user_has_set(tmp_path: Path) -> None:
    for name in ("clusterddp", "json", "runpy", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')\n")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere", "PYTHONSTARTUP": str(tmp_path / "json.py")}
    argv = python.isolated_command("clusterddp", "--version")
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip().rpartition(" ")[2]) == (0, clusterddp.__version__), done.stderr


def test_an_isolated_module_passes_on_the_environment_that_it_has_been_given(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('planted')\n")
    for environment in ({"A": "b"}, {"A": "b", "LC_CTYPE": "C.UTF-8"}, {"A": "b", "LANG": "C"}):
        argv = python.isolated_command("tests.support.shown_environment")
        argv = tuple(word.replace(str(HOME.parent), str(Path(__file__).parents[3])) for word in argv)
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"{environment}\n"
