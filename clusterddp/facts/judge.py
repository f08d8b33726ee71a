"""Judge a machine's facts for a run: each is red, a note, or ok, with the fix; one rule for each fact.

The same rules judge the machine of the submit, the nodes of a job, and hosts over SSH.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from clusterddp.facts.checks import Check, Needs, Result, note, ok, red
from clusterddp.facts.machine import Data, Directory, Logout, Machine
from clusterddp.facts.torch import INSTALL_CUDA, Torch, explain_old_driver, install_command
from clusterddp.network.interface import is_loopback
from clusterddp.system.gpu_lease import spell_busy
from clusterddp.system.units import format_bytes

_Value = TypeVar("_Value")
_GIB = 2**30
_MIN_FREE, _FEW_FREE = 100 * 2**20, 5 * _GIB
_MIN_FILES, _FEW_FILES = 256, 1024
_MIN_SHM, _FEW_SHM = 32 * 2**20, _GIB
LITTLE_LOCKED = 64 * 2**20
CLOCK_NOTE_S, CLOCK_RED_S = 1.0, 5.0
"""Checkpoints and ends are ordered by attempt numbers, not by clocks; seconds matter to logs and NFS caches."""
_SHARED_HINT = "--runs DIR or CLUSTERDDP_RUNS names a directory on storage that all nodes share"
_DIR_HINT = "ssh.dir names another directory"


def judge_machine(
    machine: Machine, needs: Needs, *, shared: bool = True, usual: Torch | None = None
) -> Iterator[tuple[str, Result]]:
    """Judge what each machine of a run must have; facts that were not read are left out.

    `shared`: its directory is the runs directory that all machines share, not one of its own. `usual`: the torch that
    most machines have.
    """
    torch, gpus = machine.torch, machine.gpus
    wants_gpus = needs.num_gpus > 0 or (needs.use_gpus and bool(gpus))
    if torch is not None:
        yield "torch", judge_torch(torch, needs, has_gpus=wants_gpus, usual=usual)
        if needs.trainer and wants_gpus and torch.version:
            yield "compiler", judge_compiler(torch.compile_obstacle)
    if gpus is not None:
        yield "GPUs", _judge_gpus(gpus, machine.busy_gpus, needs)
    if torch is not None and torch.gpus is None and wants_gpus and torch.driver and torch.cuda:
        yield "driver", judge_driver(torch)
    yield (
        "runs directory" if shared else "disk",
        judge_directory(machine.directory, shared=shared, sent_bytes=needs.sent_bytes),
    )
    if shared and machine.directory.clock_offset_s is not None:
        yield "clock", judge_clock(machine.directory.clock_offset_s, "the clock of the runs directory's file system")
    if machine.data is not None:
        yield "data", _judge_data(machine.data, needs)
    if machine.logout is not None:
        yield "log out", _judge_logout(machine.logout)
    yield "open files", _judge_open_files(machine.open_files)
    yield "shared memory", _judge_shm(machine.shm_bytes)


def judge_hosts(machines: Mapping[str, Machine], needs: Mapping[str, Needs]) -> list[Check]:
    """Judge hosts by themselves and against each other."""
    pythons = [each for each in machines.values() if each.torch is None or each.torch.python_error is None]
    python = _most_common(pythons, lambda machine: minor_version(machine.python))
    torches = [each.torch for each in machines.values() if each.torch is not None and each.torch.version is not None]
    torch = _most_common(torches, lambda torch: (torch.version, torch.nccl))
    found: dict[str, dict[str, Result]] = {}
    for host, machine in machines.items():
        found.setdefault("Python", {})[host] = judge_python(machine, python)
        for name, result in judge_machine(machine, needs[host], shared=False, usual=torch):
            found.setdefault(name, {})[host] = result
    return [Check(name=name, results=results) for name, results in found.items()]


def judge_here(machine: Machine) -> Iterator[tuple[str, Result]]:
    """Judge the facts that matter only on the machine of the submit."""
    yield "Python", ok(f"{machine.python}, {machine.executable}")
    yield "interfaces", _judge_interfaces(machine)
    yield "host name", _judge_own_name(machine)


def judge_directory(directory: Directory, *, shared: bool = True, sent_bytes: int = 0) -> Result:
    """Judge the directory of runs as one machine sees it; `shared`: all machines use the same one."""
    hint = _SHARED_HINT if shared else _DIR_HINT
    where = f"{directory.path} on {directory.file_system}" if directory.file_system else directory.path
    if shared and directory.in_memory:
        return red(f"{where}: in the memory of this machine ({directory.mount_point})", hint)
    if directory.error is not None:
        return red(f"{where}: cannot be written: {directory.error}", hint)
    found = f"{where}, {format_bytes(directory.free_bytes or 0)} free"
    return (
        _judge_room(directory, found, sent_bytes=sent_bytes, shared=shared)
        or (_weak_locks(directory, found) if shared else _judge_own_directory(directory, found))
        or ok(found)
    )


def judge_python(machine: Machine, usual: Machine | None) -> Result:
    """Judge the Python of a host, also against the one that most hosts have."""
    if machine.torch is not None and machine.torch.python_error is not None:
        error = machine.torch.python_error
        return red(f"{machine.torch.executable}: {error}", "python, venv, conda or ssh.modules name another")
    found = f"{machine.python}, {machine.executable}"
    if usual and minor_version(machine.python) != minor_version(usual.python):
        return note(f"{found}; elsewhere {usual.python}", "python, venv or conda of the host name another")
    return ok(found)


def judge_torch(torch: Torch, needs: Needs, *, has_gpus: bool, usual: Torch | None = None) -> Result:
    """Judge a torch; `has_gpus`: there are GPUs for it, or the run needs some; `usual`: that of most hosts."""
    if torch.python_error is not None:
        return note("not looked for")
    if torch.error is not None:
        return red(f"cannot be imported: {torch.error}", 'pip install --force-reinstall "clusterddp[train]"')
    if torch.version is None:
        fix = install_command(torch, usual.version if usual else None)
        missing = f"{torch.executable} has none"
        return red(f"{missing}, and the trainer needs it", fix) if needs.trainer else note(missing, fix)
    lacking = _judge_gpu_support(torch, needs, usual or torch) if has_gpus else None
    return lacking or _judge_version(torch, needs, usual or torch)


def judge_compiler(obstacle: str | None) -> Result:
    """Judge what torch.compile needs to build kernels for GPUs."""
    if obstacle is None:
        return ok("a C compiler and Python.h, for torch.compile")
    return note(
        f"{obstacle}: train.compile auto runs uncompiled, always fails",
        "apt-get install gcc python3-dev, module load gcc, or a Python that brings its Python.h (conda, uv)",
    )


def judge_driver(torch: Torch) -> Result:
    """Judge whether NVIDIA's driver is new enough for a torch that was not imported."""
    outdated = explain_old_driver(str(torch.cuda), str(torch.driver))
    if outdated is None:
        return ok(f"{torch.driver}, CUDA {torch.cuda}")
    found, fix = outdated
    return red(f"torch for CUDA {torch.cuda}, {found}", f"{fix}; {install_command(torch, None)}")


