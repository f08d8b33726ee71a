"""The lease on a GPU: the processes of one run hold it, all users of the host see it, the last holder's end frees it.

A lease is two abstract unix sockets per device, bound and never used. The name of the first is the device's, so the
kernel gives it to one process only; the name of the second contains the run. /proc/net/unix lists the names. The kernel
closes both when the last process that has them open ends, so there is no file to clean up, and users need no common
directory. Sockets belong to a network namespace: containers with networks of their own do not see each other's leases.

A run in a hold takes a lease of its own, of another name, on a GPU that the hold has leased. No other run gets the GPU
until both have ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.system.devices import Gpu, ask_nvidia_smi, list_gpus, visible_gpus
from clusterddp.system.netlink import ask_kernel, attributes_of
from clusterddp.system.own_directory import account_name

ENDING_S = 3.0
"""How long the last process of an ended run may take to exit, and so to free its GPUs."""
_GPU = "clusterddp-gpu"
_IN_HOLD = "in:"
"""Before the device in the name that a run in a hold binds."""
_NO_GPU = ("host-", "hold-")
"""How names begin that stand for a host and a hold."""
_MAX_NAME = 107
"""Bytes of an abstract name: sun_path has 108, the first of them is 0."""
_NAMES = Path("/proc/net/unix")
_SOCK_DIAG, _BY_FAMILY, _SHOW, _NAME, _UID = 4, 20, 0x41, 0, 7
"""Numbers of linux/sock_diag.h and linux/unix_diag.h; _SHOW: the name and the user."""
_UNIX_ENTRY = 16
"""Bytes of an entry before its attributes."""
_NO_HOLDER = frozenset({"nvidia-cuda-mps"})
"""Processes, by their names in the kernel, that compute for other processes, which are listed themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The run that holds a lease; its name is unverified, since any user can bind any name."""

    run: str
    """Empty: the second socket is not bound yet, or its holder is no run."""
    uid: int | None
    """The user who has bound the name, of whom the kernel knows; before Linux 5.3, whom the name says."""

    def __str__(self) -> str:
        if not self.run or self.uid is None:
            return "another run" if self.uid in (None, os.getuid()) else f"a process of {account_name(self.uid)}"
        return f"run {self.run}" if self.uid == os.getuid() else f"run {self.run} of {account_name(self.uid)}"


class Lease:
    """Leases; they end when all processes that have the descriptors have closed them."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that another process inherits to hold them, too: two per device, in their order."""
        return tuple(each.fileno() for each in self._sockets)

    def close(self) -> None:
        """Close the descriptors; processes that have inherited them still hold the leases."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()


def take_leases(gpus: Iterable[str], run: str, listed: Sequence[Gpu], *, hold: str | None = None) -> Lease | None:
    """Take the leases of all these GPUs (as CUDA_VISIBLE_DEVICES names them) for a run; None: one of them is leased.

    `listed`: the GPUs of this host. `hold`: the hold that the run is in, or its own name: it is a hold. A hold without
    GPUs leases the host, which keeps other such holds of this user away; a run without GPUs leases the hold that it is
    in.
    """
    in_hold = hold not in (None, run)
    mark = f"{os.getuid()}/{re.sub('[^0-9A-Za-z_.-]', '_', run)}"
    names = names_to_lease(gpus, run, hold)
    devices = dict.fromkeys(_key(device) for gpu in names for device in devices_of(gpu, listed))
    sockets: list[socket.socket] = []
    try:
        firsts = (f"{_GPU}/{_IN_HOLD if in_hold else ''}{key}" for key in devices)
        for name in (name for first in firsts for name in (first, f"{first}/{mark}")):
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sockets[-1].bind(b"\0" + name.encode()[:_MAX_NAME])
    except OSError as error:
        Lease(sockets).close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    # Looking comes after binding: of a run in a hold and another run that take a GPU at once, one sees the other.
    leased = _read_marks()
    if all(_has(leased, key, hold) if in_hold else _IN_HOLD + key not in leased for key in devices):
        return Lease(sockets)
    Lease(sockets).close()
    return None


def names_to_lease(gpus: Iterable[str], run: str, hold: str | None) -> tuple[str, ...]:
    """Return what a run leases: its GPUs; without GPUs, a hold leases the host, and a run in a hold the hold."""
    names = tuple(gpus)
    if hold is None:
        return names
    own = f"hold-{hold}"
    return (*(names or (f"host-{os.getuid()}",)), own) if hold == run else names or (own,)


def read_leases(gpus: Iterable[str], listed: Sequence[Gpu], *, in_hold: bool = False) -> dict[str, Holder]:
    """Return which of these GPUs are leased, and by which run; `in_hold`: only by runs in a hold."""
    leased, prefixes = _read_marks(), (_IN_HOLD,) if in_hold else ("", _IN_HOLD)
    keys = {gpu: [prefix + _key(each) for prefix in prefixes for each in devices_of(gpu, listed)] for gpu in gpus}
    held = {gpu: [leased[key] for key in keys[gpu] if key in leased] for gpu in keys}
    return {gpu: holders[0] for gpu, holders in held.items() if holders}


def busy_gpus(
    environ: Mapping[str, str],
    *,
    gpus: Iterable[str] | None = None,
    listed: Sequence[Gpu] | None = None,
    foreign: bool = True,
    hold: str | None = None,
) -> dict[str, str]:
    """Return which GPUs that this environment sees (or of `gpus`) are in use, and by what: GPU -> text for people.

    The text names the run that leases a GPU; with `foreign`, for a GPU without a lease, the processes that use it.
    For a run in `hold`, all GPUs but those of the hold are in use.
    """
    listed = list_gpus(environ) if listed is None else listed
    names = visible_gpus(environ, listed) if gpus is None else tuple(gpus)
    busy = {gpu: str(holder) for gpu, holder in read_leases(names, listed, in_hold=hold is not None).items()}
    busy |= _outside(names, listed, hold) if hold else {}
    processes = _processes(environ) if foreign and set(names) - set(busy) else {}
    for gpu in names:
        users = [user for device in devices_of(gpu, listed) for user in processes.get(device, ())]
        if users and gpu not in busy:
            busy[gpu] = ", ".join(dict.fromkeys(users))
    return {gpu: busy[gpu] for gpu in names if gpu in busy}


def spell_busy(busy: Mapping[str, str]) -> str:
    """Write which GPU is used by what: `GPUs 0 and 1: run brisk-otter-3; GPU 2: pid 4120 of ana`."""
    by_user: dict[str, list[str]] = {}
    for gpu, user in busy.items():
        by_user.setdefault(user, []).append(gpu)
    parts = []
    for user, gpus in by_user.items():
        names = gpus[0] if len(gpus) == 1 else f"{', '.join(gpus[:-1])} and {gpus[-1]}"
        parts.append(f"GPU{'s' if len(gpus) > 1 else ''} {names}: {user}" if not names.startswith(_NO_GPU) else user)
    return "; ".join(parts)


def devices_of(gpu: str, listed: Sequence[Gpu]) -> tuple[str, ...]:
    """Return the UUID of the device that CUDA_VISIBLE_DEVICES names by index, UUID, or the beginning of a UUID.

    For a GPU with MIG slices it returns all slices, for a name that nvidia-smi does not list the name itself.
    """
    for each in listed:
        if gpu == each.index or (gpu.startswith("GPU-") and each.uuid.startswith(gpu)):
            return each.slices or (each.uuid,)
    if gpu.startswith("MIG-"):
        for uuid in (uuid for each in listed for uuid in each.slices):
            if uuid.startswith(gpu):
                return (uuid,)
    return (gpu,)


def _outside(gpus: Iterable[str], listed: Sequence[Gpu], hold: str) -> dict[str, str]:
    """Return which of these GPUs a hold of this user has not leased, each with a text for people."""
    leased = _read_marks()
    why = f"not in hold {hold}" if _has(leased, f"hold-{hold}", hold) else f"hold {hold} has ended"
    return {gpu: why for gpu in gpus if not all(_has(leased, _key(each), hold) for each in devices_of(gpu, listed))}


def _has(leased: Mapping[str, Holder], key: str, run: str | None) -> bool:
    """Return whether a run of this user has leased a device."""
    return key in leased and leased[key].run == run and leased[key].uid in (None, os.getuid())


def _read_marks() -> dict[str, Holder]:
    """Read which devices are taken, and by which run: the socket that names it is of the user who has the device's."""
    taken: dict[str, int | None] = {}
    holders: dict[tuple[str, int | None], Holder] = {}
    for name, owner in _list_sockets():
        # Any user may bind any name, also one with line ends or invalid numbers.
        if mark := re.fullmatch(rf"@{_GPU}/([^/]+)(?:/([0-9]{{1,10}})/([^/]+))?", name):
            if mark[3]:
                holders[mark[1], owner] = Holder(run=mark[3], uid=int(mark[2]) if owner is None else owner)
            else:
                taken[mark[1]] = owner
    return {device: holders.get((device, owner), Holder(run="", uid=owner)) for device, owner in taken.items()}


