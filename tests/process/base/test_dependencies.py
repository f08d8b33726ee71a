"""What the package imports is what it declares: by its text, and in an environment that has nothing else."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.cli.main import _COMMANDS
from clusterddp.places.staging import make_run
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run, write_run
from tests.support.launch_runs import git, plan_text
from tests.support.paths import ROOT

SSH_SPEC = "name: a\nlauncher: ssh\nssh: {hosts: [host.invalid]}\nentry: {script: train.py}\n"
LOCAL_SPEC = "name: a\nentry: {script: train.py}\n"
ARGUMENTS = {
    "cancel": "cancel RUN",
    "compare": "compare RUN RUN",
    "completion": "completion bash",
    "dash": "dash --help",
    "demo": "demo",
    "doctor": "doctor",
    "exec": "exec RUN -- true",
    "gc": "gc -n",
    "help": "help",
    "hold": "hold job.yaml -n",
    "hosts": "hosts host.invalid",
    "import": "import hostfile",
    "init": "init new.yaml",
    "list": "list",
    "logs": "logs RUN",
    "manifest": "manifest job.yaml --image x",
    "nodes": "nodes",
    "ps": "ps",
    "report": "report RUN --out -",
    "resume": "resume RUN -n",
    "rm": "rm RUN -n",
    "schema": "schema",
    "stacks": "stacks RUN",
    "status": "status RUN",
    "submit": "submit job.yaml -n",
    "wait": "wait RUN --timeout 0",
    "worker": "worker trainer.yaml",
}
"""Something that each command does where there is no torch."""


def declared() -> tuple[set[str], set[str]]:
    """Return the distributions that everybody gets, and those of the machines that train."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(map(name_of, project["dependencies"])), set(map(name_of, project["optional-dependencies"]["train"]))


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return normal(match[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(path: Path) -> Iterator[str]:
    """Yield the packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_every_import_is_declared() -> None:
    everywhere, for_training = declared()
    distributions = importlib.metadata.packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)}: {package}"
        for path in (ROOT / "clusterddp").rglob("*.py")
        for package in set(imported(path)) - sys.stdlib_module_names - {"clusterddp"}
        if not {normal(name) for name in distributions.get(package, ["?"])}
        & (everywhere | for_training if "train" in path.relative_to(ROOT).parts else everywhere)
    }
    assert undeclared == set()


def with_what_they_need(names: set[str]) -> set[str]:
    """Return distributions with those that they need, as installed here; extras left out."""
    found: set[str] = set()
    todo = set(names)
    while todo:
        found |= todo
        needed = (line for name in todo for line in importlib.metadata.requires(name) or () if "extra ==" not in line)
        todo = {name for name in map(name_of, needed) if is_installed(name)} - found
    return found


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def bare_clusterddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with what is declared for everybody: links to the distributions of this one."""
    directory = tmp_path_factory.mktemp("submitting")
    venv.create(directory, symlinks=True)
    place = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    for name in with_what_they_need(declared()[0]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}:
            if not (place / top).exists():
                (place / top).symlink_to(Path(str(distribution.locate_file(top))))
    (place / "clusterddp").symlink_to(ROOT / "clusterddp")
    return directory / "bin" / "python"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory to submit from, with a run on a host that cannot be reached."""
    git(tmp_path, "init")
    (tmp_path / "train.py").write_text("")
    run = RunDir(make_run(plan_text(SSH_SPEC, tmp_path), dict(os.environ)).run_dir)
    write_run(run, dataclasses.replace(read_run(run), job_id="7@host.invalid", submitter={}))
    (tmp_path / "job.yaml").write_text(LOCAL_SPEC)
    (tmp_path / "trainer.yaml").write_text("name: a\ntrain: {dataset: shapes}\n")
    (tmp_path / "hostfile").write_text("a slots=4\n")
    return run.path


def test_every_command_works_where_only_what_is_declared_is_installed(bare_clusterddp: Path, place: Path) -> None:
    assert set(ARGUMENTS) == set(_COMMANDS)
    environ = {name: text for name, text in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    environ |= {"CLUSTERDDP_RUNS": str(place.parent), "CLUSTERDDP_DEBUG": "1"}
    said: dict[str, str] = {}
    for command, text in sorted(ARGUMENTS.items(), key=lambda item: item[0] in {"cancel", "gc"}):
        argv = [str(bare_clusterddp), "-m", "clusterddp", *text.replace("RUN", place.name).split()]
        done = subprocess.run(
            argv, cwd=place.parent.parent, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        said[command] = done.stderr
    missing = {command: text for command, text in said.items() if "internal:" in text or "No module named" in text}
    assert missing == {}
    assert 'pip install "clusterddp[train]"' in said["worker"]
    assert "host.invalid" in (place / "launcher" / "hosts.json").read_text()


def test_a_lock_keeps_another_process_from_a_mirror(place: Path) -> None:
    from clusterddp.places.ssh.host_run import locked

    run = RunDir(place)
    with locked(run, "fetch") as first, locked(run, "fetch", 0.1) as second, locked(run, "hosts") as other:
        assert (first, second, other) == (True, False, True)
    with locked(run, "fetch") as again:
        assert again