def minor_version(version: str) -> tuple[str, ...]:
    """Return the part of a version that must be the same on all hosts: 2.10 of 2.10.1+cu128."""
    return tuple(version.split(".")[:2])


def judge_clock(offset_s: float, than: str) -> Result:
    """Judge a difference between two clocks; positive: the other one is ahead."""
    found = f"{abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} {than}"
    if abs(offset_s) < CLOCK_NOTE_S:
        return ok(f"agrees with {than}")
    fix = "chronyc tracking, or timedatectl status, on both"
    return red(found, fix) if abs(offset_s) >= CLOCK_RED_S else note(found, fix)


def judge_locked_memory(machine: Machine, fix: str, *, nccl: bool) -> Result:
    """Judge how much memory may be locked, which RDMA needs; `nccl`: NCCL connects the hosts of the run."""
    if machine.locked_memory < 0:
        return ok("no limit")
    limit = f"at most {format_bytes(machine.locked_memory)}"
    if machine.locked_memory >= LITTLE_LOCKED or not machine.infiniband:
        return ok(limit)
    found = f"{limit}: NCCL over InfiniBand or RoCE fails there (ibv_reg_mr: Cannot allocate memory)"
    return red(found, fix) if nccl else note(found, fix)


def _judge_own_name(machine: Machine) -> Result:
    """Judge the addresses that the machine's own name has there."""
    addresses = machine.own_addresses
    if not addresses:
        return note(f"{machine.host} does not resolve here", "a line with the host's real address in its /etc/hosts")
    if all(map(is_loopback, addresses)):
        return note(
            f"{machine.host} is {', '.join(addresses)} here: ranks get addresses instead, but a script that binds to "
            "its host name reaches no other host",
            "the host's real address in its /etc/hosts",
        )
    return ok(f"{machine.host} is {', '.join(addresses)}")