def _list_sockets() -> list[tuple[str, int | None]]:
    """List the names of unix sockets, abstract ones after an @, and who made each; None: the kernel does not say."""
    question = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW, 0, 0)  # see sock_diag(7)
    with contextlib.suppress(OSError, KeyError):  # before Linux 5.3 there is no user
        sockets = [attributes_of(entry[_UNIX_ENTRY:]) for entry in ask_kernel(_SOCK_DIAG, _BY_FAMILY, question)]
        return [
            (each[_NAME].decode("ascii", "replace").replace("\0", "@"), int(struct.unpack("=I", each[_UID])[0]))
            for each in sockets
            if _NAME in each
        ]
    with contextlib.suppress(OSError):
        text = _NAMES.read_text(encoding="ascii", errors="replace")
        return [(line.split(maxsplit=7)[-1], None) for line in text.splitlines() if line.strip()]
    return []


def _key(device: str) -> str:
    return re.sub("[^0-9A-Za-z_.:-]", ":", device)


def _processes(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """List the processes of all users that compute on each GPU: UUID -> texts for people."""
    found: dict[str, list[str]] = {}
    listing = ask_nvidia_smi(environ, "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
    for line in listing.splitlines():
        uuid, comma, pid = (part.strip() for part in line.partition(","))
        if comma and (user := _spell_process(pid)):
            found.setdefault(uuid, []).append(user)
    return found


def _spell_process(pid: str) -> str:
    """Name a process and its user; empty for one in `_NO_HOLDER`."""
    if not pid.isdigit():
        return "a process that cannot be seen from here"  # nvidia-smi gives the reason in brackets
    process = Path("/proc", pid)
    with contextlib.suppress(OSError):
        if (process / "comm").read_text(errors="replace").strip() in _NO_HOLDER:
            return ""
        return f"pid {pid} of {account_name(process.stat().st_uid)}"
    return f"pid {pid}"  # it is in another PID namespace, or has just ended
