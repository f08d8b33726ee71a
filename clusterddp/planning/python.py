"""Which Python runs the ranks: the one that the spec names, else that of the activated environment, else our own."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clusterddp.errors import PreflightError, UsageError
from clusterddp.facts.torch import Torch, ask_python, install_command, read_torch
from clusterddp.run.call import PYTHON, different_python
from clusterddp.run.gang import RankPython, is_call

if TYPE_CHECKING:
    from clusterddp.planning.placement import Request
    from clusterddp.spec.model import JobSpec

_Kind = Literal["", "venv", "conda"]
_OWN = "clusterddp's own"
_SUBMITS = "it submits the function"
_CONDA_HOMES = (
    *("~/miniforge3", "~/mambaforge", "~/miniconda3", "~/anaconda3", "~/micromamba", "~/.local/share/mamba"),
    *("/opt/conda", "/opt/miniforge3", "/opt/miniconda3", "/opt/anaconda3"),
)


def choose_python(job: JobSpec, request: Request) -> RankPython:
    """Choose the Python of the ranks, with what is known of it.

    Raises: UsageError: the spec names none that exists. PreflightError: the chosen one cannot run ranks.
    """
    key = next((name for name in ("python", "venv", "conda") if getattr(job, name)), None)
    if request.python is not None:
        return request.python
    if request.placed is not None or (job.entry and job.entry.batch_script):
        return RankPython()  # the ranks are started by others
    if job.launcher == "ssh" or job.container:
        why, by_setup = f"{key}: in the spec" if key else "the default", _may_choose(job) and not key
        return RankPython(why=why, is_named=key is not None, by_setup=by_setup)
    if key is not None:
        return _named(job, key, request)
    try:
        found = _by_default(job, request)
    except PreflightError:
        if not _may_choose(job):
            raise
        found = RankPython(executable=sys.executable, why=_OWN)
    return dataclasses.replace(found, by_setup=_may_choose(job) and bool(job.entry) and found.why != _SUBMITS)


def _may_choose(job: JobSpec) -> bool:
    """Return whether setup lines may put the ranks' Python first on PATH; of a command they change PATH alone."""
    return bool(job.setup) and not (job.entry and job.entry.command)


def _by_default(job: JobSpec, request: Request) -> RankPython:
    """Return the Python of a spec that names none."""
    activated = find_activated(request.environ)
    is_own = activated is None or activated.resolve() == Path(sys.prefix).resolve()
    function, command = (job.entry.function or "", job.entry.command) if job.entry else ("", None)
    if activated is not None and not (is_own or job.entry is None or is_call(function)):
        found = RankPython(
            executable=str(activated / "bin" / "python"),
            prefix=str(activated),
            kind=kind_of(activated),
            why="activated where you submit",
        )
        what = f"the activated environment {found.name} ({activated})"
        return _checked(found, job, request, what, f"python: {sys.executable} takes {_OWN}")
    if command:
        return RankPython(why="the one that the command finds on PATH")
    why = _SUBMITS if is_call(function) else _OWN
    own = RankPython(executable=sys.executable if job.entry else "", why=why)
    return _with_facts(own, read_torch())


def _named(job: JobSpec, key: str, request: Request) -> RankPython:
    """Return the Python that a key of the spec names."""
    text, environ = str(getattr(job, key)), request.environ
    if key == "python":
        on_path = None if os.sep in text else shutil.which(text, path=environ.get("PATH"))
        place = Path(on_path) if on_path else request.working_dir / Path(text).expanduser()
        missing = f"python: {text}: " + ("no such program" if os.sep in text else "no such program on PATH")
    else:
        prefix = request.working_dir / Path(text).expanduser() if key == "venv" else find_conda(text, environ)
        place = prefix / "bin" / "python"
        missing = f"{key}: {text}: found no {place}"
    if not _is_program(place):
        raise UsageError(missing, hint="a path is relative to the directory of the submit")
    executable = Path(os.path.normpath(place))
    kind = kind_of(executable.parents[1])
    found = RankPython(
        executable=str(executable),
        prefix=str(executable.parents[1]) if kind else "",
        kind=kind,
        why=f"{key}: in the spec",
        is_named=True,
    )
    return _checked(found, job, request, f"{key}: {text}")


