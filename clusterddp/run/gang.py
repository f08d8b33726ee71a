"""The gang: which ranks run on which nodes, and what each of them executes.

The submission side computes a `Gang`, writes it into `plan.json`, and hands it to each node's supervisor as JSON;
the supervisor starts exactly that. Nothing here touches the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clusterddp.ranks.entry_environment import ENVIRONMENT_KEYS, Counts, Init, entry_environment
from clusterddp.ranks.environment import GPU, RankPlace, RankSettings, Variable, rank_variables
from clusterddp.system.timeouts import HEARTBEAT_TIMEOUT_S, HOST_SILENCE_S
from clusterddp.wire import build

Start = Literal["ranks", "torchrun"]
HangPolicy = Literal["report", "restart", "fail"]
_MAX_SPAWNS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a rank runs, and how it wants to be started."""

    kind: Literal["module", "script", "function", "command"]
    target: str
    """A module, the path of a script, `module:function` or `path.py:function`, a program; a shell's text."""
    words: tuple[str, ...] = ()
    """The words that a command has of itself, after its program and before `args`."""
    args: tuple[Any, ...] = ()
    """Words; for a function, values of any kind."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """For a function."""
    shell: bool = False
    """True: /bin/sh reads `target`."""
    working_dir: str
    import_paths: tuple[str, ...] = ()
    """Directories put at the head of `sys.path`, the snapshot of the code among them."""
    stop_aware: bool = False
    """True when the entry confirms a stop itself (the built-in trainer does)."""
    init: Init = "tcp"
    """How ranks meet that use CLUSTERDDP_INIT_METHOD or {init_method}."""
    spawns: tuple[int, ...] = ()
    """How many ranks the entry itself starts on each node, where it does: it is one rank on each to us."""
    counts: Counts = "processes"
    """What {rank} and {world_size} count."""
    local_rank_arg: bool = False
    """True: --local_rank=N comes before the arguments."""
    fork: bool = True
    """False: each rank is a Python of its own; else a node's ranks may be forked from one (node/fork_server.py)."""
    smoke_test: dict[str, Any] | None = None
    """The program in whose place the smoke test runs (train/smoke_test.py): its kind, its target, and whether it is a
    shell's; None for the trainer."""
    stop_signal: str = "none"
    """By which a command is told to stop: TERM and the like."""
    data_dir: str | None = None
    output_dir: str | None = None
    code_dir: str | None = None
    """Where the run was submitted from, in the copy of the code; the working directory where there is no copy."""

    @property
    def takes_listener(self) -> bool:
        """True when rank 0's own process serves at the master port, and with torch's store, as far as we can tell.

        A command is another process than the rank; a program that starts ranks itself has those serve.
        """
        return self.kind != "command" and not self.spawns and self.counts == "processes"

    def environment(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """Compute what the start-up of a rank changes in its environment; see `entry_environment`."""
        return entry_environment(environ, **{name: getattr(self, name) for name in ENVIRONMENT_KEYS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node of the gang: a slot for a supervisor and its ranks."""

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of their local ranks."""
    gpus: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES of this node's ranks holds; empty: the ranks see no GPU."""
    interface: str | None = None
    """The interface of this host that carries the gang's traffic, where the launcher has looked; else the gang's."""
    address: str | None = None
    """Its address."""
    why: str = ""
    """Why that one."""
    nccl_interfaces: tuple[str, ...] = ()
    """What NCCL's sockets take in place of the interface, where there is something faster; known at the start."""
    slurm_chooses_gpus: bool = False
    """True: `gpus` says nothing, each rank sees what Slurm has made visible to its task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """All ranks of one run, and the rules that they live and die by."""

    run: str
    token: str
    """Secret of the run: every process carries it, a sweep goes by it, the supervisors' link is signed with it."""
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
    """The user's own variables for every rank; they beat everything that clusterddp would set."""
    restarts: int = 0
    start: Start = "ranks"
    """What is started on a node: its ranks, or torchrun, which starts them."""
    time_limit_s: float | None = None
    """Seconds that one attempt may last."""
    stop_lead_s: float = 60.0
    """How long before the time limit the ranks are asked to stop."""
    stop_grace_s: float = 120.0
    """How long ranks may take from the request to stop until they have ended."""
    start_timeout_s: float = 60.0
    """How long the supervisors, and on Slurm the tasks, may take to find each other."""
    host_silence_s: float = HOST_SILENCE_S
    """How long another host may be silent before its node counts as lost."""
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    """How long a supervisor on a host that answers may be silent before its node counts as lost."""
    hang: HangPolicy = "report"
    """What follows when the run shows no progress."""
    hang_after_s: float | None = None
    """After so long; None: as the steps of the run suggest."""

    @property
    def give_up_s(self) -> float:
        """Seconds from the SIGTERM after which a process that is still there is reported as one that cannot be killed.

        It hangs in the kernel. The driver of a GPU frees the memory of a process there, for eight of them in a row.
        """
        return 6.0 if self.on_cpu else 30.0

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    def node_of(self, rank: int) -> Node:
        """Return the node that `rank` belongs to."""
        return next(node for node in self.nodes if rank in node.ranks)

    def carried_by(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that these of ours stand for: themselves, or those that the entry starts on their nodes."""
        spawns = self.entry.spawns
        if not spawns:
            return tuple(sorted(ranks))
        firsts = [sum(spawns[:place]) for place in range(len(spawns))]
        return tuple(firsts[rank] + each for rank in sorted(ranks) for each in range(spawns[rank]))

    def variables_of(
        self, rank: int, *, run_dir: str, attempt: int, master_port: int | str, restart: int = 0
    ) -> dict[str, Variable]:
        """Compute the variables of one rank: what the plan shows is what the supervisor sets.

        See `RankSettings` for `restart`, and for a `master_port` in words.
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
        # Not dataclasses.asdict, which copies every number: a sweep writes a thousand gangs.
        return _fields(self) | {"entry": _fields(self.entry), "nodes": [_fields(node) for node in self.nodes]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Gang:
        """Rebuild a gang from what `to_json` gave.

        Raises: ValueError: it is none; see `build`.
        """
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


def _fields(value: Gang | Entry | Node) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
