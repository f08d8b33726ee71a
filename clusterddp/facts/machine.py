"""The facts of this machine, as one value with a JSON form; facts/judge.py judges it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import pwd
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clusterddp.facts.memory import read_cpu_limit, read_memory_limit
from clusterddp.facts.torch import Torch, ask_torch
from clusterddp.network.interface import Link, read_links, resolve
from clusterddp.system.devices import read_driver, visible_gpus
from clusterddp.system.exclusive import Method, probe_exclusive
from clusterddp.system.storage import find_mount
from clusterddp.wire import Written

_SHM = "/dev/shm"  # noqa: S108 (it is looked at, not written to)
_LOGIND = ("/usr/lib/systemd", "/usr/local/lib/systemd", "/run/systemd", "/etc/systemd")
"""Where systemd-logind reads its settings; later ones override earlier ones."""
_YES = {"1", "yes", "y", "true", "t", "on"}
DataState = Literal["there", "empty", "missing", "not readable"]


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
    """How a record is created exclusively there; None: unknown."""
    no_exec: bool = False
    """Mounted noexec: no file there can run as a program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The directory of the data set."""

    path: str
    state: DataState


@dataclass(frozen=True, kw_only=True, slots=True)
class Logout:
    """What systemd-logind does to this user's processes at the end of the session in which they were started."""

    user: str
    in_session: bool
    """This process belongs to a session of systemd-logind."""
    kills: bool
    """KillUserProcesses is on, and applies to this user."""
    lingers: bool
    """The user always counts as logged in (loginctl enable-linger); processes of a session are ended nevertheless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine(Written):
    """The facts of a machine at one moment, as this process sees them."""

    host: str
    time: float
    python: str
    executable: str
    cores: int
    memory_bytes: int
    shm_bytes: int | None
    open_files: int
    gpus: tuple[str, ...] | None
    """None: not read."""
    own_addresses: tuple[str, ...] | None
    """The addresses of the machine's own name; None: not read."""
    links: tuple[Link, ...]
    directory: Directory
    torch: Torch | None = None
    """None: not read."""
    locked_memory: int = -1
    """Bytes that a process may lock; -1: no limit."""
    infiniband: bool = False
    """It has a device for RDMA: InfiniBand or RoCE."""
    busy_gpus: dict[str, str] = dataclasses.field(default_factory=dict)
    """Those of `gpus` that are in use -> the run or process."""
    cpu_limit: float | None = None
    """Cores' worth of time that the control group may use; None: no limit."""
    memory_limit_bytes: int | None = None
    logout: Logout | None = None
    """None: not read, as a run there does not outlive a session."""
    data: Data | None = None
    """None: not read, or the run names no data."""


def read_machine(directory: Path, environ: Mapping[str, str], *, brief: bool = False) -> Machine:
    """Read the facts of this machine without torch; it takes as long as nvidia-smi.

    `brief`: without GPUs and without resolving the machine's own name, which a dead name server delays.
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
        gpus=None if brief else visible_gpus(environ),
        own_addresses=None if brief else resolve(host),
        links=read_links(),
        directory=read_directory(directory),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        cpu_limit=read_cpu_limit(),
        memory_limit_bytes=read_memory_limit(),
    )


def read_host(
    root: Path, environ: Mapping[str, str], *, executable: str, data_dir: Path | None, with_driver: bool
) -> Machine:
    """Read the facts of a host for a run that outlives the SSH session, without importing torch.

    `root`: the directory of clusterddp there; `environ`: that of the ranks' Python `executable`, with this package on
    its path.
    """
    torch = ask_torch(executable, environ, root)
    return dataclasses.replace(
        read_machine(root, environ, brief=True),
        torch=dataclasses.replace(torch, driver=read_driver(environ)) if with_driver else torch,
        logout=read_logout(),
        data=read_data(data_dir) if data_dir else None,
    )


def read_directory(path: Path) -> Directory:
    """Read the facts of a directory, or of its nearest parent that exists, by writing a file there."""
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
        no_exec = bool(os.statvfs(existing).f_flag & getattr(os, "ST_NOEXEC", 0))
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".clusterddp-doctor-") as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            offset = os.stat(file.name).st_mtime - (before + time.time()) / 2
        exclusive = probe_exclusive(existing)
    except OSError as error:
        return dataclasses.replace(seen, error=error.strerror)
    return dataclasses.replace(
        seen, free_bytes=free, clock_offset_s=round(offset, 3), exclusive=exclusive, no_exec=no_exec
    )


def read_data(path: Path) -> Data:
    """Check whether a directory has entries and can be read."""
    state: DataState = "there"
    try:
        with os.scandir(path) as entries:
            state = "there" if any(True for _ in entries) else "empty"
    except FileNotFoundError:
        state = "missing"
    except OSError:
        state = "not readable"
    return Data(path=str(path), state=state)


def read_logout(root: Path = Path("/")) -> Logout:
    """Read the settings of this machine; a setting that is missing is off, as in the distributions."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    settings = dict(_read_settings(root))
    only, excluded = settings.get("KillOnlyUsers", "").split(), settings.get("KillExcludeUsers", "root").split()
    meant = (user in only if only else True) and user not in excluded
    with contextlib.suppress(OSError):
        group = (root / "proc/self/cgroup").read_text()
        return Logout(
            user=user,
            in_session=re.search(r"/session-[^/\n]+\.scope", group) is not None,
            kills=settings.get("KillUserProcesses", "no").lower() in _YES and meant,
            lingers=(root / "var/lib/systemd/linger" / user).exists(),
        )
    return Logout(user=user, in_session=False, kills=False, lingers=False)


def _read_settings(root: Path) -> Iterator[tuple[str, str]]:
    """Read logind's settings, the ones that override others last."""
    main = [root / place.lstrip("/") / "logind.conf" for place in _LOGIND]
    extras: dict[str, Path] = {}
    for place in _LOGIND:
        with contextlib.suppress(OSError):
            extras |= {path.name: path for path in (root / place.lstrip("/") / "logind.conf.d").glob("*.conf")}
    for path in [*main, *(extras[name] for name in sorted(extras))]:
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                if match := re.fullmatch(r"\s*(Kill\w+)\s*=\s*(.*?)\s*", line):
                    yield match[1], match[2]
