"""Weights & Biases: one run of it, by its id, for each run of clusterddp.

W&B's own step is the number of the row, which never goes back; `step` is a value, and the axis of all charts. A row
counts as stored when `finish` has returned. Rows that are sent again have the same numbers, and W&B takes none twice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.relay.facts import RunEnd, RunFacts
from clusterddp.relay.rows import Point
from clusterddp.run.view import RunState


def open_here(project: str, environ: Mapping[str, str]) -> Wandb:
    """Raises: ImportError: wandb is not installed."""
    import wandb

    # A project of the same name of another server or team is another target.
    place = "/".join(filter(None, [environ.get("WANDB_BASE_URL", "api.wandb.ai"), environ.get("WANDB_ENTITY")]))
    return Wandb(wandb, project, place)


class Wandb:
    """A run in a project; W&B's own variables say where, and as whom: WANDB_API_KEY, WANDB_ENTITY, WANDB_MODE."""

    def __init__(self, wandb: Any, project: str, address: str) -> None:
        self._wandb, self._project = wandb, project
        self.address = address
        self._run: Any = None

    def view(self) -> str:
        if self._run.offline:
            return f"wandb sync {str(self._run.dir).removesuffix('/files')}"
        return str(self._run.url)

    def open(self, run: RunFacts, remembered: Mapping[str, Any]) -> None:
        settings = {"console": "off", "silent": True, "disable_code": True, "disable_git": True, "x_disable_meta": True}
        self._run = self._wandb.init(
            project=self._project,
            id=run.id,
            name=run.title,
            group=run.group,
            tags=[run.name[:64], run.launcher],
            config={**run.config, "launcher": run.launcher, "run": run.run},
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(x_disable_stats=True, **settings),
            allow_val_change=True,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, points: Sequence[Point], *, again: bool) -> None:
        for point in points:
            place = {"step": point.step, "attempt": point.attempt, "_timestamp": point.time or time.time()}
            self._run.log({**point.values, **place}, step=point.number)

    def commit(self) -> None:
        return None

    def close(self, end: RunEnd | None) -> Mapping[str, Any]:
        if end is not None:
            self._run.tags = (*self._run.tags, end.state.value)
            self._run.summary.update({f"summary/{key}": value for key, value in end.summary.items()})
            self._run.summary.update({"state": end.state.value, "reason": end.reason})
        self._run.finish(exit_code=0 if end is None or end.state is RunState.COMPLETED else 1)
        return {}
