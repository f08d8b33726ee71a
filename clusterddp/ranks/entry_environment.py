"""The variables that an entry gets in addition to the rank's own.

They follow from the rank's variables and the plan, so the start-up of the rank sets them, and a launcher (supervisor,
torchrun, mpirun) need not know them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

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

    `spawns`: the ranks that the entry itself starts on each node, where it does.
    """
    directories = {DATA_DIR: data_dir, OUTPUT_DIR: output_dir, CODE_DIR: code_dir}
    changes: dict[str, str | None] = {INIT_METHOD: init_method(init, environ)}
    changes |= {name: value for name, value in directories.items() if value is not None}
    return changes | (_for_owner_of_ranks(environ, spawns, counts) if spawns else {})


def _for_owner_of_ranks(environ: Mapping[str, str], spawns: Sequence[int], counts: Counts) -> dict[str, str | None]:
    """Compute the variables of a program that is started once per machine and starts its ranks there itself.

    RANK and WORLD_SIZE count machines, as in pytorch/examples' imagenet and Kubeflow, or processes (RANK is then that
    of the first one here). torchrun reads PET_*.
    """
    node_rank = int(environ.get("NODE_RANK") or environ.get("GROUP_RANK") or environ.get("RANK") or 0)
    here, before = spawns[node_rank], sum(spawns[:node_rank])
    rank, world_size = (node_rank, len(spawns)) if counts == "machines" else (before, sum(spawns))
    return dict.fromkeys(_OF_TORCHRUNS_RANKS) | {
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