def _judge_gpu_support(torch: Torch, needs: Needs, usual: Torch) -> Result | None:
    """Return why a torch cannot compute on this machine's GPUs; None: it can, as far as is known."""
    if torch.for_cpu:
        why = "GPUs are asked for" if needs.num_gpus else "there are GPUs"
        wanted = str(torch.version).partition("+")[0] if usual.for_cpu else usual.version
        return red(
            f"{torch.version} is built for the CPU, and {why}", f"{install_command(torch, wanted)}, or {INSTALL_CUDA}"
        )
    if torch.gpus == 0:
        finds_none = ("and it finds no GPU", "nvidia-smi shows the driver; torch needs one for its CUDA")
        found, fix = explain_old_driver(str(torch.cuda), torch.driver or "") or finds_none
        return red(f"{_spell_torch(torch)}, {found}", fix)
    return None


def _judge_version(torch: Torch, needs: Needs, usual: Torch) -> Result:
    found, wanted = _spell_torch(torch), str(usual.version)
    differs = f"{found}; elsewhere {_spell_torch(usual)}"
    fix = install_command(torch, wanted)
    if needs.nccl and torch.nccl and usual.nccl and torch.nccl != usual.nccl:
        return red(differs, fix)
    if minor_version(str(torch.version)) != minor_version(wanted):
        return red(differs, fix) if needs.trainer else note(differs, fix)
    if torch.version != wanted:
        return note(differs, fix)
    if torch.torchvision_error is not None:
        return note(
            f"{found}; torchvision does not match it ({torch.torchvision_error}): the trainer works around that, a "
            "script may not",
            "install torch and torchvision together, from one index",
        )
    return ok(found)


def _spell_torch(torch: Torch) -> str:
    built_for = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "for the CPU"
    parts = [str(torch.version), built_for]
    parts += [f"NCCL {torch.nccl}"] if torch.nccl else []
    parts += [f"torchvision {torch.torchvision}"] if torch.torchvision else []
    return ", ".join(parts)


def _most_common(values: list[_Value], trait: Callable[[_Value], object]) -> _Value | None:
    """Return the first value with the most common trait."""
    counts = Counter(map(trait, values))
    return max(values, key=lambda each: counts[trait(each)], default=None)


def _judge_gpus(gpus: Sequence[str], busy: Mapping[str, str], needs: Needs) -> Result:
    count, free = len(gpus), len(gpus) - len(busy)
    used = f"; {spell_busy(busy)}" if busy else ""
    if count < needs.num_gpus:
        return red(
            f"{needs.num_gpus} are asked for, and there {'is' if count == 1 else 'are'} {count or 'none'}",
            "nvidia-smi -L there; resources.gpus_per_node, or gpus of the host; --cpu",
        )
    if free < needs.num_gpus:
        found = f"{needs.num_gpus} of {count} are asked for, {free or 'none'} {'is' if free == 1 else 'are'} free{used}"
        return red(found, "submit it when they are free; a sweep waits for GPUs by itself")
    if needs.num_gpus:
        return ok(f"{needs.num_gpus} of {count} are asked for{used}")
    return ok(f"{count}: {', '.join(gpus)}{used}" if gpus else "none")


