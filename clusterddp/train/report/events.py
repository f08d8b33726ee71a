"""TensorBoard's events, written by a thread without torch: importing tensorboard takes up to a second."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def flat_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the numbers among `values`, those of a dict as `name_key`, as TensorBoard needs them."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat_numbers({f"{name}_{key}": each for key, each in value.items()})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def hparams_summary(hparams: Mapping[str, str | float], metrics: Sequence[str], *, group: str, started: float) -> Any:
    """Return the summary that shows a run in TensorBoard's table of hyperparameters, beside `metrics`, which are tags.

    `group`: the name in the table; `started`: seconds since the epoch.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    kinds = {
        key: "DATA_TYPE_STRING" if isinstance(value, str) else "DATA_TYPE_FLOAT64" for key, value in hparams.items()
    }
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=key, type=api_pb2.DataType.Value(kind)) for key, kind in kinds.items()],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    start = plugin_data_pb2.SessionStartInfo(group_name=group, start_time_secs=started)
    for key, value in hparams.items():
        if isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    parts = {
        metadata.EXPERIMENT_TAG: plugin_data_pb2.HParamsPluginData(experiment=experiment),
        metadata.SESSION_START_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_start_info=start),
    }
    return Summary(value=[_hparams_value(tag, data) for tag, data in parts.items()])


def _hparams_value(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)


class EventWriter:
    """Writes scalars from a thread of its own; where tensorboard is absent it says so once and writes none."""

    def __init__(
        self,
        directory: str,
        *,
        purge_step: int,
        report: Callable[[str], None],
        first: Callable[[], Any] | None = None,
    ) -> None:
        """Begin a file of events; those of earlier files from `purge_step` on count no more.

        `first` makes the summary that the file begins with; it is called from that thread, and so is `report`, when
        there will be no events.
        """
        self._report = report
        self._rows: queue.SimpleQueue[tuple[float, int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(directory, purge_step, first), daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        self._rows.put((time.time(), step, values))

    def close(self) -> None:
        self._rows.put(None)
        self._thread.join()

    def _work(self, directory: str, purge_step: int, first: Callable[[], Any] | None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            self._report(f"note: no TensorBoard events ({error}); metrics.jsonl has the same numbers")
            return
        try:
            writer = EventFileWriter(directory)
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=time.time(), step=purge_step, session_log=start))
            if first is not None:
                writer.add_event(Event(wall_time=time.time(), step=0, summary=first()))
            while (row := self._rows.get()) is not None:
                at, step, values = row
                scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
                writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=scalars)))
            writer.close()
        except OSError as error:
            self._report(f"warning: no more TensorBoard events ({error}); training goes on")
