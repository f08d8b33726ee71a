"""Sends the message about a run's end that its head has not sent: a compute node may have no network.

Only a run of this user's own sends anything: another user may write a runs directory. A message is sent until
`_LATEST_S` after the end.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.sync import NO_HOSTS, Synchroniser
from clusterddp.planning.processes import process_environment
from clusterddp.run.directory import SWEEP_RECORD, RunDir
from clusterddp.run.gang import Notify
from clusterddp.run.notices import (
    SEND_S,
    HelperOrder,
    Message,
    claim,
    message_of_end,
    start_helper,
    view_of_sweep,
    webhook_address,
)
from clusterddp.run.record import FOREIGN, read_events, read_run
from clusterddp.run.seal import demand_sealed
from clusterddp.run.state import RunView
from clusterddp.run.sweep import SweepDir
from clusterddp.system.files import build_record

PATIENCE_S = SEND_S + 5.0
"""How long `wait` stays after the end of a run for the head's result, and for its own."""
_HEAD_S = 60.0
"""After so long without a result the head was killed before it sent the message."""
_LATEST_S = 24 * 3600.0


def send_left(
    run: RunDir, view: RunView, environ: Mapping[str, str], *, patience_s: float = 0.0, sync: Synchroniser = NO_HOSTS
) -> None:
    """Send the message about the end of a run where its head could not; a failure to is in the run's history.

    `patience_s`: wait so long for the head's result, and for the message that is sent from here.
    """
    with contextlib.suppress(ClusterddpError, OSError, ValueError, TypeError):
        run = RunDir(run.path.absolute())
        if view.finished and not (run.path.parent / SWEEP_RECORD).exists():
            _send(run, run, view, run.events.stat().st_mtime, environ, patience_s=patience_s, sync=sync)


def send_left_of_sweep(
    sweep: SweepDir, views: Sequence[RunView], ended: float, environ: Mapping[str, str], *, patience_s: float = 0.0
) -> None:
    """Send the message about the end of a sweep, where no head could.

    `views`: the states of its runs, all of which have ended; `ended`: when the last one did.
    """
    with contextlib.suppress(ClusterddpError, OSError, ValueError, TypeError, IndexError):
        sweep = SweepDir(sweep.path.absolute())
        place, view = RunDir(sweep.path), view_of_sweep(views)
        _send(place, sweep.runs()[0], view, ended, environ, patience_s=patience_s, sync=NO_HOSTS)


def _send(
    place: RunDir,
    run: RunDir,
    view: RunView,
    ended: float,
    environ: Mapping[str, str],
    *,
    patience_s: float,
    sync: Synchroniser,
) -> None:
    """Send what is left to send about a run or a sweep at `place`; `run`: the run, or one of the sweep's."""
    of_plan = demand_sealed(run)["gang"].get("notify")
    notify = build_record(Notify, of_plan, str(run.plan)) if of_plan else None
    about = message_of_end(notify, place, view, at=ended) if notify else None
    if notify is None or about is None or time.time() > about.time + _LATEST_S:
        return
    launcher, deadline = read_run(run).launcher, time.monotonic() + patience_s
    sent, open_ = _results(place, launcher, notify, about)
    while open_ and time.monotonic() < deadline:
        time.sleep(0.5)
        sync.update(after_end=True)
        sent, open_ = _results(place, launcher, notify, about)
    if not webhook_address(notify.webhook or "", environ):
        sent.add("webhook")  # another shell of the user's may have the variable
    channels = [channel for channel in notify.channels if channel not in sent | open_]
    channels = [channel for channel in channels if claim(place, f"end-{about.attempt}-{channel}")]
    environment = process_environment(environ)
    for process in [
        start_helper(HelperOrder(notify=notify, message=about, channel=each), environment) for each in channels
    ]:
        if patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        else:
            threading.Thread(target=process.wait, daemon=True).start()


def _results(run: RunDir, launcher: str, notify: Notify, about: Message) -> tuple[set[str], set[str]]:
    """Return the channels by which the message about the end is sent, and those that the head may be trying."""
    rows = (row for row in read_events(run) if row.get("attempt") == about.attempt and isinstance(row.get("by"), str))
    ends = [row for row in rows if row.get("what") in ("end", "fail")]
    sent = {row["by"] for row in ends if row["event"] == "notified"}
    failed = {row["by"] for row in ends if row["event"] == "notify_failed"}
    of_head = set(notify.channels)
    if launcher == FOREIGN or time.time() > about.time + _HEAD_S:
        of_head = set()
    elif launcher == "ssh":
        of_head &= {"webhook"}
    return sent, of_head - sent - failed
