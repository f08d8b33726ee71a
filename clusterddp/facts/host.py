"""The facts of a host of a run: its machine, its Python, and what it does with a run that nobody is logged in for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clusterddp.facts.login import Logout, read_logout
from clusterddp.facts.machine import Machine, read_machine
from clusterddp.facts.packages import Packages, ask_packages
from clusterddp.system.devices import read_driver

DataState = Literal["there", "empty", "missing", "not readable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The directory of the data set on a host."""

    path: str
    state: DataState


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """A host at one moment."""

    machine: Machine
    """Its directory is the one of all that is ours there."""
    packages: Packages
    logout: Logout
    no_exec: bool
    """Nothing that lies in our directory can be started as a program."""
    driver: str | None
    """NVIDIA's; None: not asked for, or there is none."""
    data: Data | None
    """None: the run names no data."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_host(
    root: Path, environ: Mapping[str, str], *, executable: str, data_dir: Path | None, with_driver: bool
) -> HostFacts:
    """Look at this host; `root`: our directory, `environ`: that of the ranks' Python, with this package on its path."""
    return HostFacts(
        machine=read_machine(root, environ, brief=True),
        packages=ask_packages(executable, environ, root),
        logout=read_logout(),
        no_exec=bool(os.statvfs(root).f_flag & os.ST_NOEXEC),
        driver=read_driver(environ) if with_driver else None,
        data=read_data(data_dir) if data_dir else None,
    )


def read_data(path: Path) -> Data:
    """Look whether something can be read in a directory."""
    state: DataState = "there"
    try:
        with os.scandir(path) as entries:
            state = "there" if any(True for _ in entries) else "empty"
    except FileNotFoundError:
        state = "missing"
    except OSError:
        state = "not readable"
    return Data(path=str(path), state=state)