def find_conda(name: str, environ: Mapping[str, str]) -> Path:
    """Find the directory of a conda environment by its name, or by its path.

    Raises: UsageError: there is none.
    """
    if os.sep in name:
        return Path(name).expanduser()
    listed = Path("~/.conda/environments.txt").expanduser()
    lines = listed.read_text(errors="replace").splitlines() if listed.is_file() else []
    homes = list(dict.fromkeys(_conda_homes(environ)))
    places = [home if name == "base" else home / "envs" / name for home in homes]
    for place in (*places, *(Path(line) for line in lines if Path(line).name == name)):
        if _is_program(place / "bin" / "python"):
            return place
    raise UsageError(
        f"conda: {name}: found no environment of this name with a Python in {', '.join(map(str, homes))}",
        hint="`conda env list` shows the directories; conda: DIRECTORY names one for certain",
    )


def _conda_homes(environ: Mapping[str, str]) -> Iterator[Path]:
    """Name the directories that conda or micromamba may be installed in, or keep environments in."""
    found = [shutil.which(name, path=environ.get("PATH")) for name in ("conda", "mamba")]
    yield from (Path(program).resolve().parents[1] for program in (environ.get("CONDA_EXE"), *found) if program)
    active = Path(environ.get("CONDA_PREFIX") or "/")
    yield active.parents[1] if active.parent.name == "envs" else active
    yield Path(environ.get("MAMBA_ROOT_PREFIX") or "~/.local/share/mamba").expanduser()
    yield from (home for home in (Path(name).expanduser() for name in _CONDA_HOMES) if home.is_dir())


def find_activated(environ: Mapping[str, str]) -> Path | None:
    """Find the environment that is activated: its Python is that of `python train.py`."""
    paths = [os.path.normpath(path) for path in environ.get("PATH", "").split(os.pathsep) if path]
    prefixes = [Path(environ[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    active = [each for each in prefixes if str(each / "bin") in paths and _is_program(each / "bin" / "python")]
    return min(active, key=lambda prefix: paths.index(str(prefix / "bin")), default=None)


def kind_of(prefix: Path) -> _Kind:
    """Return the kind of an environment, which is also the key of a spec."""
    if (prefix / "pyvenv.cfg").exists():
        return "venv"
    return "conda" if (prefix / "conda-meta").is_dir() else ""


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _checked(found: RankPython, job: JobSpec, request: Request, what: str, instead: str = "") -> RankPython:
    """Return a Python with what is known of it.

    Raises: PreflightError: it cannot run ranks. A command may be a program of any kind, which needs no torch.
    """
    torch = read_torch() if found.executable == sys.executable else _ask(found.executable, request.environ)
    function, command = (job.entry.function or "", job.entry.command) if job.entry else ("", None)
    problem, fix = "", "python: PATH, venv: DIRECTORY or conda: NAME names another"
    if command:
        # The rank itself, which starts the command, may be ours.
        found = dataclasses.replace(found, executable="") if torch.python_error else found
    elif torch.python_error is not None:
        problem = torch.python_error
    elif torch.version is None:
        problem, fix = "it has no torch", install_command(torch, None)
    elif is_call(function) and torch.python and not torch.python.startswith(f"{PYTHON}."):
        problem = different_python(PYTHON, torch.python)
    if problem:
        raise PreflightError(f"{what} cannot run the ranks: {problem}", hint=f"{fix}; {instead}" if instead else fix)
    return _with_facts(found, torch)


def _with_facts(python: RankPython, torch: Torch) -> RankPython:
    return dataclasses.replace(
        python, version=torch.python, torch=torch.version, cuda=torch.cuda, packages=torch.packages
    )


def _ask(executable: str, environ: Mapping[str, str]) -> Torch:
    """Ask a Python once, for all runs that are planned together; one that cannot run ranks may be mended meanwhile."""
    found = _ask_once(executable, tuple(sorted(environ.items())))
    if found.version is None:
        _ask_once.cache_clear()
    return found


@functools.lru_cache(maxsize=16)
def _ask_once(executable: str, environ: tuple[tuple[str, str], ...]) -> Torch:
    return ask_python(executable, dict(environ))
