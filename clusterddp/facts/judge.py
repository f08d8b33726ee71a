"""What a machine's facts mean for a run: each of them red, a note, or ok, with what mends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clusterddp.facts.checks import Result, note, ok, red
from clusterddp.facts.machine import Directory, Machine
from clusterddp.facts.torch import INSTALL_CUDA, Torch, driver_trouble

_GIB = 2**30
MIN_FREE, FEW_FREE = 100 * 2**20, 5 * _GIB
_MIN_FILES, _FEW_FILES = 256, 1024
_MIN_SHM, _FEW_SHM = 32 * 2**20, _GIB
LITTLE_LOCKED = 64 * 2**20
CLOCK_NOTE_S, CLOCK_RED_S = 1.0, 5.0
"""Checkpoints and ends are ordered by attempt numbers, not by clocks; logs and NFS caches are hurt by seconds."""
_SHARED_HINT = "--runs DIR or CLUSTERDDP_RUNS names a directory on storage that all nodes share"


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What the spec asks of each machine; without a spec nothing in particular."""

    trainer: bool = False
    """The built-in trainer runs, which needs torch."""
    gpus: bool = True
    """Ranks compute on GPUs where there are any."""
    gpus_per_node: int = 0


def judge_machine(machine: Machine, needs: Needs) -> Iterator[tuple[str, Result]]:
    """Judge what each machine of a run must have, whichever it is."""
    if machine.torch is not None:
        yield "torch", judge_torch(machine.torch, needs, has_gpus=needs.gpus and bool(machine.gpus))
        if needs.trainer and needs.gpus and machine.gpus:
            yield "compiler", judge_compiler(machine.torch.compile_obstacle)
    yield "GPUs", _judge_gpus(machine, needs)
    yield "runs directory", judge_directory(machine.directory)
    if machine.directory.clock_offset_s is not None:
        yield "clock", judge_clock(machine.directory.clock_offset_s, "the clock of the runs directory's file system")
    yield "open files", judge_open_files(machine.open_files)
    yield "shared memory", judge_shm(machine.shm_bytes)


def judge_here(machine: Machine) -> Iterator[tuple[str, Result]]:
    """Judge what matters of the machine that a person is logged in to."""
    yield "Python", ok(f"{machine.python}, {machine.executable}")
    yield "interfaces", _judge_interfaces(machine)
    yield "host name", _judge_own_name(machine)


def judge_torch(torch: Torch, needs: Needs, *, has_gpus: bool) -> Result:
    """Judge what came of importing torch."""
    if torch.error is not None:
        return red(f"cannot be imported: {torch.error}", 'pip install --force-reinstall "clusterddp[train]"')
    if torch.version is None:
        fix = 'pip install "clusterddp[train]"'
        return red("not installed, and the trainer needs it", fix) if needs.trainer else note("not installed", fix)
    build = f"CUDA {torch.cuda}" if torch.cuda else "for the CPU"
    found = f"{torch.version}, {build}"
    if has_gpus and not torch.cuda:
        return red(f"{found}, and there are GPUs", INSTALL_CUDA)
    if has_gpus and torch.gpus == 0:
        finds_none = ("and it finds no GPU", "nvidia-smi tells the driver; torch needs one for its CUDA")
        words, fix = driver_trouble(str(torch.cuda), torch.driver or "") or finds_none
        return red(f"{found}, {words}", fix)
    if torch.torchvision_error is not None:
        return note(
            f"{found}; torchvision does not match it ({torch.torchvision_error}): the trainer works around that, a "
            "script of yours may not",
            "install torch and torchvision together, from one index",
        )
    return ok(f"{found}, torchvision {torch.torchvision}" if torch.torchvision else found)


def judge_compiler(obstacle: str | None) -> Result:
    """Judge what torch.compile needs to build kernels for GPUs."""
    if obstacle is None:
        return ok("a C compiler and Python.h, for torch.compile")
    return note(
        f"{obstacle}: train.compile auto goes on uncompiled, always fails",
        "apt-get install gcc python3-dev, module load gcc, or a Python that brings its Python.h (conda, uv)",
    )


