"""Judge a machine's facts for a run: each is red, a note, or ok, with the fix; one rule for each fact.

The same rules judge the machine of the submit, the nodes of a job, and hosts over SSH.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from clusterddp.facts.checks import Check, Needs, Result, note, ok, red
from clusterddp.facts.judge_torch import (
    judge_compiler,
    judge_driver,
    judge_python,
    judge_torch,
    usual_python,
    usual_torch,
)
from clusterddp.facts.logind import Logout
from clusterddp.facts.machine import Data, Directory, Machine
from clusterddp.facts.torch import Torch
from clusterddp.network.interface import is_loopback
from clusterddp.system.gpu_lease import spell_busy
from clusterddp.system.units import format_bytes

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
    python, torch = usual_python(machines.values()), usual_torch(machines.values())
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
    yield "host name", judge_own_name(machine.own_addresses, machine.host)


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


def judge_own_name(addresses: Sequence[str] | None, host: str = "") -> Result:
    """Judge the addresses of a machine's own name there; `host`: the name, unless the row of the result has it."""
    name, place = (f"{host} ", "here") if host else ("", "there")
    if addresses is None:
        return note("looking it up takes more than a second", "resolvectl status there: is its name server gone?")
    if not addresses:
        return note(f"{name}does not resolve {place}", "a line with the host's real address in its /etc/hosts")
    if all(map(is_loopback, addresses)):
        return note(
            f"{name}is {', '.join(addresses)} {place}: ranks get addresses instead, but a script that binds to its "
            "host name reaches no other host",
            "the host's real address in its /etc/hosts",
        )
    return ok(f"{name}is {', '.join(addresses)}")


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
