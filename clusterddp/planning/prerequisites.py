"""Checks on this machine before a run is made: the request, secrets, the trainer's packages, its data."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import clusterddp
from clusterddp.errors import PreflightError, UsageError
from clusterddp.facts.checks import Needs
from clusterddp.facts.judge import judge_torch
from clusterddp.facts.torch import read_torch
from clusterddp.planning.placement import Request
from clusterddp.planning.program import TRAINER
from clusterddp.run.gang import Gang, is_call
from clusterddp.spec.secret_values import is_secret
from clusterddp.spec.train import is_there
from clusterddp.system.storage import find_mount

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

_HARMLESS = re.compile(r"|[\d.]+|true|false|yes|no|on|off|none|[~./].*", re.IGNORECASE)
"""Values that are no secrets under any name: switches, numbers (MAX_TOKENS: 512), paths (SSH_AUTH_SOCK: /run/...)."""


def refuse_unplannable(job: JobSpec, request: Request) -> None:
    """Raise a UsageError for a spec of many runs, or a function without its pickle."""
    if job.sweep:
        raise UsageError("a spec with a sweep is many runs; this command takes one", hint="~sweep drops the section")
    if job.elastic and request.placed:
        raise UsageError("elastic: is for ranks that a launcher starts; clusterddp worker has fixed nodes")
    function = (job.entry and job.entry.function) or ""
    if is_call(function) and request.submission is None and not (request.parent or request.trial):
        raise UsageError(
            f"entry.function: {function}: a function with arguments in parentheses was submitted from Python; its "
            "pickle is in the run, and not in the spec",
            hint="clusterddp submit RUN repeats that run; or write module:name, and entry.args",
        )


def check_secrets(names: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Raise a UsageError unless `environ` has every secret."""
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(
            f"secrets: {', '.join(missing)} not set in this environment",
            hint=f"export {missing[0]}=..., then submit; only the name is stored in the run",
        )


def secret_notes(resolved: ResolvedSpec) -> tuple[str, ...]:
    """Warn of values under `env` that look like secrets: the files of the run keep them forever."""
    return tuple(
        f"{resolved.origins.get(f'env.{name}', 'env')}: env.{name} looks like a secret, and the run's files keep its "
        f"value forever; secrets: [{name}] takes it from your environment and stores only its name"
        for name, value in resolved.job.env.items()
        if is_secret(name, value) and not _HARMLESS.fullmatch(value)
    )


_SETTING = re.compile(r"(NCCL|GLOO|UCX|TORCH|PYTORCH)_(?!.*(HOME|ROOT|PATH|DIR|VERSION)$).*|CUDA_LAUNCH_BLOCKING")


def setting_notes(job: JobSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """Name what this shell sets for torch and its networks, since no line of the spec says so."""
    found = sorted(name for name in environ if _SETTING.fullmatch(name) and name not in job.env)
    if found and job.launcher != "ssh":
        yield f"of this shell, the ranks get {' and '.join(found)} too; env: sets them in the spec"


def check_trainer(gang: Gang, *, elsewhere: bool) -> None:
    """Raise a PreflightError if the trainer lacks torch, or a torch for GPUs: one error instead of one per rank.

    On Slurm the ranks use the Python of the submit. `elsewhere`: they use another Python, so nothing is checked.
    """
    if elsewhere or gang.entry.target != TRAINER:
        return
    torch, on_gpus = read_torch(), not gang.on_cpu
    result = judge_torch(torch, Needs(trainer=True, num_gpus=int(on_gpus)), has_gpus=on_gpus)
    if result.level != "red":
        return
    if torch.version is None:
        raise PreflightError(f"torch: {result.found}", hint='pip install "clusterddp[train]"')
    raise PreflightError(f"torch {result.found}", hint=f"{result.fix}; --cpu runs the same ranks on the CPU")


def storage_notes(*others: str) -> tuple[str, ...]:
    """Warn if a job's nodes may lack Python or this package, because they are on a disk of this machine.

    `others`: what they need in place of these.
    Files under /usr are assumed to be on every node.
    """
    places = dict.fromkeys(
        Path(place)
        for place in others
        or (sys.prefix, Path(sys.executable).resolve(), Path(clusterddp.__file__).absolute().parents[1])
        if not Path(place).is_relative_to("/usr")
    )
    own = [(place, mount) for place in places if (mount := find_mount(place)) is not None and not mount.shared]
    if not own:
        return ()
    point = own[0][1]
    names = ", ".join(str(place) for place, _ in own)
    return (f"{names}: on {point.kind} ({point.point}); the job's nodes must see the same there, or its start fails",)


def data_notes(train: Mapping[str, object] | None) -> tuple[str, ...]:
    """Warn of a data directory that does not exist on this machine."""
    if not train or is_there(str(train["dataset"]), Path(str(train["data_dir"]))):
        return ()
    data_dir = Path(str(train["data_dir"]))
    if data_dir.exists():
        return ()
    return (f"train.data_dir {data_dir} is not seen from here: each node needs the set there",)
