"""Sends the message about a run's end that its head could not send: a compute node may have no network.

Only a run of this user's sends anything: another user may write a runs directory, so the seal of the plan must be
right. A message is sent until `_LATEST_S` after the end.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.planning.environment import process_environment
from clusterddp.planning.notify import read_notify
from clusterddp.ranks.environment import COOKIE
from clusterddp.results.sync import NO_HOSTS, Synchroniser
from clusterddp.run.directory import SWEEP_RECORD, RunDir
from clusterddp.run.gang import Notify
from clusterddp.run.notices import (
    SEND_S,
    Message,
    SendOrder,
    is_settled,
    message_of_sweep,
    message_of_view,
    next_try,
    start_sending,
    webhook_address,
)
from clusterddp.run.record import FOREIGN, RunRecord, read_run
from clusterddp.run.sweep import SweepDir
from clusterddp.run.view import RunView
from clusterddp.system.files import read_jsonl

PATIENCE_S = SEND_S + 5.0
"""How long `wait` stays after the end of a run, until its head has sent the message or failed to."""
_LATEST_S = 24 * 3600.0
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Due:
    """The message about the end of a run or a sweep, which may not be sent yet."""

    run: RunDir
    record: RunRecord
    """Of a sweep that of one of its runs."""
    folder: Path
    notify: Notify
    message: Message

    def orders(self, environ: Mapping[str, str]) -> list[SendOrder]:
        """Return what can be sent from here now."""
        found = []
        for channel in self.notify.channels:
            if channel == "webhook" and not webhook_address(self.notify.webhook or "", environ):
                continue  # another shell of the user's may have the variable
            order = SendOrder(
                folder=self.folder,
                notify=self.notify,
                message=self.message,
                channels=(channel,),
                is_first=self._has_no_head(channel),
            )
            if not self._sent_by_host(channel) and next_try(order, channel) is not None:
                found.append(order)
        return found

    def is_settled(self) -> bool:
        """Return whether no process is about to send the message."""
        left = tuple(channel for channel in self.notify.channels if not self._sent_by_host(channel))
        return all(is_settled(self.folder, self.message, channel) for channel in left)

    def _has_no_head(self, channel: str) -> bool:
        """Return whether only a command of the user's sends by this channel."""
        return self.record.launcher == FOREIGN or (self.record.launcher == "ssh" and channel != "webhook")

    def _sent_by_host(self, channel: str) -> bool:
        """Return whether a host over SSH has sent the message; its tries are in its own directory of the run."""
        sent = {"event": "notified", "attempt": self.message.attempt, "by": channel}
        if self.record.launcher != "ssh":
            return False
        rows = read_jsonl(self.run.events)
        return any(sent.items() <= row.items() and row.get("what") in {"end", "fail"} for row in rows)


def send_left(
    run: RunDir,
    view: RunView,
    environ: Mapping[str, str],
    *,
    patience_s: float = 0.0,
    sync: Synchroniser = NO_HOSTS,
) -> bool:
    """Send the message about the end of a run, where no process has sent it; a failure to is in the run's history.

    `patience_s`: wait so long for another process that is about to send it, and for the result. Return whether nothing
    is left to do; False: another process is about to send it.
    """
    with contextlib.suppress(ClusterddpError, OSError, ValueError, TypeError):
        due = _find_due(RunDir(run.path.absolute()), view)
        if due is not None:
            return _send(due, environ, patience_s, sync)
    return True


def send_left_of_sweep(
    sweep: SweepDir, views: Sequence[RunView], ended: float, environ: Mapping[str, str], *, patience_s: float = 0.0
) -> None:
    """Send the message about the end of a sweep, where no process has sent it.

    `views`: the states of its runs, all of which have ended; `ended`: when the last one did.
    """
    with contextlib.suppress(ClusterddpError, OSError, ValueError, TypeError, IndexError):
        sweep = SweepDir(sweep.path.absolute())
        run = sweep.runs()[0]
        notify = read_notify(run)
        message = message_of_sweep(notify, sweep, views, at=ended) if notify is not None else None
        if notify is not None and message is not None and _is_recent(message):
            folder = RunDir(sweep.path).notices
            due = _Due(run=run, record=read_run(run), folder=folder, notify=notify, message=message)
            _send(due, environ, patience_s, NO_HOSTS)


def _find_due(run: RunDir, view: RunView) -> _Due | None:
    if not view.finished or (run.path.parent / SWEEP_RECORD).exists():
        return None
    notify = read_notify(run)
    if notify is None:
        return None
    message = message_of_view(notify, run, view, at=run.events.stat().st_mtime)
    if message is None or not _is_recent(message):
        return None
    return _Due(run=run, record=read_run(run), folder=run.notices, notify=notify, message=message)


def _is_recent(message: Message) -> bool:
    return time.time() < message.time + _LATEST_S


def _send(due: _Due, environ: Mapping[str, str], patience_s: float, sync: Synchroniser) -> bool:
    deadline = time.monotonic() + patience_s
    tried: set[str] = set()
    while True:
        orders = [order for order in due.orders(environ) if not tried.intersection(order.channels)]
        environment = process_environment("", environ)
        environment.pop(COOKIE)
        processes = [start_sending(order, environment) for order in orders]
        tried.update(*(order.channels for order in orders))
        for process in processes:
            _await(process, patience_s)
        is_settled = due.is_settled()
        if is_settled or time.monotonic() >= deadline:
            return is_settled
        time.sleep(_POLL_S)
        sync.update()


def _await(process: subprocess.Popen[bytes], patience_s: float) -> None:
    if patience_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    else:
        threading.Thread(target=process.wait, daemon=True).start()
