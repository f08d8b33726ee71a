"""What the environment says of this process: which launcher started it, which rank it is, and where the ranks meet.

docs/launchers.md has the table of the launchers and their variables.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from clusterddp.errors import UsageError
from clusterddp.network.hostlist import MAX_HOSTS, expand
from clusterddp.network.interface import LOOPBACK_ADDRESS
from clusterddp.ranks.environment import Variable
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
}
NAMES["hand"] = NAMES["torchrun"] | {"node_rank": ("GROUP_RANK", "NODE_RANK")}
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


_MUST_AGREE: dict[Launcher, tuple[Launcher, ...]] = {
    "openmpi": ("pmix", "hand"),
    "srun": ("pmi", "pmix", "hand"),  # Slurm's own plugins for MPI set these
    "kubeflow": ("kubeflow", "hand"),
    **dict.fromkeys(("mpich", "pmi", "pmix", "hand"), ("hand",)),
    "torchrun": (),
}
"""The sources that hold the same numbers as a launcher's variables.

Those of an outer launcher count something else: SLURM_* around torchrun or mpirun, mpirun around torchrun.
"""


def _read_numbers(launcher: Launcher, environ: Mapping[str, str]) -> list[Number]:
    """Read the variables of one launcher, as far as they are set."""
    numbers = []
    for key, names in NAMES[launcher].items():
        found = [name for name in names if environ.get(name)]
        # Slurm's names mean different things: the step's tasks, the job's. Elsewhere two names mean the same number.
        for name in found if launcher in {"hand", "kubeflow"} else found[:1]:
            numbers.append(Number(key=key, variable=name, value=_read(environ, name)))
    return numbers


def _is_step_task(environ: Mapping[str, str]) -> bool:
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
        ("srun", _is_step_task(environ)),
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


DEFAULT_PORT = 29500
"""torchrun's default, when only MASTER_ADDR is set."""
_DAEMONS = re.compile(r"([^,\[]{1,255})(?:\[([0-9]{1,2}):([0-9,-]+)\]([^,]{0,255}))?")
TITLES: dict[Launcher | None, str] = {
    "torchrun": "torchrun",
    "openmpi": "mpirun (Open MPI)",
    "mpich": "mpirun (MPICH)",
    "srun": "srun",
    "pmi": "a launcher with PMI",
    "pmix": "a launcher with PMIx",
    "kubeflow": "Kubeflow",
    "hand": "RANK and WORLD_SIZE in the environment",
    None: "no launcher",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A process's place, as far as its environment holds it; the rendezvous of the ranks completes what is None."""

    launcher: Launcher | None
    """None: no launcher; the process is the only rank."""
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    master_addrs: tuple[str, ...] = ()
    """Candidate addresses of rank 0, tried in this order."""
    master_port: int | None = None
    """None: rank 0 takes the first free port of a list that follows from `identity`."""
    port_is_taken: bool = False
    """True: torchrun's agent listens at the master port already, and serves the ranks' store."""
    identity: str = ""
    """Identifies this start, the same on all its ranks; empty when there is no launcher."""
    start: int = 0
    """How often the launcher has restarted these ranks."""
    variables: Mapping[str, Variable] = field(default_factory=dict)
    """RANK and the like, as far as they are known, each with the variable that it came from."""

    @property
    def title(self) -> str:
        return TITLES[self.launcher]

    @property
    def is_on_one_host(self) -> bool:
        """True when all ranks are known to be on this host."""
        return self.local_world_size == self.world_size or self.num_nodes == 1


def find_place(environ: Mapping[str, str]) -> Launched:
    """Find out which launcher started this process and which rank it is.

    Raises: UsageError: no rank can start here, a variable is missing or invalid, or two contradict each other.
    """
    launcher = _find_launcher(environ)
    _refuse_wrong_places(launcher, environ)
    if launcher is None:
        return Launched(launcher=None, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
    own = _read_numbers(launcher, environ)
    found = list(own)
    for other in _MUST_AGREE[launcher]:
        others = _read_numbers(other, environ)
        _check_agreement(launcher, own, other, others)
        found += others
    numbers = {number.key: number for number in reversed(found)}
    _check_complete(launcher, own, numbers.keys())
    launched = Launched(
        launcher=launcher,
        **{key: number.value for key, number in numbers.items()},  # type: ignore[arg-type]
        variables={_torchruns(each.key): Variable(str(each.value), each.variable) for each in numbers.values()},
    )
    _check_sizes(launched)
    return _with_master(launched, environ)


def _refuse_wrong_places(launcher: Launcher | None, environ: Mapping[str, str]) -> None:
    run = environ.get("CLUSTERDDP_RUN")
    if run:
        raise UsageError(
            f"this is a rank of {run} already: CLUSTERDDP_RUN is set",
            hint="entry in the spec names what the ranks run; clusterddp worker is for other launchers",
        )
    procs = environ.get("PET_NPROC_PER_NODE", "")
    if _is_number(procs) and int(procs) > 1 and not environ.get("TORCHELASTIC_RUN_ID"):
        raise UsageError(
            f"PET_NPROC_PER_NODE is {procs}: torchrun starts {procs} ranks here, and this process is none of them",
            hint="torchrun -m clusterddp worker SPEC; torchrun reads PET_* itself",
        )
    tasks = environ.get("SLURM_NTASKS", "")
    if launcher is None and environ.get("SLURM_JOB_ID") and _is_number(tasks) and int(tasks) > 1:
        raise UsageError(
            f"job {environ['SLURM_JOB_ID']} of Slurm has {tasks} tasks (SLURM_NTASKS), this process is none of them",
            hint="srun clusterddp worker SPEC",
        )


def _torchruns(key: Key) -> str:
    """Return torchrun's variable for a number, which a rank gets."""
    return NAMES["torchrun"][key][0]


def _check_agreement(launcher: Launcher, own: list[Number], other: Launcher, others: list[Number]) -> None:
    """Check that variables for the same number have the same value."""
    ours = {number.key: number for number in reversed(own)}
    for number in others:
        same = ours.get(number.key)
        if same is not None and same.value != number.value:
            left_over = f"{TITLES[launcher]} has set {same.variable}; " if launcher != other else ""
            raise UsageError(
                f"{same.variable} is {same.value} and {number.variable} is {number.value}: "
                f"two values for one number ({_torchruns(number.key)}), and both are set",
                hint=f"{left_over}unset {number.variable}",
            )


def _check_complete(launcher: Launcher, own: list[Number], known: Collection[Key]) -> None:
    hints: dict[Launcher, str] = {
        "pmix": "PMIx sets no variable for the world size: have the launcher set WORLD_SIZE, as mpirun -x does",
        "hand": "each rank has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
    }
    required: tuple[Key, ...] = ("rank", "world_size")
    for key in required:
        if key not in known:
            found = ", ".join(f"{number.variable} is {number.value}" for number in own)
            raise UsageError(f"{found}, and {_torchruns(key)} is not set", hint=hints.get(launcher))


def _check_sizes(launched: Launched) -> None:
    variables = launched.variables
    for prefix in ("", "LOCAL_", "GROUP_"):
        rank, size = variables.get(f"{prefix}RANK"), variables.get(f"{prefix}WORLD_SIZE")
        if rank and size and int(rank.value) >= int(size.value):
            raise UsageError(
                f"{rank.origin} is {rank.value} and {size.origin} is {size.value}: "
                f"ranks are numbered from 0 to {int(size.value) - 1}"
            )
    if launched.local_world_size is not None and launched.local_world_size > launched.world_size:
        local, world = variables["LOCAL_WORLD_SIZE"], variables["WORLD_SIZE"]
        raise UsageError(
            f"{local.origin} is {local.value} and {world.origin} is {world.value}: more ranks on a host than in all"
        )


def _with_master(launched: Launched, environ: Mapping[str, str]) -> Launched:
    """Add where the ranks meet, and the identity of this start."""
    addresses: tuple[str, ...] = ()
    port: int | None = None
    variables = dict(launched.variables)
    for prefix in ("", "PET_"):
        if not addresses and environ.get(f"{prefix}MASTER_ADDR"):
            addresses = (environ[f"{prefix}MASTER_ADDR"],)
            variables["MASTER_ADDR"] = Variable(addresses[0], f"{prefix}MASTER_ADDR")
        if port is None and environ.get(f"{prefix}MASTER_PORT"):
            port = _read_port(environ, f"{prefix}MASTER_PORT")
            variables["MASTER_PORT"] = Variable(str(port), f"{prefix}MASTER_PORT")
    if not addresses:
        addresses, origin = _find_addresses(launched, environ)
        if addresses:
            variables["MASTER_ADDR"] = Variable(addresses[0], origin)
    if port is None and launched.launcher in {"hand", "kubeflow"}:
        port = DEFAULT_PORT
        variables["MASTER_PORT"] = Variable(str(port), "torchrun's default")
    port_is_taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and launched.launcher == "torchrun"
    identity, start = _identify(launched, environ, f"{addresses[0] if addresses else ''}:{port}")
    return dataclasses.replace(
        launched,
        master_addrs=addresses,
        master_port=port,
        port_is_taken=port_is_taken,
        identity=identity,
        start=start,
        variables=variables,
    )


def _find_addresses(launched: Launched, environ: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    if launched.is_on_one_host or launched.world_size == 1:
        return (LOOPBACK_ADDRESS,), "all ranks are on one host"
    if launched.launcher == "srun":
        for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
            if environ.get(name):
                return expand(environ[name])[:1], f"the first host of {name}"
    if launched.launcher == "openmpi" and environ.get("OMPI_MCA_orte_hnp_uri"):
        # mpirun's own host has rank 0 if it has a rank; else rank 0 is on the host of mpirun's first daemon.
        others = _hosts_of(environ.get("OMPI_MCA_orte_node_regex", ""))[1:]
        addresses = (*others[:1], *_addresses_of(environ["OMPI_MCA_orte_hnp_uri"]), *others[1:])
        return addresses, "OMPI_MCA_orte_node_regex and OMPI_MCA_orte_hnp_uri: the hosts of mpirun"
    if launched.launcher in {"openmpi", "mpich", "pmi"} and environ.get("SLURM_JOB_NODELIST"):
        # Neither MPICH nor, since version 5, Open MPI names the hosts; in an allocation they are the allocation's.
        return expand(environ["SLURM_JOB_NODELIST"]), "SLURM_JOB_NODELIST: the hosts of the allocation"
    hints = {
        "openmpi": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..., HOST being where rank 0 is",
        "mpich": "mpirun -genv MASTER_ADDR HOST ..., HOST being where rank 0 is",
    }
    raise UsageError(
        f"rank {launched.rank} of {launched.world_size}: MASTER_ADDR is not set, so the host of rank 0 is not known",
        hint=hints.get(launched.launcher or "", "export MASTER_ADDR=HOST MASTER_PORT=29500, HOST being rank 0's"),
    )


def _addresses_of(uri: str) -> tuple[str, ...]:
    """Read the addresses of `1504706560.0;tcp://192.0.2.2,10.0.0.2:52885;tcp6://[fd00::2]:45157`."""
    plain = re.findall(r"tcp://([0-9.,]+):\d+", uri)
    six = re.findall(r"tcp6://([^;]+):\d+", uri)
    found = [*",".join(plain).split(","), *(part.strip("[]") for part in ",".join(six).split(","))]
    return tuple(filter(None, found))


def _hosts_of(regex: str) -> tuple[str, ...]:
    """Read the hosts of mpirun's daemons in their order: `head,node[1:1-2]@0(3)` is head, node1, node2."""
    hosts: list[str] = []
    for name, width, ranges, rest in _DAEMONS.findall(regex.partition("@")[0]):
        for first, last in re.findall(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", ranges):
            numbers = range(int(first), min(int(last or first) + 1, int(first) + MAX_HOSTS - len(hosts)))
            hosts += [f"{name}{str(number).zfill(int(width))}{rest}" for number in numbers]
        hosts += [] if ranges else [name]
    return tuple(hosts)


def _identify(launched: Launched, environ: Mapping[str, str], meeting: str) -> tuple[str, int]:
    """Return the identity of this start of the ranks, and how often the launcher has restarted them."""
    if launched.launcher == "torchrun":
        run_id = environ["TORCHELASTIC_RUN_ID"]
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"torchrun {run_id}" if run_id not in {"", "none"} else f"torchrun at {meeting}"
        return name, int(restarts) if _is_number(restarts) else 0
    if launched.launcher == "srun":
        restarts = environ.get("SLURM_RESTART_COUNT", "0")
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
        step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")
        return f"srun {job}.{step}", int(restarts) if _is_number(restarts) else 0
    if launched.launcher in {"openmpi", "pmix"}:
        namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        return f"mpirun {namespace or meeting}", 0
    if launched.launcher in {"mpich", "pmi"}:
        return _identify_mpich(launched, environ, meeting), 0
    return f"hand at {meeting}", 0


def _identify_mpich(launched: Launched, environ: Mapping[str, str], meeting: str) -> str:
    """Identify an mpirun by what its ranks on one host share: the connection to Hydra, or the parent process."""
    if not launched.is_on_one_host:
        return f"mpirun at {meeting}"
    try:
        return f"mpirun {os.fstat(int(environ['HYDI_CONTROL_FD'])).st_ino}"
    except (KeyError, ValueError, OSError):
        return f"mpirun process {os.getppid()}"


def _read_port(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (_is_number(text) and 0 < int(text) < 65536):
        raise UsageError(f"{name} is {environ[name]!r}, a port from 1 to 65535 is expected")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
