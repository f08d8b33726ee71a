"""The facts of the machine that this process is on, as one value that travels as JSON; nothing is judged here."""

from __future__ import annotations

import dataclasses
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.facts.limits import read_cpu_limit, read_memory_limit
from clusterddp.facts.torch import Torch
from clusterddp.network.interface import read_links
from clusterddp.system.devices import visible_gpus
from clusterddp.system.exclusive import Method, probe_exclusive
from clusterddp.system.storage import find_mount

_SHM = "/dev/shm"  # noqa: S108 (it is looked at, not written to)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    addresses: tuple[str, ...]
    usable: bool
    """It may carry a gang: neither the loopback nor one between containers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Directory:
    """The runs directory, or what exists of its path, as this machine sees it."""

    path: str
    error: str | None = None
    """Why nothing can be written there."""
    file_system: str | None = None
    mount_point: str | None = None
    in_memory: bool = False
    free_bytes: int | None = None
    clock_offset_s: float | None = None
    """The file system's clock minus this machine's; a file server has one of its own."""
    exclusive: Method | None = None
    """How a record gets a name that none has there; None: not found out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine at one moment, as a process of ours sees it."""

    host: str
    time: float
    python: str
    executable: str
    cores: int
    memory_bytes: int
    shm_bytes: int | None
    open_files: int
    gpus: tuple[str, ...]
    own_addresses: tuple[str, ...]
    """What the machine's own name resolves to here."""
    interfaces: tuple[Interface, ...]
    directory: Directory
    torch: Torch | None = None
    """None: not looked at."""
    locked_memory: int = -1
    """Bytes that a process may lock; -1: no limit."""
    infiniband: bool = False
    """It has a device for RDMA: InfiniBand, or a card that speaks RoCE."""
    cpu_limit: float | None = None
    """Cores' worth of time that the control group may use; None: no limit."""
    memory_limit_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_machine(directory: Path, environ: Mapping[str, str], *, brief: bool = False) -> Machine:
    """Look at this machine, which takes no longer than nvidia-smi does; torch is looked at apart.

    `brief`: without GPUs and what the machine's own name means, which a name server that is gone delays for long.
    """
    host = socket.gethostname()
    try:
        shm_bytes: int | None = shutil.disk_usage(_SHM).total
    except OSError:
        shm_bytes = None
    return Machine(
        host=host,
        time=time.time(),
        python=platform.python_version(),
        executable=sys.executable,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        shm_bytes=shm_bytes,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=() if brief else visible_gpus(environ),
        own_addresses=() if brief else resolve(host),
        interfaces=read_interfaces(),
        directory=read_directory(directory),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=_has_infiniband(),
        cpu_limit=read_cpu_limit(),
        memory_limit_bytes=read_memory_limit(),
    )


def _has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def resolve(name: str) -> tuple[str, ...]:
    """Return the addresses of a host as this machine knows them; none when it does not know the name."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[4][0]) for address in found))


def read_interfaces() -> tuple[Interface, ...]:
    """List the interfaces that are up and have an address, and those that are never used."""
    return tuple(
        Interface(
            name=link.name,
            addresses=tuple(entry.address for entry in link.addresses),
            usable=bool(link.addresses) and not (link.loopback or link.of_containers),
        )
        for link in read_links()
        if link.of_containers or (link.addresses and link.up)
    )


def interface_of(address: str, interfaces: tuple[Interface, ...]) -> str | None:
    """Name the interface that has an address."""
    return next((interface.name for interface in interfaces if address in interface.addresses), None)


def read_directory(path: Path) -> Directory:
    """Write a file into a directory, or into the nearest one that exists above it, and look at what it lies on."""
    path = path.absolute()
    existing = path
    while not existing.exists():
        existing = existing.parent
    mount = find_mount(existing)
    seen = Directory(
        path=str(path),
        file_system=mount.kind if mount else None,
        mount_point=mount.point if mount else None,
        in_memory=mount is not None and mount.in_memory,
    )
    try:
        free = shutil.disk_usage(existing).free
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".clusterddp-doctor-") as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            offset = os.stat(file.name).st_mtime - (before + time.time()) / 2
        exclusive = probe_exclusive(existing)
    except OSError as error:
        return dataclasses.replace(seen, error=error.strerror)
    return dataclasses.replace(seen, free_bytes=free, clock_offset_s=round(offset, 3), exclusive=exclusive)
