"""The gang: which ranks run on which nodes, and what each of them executes.

The submitting side computes a `Gang`, writes it into `plan.json` and sends it to each node's supervisor as JSON; the
supervisor starts exactly that. Nothing here touches the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clusterddp.ranks.environment import (
    ENVIRONMENT_KEYS,
    GPU,
    Counts,
    Init,
    RankPlace,
    RankSettings,
    Variable,
    entry_environment,
    rank_variables,
)
from clusterddp.system.storage import HEARTBEAT_TIMEOUT_S, HOST_SILENCE_S
from clusterddp.wire import build

HangPolicy = Literal["report", "restart", "fail"]
_MAX_SPAWNS = 4096


def is_call(function: str) -> bool:
    """Return whether an `entry.function` is one from Python, `module:name(arguments)`, pickled in the run."""
    return function.endswith(")")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The program of a rank, and how it is started."""

    kind: Literal["module", "script", "function", "command"]
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
    local_rank_arg: bool = False
    """True: --local_rank=N comes before the arguments."""
    fork: bool = True
    """False: each rank is a new Python process; True: a node's ranks may be forked from one (node/fork_server.py)."""
    smoke_test: dict[str, Any] | None = None
    """The program that the smoke test replaces (train/smoke_test.py): its kind, its target, whether a shell runs it;
    None for the trainer."""
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
class Notify:
    """Of which events of the run a message is sent, and where to (run/notices.py)."""

    on: tuple[str, ...]
    """`start`, `end`, `fail`, `requeue`, `hang`."""
    command: tuple[str, ...] = ()
    """Its words; empty: none."""
    webhook: str | None = None
    """`${NAME}` of the variable that has its address."""
    mail: str | None = None
    """The address, unless Slurm sends the mail."""

    @property
    def channels(self) -> tuple[str, ...]:
        """The ways by which messages are sent."""
        ways = {"command": self.command, "webhook": self.webhook, "mail": self.mail}
        return tuple(name for name, value in ways.items() if value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node of the gang: a slot for a supervisor and its ranks."""

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of their local ranks."""
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
class Gang:
    """All ranks of one run, with its timeouts and limits."""

    run: str
    token: str
    """Secret of the run: it is in the cookie of every process, and signs the messages between the supervisors."""
    nodes: tuple[Node, ...]
    entry: Entry
    threads_per_rank: int
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
    def num_ranks(self) -> int:
        """The ranks of the run, also of those that a program starts itself."""
        return sum(self.entry.spawns) or self.world_size

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
        self, rank: int, *, run_dir: str, attempt: int, master_port: int | str, restart: int = 0
    ) -> dict[str, Variable]:
        """Compute the environment variables of one rank; the plan shows them and the supervisor sets them.

        See `RankSettings` for `restart`, and for a `master_port` that is a text.
        """
        node = self.node_of(rank)
        gpus, variables = node.gpus, {}
        if any(gpu.startswith("MIG-") for gpu in gpus) and len(gpus) == len(node.ranks) > 1:
            gpus = (gpus[node.ranks.index(rank)],)
            variables[GPU] = Variable("0", "CUDA shows a process one slice of a GPU")
        settings = RankSettings(
            place=RankPlace(
                rank=rank,
                local_rank=node.ranks.index(rank),
                node_rank=node.node_rank,
                world_size=self.world_size,
                local_world_size=len(node.ranks),
                num_nodes=len(self.nodes),
            ),
            run=self.run,
            attempt=attempt,
            restart=restart,
            restarts=self.restarts,
            master_addr=self.master_addr,
            master_port=master_port,
            threads=self.threads_per_rank,
            gpus=None if node.slurm_chooses_gpus else gpus,
            interface=node.interface or self.interface,
            nccl_interfaces=node.nccl_interfaces,
            backend=self.backend,
            run_dir=run_dir,
            token=self.token,
            user=self.env,
            on_cpu=self.on_cpu,
        )
        return variables | rank_variables(settings)

    def to_json(self) -> dict[str, Any]:
        # dataclasses.asdict copies every number, which is slow for the thousand gangs of a sweep.
        parts = {"entry": _fields(self.entry), "nodes": [_fields(node) for node in self.nodes]}
        return _fields(self) | parts | {"notify": self.notify and _fields(self.notify)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Gang:
        """Read a gang that `to_json` wrote."""
        return build(cls, data, "gang")

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


def _fields(value: Gang | Entry | Node | Notify) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
