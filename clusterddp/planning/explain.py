"""The origin of each variable of a rank under each launcher, as `clusterddp explain` shows it.

Variables that another launcher has set stay as they are; the table is about those that it has not set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterddp.ranks.environment import ERROR_FILE, USERS, RankPlace, RankSettings, rank_variables
from clusterddp.ranks.launched_sources import NAMES, Key, Launcher

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec

_PLACE: dict[str, Key] = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_world_size",
    "GROUP_RANK": "node_rank",
    "NODE_RANK": "node_rank",
    "GROUP_WORLD_SIZE": "num_nodes",
    "ROLE_RANK": "rank",
    "ROLE_WORLD_SIZE": "world_size",
}
_OF_TORCHRUN = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"}
    | {"ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", ERROR_FILE}
    | {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"}
)
"""The variables that torchrun sets for its workers. Source: torch 2.13, local_elastic_agent.py, _start_workers."""
_COUNTED = "counted when all ranks have met"
_WALK = "the first free port of a walk from"
_MASTER: dict[str, tuple[str, str]] = {
    "srun": ("the first host of SLURM_STEP_NODELIST", f"{_WALK} job and step"),
    "openmpi": (
        "loopback on one host, else that of mpirun's hosts where rank 0 listens",
        f"{_WALK} PMIX_NAMESPACE",
    ),
    "mpich": (
        "loopback on one host, else rank 0's over PMI",
        f"{_WALK} PMI's kvsname",
    ),
    "kubeflow": ("MASTER_ADDR or PET_MASTER_ADDR", "MASTER_PORT or PET_MASTER_PORT, else 29500"),
    "hand": ("MASTER_ADDR", "MASTER_PORT, else 29500"),
    "local": ("loopback", "network.master_port, else a free one that node 0's supervisor holds"),
    "ssh": ("node 0's address on the network that reaches all hosts", "as for local"),
    "slurm": (
        "the address of the job's first node that the others reach",
        f"network.master_port, else {_WALK} the job's id",
    ),
}
COLUMNS: tuple[tuple[str, Launcher | None], ...] = (
    ("local", None),
    ("ssh", None),
    ("slurm", None),
    ("torchrun", "torchrun"),
    ("srun", "srun"),
    ("mpirun (Open MPI)", "openmpi"),
    ("mpirun (MPICH)", "mpich"),
    ("Kubeflow", "kubeflow"),
    ("by hand", "hand"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The origin of a variable under one launcher."""

    launcher: str
    variable: str
    origin: str


def explain(job: JobSpec) -> list[Origin]:
    """Return the origin of each variable of a rank, for each launcher."""
    place = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=2, local_world_size=1, num_nodes=2)
    settings = RankSettings(
        place=place,
        run="RUN",
        attempt=0,
        restarts=job.restarts,
        master_addr="",
        master_port="",
        threads=1,
        gpus=(),
        interface="eth0",
        backend="gloo",
        run_dir="RUN_DIR",
        token="",
        user=job.env,
        on_cpu=True,
    )
    planned = {name: variable.origin for name, variable in rank_variables(settings).items()}
    return [
        Origin(launcher=title, variable=name, origin=_origin(name, origin, title, launcher))
        for title, launcher in COLUMNS
        for name, origin in planned.items()
    ]


def _origin(name: str, planned: str, title: str, launcher: Launcher | None) -> str:
    if planned == USERS:
        return USERS
    if name in {"MASTER_ADDR", "MASTER_PORT"} and launcher != "torchrun":
        return _MASTER[launcher or title][name == "MASTER_PORT"]
    if launcher is None or name.startswith("CLUSTERDDP_"):
        return planned
    if launcher == "torchrun" and name in _OF_TORCHRUN:
        return "torchrun"
    if name not in _PLACE:
        return _planned_here(name, planned)
    names = NAMES[launcher].get(_PLACE[name], ())
    counted = () if _PLACE[name] in {"rank", "world_size"} or launcher in {"torchrun", "srun"} else (_COUNTED,)
    return ", else ".join((*names, *counted))


def _planned_here(name: str, planned: str) -> str:
    return {
        "OMP_NUM_THREADS": "resources.cpus_per_task, else a share of the cores",
        "CUDA_VISIBLE_DEVICES": "empty where ranks compute on the CPU",
        "GLOO_SOCKET_IFNAME": "the interface of the route to rank 0",
        "NCCL_SOCKET_IFNAME": "the fastest network of all hosts, else the interface of the route to rank 0",
        "ROLE_NAME": "always default",
    }.get(name, planned)
