"""The trackers, and what each of them does for a relay."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from clusterddp.errors import PreflightError
from clusterddp.relay.facts import RunEnd, RunFacts
from clusterddp.relay.rows import Point

_MODULES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow", "tensorboard": "tensorboard"}
"""Tracker -> the name of its package for pip."""
TRACKERS = tuple(_MODULES)


class Tracker(Protocol):
    """One tracker, for one run of clusterddp at a time."""

    @property
    def address(self) -> str:
        """Where the tracker keeps its runs; another address is another target."""

    def open(self, run: RunFacts, remembered: Mapping[str, Any]) -> None:
        """Begin the tracker's run, or continue it; `remembered`: what `commit` or `close` returned last.

        The rows that an earlier call has stored stay; no row is sent twice to an open run.
        """

    def send(self, points: Sequence[Point], *, again: bool) -> None:
        """Send points; `again`: a call that was killed may have sent them; those that the tracker has are left out."""

    def commit(self) -> Mapping[str, Any] | None:
        """Return what `open` needs next time, once all points are stored; None: they may not be before `close`."""

    def close(self, end: RunEnd | None) -> Mapping[str, Any]:
        """Store all points, and how the run ended; return what `open` needs next time."""

    def view(self) -> str:
        """Return where the run can be seen."""


def open_tracker(name: str, *, project: str, environ: Mapping[str, str]) -> Tracker:
    """Load a tracker's library.

    Raises: PreflightError: it is not installed here.
    """
    module = importlib.import_module(f"clusterddp.relay.to_{name}")
    try:
        tracker: Tracker = module.open_here(project, environ)
    except ImportError as error:
        raise PreflightError(
            f"{name}: its library cannot be loaded here: {error}", hint=f"pip install {_MODULES[name]}"
        ) from error
    return tracker
