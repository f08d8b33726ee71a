"""The messages of the rendezvous of ranks, and the checks that a rank belongs to the gang."""

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
from clusterddp.rendezvous.connection import Protocol
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.wire import build

RANKS = Protocol(name="worker", key=JOIN_KEY, max_bytes_to_server=10_000, max_bytes_to_client=4_000_000)
"""Rank 0 sends a few dozen bytes for each rank of the gang."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHello:
    """The first message of a rank."""

    rank: int
    world_size: int
    world_size_from: str
    """The variable that has the world size."""
    host: str
    machine: str
    """An id of the machine: the same for two host names of one machine."""
    pid: int
    spec: str
    """The sha256 of the spec that this rank has read, with overrides."""
    torch: str
    """The version of torch; empty: it is not installed."""
    python: str
    local_rank: int | None = None
    gpus: int = 0
    """How many GPUs this rank sees."""
    links: dict[str, int] = field(default_factory=dict)
    """The links of its host, where it has GPUs; see `report_links`."""
    identity: str = ""
    """The job's identity, where no port was given: ranks of another job may connect to the same port."""
    left_s: float = 0.0
    """How long this rank still waits, in seconds."""
    nonce: str = ""
    """A random id of the process."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def place(self) -> tuple[str, str]:
        """The node of this rank: equal for the ranks of one node."""
        return self.host, self.machine

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankHello:
        """Read a rank's first message.

        Raises: ValueError: it is not one.
        """
        hello: RankHello = build(cls, data, "hello")
        if min(hello.rank, hello.world_size, hello.pid) < 0:
            raise ValueError("a number from 0 is expected")
        if not all(text.isprintable() for text in (hello.host, hello.world_size_from, hello.torch)):
            raise ValueError("a name is expected")
        return hello


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksMet:
    """All ranks of the gang, once rank 0 has counted them."""

    hellos: tuple[RankHello, ...]
    """By rank."""
    reached: str
    """The address at which most other ranks have reached rank 0."""
    port: int
    """The port on which rank 0 listened."""


Decide = Callable[[RanksMet], dict[str, Any]]
"""Makes rank 0's decision, which all ranks receive."""


def introduce_rank(*, rank: int, world_size: int, world_size_from: str, spec: str, **rest: Any) -> RankHello:
    """Make this process's first message; torch's version is read without an import of torch."""
    return RankHello(
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


def find_mismatch(own: RankHello, other: RankHello) -> PreflightError | None:
    """Return why a rank does not match rank 0's gang, or None; `own` is rank 0's."""
    if other.world_size != own.world_size or other.rank >= own.world_size:
        return PreflightError(
            f"{other.name} was started for {other.world_size} ranks ({other.world_size_from}), "
            f"{own.name} for {own.world_size} ({own.world_size_from})",
            hint="all ranks need the same world size",
        )
    if other.spec != own.spec:
        return PreflightError(
            f"{other.name} reads another spec than {own.name}: the checksums are {other.spec[:12]} and {own.spec[:12]}",
            hint="the file and the KEY=VALUE arguments, CLUSTERDDP__* and profiles have to be the same",
        )
    if other.torch != own.torch:
        return PreflightError(
            f"{other.name} has torch {other.torch or '(none)'}, {own.name} has torch {own.torch or '(none)'}",
            hint="the gang needs the same version everywhere",
        )
    return None


def find_twin(earlier: RankHello, later: RankHello) -> PreflightError | None:
    """Return an error when two processes have the same rank, or the same local rank on one host; else None."""
    if earlier.rank == later.rank:
        return PreflightError(
            f"rank {later.rank} was started twice: on {earlier.host} (process {earlier.pid}) and on {later.host} "
            f"(process {later.pid})",
            hint="each rank has a number of its own, and each machine a node rank of its own",
        )
    if earlier.place == later.place and earlier.local_rank is not None and earlier.local_rank == later.local_rank:
        return PreflightError(
            f"ranks {earlier.rank} and {later.rank} on {later.host} both have LOCAL_RANK {later.local_rank}",
            hint="leave LOCAL_RANK unset: the ranks of a host are then counted",
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
