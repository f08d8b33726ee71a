"""What must be there before a run is made and can be seen from here: secrets, the trainer's packages, its data."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import clusterddp
from clusterddp.errors import PreflightError, UsageError
from clusterddp.facts.checks import Needs
from clusterddp.facts.judge_torch import judge_torch
from clusterddp.facts.torch import read_torch
from clusterddp.planning.environment import is_secret
from clusterddp.planning.program import TRAINER
from clusterddp.run.gang import Gang
from clusterddp.spec.image_sets import is_there
from clusterddp.system.storage import find_mount

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec

_HARMLESS = re.compile(r"|[\d.]+|true|false|yes|no|on|off|none|[~./].*", re.IGNORECASE)
"""A switch, a number (MAX_TOKENS: 512) or a path (SSH_AUTH_SOCK: /run/...) is no secret, whatever its name."""


def check_secrets(names: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Raise a UsageError unless every secret is set where the run is started from."""
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(
            f"secrets: {', '.join(missing)} not set in this environment",
            hint=f"export {missing[0]}=..., then submit; only the name is stored in the run",
        )


def secret_notes(resolved: ResolvedSpec) -> tuple[str, ...]:
    """Warn of values under `env` that look like secrets: spec, plan and record of a run hold them for good."""
    return tuple(
        f"{resolved.origins.get(f'env.{name}', 'env')}: env.{name} looks like a secret, and the run's files hold its "
        f"value for good; secrets: [{name}] takes it from your environment and stores only its name"
        for name, value in resolved.job.env.items()
        if is_secret(name, value) and not _HARMLESS.fullmatch(value)
    )


def check_trainer(gang: Gang, *, elsewhere: bool) -> None:
    """Raise a PreflightError where the trainer lacks torch, or a torch for GPUs: one error in place of one per rank.

    On Slurm ranks have the Python that submits. `elsewhere`: the ranks run where that cannot be seen from here.
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


def storage_notes() -> tuple[str, ...]:
    """Name what a job's processes start with and its nodes may lack: a Python, or this package, on a disk of our own.

    What lies under /usr is thought to be installed on every node.
    """
    places = dict.fromkeys(
        Path(place)
        for place in (sys.prefix, Path(sys.executable).resolve(), _package_place())
        if not Path(place).is_relative_to("/usr")
    )
    own = [(place, mount) for place in places if (mount := find_mount(place)) is not None and not mount.shared]
    if not own:
        return ()
    point = own[0][1]
    names = ", ".join(str(place) for place, _ in own)
    return (f"{names}: on {point.kind} ({point.point}); the job's nodes must see the same there, or its start fails",)


def data_notes(train: Mapping[str, object] | None) -> tuple[str, ...]:
    """Name a directory of the data that is not to be seen from here."""
    if not train or is_there(str(train["dataset"]), Path(str(train["data_dir"]))):
        return ()
    data_dir = Path(str(train["data_dir"]))
    return (
        ()
        if data_dir.exists()
        else (f"train.data_dir {data_dir} is not seen from here: each node needs the set there",)
    )


def _package_place() -> str:
    return str(Path(clusterddp.__file__).absolute().parents[1])