def _judge_room(directory: Directory, found: str, *, sent_bytes: int, shared: bool) -> Result | None:
    free = directory.free_bytes or 0
    clean = "clusterddp gc --older-than 30d --hosts HOST removes what old runs left"
    fix = f"df -h {directory.path}, then make room: checkpoints need it" if shared else f"{clean}; {_DIR_HINT}"
    if free < _MIN_FREE:
        return red(found, fix)
    if free < sent_bytes:
        return note(f"{found}, {format_bytes(sent_bytes)} are sent unless they are there", fix)
    return note(found, fix) if free < _FEW_FREE else None


def _weak_locks(directory: Directory, found: str) -> Result | None:
    """Return a note where only locks protect the records of several hosts."""
    if directory.exclusive != "lock":
        return None
    return note(
        f"{found}; no hard links and no exclusive rename: only locks protect the files of a run",
        "see docs/storage.md; a runs directory on NFS, Lustre or a local disk has both",
    )


def _judge_own_directory(directory: Directory, found: str) -> Result | None:
    if directory.in_memory:
        return note(f"{found}, in memory: gone when the host restarts", _DIR_HINT)
    if directory.no_exec:
        return note(f"{found}, mounted noexec: compiled extensions of your code cannot be loaded from there", _DIR_HINT)
    return None


def _judge_data(data: Data, needs: Needs) -> Result:
    if data.state == "there":
        return ok(data.path)
    fix = f"ssh.send: {{LOCAL: {data.path}}} sends it; train.data_dir names where it is"
    found = f"{data.path}: {data.state}"
    if data.state != "not readable" and needs.download:
        return note(f"{found}; it is downloaded at the start, for which the host needs the internet", fix)
    return red(found, f"ls -ld {data.path}" if data.state == "not readable" else fix)


def _judge_logout(logout: Logout) -> Result:
    if not logout.in_session:
        return ok("processes go on (no session of logind)")
    if not logout.kills:
        return ok("processes go on")
    also = " (enable-linger does not help)" if logout.lingers else ""
    return red(
        f"systemd-logind ends what {logout.user} has started (KillUserProcesses=yes){also}",
        f"as root: mkdir -p /etc/systemd/logind.conf.d && printf '[Login]\\nKillExcludeUsers=root {logout.user}\\n' > "
        "/etc/systemd/logind.conf.d/clusterddp.conf && systemctl restart systemd-logind",
    )


def _judge_open_files(limit: int) -> Result:
    if limit < 0:
        return ok("no limit")
    if limit >= _FEW_FILES:
        return ok(f"at most {limit}")
    level = red if limit < _MIN_FILES else note
    return level(f"at most {limit}", "ulimit -n 65536; for good: nofile in /etc/security/limits.conf")


def _judge_shm(num_bytes: int | None) -> Result:
    if num_bytes is None:
        return note("no /dev/shm", "mount a tmpfs there: workers of data loaders share memory there")
    if num_bytes >= _FEW_SHM:
        return ok(format_bytes(num_bytes))
    level = red if num_bytes < _MIN_SHM else note
    return level(format_bytes(num_bytes), "in a container --shm-size=8g: workers of data loaders share memory there")


def _judge_interfaces(machine: Machine) -> Result:
    usable = [f"{link.name} {link.addresses[0].address}" for link in machine.links if link.leads_out and link.addresses]
    never = [link.name for link in machine.links if link.of_containers]
    text = f"{', '.join(usable)} (by route)" if usable else "only the loopback: runs stay on this machine"
    text += f"; never used: {', '.join(never)}" if never else ""
    return ok(text) if usable else note(text)
