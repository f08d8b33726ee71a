"""The environment of a rank: the names of its variables, and what its entry and commands beside it get.

An entry gets more variables, which follow from the rank's variables and the plan: the start-up of the rank sets them,
so a launcher (supervisor, torchrun, mpirun) need not know them. In its arguments `--rank {rank}` becomes each rank's
own number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


def spell_ranks(ranks: Iterable[int]) -> str:
    """Write ranks: `rank 3`, `ranks 0-7`, `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


COOKIE = "CLUSTERDDP_COOKIE"
"""Names the run (its token) and the role of a process. All descendants inherit it; cleanup finds processes by it."""
STOP_FILE = "CLUSTERDDP_STOP_FILE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SUPERVISOR_PID = "CLUSTERDDP_SUPERVISOR_PID"
"""The process with whose death a starting rank ends; removed before the user's program runs."""
STEP = "CLUSTERDDP_STEP"
"""Of a batch script: the step that the rank belongs to."""
DEVICE = "CLUSTERDDP_DEVICE"
"""The device of the trainer's ranks: cuda or cpu."""
GPU = "CLUSTERDDP_GPU"
"""The index of the rank's GPU among those that it sees, where that is not LOCAL_RANK."""
PRELOAD = "CLUSTERDDP_PRELOAD"
"""The modules, with commas between, that a starting rank imports first; removed before the user's program runs."""
LISTENER_FD = "CLUSTERDDP_LISTENER_FD"
"""The inherited descriptor on which rank 0 listens at the master port; removed before the user's program runs."""
ALONE = "CLUSTERDDP_ALONE"
"""Set for a rank without a supervisor: it records its own end."""
EXEC_PREFIX = "CLUSTERDDP_EXEC_"
"""Begins the names under which a command beside a rank reads the variables that would make it a rank."""
USERS = "env in the spec"
"""The origin of the user's own variables."""


NCCL_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
"""Variables that make NCCL write its log; none is set where the user has set one of them."""
SETTINGS = frozenset(
    {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "ACCELERATE_USE_CPU", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    | set(NCCL_VARIABLES)
)
"""Variables that clusterddp chooses for ranks unless the setup lines set them."""
PLACE_VARIABLES = frozenset(
    {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
        "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    }
)  # fmt: skip
"""The place of a rank and its rendezvous, by torchrun's names."""
OF_THE_ATTEMPT = PLACE_VARIABLES | {"CLUSTERDDP_ATTEMPT", STOP_FILE, "TORCHELASTIC_RESTART_COUNT"}
"""What differs between the attempts of a run."""
_OF_THE_RUN = frozenset({"CLUSTERDDP_RUN_DIR", "CLUSTERDDP_ATTEMPT", "CLUSTERDDP_INIT_METHOD", STOP_FILE, STEP})
_OF_THE_START = frozenset({SUPERVISOR_PID, PRELOAD, LISTENER_FD, ALONE})
_OF_LAUNCHERS = ("SLURM_", "SLURMD_", "SPANK_", "PMI_", "PMIX_", "OMPI_", "MV2_", "MPI_LOCAL", "PALS_")


@dataclass(frozen=True, slots=True)
class Variable:
    """The value of one variable and its origin, as text for the user."""

    value: str
    origin: str


def cookie(token: str, role: str) -> str:
    """Return the value of CLUSTERDDP_COOKIE for a role: `s2` supervisor, `g2` guard, `n2` ranks of node 2, `task`."""
    return f"{token}.{role}"


def rank_cookies(token: str, *node_ranks: int) -> tuple[str, ...]:
    """Return the cookies of the ranks of nodes (`n2`) and of commands beside them (`x2`)."""
    return tuple(cookie(token, f"{role}{node_rank}") for node_rank in node_ranks for role in ("n", "x"))


def exec_environment(environ: Mapping[str, str], place: Mapping[str, int], token: str) -> dict[str, str]:
    """Compute the environment of a command beside a rank from the rank's own and its place.

    The variables by which a program takes itself for a rank get names that begin with `EXEC_PREFIX`: the command joins
    no rendezvous, writes no metrics of the run, and overwrites no error file or log of the rank. Those of other
    launchers (SLURM_PROCID, PMI_RANK) are removed for the same reason. The cookie has the role `x2`.
    """
    renamed = {name: value for name, value in environ.items() if name in PLACE_VARIABLES | _OF_THE_RUN}
    renamed |= {name: str(value) for name, value in place.items()}
    run_dir = environ.get("CLUSTERDDP_RUN_DIR")
    logs_nccl = run_dir is not None and environ.get("NCCL_DEBUG_FILE", "").startswith(run_dir)  # into a file of the run
    gone = {*renamed, *_OF_THE_START, *(NCCL_VARIABLES if logs_nccl else ())}
    kept = {
        name: value
        for name, value in environ.items()
        if name not in gone and not name.startswith(("TORCHELASTIC_", *_OF_LAUNCHERS))
    }
    named = {f"{EXEC_PREFIX}{name.removeprefix('CLUSTERDDP_')}": value for name, value in renamed.items()}
    return kept | named | {COOKIE: cookie(token, f"x{place['NODE_RANK']}")}


def inherited_environment() -> dict[str, str]:
    """Return the environment that child processes inherit: this process's, without the variables of one process."""
    from clusterddp.system.own_directory import SAFE_DIRECTORIES  # which a rank, that imports little, does not need

    kept = (name for name in os.environ if name == SAFE_DIRECTORIES or not name.startswith("CLUSTERDDP_"))
    return {name: os.environ[name] for name in kept}


Counts = Literal["processes", "machines"]
Init = Literal["env", "tcp", "file"]

INIT_METHOD = "CLUSTERDDP_INIT_METHOD"
DATA_DIR = "CLUSTERDDP_DATA_DIR"
OUTPUT_DIR = "CLUSTERDDP_OUTPUT_DIR"
CODE_DIR = "CLUSTERDDP_CODE_DIR"
RENDEZVOUS_FILE = "rendezvous"
"""The file of torch's rendezvous with `init: file`; it is in the attempt's directory, so each attempt has a new one."""
ENVIRONMENT_KEYS = ("init", "spawns", "counts", "data_dir", "output_dir", "code_dir")
"""The keys of a plan's entry that `entry_environment` takes."""
_OF_TORCHRUNS_RANKS = (
    "LOCAL_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "CLUSTERDDP_GPU",
)  # fmt: skip
"""Variables by which a program detects that torchrun started it as a rank, so that it starts no ranks itself."""


def init_method(init: Init, environ: Mapping[str, str]) -> str:
    """Return the init_method for `torch.distributed.init_process_group`."""
    if init == "env":
        return "env://"
    if init == "file":
        attempt = environ.get("CLUSTERDDP_ATTEMPT", "0")
        return f"file://{environ.get('CLUSTERDDP_RUN_DIR', '')}/attempts/{attempt}/{RENDEZVOUS_FILE}"
    host = environ.get("MASTER_ADDR", "")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{environ.get('MASTER_PORT', '')}"


def entry_environment(
    environ: Mapping[str, str],
    *,
    init: Init,
    spawns: Sequence[int] = (),
    counts: Counts = "processes",
    data_dir: str | None = None,
    output_dir: str | None = None,
    code_dir: str | None = None,
) -> dict[str, str | None]:
    """Compute how a rank's environment changes for its entry: name -> value; None removes the variable.

    `spawns`: the ranks that the entry itself starts on each node, where it does. RANK and WORLD_SIZE then count
    machines, as in pytorch/examples' imagenet and Kubeflow, or processes (RANK is that of the first one here).
    torchrun reads PET_*.
    """
    directories = {DATA_DIR: data_dir, OUTPUT_DIR: output_dir, CODE_DIR: code_dir}
    changes: dict[str, str | None] = {INIT_METHOD: init_method(init, environ)}
    changes |= {name: value for name, value in directories.items() if value is not None}
    if not spawns:
        return changes
    node_rank = int(environ.get("NODE_RANK") or environ.get("GROUP_RANK") or environ.get("RANK") or 0)
    here, before = spawns[node_rank], sum(spawns[:node_rank])
    rank, world_size = (node_rank, len(spawns)) if counts == "machines" else (before, sum(spawns))
    changes |= dict.fromkeys(_OF_TORCHRUNS_RANKS)
    return changes | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(here),
        "NODE_RANK": str(node_rank),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(len(spawns)),
        "PET_NODE_RANK": str(node_rank),
        "PET_NNODES": str(len(spawns)),
        "PET_NPROC_PER_NODE": str(here),
        "PET_MASTER_ADDR": environ.get("MASTER_ADDR", ""),
        "PET_MASTER_PORT": str(environ.get("MASTER_PORT", "")),
    }


VARIABLES = {
    "init_method": (INIT_METHOD,),
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "procs_per_node": ("LOCAL_WORLD_SIZE",),
    "node_rank": ("NODE_RANK", "GROUP_RANK"),
    "num_nodes": ("GROUP_WORLD_SIZE",),
    "master_addr": ("MASTER_ADDR",),
    "master_port": ("MASTER_PORT",),
    "data_dir": (DATA_DIR,),
    "output_dir": (OUTPUT_DIR,),
    "code_dir": (CODE_DIR,),
    "run_dir": ("CLUSTERDDP_RUN_DIR",),
}
"""Name -> the variable that has the value; where there are two, the first that is set."""
_PATTERN = re.compile(r"\{\{([a-z][a-z0-9_]*)\}\}|\{([a-z][a-z0-9_]*)\}")
"""`{{name}}` stands for the text `{name}`; other text with braces (JSON, `{}`, `${HOME}`) is not changed."""


def find_placeholders(text: str) -> Iterator[str]:
    """Yield the names of the placeholders in `text`, known or not."""
    for match in _PATTERN.finditer(text):
        if match[2] is not None and text[match.start() - 1 : match.start()] != "$":
            yield match[2]


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders by their values; one without a value stays."""

    def value(match: re.Match[str]) -> str:
        if match[1] is not None:
            return "{" + match[1] + "}"
        if text[match.start() - 1 : match.start()] == "$":
            return match[0]
        return values.get(match[2], match[0])

    return _PATTERN.sub(value, text) if "{" in text else text


def placeholder_values(environ: Mapping[str, str], counts: Counts = "processes") -> dict[str, str]:
    """Return the value of every placeholder for the rank with this environment.

    `counts`: what {rank} and {world_size} count.
    """
    machines = {"rank": VARIABLES["node_rank"], "world_size": VARIABLES["num_nodes"]} if counts == "machines" else {}
    chosen = VARIABLES | machines
    return {name: next((environ[each] for each in names if each in environ), "") for name, names in chosen.items()}
