"""The surroundings of a run (`env.json`): packages, git commit and GPUs at the time of the submit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.run.code import describe_commit
from clusterddp.run.gang import RankPython
from clusterddp.system.devices import ask_nvidia_smi
from clusterddp.system.torch_files import find_package, read_torch_values

_SMI_FIELDS = ("index", "name", "uuid", "memory.total", "driver_version")


def capture_surroundings(working_dir: Path, environ: Mapping[str, str], ranks: RankPython) -> dict[str, Any]:
    """Collect what can be found out without importing torch, and no values of environment variables.

    `ranks`: their Python, whose version and packages count where they are known.
    """
    packages = installed_packages(ranks.packages or None)
    torch: dict[str, str | None] = {**read_torch_values(find_package("torch"))}
    if ranks.version:
        torch = {"__version__": ranks.torch, "cuda": ranks.cuda}
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": {
            "version": ranks.version or platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": ranks.executable or sys.executable,
        },
        "torch": {"version": torch.get("__version__", packages.get("torch")), "cuda": torch.get("cuda")},
        "gpus": describe_gpus(environ),
        "git": describe_commit(working_dir, environ),
        "working_dir": str(working_dir),
        "packages": packages,
    }


def installed_packages(directories: Sequence[str] | None = None) -> dict[str, str]:
    """List the installed distributions with their versions; as for imports, the first one on the path counts.

    `directories`: those of another Python's packages; None: `sys.path`.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=list(directories or sys.path)):
        # A partly removed distribution has no metadata, so no name.
        name = distribution.metadata["Name"] if distribution.metadata else None
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return dict(sorted(found.items()))


def describe_gpus(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Describe the NVIDIA GPUs of this machine by nvidia-smi; none if it is not installed or fails."""
    answer = ask_nvidia_smi(environ, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader")
    rows = [[value.strip() for value in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [dict(zip(_SMI_FIELDS, row, strict=True)) for row in rows if len(row) == len(_SMI_FIELDS)]
