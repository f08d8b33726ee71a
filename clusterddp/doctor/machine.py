"""The facts of the machine that this process is on, as one value that travels as JSON; nothing is judged here."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from clusterddp.dist.devices import visible_gpus
from clusterddp.run.storage import find_mount

_NEVER_USED = ("docker", "veth", "virbr", "br-", "cni", "flannel", "cali", "podman", "lxc", "lxd")
"""Interfaces between the containers of one machine: other machines have the same ones, with the same addresses."""
_SHM = "/dev/shm"  # noqa: S108 (it is looked at, not written to)
_TORCH_TIMEOUT_S = 40.0
_TORCH_PROBE = """\
import json
found = {}
try:
    import torch
    found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
if "error" not in found:
    try:
        import torchvision
        found["torchvision"] = torchvision.__version__
    except ModuleNotFoundError:
        found["torchvision"] = None
    except Exception as error:
        found["torchvision_error"] = f"{type(error).__name__}: {error}"
print("FOUND" + json.dumps(found))
"""
"""Runs in an interpreter of its own: an import that crashes, or takes a minute, ends only that."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """What came of importing torch, and torchvision after it; None: not installed, not known."""

    version: str | None = None
    cuda: str | None = None
    gpus: int | None = None
    error: str | None = None
    torchvision: str | None = None
    torchvision_error: str | None = None


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

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """Rebuild what `to_json` gave."""
        parts = {
            "gpus": tuple(data["gpus"]),
            "own_addresses": tuple(data["own_addresses"]),
            "interfaces": tuple(
                Interface(**interface | {"addresses": tuple(interface["addresses"])})
                for interface in data["interfaces"]
            ),
            "directory": Directory(**data["directory"]),
            "torch": Torch(**data["torch"]) if data["torch"] else None,
        }
        return cls(**{**data, **parts})


def read_machine(directory: Path, environ: Mapping[str, str]) -> Machine:
    """Look at this machine, which takes no longer than nvidia-smi does; torch is looked at apart."""
    host = socket.gethostname()
    try:
        shm_bytes: int | None = psutil.disk_usage(_SHM).total
    except OSError:
        shm_bytes = None
    return Machine(
        host=host,
        time=time.time(),
        python=platform.python_version(),
        executable=sys.executable,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        shm_bytes=shm_bytes,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=visible_gpus(environ),
        own_addresses=resolve(host),
        interfaces=read_interfaces(),
        directory=read_directory(directory),
    )


def resolve(name: str) -> tuple[str, ...]:
    """Return the addresses of a host as this machine knows them; none when it does not know the name."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[4][0]) for address in found))


def read_interfaces() -> tuple[Interface, ...]:
    """List the interfaces that are up and have an address, and those that are never used."""
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
        )
        virtual = name.startswith(_NEVER_USED)
        if virtual or (addresses and name in states and states[name].isup):
            loopback = name == "lo" or all(address.startswith("127.") or address == "::1" for address in addresses)
            found.append(
                Interface(name=name, addresses=addresses, usable=bool(addresses) and not (loopback or virtual))
            )
    return tuple(found)


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
        free = psutil.disk_usage(str(existing)).free
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".clusterddp-doctor-") as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            offset = os.stat(file.name).st_mtime - (before + time.time()) / 2
    except OSError as error:
        return dataclasses.replace(seen, error=error.strerror)
    return dataclasses.replace(seen, free_bytes=free, clock_offset_s=round(offset, 3))


def import_torch() -> Torch:
    """Import torch and torchvision in a process of their own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"the import takes longer than {_TORCH_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Torch(error=f"{sys.executable}: {error.strerror}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    if not lines:
        words = done.stderr.strip().splitlines()
        return Torch(error=words[-1] if words else f"the import ends with exit code {done.returncode}")
    found = json.loads(lines[-1].removeprefix("FOUND"))
    if str(found.get("error", "")).startswith("ModuleNotFoundError: No module named 'torch'"):
        return Torch()
    return Torch(**found)
