"""Judge the Python and the torch of a machine for a run: by themselves, and against those of the other machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from clusterddp.facts.checks import Needs, Result, note, ok, red
from clusterddp.facts.machine import Machine
from clusterddp.facts.torch import INSTALL_CUDA, Torch, explain_old_driver, install_command

_Value = TypeVar("_Value")


def judge_python(machine: Machine, usual: Machine | None) -> Result:
    """Judge the Python of a host, also against the one that most hosts have."""
    if machine.torch is not None and machine.torch.python_error is not None:
        error = machine.torch.python_error
        return red(f"{machine.torch.executable}: {error}", "ssh.python, venv, conda or modules name another")
    found = f"{machine.python}, {machine.executable}"
    if usual and minor_version(machine.python) != minor_version(usual.python):
        return note(f"{found}; elsewhere {usual.python}", "ssh.python, venv or conda of the host name another")
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


def usual_torch(machines: Iterable[Machine]) -> Torch | None:
    """Return the torch with the most common version and NCCL."""
    found = [each.torch for each in machines if each.torch is not None and each.torch.version is not None]
    return _most_common(found, lambda torch: (torch.version, torch.nccl))


def usual_python(machines: Iterable[Machine]) -> Machine | None:
    """Return a machine with the most common Python."""
    found = [each for each in machines if each.torch is None or each.torch.python_error is None]
    return _most_common(found, lambda machine: minor_version(machine.python))


def minor_version(version: str) -> tuple[str, ...]:
    """Return the part of a version that must be the same on all hosts: 2.10 of 2.10.1+cu128."""
    return tuple(version.split(".")[:2])


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
            "script of yours may not",
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
