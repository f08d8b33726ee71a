"""TensorBoard's events, written by a thread without torch: importing tensorboard takes up to a second."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def flat_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the numbers among `values`, those of a dict as `name_key`, as TensorBoard needs them."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat_numbers({f"{name}_{key}": each for key, each in value.items()})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


class EventWriter:
    """Writes scalars from a thread of its own; where tensorboard is absent it says so once and writes none."""

    def __init__(self, directory: str, *, purge_step: int, report: Callable[[str], None]) -> None:
        """Begin a file of events; those of earlier files from `purge_step` on count no more.

        `report` is called from that thread, when there will be no events.
        """
        self._report = report
        self._rows: queue.SimpleQueue[tuple[float, int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(directory, purge_step), daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        self._rows.put((time.time(), step, values))

    def close(self) -> None:
        self._rows.put(None)
        self._thread.join()

    def _work(self, directory: str, purge_step: int) -> None:
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
            while (row := self._rows.get()) is not None:
                at, step, values = row
                scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
                writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=scalars)))
            writer.close()
        except OSError as error:
            self._report(f"warning: no more TensorBoard events ({error}); training goes on")
