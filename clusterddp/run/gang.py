"""The gang: which ranks run on which nodes, and what each of them executes.

The submitting side computes a `Gang`, writes it into `plan.json` and sends it to each node's supervisor as JSON; the
supervisor starts exactly that. Nothing here touches the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from clusterddp.ranks.environment import (
    COOKIE,
    DEVICE,
    ENVIRONMENT_KEYS,
    ERROR_FILE,
    GPU,
    NCCL_VARIABLES,
    STOP_FILE,
    USERS,
    Counts,
    Init,
    Variable,
    cookie,
    entry_environment,
)
from clusterddp.run.directory import STEPS
from clusterddp.system.storage import HEARTBEAT_TIMEOUT_S, HOST_SILENCE_S
from clusterddp.wire import Written

HangPolicy = Literal["report", "restart", "fail"]
_MAX_SPAWNS = 4096


def is_call(function: str) -> bool:
    """Return whether an `entry.function` is one from Python, `module:name(arguments)`, pickled in the run."""
    return function.endswith(")")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The program of a rank, and how it is started."""

    kind: Literal["module", "script", "function", "command", "batch_script"]
    target: str
    """A module, the path of a script, `module:function` or `path.py:function`, a program, or a shell command.

    `module:function(arguments)`: a function from Python, which is pickled in the run (run/call.py)."""
    words: tuple[str, ...] = ()
    """The words of a command between its program and `args`."""
    args: tuple[Any, ...] = ()
    """Strings; for a function, values of any type."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """For a function."""
    shell: bool = False
    """True: /bin/sh reads `target`."""
    working_dir: str
    import_paths: tuple[str, ...] = ()
    """Directories put at the head of `sys.path`, the snapshot of the code among them."""
    stop_aware: bool = False
    """True if the entry confirms a stop itself (the built-in trainer does)."""
    init: Init = "tcp"
    """The rendezvous of ranks that use CLUSTERDDP_INIT_METHOD or {init_method}."""
    spawns: tuple[int, ...] = ()
    """How many ranks the entry itself starts on each node, where the gang then has one rank; empty: it starts none."""
    counts: Counts = "processes"
    """What {rank} and {world_size} count."""
    fork: bool = True
    """False: each rank is a new Python process; True: a node's ranks may be forked from one (node/fork_server.py)."""
    smoke_test: dict[str, Any] | None = None
    """The program that the smoke test replaces (train/smoke_test.py): its kind, its target, whether a shell runs it;
    None for the trainer."""
    unchanged: bool = False
    """True: a program of a batch script: the batch system's signals reach it, and it is not ended for a stop."""
    stop_signal: str = "none"
    """The signal that asks a command to stop, such as TERM."""
    data_dir: str | None = None
    output_dir: str | None = None
    code_dir: str | None = None
    """The directory of the submit within the snapshot of the code; without a snapshot, the working directory."""

    @property
    def always_stops(self) -> bool:
        """True when the entry is known to stop on request; of another program that shows when it first asks."""
        return self.stop_aware or self.stop_signal != "none"

    @property
    def is_ours(self) -> bool:
        """True for the built-in trainer and the like."""
        return self.target.startswith("clusterddp.")

    @property
    def is_call(self) -> bool:
        """True for a function from Python, which is pickled in the run (run/call.py)."""
        return self.kind == "function" and is_call(self.target)

    @property
    def takes_listener(self) -> bool:
        """True if rank 0's own process is expected to listen at the master port, with torch's store.

        A command is another process than the rank, and with `spawns` a process that the entry starts listens.
        """
        return self.kind != "command" and not self.spawns and self.counts == "processes"

    def environment(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """Compute what the start-up of a rank changes in its environment; see `entry_environment`."""
        return entry_environment(environ, **{name: getattr(self, name) for name in ENVIRONMENT_KEYS})


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPython:
    """The Python of the ranks, and why it was chosen."""

    executable: str = ""
    """Its path; empty: that of the supervisor."""
    prefix: str = ""
    """The directory of its environment, which is activated for the ranks; empty: it has none."""
    kind: Literal["", "venv", "conda"] = ""
    """Of its environment."""
    version: str | None = None
    """Of the Python; None: not known before the start, as of `torch`."""
    torch: str | None = None
    cuda: str | None = None
    """The CUDA that its torch was built for."""
    packages: tuple[str, ...] = ()
    """The directories that its packages are in."""
    why: str = ""
    is_named: bool = False
    """A key of the spec names it."""
    by_setup: bool = False
    """Where the setup lines put another one first on PATH, the ranks take that."""

    @property
    def name(self) -> str:
        """Its environment's name, as its prompt shows it."""
        return self.prefix.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Notify:
    """Of which events of the run a message is sent, and where to (run/notices.py)."""

    on: tuple[str, ...]
    """`start`, `end`, `fail`, `requeue`, `hang`."""
    command: tuple[str, ...] = ()
    """Its words; empty: none."""
    webhook: str | None = None
    """`${NAME}` of the variable that has its address."""

    @property
    def channels(self) -> tuple[str, ...]:
        """The ways by which messages are sent."""
        ways = {"command": self.command, "webhook": self.webhook}
        return tuple(name for name, value in ways.items() if value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node of the gang: a slot for a supervisor and its ranks."""

    node_rank: int
    """The number of its supervisor, the same in all attempts; its place in the order of nodes may be another one."""
    host: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of their local ranks; a spare has none."""
    spare: int = 0
    """Of a spare: how many ranks it takes in an attempt where it stands in for another node."""
    gpus: tuple[str, ...] = ()
    """The value of CUDA_VISIBLE_DEVICES of this node's ranks; empty: the ranks see no GPU."""
    interface: str | None = None
    """The interface of this host that carries the gang's traffic, if the launcher has found it; None: the gang's."""
    address: str | None = None
    """The address of `interface`."""
    why: str = ""
    """Why `interface` was chosen."""
    nccl_interfaces: tuple[str, ...] = ()
    """Faster interfaces for NCCL's sockets, if there are any; set at the start."""
    slurm_chooses_gpus: bool = False
    """True: `gpus` is not used; each rank sees the GPUs that Slurm makes visible to its task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang(Written):
    """All ranks of one run, with its timeouts and limits."""

    run: str
    token: str = dataclasses.field(repr=False)
    """Secret of the run: it is in the cookie of every process, and signs the messages between the supervisors."""
    nodes: tuple[Node, ...]
    entry: Entry
    threads_per_rank: int | None
    """None: a rank's share of the cores that the run has on its node, which is known there."""
    backend: Literal["gloo", "nccl"]
    master_addr: str
    master_port: int | None = None
    """None: node 0's supervisor finds a free one."""
    interface: str | None = None
    """The interface that carries the gang's traffic; None: the library's own choice."""
    on_cpu: bool = False
    """True: no rank has a GPU."""
    env: dict[str, str] = field(default_factory=dict)
    """The user's own variables for every rank; they override those of clusterddp."""
    restarts: int = 0
    min_nodes: int | None = None
    """An attempt may begin with so many of the nodes, and with spares in place of others (`choose_nodes`); None: each
    attempt has all nodes."""
    time_limit_s: float | None = None
    """Seconds that one attempt may last."""
    stop_lead_s: float = 60.0
    """Seconds before the time limit at which the ranks are asked to stop."""
    stop_grace_s: float = 120.0
    """Seconds that ranks may take from the request to stop until they have ended."""
    start_timeout_s: float = 60.0
    """Seconds that the supervisors, and on Slurm the tasks, may take to connect to the head."""
    host_silence_s: float = HOST_SILENCE_S
    """Seconds without an answer from another host's kernel after which its node counts as lost."""
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    """Seconds without a heartbeat from a supervisor after which its node counts as lost."""
    hang: HangPolicy = "report"
    """What follows when the run shows no progress."""
    hang_after_s: float | None = None
    """After so long; None: as the steps of the run suggest."""
    notify: Notify | None = None
    python: RankPython = field(default_factory=RankPython)
    setup: tuple[str, ...] = ()
    """Lines that bash runs on each node before its ranks start."""

    @property
    def give_up_s(self) -> float:
        """Seconds from the SIGTERM after which a process that is still there is reported as impossible to kill.

        It hangs in the kernel, where a GPU driver frees its memory; the driver does that for eight ranks in turn.
        """
        return 6.0 if self.on_cpu else 30.0

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def max_world_size(self) -> int:
        """More ranks than in any attempt, whichever nodes take part in it."""
        return sum(len(node.ranks) or node.spare for node in self.nodes)

    @property
    def num_ranks(self) -> int:
        """The ranks of the run, also of those that a program starts itself."""
        return sum(self.entry.spawns) or self.world_size

    @property
    def members(self) -> tuple[Node, ...]:
        """The nodes that have ranks; the others are spares."""
        return tuple(node for node in self.nodes if node.ranks)

    def node(self, node_rank: int) -> Node:
        """Return the node with this number."""
        return next(node for node in self.nodes if node.node_rank == node_rank)

    def of_nodes(self, node_ranks: Iterable[int]) -> Gang:
        """Return the gang of one attempt, which these nodes take part in, in this order, with their ranks counted anew.

        Raises: ValueError: there is no node, or an unknown one.
        """
        known, nodes, first = {node.node_rank: node for node in self.nodes}, [], 0
        for node_rank in node_ranks:
            if node_rank not in known:
                raise ValueError(f"the run has no node {node_rank}")
            size = len(known[node_rank].ranks) or known[node_rank].spare
            nodes.append(dataclasses.replace(known[node_rank], ranks=tuple(range(first, first + size))))
            first += size
        return dataclasses.replace(self, nodes=tuple(nodes))

    def choose_nodes(self, present: Sequence[int]) -> tuple[int, ...] | None:
        """Choose the nodes of an attempt among those that are present; None: they are too few.

        `present`: by node rank, those first that are to be taken first. The first of all stays the first, and has rank
        0; the others come in the order of the plan.
        """
        if self.min_nodes is None:
            return None if set(present) != {node.node_rank for node in self.nodes} else tuple(sorted(present))
        taken = list(present[: len(self.members)])
        return (taken[0], *sorted(taken[1:])) if taken and len(taken) >= self.min_nodes else None

    def node_of(self, rank: int) -> Node:
        """Return the node that `rank` belongs to."""
        return next(node for node in self.nodes if rank in node.ranks)

    def carried_by(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of the user's program for these ranks of the gang: with `spawns`, those that each starts."""
        spawns = self.entry.spawns
        if not spawns:
            return tuple(sorted(ranks))
        firsts = [sum(spawns[:place]) for place in range(len(spawns))]
        return tuple(firsts[rank] + each for rank in sorted(ranks) for each in range(spawns[rank]))

    def variables_of(
        self,
        rank: int,
        *,
        run_dir: str,
        attempt: int,
        master_port: int | str,
        restart: int = 0,
        step: str | None = None,
    ) -> dict[str, Variable]:
        """Compute every variable that clusterddp sets for one rank; the plan shows them and the supervisor sets them.

        The user's own override what clusterddp chooses, but not place, rendezvous and run. `master_port`: a text in a
        plan, where the port is not known yet. `step`: of a batch script. `restart` counts the gang's restarts since it
        was launched; it is not `attempt` when a run was resumed.
        """
        node, members = self.node_of(rank), self.members
        attempt_dir = f"{run_dir}/attempts/{attempt}{f'/{STEPS}/{step}' if step else ''}"
        place = {
            "RANK": rank,
            "LOCAL_RANK": node.ranks.index(rank),
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": len(node.ranks),
            "GROUP_RANK": members.index(node),
            "GROUP_WORLD_SIZE": len(members),
            "NODE_RANK": members.index(node),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "ROLE_NAME": "default",
        }
        rendezvous = {
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": master_port,
            "TORCHELASTIC_RUN_ID": self.run,
            "TORCHELASTIC_RESTART_COUNT": restart,
            "TORCHELASTIC_MAX_RESTARTS": self.restarts,
            "TORCHELASTIC_USE_AGENT_STORE": False,
        }
        run = {
            ERROR_FILE: f"{attempt_dir}/ranks/{rank:03d}.error.json",
            "CLUSTERDDP_RUN": self.run,
            "CLUSTERDDP_RUN_DIR": run_dir,
            "CLUSTERDDP_ATTEMPT": attempt,
            STOP_FILE: f"{attempt_dir}/STOP",
            "CLUSTERDDP_BACKEND": self.backend,
            DEVICE: "cpu" if self.on_cpu else "cuda",
            COOKIE: cookie(self.token, f"n{node.node_rank}"),
        }
        groups: tuple[tuple[str, dict[str, Any]], ...] = (
            ("the plan: the rank's place among all ranks", place),
            ("the plan: the rendezvous", rendezvous),
            ("the run", run),
        )
        return {
            **self._chosen(node, rank),
            **self._of_nccl(node, f"{attempt_dir}/logs/rank-{rank:03d}.nccl"),
            **{name: Variable(value, USERS) for name, value in self.env.items()},
            **{name: Variable(str(value), origin) for origin, group in groups for name, value in group.items()},
        }

    def _chosen(self, node: Node, rank: int) -> dict[str, Variable]:
        """Compute the variables that the user's own override."""
        chosen = {}
        gpus, interface = node.gpus, node.interface or self.interface
        if any(gpu.startswith("MIG-") for gpu in gpus) and len(gpus) == len(node.ranks) > 1:
            gpus = (gpus[node.ranks.index(rank)],)
            chosen[GPU] = Variable("0", "CUDA shows a process one slice of a GPU")
        if self.threads_per_rank is not None:
            chosen["OMP_NUM_THREADS"] = Variable(str(self.threads_per_rank), "resources.cpus_per_task")
        chosen["PYTHONUNBUFFERED"] = Variable("1", "clusterddp: logs are read while they are written")
        if not node.slurm_chooses_gpus:
            gpu_origin = "the GPUs of the node" if gpus else "the plan: no GPU for this run"
            chosen["CUDA_VISIBLE_DEVICES"] = Variable(",".join(gpus), gpu_origin)
        if self.on_cpu:
            # Without it Accelerate's ranks make no group when they find no GPU: each trains alone, without an error.
            chosen["ACCELERATE_USE_CPU"] = Variable("true", "the ranks compute on the CPU")
        if interface is not None:
            chosen["GLOO_SOCKET_IFNAME"] = Variable(interface, "network.interface")
            if not interface.startswith("lo"):
                # NCCL reads a bare name as a prefix; "=" makes it exact. On loopback NCCL chooses by itself.
                chosen["NCCL_SOCKET_IFNAME"] = Variable(f"={interface}", "network.interface")
        return chosen

    def _of_nccl(self, node: Node, log: str) -> dict[str, Variable]:
        """Choose NCCL's interfaces, and have it log its choice, unless the user sets NCCL's log variables."""
        variables = {}
        if node.nccl_interfaces:
            names = f"={','.join(node.nccl_interfaces)}"
            variables["NCCL_SOCKET_IFNAME"] = Variable(names, "the fastest network of all hosts")
        if self.backend == "nccl" and self.world_size > 1 and self.env.keys().isdisjoint(NCCL_VARIABLES):
            for name, value in zip(NCCL_VARIABLES, ("INFO", "INIT,NET", log.replace("%", "%%")), strict=True):
                variables[name] = Variable(value, "clusterddp: status shows the network that NCCL takes")
        return variables

    def __post_init__(self) -> None:
        """Raises: ValueError: there is no node, a rank is missing or there twice, or `spawns` does not fit them."""
        if not self.nodes:
            raise ValueError("gang.nodes is empty")
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        if ranks != list(range(len(ranks))):
            raise ValueError(f"gang: its {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once")
        spawns = self.entry.spawns
        if spawns and (len(spawns) != len(self.nodes) or min(spawns) < 1 or max(spawns) > _MAX_SPAWNS):
            raise ValueError("gang.entry.spawns is not a number of ranks for each node")
