"""The variables that each launcher sets for a rank: which variable holds which number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clusterddp.errors import UsageError
from clusterddp.ranks.slurm_step import expand_counts

Key = Literal["rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"]
Launcher = Literal["torchrun", "openmpi", "mpich", "srun", "pmi", "pmix", "kubeflow", "hand"]

NAMES: dict[Launcher, dict[Key, tuple[str, ...]]] = {
    "torchrun": {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",),
        "num_nodes": ("GROUP_WORLD_SIZE",),
    },
    "openmpi": {
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        # OMPI_COMM_WORLD_NODE_RANK is no node's rank: it counts the processes of a node over several jobs.
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
    "mpich": {
        "rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID",),
        "local_world_size": ("MPI_LOCALNRANKS",),
    },
    "srun": {
        "rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "local_rank": ("SLURM_LOCALID",),
        "local_world_size": ("SLURM_STEP_TASKS_PER_NODE",),
        "node_rank": ("SLURM_NODEID",),
        "num_nodes": ("SLURM_STEP_NUM_NODES",),
    },
    "pmi": {"rank": ("PMI_RANK",), "world_size": ("PMI_SIZE",)},
    "pmix": {"rank": ("PMIX_RANK",)},
    "kubeflow": {"rank": ("RANK", "PET_NODE_RANK"), "world_size": ("WORLD_SIZE", "PET_NNODES")},
    "hand": {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK", "NODE_RANK"),
        "num_nodes": ("GROUP_WORLD_SIZE",),
    },
}
"""For each number the variables that hold it; the first that is set counts."""

_MAX_ORDINARY_STEP = 0xFFFFFFF0
"""Step ids above this one are an interactive shell, a batch script and the like, not tasks of a step.

Slurm 26.05 prints such an id as a signed number: SLURM_STEP_ID is -5 in a batch script.
Source: slurm.h, SLURM_MAX_NORMAL_STEP_ID.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number, and the variable that holds it."""

    key: Key
    variable: str
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The numbers in the variables of one launcher."""

    launcher: Launcher
    numbers: tuple[Number, ...]

    def find(self, key: Key) -> Number | None:
        return next((number for number in self.numbers if number.key == key), None)


def read_launcher(environ: Mapping[str, str]) -> Source | None:
    """Read the variables of the launcher that started this process; not of one that started that launcher.

    Raises: UsageError: a variable holds no number.
    """
    launcher = _find_launcher(environ)
    return read_source(launcher, environ) if launcher else None


def read_source(launcher: Launcher, environ: Mapping[str, str]) -> Source:
    """Read the variables of one launcher, as far as they are set.

    Raises: UsageError: a variable holds no number.
    """
    numbers = []
    for key, names in NAMES[launcher].items():
        found = [name for name in names if environ.get(name)]
        # Slurm's names mean different things: the step's tasks, the job's. Elsewhere two names mean the same number.
        for name in found if launcher in {"hand", "kubeflow"} else found[:1]:
            numbers.append(Number(key=key, variable=name, value=_read(environ, name)))
    return Source(launcher=launcher, numbers=tuple(numbers))


def sources_that_must_agree(launcher: Launcher) -> tuple[Launcher, ...]:
    """Return the other sources that hold the same numbers as this launcher's variables, and must agree with them.

    Those of an outer launcher count something else: SLURM_* around torchrun or mpirun, mpirun around torchrun.
    """
    return {
        "torchrun": (),
        "openmpi": ("pmix", "hand"),
        "mpich": ("hand",),
        "srun": ("pmi", "pmix", "hand"),  # Slurm's own plugins for MPI set these
        "pmi": ("hand",),
        "pmix": ("hand",),
        "kubeflow": ("kubeflow", "hand"),
        "hand": ("hand",),
    }[launcher]  # type: ignore[return-value]


def is_step_task(environ: Mapping[str, str]) -> bool:
    """Return whether this process or an ancestor of it is a task of a step that srun started."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    ordinary = step.isascii() and step.isdigit() and len(step) <= 10 and int(step) <= _MAX_ORDINARY_STEP
    return ordinary and bool(environ.get("SLURM_PROCID"))


def _find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Find the launcher that started this process: of several the innermost, which is listed first here."""
    signs: tuple[tuple[Launcher, bool], ...] = (
        ("torchrun", bool(environ.get("TORCHELASTIC_RUN_ID") and environ.get("RANK"))),
        ("openmpi", bool(environ.get("OMPI_COMM_WORLD_RANK"))),
        ("mpich", bool(environ.get("PMI_RANK") and environ.get("MPI_LOCALRANKID"))),  # Hydra: MPICH's, Intel's mpirun
        ("srun", is_step_task(environ)),
        ("pmi", bool(environ.get("PMI_RANK"))),
        ("pmix", bool(environ.get("PMIX_RANK"))),
        ("kubeflow", bool(environ.get("PET_NODE_RANK") or environ.get("PET_NNODES"))),
        ("hand", bool(environ.get("RANK") or environ.get("WORLD_SIZE"))),
    )
    return next((launcher for launcher, is_there in signs if is_there), None)


def _read(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if name == "SLURM_STEP_TASKS_PER_NODE":
        if not environ.get("SLURM_NODEID"):
            raise UsageError(f"{name} is set, and SLURM_NODEID is not")
        counts, node = expand_counts(text), _read(environ, "SLURM_NODEID")
        if node >= len(counts):
            raise UsageError(f"SLURM_NODEID is {node}, and {name} ({text}) has {len(counts)} nodes")
        return counts[node]
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UsageError(f"{name} is {environ[name]!r}, a number is expected")
    return int(text)
