"""What ranks say to each other when they muster: one JSON object a line, over TCP, signed (signed.py)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import PreflightError
from clusterddp.wire import build

COMMAND = "worker"
"""How the lines of a muster begin (signed.py)."""
WIRE = 2
"""Ranks of another number do not understand each other."""
MAX_LINE = 4_000_000
"""Of what a rank may be told: a few dozen bytes for each of its fellows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """How a rank introduces itself."""

    rank: int
    world_size: int
    world_size_from: str
    """The variable that tells it."""
    host: str
    machine: str
    """The same for two names of one machine; differs for two machines of one name."""
    pid: int
    spec: str
    """The sha256 of the spec as it was read here, overrides included."""
    torch: str
    """Its version; empty: it is not installed."""
    python: str
    local_rank: int | None = None
    gpus: int = 0
    """How many this rank sees."""
    links: dict[str, int] = field(default_factory=dict)
    """Of its host, where it has GPUs; see `tell_links`."""
    identity: str = ""
    """Of the job, where the port was not given; another job's ranks may knock at the wrong door."""
    left_s: float = 0.0
    """How long this rank is still willing to wait."""
    nonce: str = ""
    wire: int = WIRE

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def place(self) -> tuple[str, str]:
        """Where it is: ranks with the same are on one node."""
        return self.host, self.machine

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Hello:
        """Rebuild what was sent; keys that a newer version sends are dropped.

        Raises: ValueError: it is no such thing.
        """
        hello: Hello = build(cls, data, "hello")
        if min(hello.rank, hello.world_size, hello.pid) < 0:
            raise ValueError("a number from 0 is expected")
        if not all(text.isprintable() for text in (hello.host, hello.world_size_from, hello.torch)):
            raise ValueError("a name is expected")
        return hello


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What rank 0 has seen: the whole gang."""

    hellos: tuple[Hello, ...]
    """By rank."""
    reached: str
    """The address of rank 0's host at which the others have reached it."""
    port: int
    """Where rank 0 listened."""


Decide = Callable[[Seen], dict[str, Any]]
"""Makes of what rank 0 has seen what all ranks are told."""


def own_hello(*, rank: int, world_size: int, world_size_from: str, spec: str, **rest: Any) -> Hello:
    """Introduce this process; torch is looked up and not imported."""
    return Hello(
        rank=rank,
        world_size=world_size,
        world_size_from=world_size_from,
        spec=spec,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        torch=_torch_version(),
        python=platform.python_version(),
        nonce=secrets.token_hex(8),
        **rest,
    )


def refusal(message: str, hint: str | None = None) -> PreflightError:
    return PreflightError(message, hint=hint)


def find_mismatch(own: Hello, other: Hello) -> PreflightError | None:
    """Say what keeps a rank from being one of rank 0's gang; `own` is rank 0's."""
    if other.wire != own.wire:
        return refusal(f"{other.name} has another version of clusterddp than {own.name}", "install the same everywhere")
    if other.world_size != own.world_size or other.rank >= own.world_size:
        return refusal(
            f"{other.name} was started for {other.world_size} ranks ({other.world_size_from}), "
            f"{own.name} for {own.world_size} ({own.world_size_from})",
            "all ranks need the same world size",
        )
    if other.spec != own.spec:
        return refusal(
            f"{other.name} reads another spec than {own.name}: its sum is {other.spec[:12]}, "
            f"there it is {own.spec[:12]}",
            "the file and the KEY=VALUE arguments, CLUSTERDDP__* and profiles have to be the same",
        )
    if other.torch != own.torch:
        return refusal(
            f"{other.name} has torch {other.torch or '(none)'}, {own.name} has torch {own.torch or '(none)'}",
            "the gang needs the same version everywhere",
        )
    return None


def find_twin(earlier: Hello, later: Hello) -> PreflightError | None:
    """Say that two processes take the same place."""
    if earlier.rank == later.rank:
        return refusal(
            f"rank {later.rank} was started twice: on {earlier.host} (process {earlier.pid}) and on {later.host} "
            f"(process {later.pid})",
            "each rank has a number of its own, and each machine a node rank of its own",
        )
    if earlier.place == later.place and earlier.local_rank is not None and earlier.local_rank == later.local_rank:
        return refusal(
            f"ranks {earlier.rank} and {later.rank} on {later.host} both have LOCAL_RANK {later.local_rank}",
            "leave LOCAL_RANK unset: the ranks of a host are then counted",
        )
    return None


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
