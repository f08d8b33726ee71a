"""TensorBoard: one file of events for each run, which every call continues.

What a killed call wrote beyond the remembered size is cut off, so no point is there twice and none is missing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.relay.facts import RunEnd, RunFacts
from clusterddp.relay.rows import Point
from clusterddp.run.view import RunState

FOLDER = "tensorboard"
_STATUS = {RunState.COMPLETED: "SUCCESS"}
_NOT_IN_NAMES = re.compile(r"[^\w\-. =,]")


def open_here(project: str, environ: Mapping[str, str]) -> TensorBoard:
    """Raises: ImportError: tensorboard is not installed."""
    import tensorboard.summary.writer.record_writer  # noqa: F401

    return TensorBoard(Path(FOLDER).absolute(), project)


class TensorBoard:
    """A directory of events: `tensorboard/PROJECT/TITLE` in the directory where the relay runs."""

    def __init__(self, folder: Path, project: str) -> None:
        self._folder, self._project = folder, project
        self._path = folder
        self._writer: Any = None
        self._step = self._attempt = -1

    @property
    def address(self) -> str:
        return str(self._folder)

    def view(self) -> str:
        return f"tensorboard --logdir {self._folder}  ({self._path.parent.relative_to(self._folder)})"

    def open(self, run: RunFacts, remembered: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        names = (_NOT_IN_NAMES.sub("_", name) for name in (self._project, run.group or "", run.title))
        self._path = self._folder.joinpath(*filter(None, names), f"events.out.tfevents.{run.created:.0f}.{run.id}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self._path, "ab")  # noqa: SIM115
        file.truncate(min(int(remembered.get("bytes", 0)), file.seek(0, 2)))
        self._writer, self._file = RecordWriter(file), file
        self._attempt = int(remembered.get("attempt", -1))
        self._step = int(remembered.get("step", -1))
        if not file.seek(0, 2):
            self._begin(run)

    def send(self, points: Sequence[Point], *, again: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            if point.attempt > self._attempt >= 0 and point.step <= self._step:
                # The points of the earlier attempt from here on count no more.
                self._write(point.time, point.step, session_log=SessionLog(status=SessionLog.START))
            values = [Summary.Value(tag=key, simple_value=value) for key, value in point.values.items()]
            self._write(point.time, point.step, summary=Summary(value=values))
            self._attempt = point.attempt
            self._step = point.step

    def commit(self) -> Mapping[str, Any]:
        self._writer.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell(), "attempt": self._attempt, "step": self._step}

    def close(self, end: RunEnd | None) -> Mapping[str, Any]:
        from tensorboard.compat.proto.summary_pb2 import Summary

        from clusterddp.train.report.events import hparams_end

        if end is not None:
            numbers = [Summary.Value(tag=f"summary/{key}", simple_value=each) for key, each in end.summary.items()]
            ended = end.ended or time.time()
            self._write(ended, max(self._step, 0), summary=Summary(value=numbers))
            self._write(ended, 0, summary=hparams_end(_STATUS.get(end.state, "FAILURE"), ended=ended))
            self._write(ended, max(self._step, 0), summary=_text("end", f"{end.state.value}: {end.reason}"))
        facts = self.commit()
        self._file.close()
        return facts

    def _begin(self, run: RunFacts) -> None:
        from clusterddp.train.report.events import hparams_summary

        self._write(run.created, 0, file_version="brain.Event:2")
        config = {key: value if isinstance(value, str) else float(value) for key, value in run.config.items()}
        table = hparams_summary(config, [], group=run.title, started=run.created)
        self._write(run.created, 0, summary=table)
        facts = {"run": run.run, "name": run.name, "launcher": run.launcher, "sweep": run.group}
        text = "\n".join(f"* {key}: {value}" for key, value in facts.items() if value)
        self._write(run.created, 0, summary=_text("run", text))

    def _write(self, at: float, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=at, step=step, **content).SerializeToString())


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text import metadata
    from tensorboard.util import tensor_util

    return Summary(
        value=[
            Summary.Value(
                tag=tag,
                metadata=metadata.create_summary_metadata(display_name=tag, description=""),
                tensor=tensor_util.make_tensor_proto(text),
            )
        ]
    )
