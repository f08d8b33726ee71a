"""What decides whether a run can start on hosts: asked of each by itself, and of all against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from clusterddp.facts.checks import Check, Result, note, ok, red
from clusterddp.facts.host import HostFacts
from clusterddp.facts.judge import FEW_FREE, MIN_FREE, judge_compiler, judge_open_files, judge_shm, size
from clusterddp.facts.login import Logout
from clusterddp.facts.packages import Packages
from clusterddp.facts.pip import install_command
from clusterddp.facts.torch import driver_trouble
from clusterddp.system.gpu_lease import spell_busy


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNeeds:
    """What a run asks of one host."""

    trainer: bool
    """The built-in trainer runs, which needs torch; what a program of the user's needs is not known."""
    gpus: int = 0
    nccl: bool = False
    download: bool = True
    """Data that is missing is downloaded."""
    waits: bool = False
    """It waits for GPUs that are in use."""
    sent_bytes: int = 0
    """How much data will be sent, if the host has none of it yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGpus:
    """The GPUs of a host that a run may use."""

    gpus: tuple[str, ...]
    busy: Mapping[str, str]
    """Those in use -> by whom, in words."""


def judge_hosts(
    facts: Mapping[str, HostFacts], needs: Mapping[str, HostNeeds], gpus: Mapping[str, HostGpus]
) -> list[Check]:
    """Judge the hosts that have told; `gpus` of those hosts that were asked for them."""
    told_packages = [each.packages for each in facts.values() if each.packages.error is None]
    usual = _usual([each for each in told_packages if each.torch is not None], lambda each: (each.torch, each.nccl))
    usual_python = _usual(told_packages, lambda each: _minor(each.python))
    found: dict[str, dict[str, Result]] = {}
    for host, told in facts.items():
        found.setdefault("Python", {})[host] = _judge_python(told.packages, usual_python)
        for name, result in _judge_host(told, needs[host], gpus.get(host), usual):
            found.setdefault(name, {})[host] = result
    return [Check(name=name, results=results) for name, results in found.items()]


def reds_of(checks: list[Check]) -> Iterator[tuple[str, str, Result]]:
    """List what is red: host, check, result."""
    for check in checks:
        for host, result in check.results.items():
            if result.level == "red":
                yield host, check.name, result


def _judge_host(
    facts: HostFacts, needs: HostNeeds, gpus: HostGpus | None, usual: Packages | None
) -> Iterator[tuple[str, Result]]:
    packages = facts.packages
    yield "torch", _judge_torch(packages, needs, usual)
    if needs.trainer and needs.gpus and packages.torch:
        yield "compiler", judge_compiler(packages.compile_obstacle)
    if gpus is not None:
        yield "GPUs", _judge_gpus(gpus, needs)
    if needs.gpus and facts.driver and packages.cuda:
        yield "driver", _judge_driver(facts.driver, packages)
    yield "disk", _judge_disk(facts, needs)
    if facts.data is not None:
        yield "data", _judge_data(facts, needs)
    yield "log out", _judge_logout(facts.logout)
    yield "open files", judge_open_files(facts.machine.open_files)
    yield "shared memory", judge_shm(facts.machine.shm_bytes)


def _judge_python(packages: Packages, usual: Packages | None) -> Result:
    if packages.error is not None:
        return red(f"{packages.executable}: {packages.error}", "ssh.python, venv, conda or modules name another")
    words = f"{packages.python}, {packages.executable}"
    if usual and _minor(packages.python) != _minor(usual.python):
        return note(f"{words}; elsewhere {usual.python}", "ssh.python, venv or conda of the host name another")
    return ok(words)


def _judge_torch(packages: Packages, needs: HostNeeds, usual: Packages | None) -> Result:
    """Judge the torch of a host, also against the one that most hosts have."""
    if packages.error is not None:
        return note("not looked for")
    wanted = usual.torch if usual else None
    if packages.torch is None:
        fix = install_command(packages, wanted)
        missing = f"{packages.executable} has none"
        return red(f"{missing}, and the trainer needs it", fix) if needs.trainer else note(missing, fix)
    found = _spell_torch(packages)
    if needs.gpus and packages.cuda is None and "+rocm" not in packages.torch:
        return red(f"{found}, and GPUs are asked for", install_command(packages, packages.torch.removesuffix("+cpu")))
    return ok(found) if usual is None or usual.torch is None else _compare_torch(packages, needs, usual)


def _compare_torch(packages: Packages, needs: HostNeeds, usual: Packages) -> Result:
    found, wanted = _spell_torch(packages), str(usual.torch)
    differs = f"{found}; elsewhere {_spell_torch(usual)}"
    fix = install_command(packages, wanted)
    if needs.nccl and packages.nccl and usual.nccl and packages.nccl != usual.nccl:
        return red(differs, fix)
    if _minor(str(packages.torch)) != _minor(wanted):
        return red(differs, fix) if needs.trainer else note(differs, fix)
    return ok(found) if packages.torch == wanted else note(differs, fix)


def _judge_gpus(gpus: HostGpus, needs: HostNeeds) -> Result:
    count = len(gpus.gpus)
    free = count - len(gpus.busy)
    used = f"; {spell_busy(gpus.busy)}" if gpus.busy else ""
    if count < needs.gpus:
        return red(
            f"{needs.gpus} are asked for, and there {'is' if count == 1 else 'are'} {count or 'none'}",
            "nvidia-smi -L there; resources.gpus_per_node, or gpus of the host; --cpu",
        )
    if free < needs.gpus:
        words = f"{needs.gpus} of {count} are asked for, {free or 'none'} {'is' if free == 1 else 'are'} free{used}"
        return (
            note(f"{words}; the run waits in line") if needs.waits else red(words, "ssh.when_busy=wait waits in line")
        )
    return ok(f"{needs.gpus} of {count} are asked for{used}" if needs.gpus else f"{count or 'none'}{used}")


def _judge_driver(driver: str, packages: Packages) -> Result:
    trouble = driver_trouble(str(packages.cuda), driver)
    if trouble is None:
        return ok(f"{driver}, CUDA {packages.cuda}")
    found, fix = trouble
    return red(f"torch for CUDA {packages.cuda}, {found}", f"{fix}; {install_command(packages, None)}")


def _judge_disk(facts: HostFacts, needs: HostNeeds) -> Result:
    directory = facts.machine.directory
    if directory.error is not None:
        return red(f"{directory.path}: cannot be written: {directory.error}", "ssh.dir names another directory")
    free = directory.free_bytes or 0
    found = f"{directory.path}, {size(free)} free"
    fix = "clusterddp gc --older-than 30d --hosts HOST removes what old runs left; ssh.dir names another directory"
    if free < MIN_FREE:
        return red(found, fix)
    if free < needs.sent_bytes:
        return note(f"{found}, {size(needs.sent_bytes)} are sent unless they are there", fix)
    if directory.in_memory:
        return note(f"{found}, in memory: gone when the host restarts", "ssh.dir names another directory")
    if facts.no_exec:
        return note(
            f"{found}, mounted noexec: compiled extensions of your code cannot be loaded from there",
            "ssh.dir names another directory",
        )
    return note(found, fix) if free < FEW_FREE else ok(found)


def _judge_data(facts: HostFacts, needs: HostNeeds) -> Result:
    data = facts.data
    assert data is not None
    if data.state == "there":
        return ok(data.path)
    fix = f"ssh.send: {{LOCAL: {data.path}}} sends it; train.data_dir names where it is"
    words = f"{data.path}: {data.state}"
    if data.state != "not readable" and needs.download:
        return note(f"{words}; it is downloaded at the start, for which the host needs the internet", fix)
    return red(words, f"ls -ld {data.path}" if data.state == "not readable" else fix)


def _judge_logout(logout: Logout) -> Result:
    if not logout.in_session:
        return ok("processes live on (no session of logind)")
    if not logout.kills:
        return ok("processes live on")
    also = " (that the user lingers does not help)" if logout.lingers else ""
    return red(
        f"systemd-logind ends what {logout.user} has started (KillUserProcesses=yes){also}",
        f"as root: mkdir -p /etc/systemd/logind.conf.d && printf '[Login]\\nKillExcludeUsers=root {logout.user}\\n' > "
        "/etc/systemd/logind.conf.d/clusterddp.conf && systemctl restart systemd-logind",
    )


def _usual(all_told: list[Packages], trait: Callable[[Packages], object]) -> Packages | None:
    """Return the packages that have in common with most hosts what matters; of several, those of the first host."""
    counts = Counter(map(trait, all_told))
    return max(all_told, key=lambda each: counts[trait(each)], default=None)


def _spell_torch(packages: Packages) -> str:
    parts = [str(packages.torch), f"CUDA {packages.cuda}" if packages.cuda else "for the CPU"]
    return ", ".join([*parts, *([f"NCCL {packages.nccl}"] if packages.nccl else [])])


def _minor(version: str) -> tuple[str, ...]:
    """Return the part of a version that has to be the same: 2.10 of 2.10.1+cu128."""
    return tuple(version.split(".")[:2])
