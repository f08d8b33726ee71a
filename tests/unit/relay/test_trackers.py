"""What the trackers are sent. The libraries are fakes that record calls; TensorBoard's test, with the real one, is in
test_relay.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from clusterddp.relay.facts import RunEnd, RunFacts
from clusterddp.relay.rows import Point
from clusterddp.relay.tracker import open_tracker
from clusterddp.run.view import RunState

RUN = RunFacts(
    id="0123456789abcdef",
    run="brisk-otter-3",
    title="cifar brisk-otter-3",
    group="calm-lynx-1",
    name="cifar",
    launcher="local",
    created=1e9,
    config={"train.lr": 0.1},
)
POINTS = [
    Point(number=7, step=20, attempt=0, time=5.0, values={"train/loss": 1.0, "a?b": 2.0}),
    Point(number=9, step=10, attempt=1, time=6.0, values={"train/loss": float("nan")}),
]
END = RunEnd(state=RunState.FAILED, attempt=1, reason="rank 1: boom", ended=9.0, summary={})


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Install a fake module."""
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


class WandbRun:
    offline, url, dir, tags = False, "https://wandb/run", "x/files", ("cifar", "local")

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.metrics: dict[str, str | None] = {}
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_wandb_counts_rows_has_the_step_as_a_value_and_the_end_in_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = WandbRun(), dict[str, Any]()
    install(monkeypatch, "wandb", init=lambda **options: asked.update(options) or run, Settings=SimpleNamespace)
    tracker = open_tracker("wandb", project="p", environ={"WANDB_ENTITY": "team"})
    tracker.open(RUN, {})
    tracker.send(POINTS, again=False)
    assert tracker.commit() is None
    tracker.close(END)
    assert tracker.address == "api.wandb.ai/team"
    assert (asked["id"], asked["resume"], asked["group"], asked["project"]) == (RUN.id, "allow", RUN.group, "p")
    assert asked["config"] == {"train.lr": 0.1, "launcher": "local", "run": "brisk-otter-3"}
    assert [step for step, _ in run.rows] == [7, 9]
    assert [(row["step"], row["attempt"], row["_timestamp"]) for _, row in run.rows] == [(20, 0, 5.0), (10, 1, 6.0)]
    assert run.metrics == {"step": None, "*": "step"}
    assert (run.summary["state"], run.summary["reason"], run.exit_code) == ("FAILED", "rank 1: boom", 1)
    assert run.tags == ("cifar", "local", "FAILED")


class MlflowClient:
    """One experiment with one run, in memory."""

    tracking_uri = "fake"

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.metrics: list[Any] = []
        self.tags: dict[str, str] = {}
        self.params: dict[str, str] = {}
        self.status = ""

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name)

    def search_runs(self, experiments: list[str], wanted: str, max_results: int) -> list[Any]:
        return [run for run in self.runs if f"'{run.data.tags['clusterddp.id']}'" in wanted]

    def create_run(self, experiment: str, start_time: int, tags: dict[str, str], run_name: str) -> Any:
        self.runs.append(
            SimpleNamespace(
                info=SimpleNamespace(run_id=f"r{len(self.runs)}", run_name=run_name),
                data=SimpleNamespace(tags=tags, params=self.params),
            )
        )
        return self.runs[-1]

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status

    def set_terminated(self, run_id: str, status: str, end_time: int | None) -> None:
        self.status = status

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.tags[key] = value

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.metrics += metrics
        self.params.update(params)

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return [metric for metric in self.metrics if metric.key == key]


def metric(key: str, value: float, timestamp: int, step: int) -> Any:
    return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    client = MlflowClient()
    install(monkeypatch, "mlflow", MlflowClient=lambda: client)
    install(monkeypatch, "mlflow.entities", Metric=metric, Param=lambda key, value: (key, value))
    return client


def test_mlflow_continues_its_run_and_takes_no_point_twice(mlflow: MlflowClient) -> None:
    for again in (False, True):
        tracker = open_tracker("mlflow", project="p", environ={})
        tracker.open(RUN, {})
        tracker.send(POINTS, again=again)
        tracker.close(END)
    assert [run.info.run_name for run in mlflow.runs] == ["cifar brisk-otter-3"]
    assert [(each.key, each.step, each.timestamp) for each in mlflow.metrics] == [
        ("train/loss", 20, 5000),
        ("a_b", 20, 5000),
        ("train/loss", 10, 6000),
    ]
    assert (mlflow.status, mlflow.tags["clusterddp.reason"]) == ("FAILED", "rank 1: boom")
    assert mlflow.params == {"train.lr": "0.1"}


def test_mlflow_keeps_the_first_value_of_a_parameter_and_tags_the_new_one(mlflow: MlflowClient) -> None:
    mlflow.params["train.lr"] = "0.5"
    open_tracker("mlflow", project="p", environ={}).open(RUN, {})
    assert mlflow.params == {"train.lr": "0.5"}
    assert mlflow.tags["changed.train.lr"] == "0.1"


def test_trackio_leaves_out_the_rows_that_its_store_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"row": 7}]
    asked = dict[str, Any]()
    run = SimpleNamespace(log=lambda values, step: rows.append({**values, "step": step}))
    storage = SimpleNamespace(get_logs=lambda project, name: list(rows))
    install(monkeypatch, "trackio", init=lambda **options: asked.update(options) or run, finish=lambda: None)
    install(monkeypatch, "trackio.utils", TRACKIO_DIR=tmp_path)
    install(monkeypatch, "trackio.sqlite_storage", SQLiteStorage=storage)
    tracker = open_tracker("trackio", project="p", environ={})
    tracker.open(RUN, {})
    tracker.send(POINTS, again=True)
    assert tracker.commit() == {}
    tracker.close(END)
    assert (asked["name"], asked["resume"], asked["group"]) == ("cifar brisk-otter-3 012345", "allow", RUN.group)
    assert [row.get("row") for row in rows] == [7, 9, None]
    assert (rows[-1]["state"], rows[-1]["step"]) == ("FAILED", 10)
    assert tracker.address == str(tmp_path)
