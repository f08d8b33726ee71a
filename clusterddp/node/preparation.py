"""What a node does before its ranks start: it prepares their environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import clusterddp
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang, RankPython


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """How the ranks of a node are started."""

    python: str | None = None
    """Their Python; None: that of the process that starts them."""
    changes: Mapping[str, str | None] = field(default_factory=dict)
    """What differs from the environment that they would inherit; None: the variable is removed."""

    def applied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with the changes."""
        kept = {name: value for name, value in environ.items() if name not in self.changes}
        return kept | {name: value for name, value in self.changes.items() if value is not None}


def prepare(run: RunDir, gang: Gang, environ: Mapping[str, str]) -> Prepared:
    """Prepare the start of ranks that would inherit `environ`. Raises: OSError."""
    python, changes = gang.python, _activation(gang.python, environ)
    is_own = python.executable in ("", sys.executable)
    if not is_own or (gang.entry.kind == "command" and (python.prefix or python.is_named)):
        # It may lack this package, and gets no other one of our Python.
        paths = environ.get("PYTHONPATH", "").split(os.pathsep)
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, str(_link_package(run))]))
    return Prepared(python=None if is_own else python.executable, changes=changes)


def _activation(python: RankPython, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return what activating the environment changes; one that was activated at the submit is so already."""
    if not python.is_named or not (python.prefix or python.executable):
        return {}
    programs = f"{python.prefix}/bin" if python.prefix else str(Path(python.executable).parent)
    values = {
        "VIRTUAL_ENV": python.prefix if python.kind == "venv" else None,
        "CONDA_PREFIX": python.prefix if python.kind == "conda" else None,
        "CONDA_DEFAULT_ENV": python.name if python.kind == "conda" else None,
        "PYTHONHOME": None,
    }
    changes = {name: value for name, value in values.items() if value is not None or name in environ}
    return changes | {"PATH": os.pathsep.join(filter(None, (programs, environ.get("PATH"))))}


def _link_package(run: RunDir) -> Path:
    """Return a directory of the run that has a link to this package, and nothing else that can be imported."""
    directory, package = run.launcher_dir / "import", Path(clusterddp.__file__).absolute().parent
    directory.mkdir(mode=0o700, exist_ok=True)
    link = directory / "clusterddp"
    if not (link.is_symlink() and link.readlink() == package):
        temporary = directory / f".{os.uname().nodename}.{os.getpid()}"
        temporary.symlink_to(package)
        with contextlib.suppress(FileNotFoundError):
            temporary.replace(link)
    return directory
