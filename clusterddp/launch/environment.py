"""What a run inherits from the environment of whoever submits it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

from clusterddp.dist.environment import COOKIE

_FOREIGN_PREFIXES = ("CLUSTERDDP_", "SUBMITIT_", "SLURM_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_")
_RANK_VARIABLES = frozenset(
    {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
        "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    }
)  # fmt: skip


def process_environment(cookie: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for one of a run's own processes.

    What another launcher left there would lie to the ranks: somebody submits from within a Slurm job, or from a rank.
    A relative PYTHONPATH would mean another directory, for the processes start elsewhere.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in _RANK_VARIABLES
    }
    paths = [str(Path(path).absolute()) for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path]
    if not _is_installed():
        paths.append(str(Path(__file__).absolute().parents[2]))
    if paths:
        kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return kept | {COOKIE: cookie}


def _is_installed() -> bool:
    """Say whether a new process finds this package wherever it starts; from a bare checkout it does not."""
    try:
        importlib.metadata.distribution("clusterddp")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
