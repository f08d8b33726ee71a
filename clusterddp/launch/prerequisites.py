"""What has to be there before a run is made, and can be told from here: secrets, the trainer's packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from clusterddp.errors import PreflightError, UsageError
from clusterddp.launch.entry import TRAINER
from clusterddp.run.gang import Entry


def check_secrets(names: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Raise a UsageError unless every secret is set where the run is started from."""
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(
            f"secrets: {', '.join(missing)} not set in this environment",
            hint=f"export {missing[0]}=..., then submit; only the name is stored in the run",
        )


def check_trainer(entry: Entry, *, elsewhere: bool) -> None:
    """Say before the start, not in sixteen tracebacks after it, that the trainer's packages are missing.

    `elsewhere`: the ranks run where that cannot be told from here.
    """
    if not elsewhere and entry.target == TRAINER and importlib.util.find_spec("torch") is None:
        raise PreflightError(
            "the built-in trainer needs torch, which is not installed here", hint='pip install "clusterddp[train]"'
        )