def judge_directory(directory: Directory) -> Result:
    """Judge the runs directory as one machine sees it."""
    where = f"{directory.path} on {directory.file_system}" if directory.file_system else directory.path
    if directory.in_memory:
        return red(f"{where}: in the memory of this machine ({directory.mount_point})", _SHARED_HINT)
    if directory.error is not None:
        return red(f"{where}: cannot be written: {directory.error}", _SHARED_HINT)
    free = directory.free_bytes or 0
    found = f"{where}, {size(free)} free"
    if free < MIN_FREE:
        return red(found, f"df -h {directory.path}, then make room: checkpoints need it")
    if free < FEW_FREE:
        return note(found, "checkpoints need room")
    return weak_locks(directory, found) or ok(found)


def weak_locks(directory: Directory, found: str) -> Result | None:
    """Return a note where records of several hosts are kept apart by locks alone."""
    if directory.exclusive != "lock":
        return None
    return note(
        f"{found}; no hard links and no exclusive rename: only locks keep the hosts of a run apart",
        "see docs/storage.md; a runs directory on NFS, Lustre or a local disk has both",
    )


def judge_clock(offset_s: float, than: str) -> Result:
    """Judge a difference between two clocks; positive: the other one is ahead."""
    found = f"{abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} {than}"
    if abs(offset_s) < CLOCK_NOTE_S:
        return ok(f"agrees with {than}")
    fix = "chronyc tracking, or timedatectl status, on both"
    return red(found, fix) if abs(offset_s) >= CLOCK_RED_S else note(found, fix)


def size(num_bytes: int) -> str:
    """Write a number of bytes for people."""
    if num_bytes >= 10 * _GIB:
        return f"{num_bytes / _GIB:.0f} GiB"
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.0f} MiB"


def _judge_gpus(machine: Machine, needs: Needs) -> Result:
    count = len(machine.gpus)
    found = f"{count}: {', '.join(machine.gpus)}" if count else "none"
    if count < needs.gpus_per_node:
        return red(
            f"{found}; the spec asks for {needs.gpus_per_node} per node",
            "nvidia-smi -L there; resources.gpus_per_node, or --cpu",
        )
    return ok(found)


def judge_open_files(limit: int) -> Result:
    if limit < 0:
        return ok("no limit")
    if limit >= _FEW_FILES:
        return ok(f"at most {limit}")
    level = red if limit < _MIN_FILES else note
    return level(f"at most {limit}", "ulimit -n 65536; for good: nofile in /etc/security/limits.conf")


def judge_locked_memory(machine: Machine, fix: str, *, nccl: bool) -> Result:
    """Judge how much memory may be locked, which RDMA needs; `nccl`: the run communicates by it between hosts."""
    if machine.locked_memory < 0:
        return ok("no limit")
    words = f"at most {size(machine.locked_memory)}"
    if machine.locked_memory >= LITTLE_LOCKED or not machine.infiniband:
        return ok(words)
    found = f"{words}: NCCL over InfiniBand or RoCE fails there (ibv_reg_mr: Cannot allocate memory)"
    return red(found, fix) if nccl else note(found, fix)


def judge_shm(num_bytes: int | None) -> Result:
    if num_bytes is None:
        return note("no /dev/shm", "mount a tmpfs there: workers of data loaders share memory there")
    if num_bytes >= _FEW_SHM:
        return ok(size(num_bytes))
    level = red if num_bytes < _MIN_SHM else note
    return level(size(num_bytes), "in a container --shm-size=8g: workers of data loaders share memory there")


def _judge_interfaces(machine: Machine) -> Result:
    usable = [f"{entry.name} {entry.addresses[0]}" for entry in machine.interfaces if entry.usable]
    never = [
        entry.name
        for entry in machine.interfaces
        if not entry.usable and not all(map(_is_loopback, entry.addresses or ("?",)))
    ]
    text = f"{', '.join(usable)} (by route)" if usable else "only the loopback: runs stay on this machine"
    text += f"; never used: {', '.join(never)}" if never else ""
    return ok(text) if usable else note(text)


def _judge_own_name(machine: Machine) -> Result:
    host, addresses = machine.host, machine.own_addresses
    if not addresses:
        return note(f"{host} does not resolve here", f"a line for {host} in /etc/hosts")
    if all(map(_is_loopback, addresses)):
        return note(
            f"{host} is {', '.join(addresses)} here: clusterddp goes by addresses, but a script that binds to its "
            "host name reaches nobody",
            f"give {host} its real address in /etc/hosts",
        )
    return ok(f"{host} is {', '.join(addresses)}")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
