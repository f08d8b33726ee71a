"""MLflow: one run of it for each run, found by a tag, so that any number of calls continue it.

Rows that may have been sent are compared with the tracker's history, so a killed call leaves no point twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clusterddp.relay.facts import RunEnd, RunFacts
from clusterddp.relay.rows import Point
from clusterddp.run.view import RunState

_ID = "clusterddp.id"
_METRICS, _PARAMS = 1000, 100
"""The most that a request may have."""
_PARAM_CHARS = 500
_STATUS = {RunState.COMPLETED: "FINISHED", RunState.CANCELLED: "KILLED"}
_NOT_IN_NAMES = re.compile(r"[^\w\-./ :]")


def open_here(project: str, environ: Mapping[str, str]) -> Mlflow:
    """Raises: ImportError: mlflow is not installed."""
    from mlflow import MlflowClient

    return Mlflow(MlflowClient(), project)


class Mlflow:
    """A run in an experiment; MLFLOW_TRACKING_URI names the server, or the store."""

    def __init__(self, client: Any, project: str) -> None:
        self._client, self._project = client, project
        self._run_id = ""
        self._experiment_id = ""

    @property
    def address(self) -> str:
        return str(self._client.tracking_uri)

    def view(self) -> str:
        return f"{self.address} experiment {self._experiment_id} run {self._run_id}"

    def open(self, run: RunFacts, remembered: Mapping[str, Any]) -> None:
        found = self._client.get_experiment_by_name(self._project)
        self._experiment_id = found.experiment_id if found else self._client.create_experiment(self._project)
        runs = self._client.search_runs([self._experiment_id], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        tags = {"clusterddp.run": run.run, "clusterddp.name": run.name, "clusterddp.launcher": run.launcher}
        tags |= {"clusterddp.sweep": run.group} if run.group else {}
        if runs:
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
        first = (
            runs[0]
            if runs
            else self._client.create_run(
                self._experiment_id, start_time=round(run.created * 1000), tags={_ID: run.id}, run_name=run.title
            )
        )
        self._run_id = first.info.run_id
        self._set(tags | {"clusterddp.state": "RUNNING"})
        self._log_config(run, first.data.params)

    def send(self, points: Sequence[Point], *, again: bool) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", key), value, round(point.time * 1000), point.step)
            for point in points
            for key, value in point.values.items()
        ]
        if again:
            known = {key: set(self._history(key)) for key in {metric.key for metric in metrics}}
            metrics = [metric for metric in metrics if _point_of(metric) not in known[metric.key]]
        for begin in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _METRICS])

    def commit(self) -> Mapping[str, Any]:
        return {"run_id": self._run_id}

    def close(self, end: RunEnd | None) -> Mapping[str, Any]:
        if end is not None:
            self._log_summary(end)
            self._set({"clusterddp.state": end.state.value, "clusterddp.reason": end.reason})
            ended = round(end.ended * 1000) if end.ended else None
            self._client.set_terminated(self._run_id, _STATUS.get(end.state, "FAILED"), end_time=ended)
        return self.commit()

    def _log_config(self, run: RunFacts, known: Mapping[str, str]) -> None:
        """Log what the run has no value for; MLflow refuses another value for a parameter that has one."""
        from mlflow.entities import Param

        values = {_NOT_IN_NAMES.sub("_", key): str(value)[:_PARAM_CHARS] for key, value in run.config.items()}
        params = [Param(key, value) for key, value in values.items() if key not in known]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run_id, params=params[begin : begin + _PARAMS])
        self._set({f"changed.{key}": value for key, value in values.items() if known.get(key, value) != value})

    def _log_summary(self, end: RunEnd) -> None:
        from mlflow.entities import Metric

        at = round(end.ended * 1000)
        metrics = [Metric(_NOT_IN_NAMES.sub("_", f"summary/{key}"), each, at, 0) for key, each in end.summary.items()]
        for begin in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _METRICS])

    def _set(self, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self._client.set_tag(self._run_id, key, value)

    def _history(self, key: str) -> Iterator[tuple[Any, ...]]:
        return map(_point_of, self._client.get_metric_history(self._run_id, key))


def _point_of(metric: Any) -> tuple[Any, ...]:
    # A value that is not finite is stored as another one by some stores.
    return (
        metric.step,
        metric.timestamp,
        metric.value if math.isfinite(metric.value) and abs(metric.value) < 1e300 else None,
    )
