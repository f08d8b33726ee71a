"""Trackio: one run of it, by its name, for each run of clusterddp; each row has its number as `row`.

Each block of rows is finished by itself, for Trackio has one open run in a process. Rows that may have been sent are
compared with those of the local store. A Space or a server is not asked: there a killed call may leave rows twice.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clusterddp.relay.facts import RunEnd, RunFacts
from clusterddp.relay.rows import Point

_RESERVED = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})


def open_here(project: str, environ: Mapping[str, str]) -> Trackio:
    """Raises: ImportError: trackio is not installed."""
    import trackio
    from trackio.utils import TRACKIO_DIR

    remote = environ.get("TRACKIO_SPACE_ID") or environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
    return Trackio(trackio, project, remote or str(TRACKIO_DIR), is_local=not remote)


class Trackio:
    """A run in a project; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name another place than the local store."""

    def __init__(self, trackio: Any, project: str, address: str, *, is_local: bool) -> None:
        self._trackio, self._project = trackio, project
        self.address = address
        self._is_local = is_local
        self._name = ""
        self._facts: RunFacts | None = None
        self._open: Any = None
        self._step = 0

    def view(self) -> str:
        return f"trackio show --project {self._project}  ({self._name})"

    def open(self, run: RunFacts, remembered: Mapping[str, Any]) -> None:
        self._facts = run
        self._name = f"{run.title} {run.id[:6]}"  # runs of several machines may share a name

    def send(self, points: Sequence[Point], *, again: bool) -> None:
        with _quiet():
            known = self._rows() if again else frozenset()
            for point in points:
                if point.number not in known:
                    values = {f"{key}_" if key in _RESERVED else key: value for key, value in point.values.items()}
                    self._run().log({**values, "row": point.number, "attempt": point.attempt}, step=point.step)
                self._step = point.step

    def commit(self) -> Mapping[str, Any]:
        with _quiet():
            if self._open is not None:
                self._trackio.finish()
                self._open = None
        return {}

    def close(self, end: RunEnd | None) -> Mapping[str, Any]:
        if end is not None:
            with _quiet():
                summary = {f"summary/{key}": value for key, value in end.summary.items()}
                self._run().log({**summary, "state": end.state.value, "reason": end.reason}, step=self._step)
        return self.commit()

    def _run(self) -> Any:
        run = self._facts
        assert run is not None, "open was called"
        if self._open is None:
            self._open = self._trackio.init(
                project=self._project,
                name=self._name,
                group=run.group,
                config={**run.config, "launcher": run.launcher, "run": run.run},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return self._open

    def _rows(self) -> frozenset[int]:
        """Return the numbers of the rows that the local store has."""
        if not self._is_local:
            return frozenset()
        from trackio.sqlite_storage import SQLiteStorage

        return frozenset(row["row"] for row in SQLiteStorage.get_logs(self._project, self._name) if "row" in row)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what Trackio prints, which is meant for notebooks."""
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        yield
    sys.stdout.flush()
