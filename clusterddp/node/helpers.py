"""The head's helpers: processes that send messages of `notify` and write the report, on which the run does not depend.

A helper ends by itself within seconds and has no cookie: no cleanup ends it, and no process of the run is left for it.
Outside a batch job it may outlive the supervisor: the end of a run, and the release of its GPUs, wait for none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError
from clusterddp.node.log import log_line
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import SWEEP_RECORD, RunDir
from clusterddp.run.notices import (
    Event,
    Message,
    SendOrder,
    claim,
    message,
    message_of_end,
    message_of_view,
    start_helper,
    start_sending,
    view_of_sweep,
)
from clusterddp.run.state import RunState, RunView, final_view
from clusterddp.run.sweep import SweepDir

if TYPE_CHECKING:
    import subprocess

    from clusterddp.run.attempts import AttemptEnd
    from clusterddp.run.gang import Notify
    from clusterddp.run.supervisors import SupervisorOrder

_FINISH_S = 15.0
"""How long a batch job waits for helpers, which end with it."""


class Helpers:
    """Starts the helpers of a run, and knows those that have not ended."""

    def __init__(self, order: SupervisorOrder, environment: Mapping[str, str]) -> None:
        self.pids: set[int] = set()
        self._run = order.run
        self._in_sweep = (order.run.path.parent / SWEEP_RECORD).exists()
        notify = order.gang.notify
        if notify is not None and order.over_ssh:  # users have commands and mail where they submit
            notify = dataclasses.replace(notify, command=(), mail=None)
        self._notify = notify if notify is not None and notify.channels else None
        # Over SSH the host has no package to draw it with; the copy of the run where it was submitted gets one.
        self._writes_report = not (order.over_ssh or self._in_sweep)
        self._environ = dict(environment)

    def on_event(self, event: Event, attempt: int, reason: str) -> None:
        """Send the message about an event while the run goes on, if the spec asks for it."""
        if self._notify is not None and event in self._notify.on and not self._in_sweep:
            self._send(self._notify, message(event, self._run, attempt, RunState.RUNNING, reason))

    def on_end(self, attempt: int, end: AttemptEnd) -> None:
        """Send the message about the end of an attempt, and write the report."""
        if self._notify is not None:
            if self._in_sweep:
                about = _message_of_last(self._notify, SweepDir(self._run.path.parent))
            else:
                about = message_of_end(self._notify, self._run, attempt, end)
            if about is not None:
                self._send(self._notify, about)
        if self._writes_report:
            self._keep(lambda: start_helper("report", str(self._run.path), environ=self._environ))

    def on_exits(self, exits: Collection[int]) -> None:
        self.pids.difference_update(exits)

    def finish(self) -> None:
        """Wait until no helper is left; kill those that take too long."""
        deadline = time.monotonic() + _FINISH_S
        while self.pids and time.monotonic() < deadline:
            self.pids -= {pid for pid in self.pids if _has_ended(pid)}
            time.sleep(0.05)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _send(self, notify: Notify, about: Message) -> None:
        order = SendOrder(notify=notify, message=about, channels=notify.channels)
        self._keep(lambda: start_sending(order, self._environ))

    def _keep(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        try:
            process = start()
        except OSError as error:
            log_line(f"a message or the report could not be started: {error}")
            return
        process.returncode = 0  # the supervisor's loop reaps what ends
        self.pids.add(process.pid)


def _message_of_last(notify: Notify, sweep: SweepDir) -> Message | None:
    """Return the message about the end of a sweep, for the head of the run that ends last; None for the others."""
    views: list[RunView] = []
    with contextlib.suppress(ClusterddpError, OSError):  # a run whose record is damaged has not ended
        for run in reversed(sweep.runs()):  # the last ones usually end last
            newest = run.newest_attempt()
            end = read_end(newest)
            if end is None or end.will_restart:
                return None
            views.append(final_view(newest, end))
        place = RunDir(sweep.path)
        return message_of_view(notify, place, view_of_sweep(views)) if claim(place, "end") else None
    return None


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
