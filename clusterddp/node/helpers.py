"""The head's helpers: processes that send messages of `notify` and write the report, on which the run does not depend.

A helper ends by itself within seconds and has no cookie: no cleanup ends it, and no process of the run is left for it.
Elsewhere than on Slurm it may outlive the supervisor: the end of a run, and the release of its GPUs, wait for none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError
from clusterddp.node.log import log_line
from clusterddp.run.directory import SWEEP_RECORD, RunDir
from clusterddp.run.notices import (
    Event,
    SendOrder,
    message,
    message_of_end,
    message_of_sweep,
    read_views,
    start_sending,
)
from clusterddp.run.sweep import SweepDir
from clusterddp.run.view import RunState

if TYPE_CHECKING:
    from clusterddp.run.gang import Notify
    from clusterddp.run.notices import Message
    from clusterddp.run.outcome import AttemptEnd
    from clusterddp.run.supervisors import SupervisorOrder

_FINISH_S = 15.0
"""How long a job of Slurm's waits for helpers, which end with it."""
_REPORT = (sys.executable, "-m", "clusterddp.node.report")


class Helpers:
    """Starts the helpers of a run, and knows those that have not ended."""

    def __init__(self, order: SupervisorOrder, environment: Mapping[str, str]) -> None:
        self.pids: set[int] = set()
        self._run = order.run
        self._notify = notify_here(order)
        # Over SSH the host has no package to draw it with; the copy of the run where it was submitted gets one.
        self._writes_report = not (order.over_ssh or is_in_sweep(order.run))
        self._environ = dict(environment)

    def on_event(self, event: Event, attempt: int, reason: str) -> None:
        """Send the message about an event while the run goes on, if the spec asks for it."""
        if self._notify is not None and event in self._notify.on and not is_in_sweep(self._run):
            self._start(order_of(self._notify, message(event, self._run, attempt, RunState.RUNNING, reason), self._run))

    def on_end(self, attempt: int, end: AttemptEnd) -> None:
        """Send the message about the end of an attempt, and write the report."""
        if self._notify is not None:
            order = order_of_end(self._notify, self._run, attempt, end)
            if order is not None:
                self._start(order)
        if self._writes_report:
            self._write_report()

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

    def _start(self, order: SendOrder) -> None:
        try:
            process = start_sending(order, self._environ)
        except OSError as error:
            log_line(f"no message could be sent: {error}")
            return
        self._adopt(process)

    def _write_report(self) -> None:
        try:
            process = subprocess.Popen(
                [*_REPORT, str(self._run.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=self._environ,
                start_new_session=True,
            )
        except OSError as error:
            log_line(f"the report could not be written: {error}")
            return
        self._adopt(process)

    def _adopt(self, process: subprocess.Popen[bytes]) -> None:
        process.returncode = 0  # the supervisor's loop reaps what ends
        self.pids.add(process.pid)


def notify_here(order: SupervisorOrder) -> Notify | None:
    """Return the messages that are sent from this machine: over SSH users have commands and mail where they submit."""
    notify = order.gang.notify
    if notify is not None and order.over_ssh:
        notify = dataclasses.replace(notify, command=(), mail=None)
    return notify if notify is not None and notify.channels else None


def send_end(notify: Notify, run: RunDir, attempt: int, end: AttemptEnd, environ: Mapping[str, str]) -> None:
    """Send the message about an end that another process than the head has recorded; return when it is sent."""
    order = order_of_end(notify, run, attempt, end)
    if order is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            start_sending(order, environ).wait(_FINISH_S)


def order_of_end(notify: Notify, run: RunDir, attempt: int, end: AttemptEnd) -> SendOrder | None:
    """Return what is sent about the end of an attempt; a sweep has one message, when its last run has ended."""
    if is_in_sweep(run):
        sweep, views = SweepDir(run.path.parent), None
        with contextlib.suppress(ClusterddpError, OSError):  # a run whose record is damaged has not ended
            views = read_views(sweep)
        about, place = message_of_sweep(notify, sweep, views) if views else None, RunDir(sweep.path)
    else:
        about, place = message_of_end(notify, run, attempt, end), run
    return order_of(notify, about, place) if about is not None else None


def order_of(notify: Notify, about: Message, run: RunDir) -> SendOrder:
    """Return the order that sends a message from here, before any other process tries."""
    return SendOrder(folder=run.notices, notify=notify, message=about, channels=notify.channels, is_first=True)


def is_in_sweep(run: RunDir) -> bool:
    """Return whether the run is one of a sweep."""
    return (run.path.parent / SWEEP_RECORD).exists()


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
