"""The messages of a spec's `notify`: what they say, and which process sends each of them, once.

A message about one event goes by each channel (command, webhook, mail). The process that sends it claims it first, by
an exclusive file in the run's directory: `notices/end-0-webhook.0.json` is the first try. The head tries first. When it
cannot, as a compute node without a network, a later command of the run's owner claims the next try.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Notify
from clusterddp.run.outcome import AttemptEnd, read_end
from clusterddp.run.record import log_event
from clusterddp.run.sweep import SweepDir
from clusterddp.run.view import RunState, RunView, final_view, spell_states
from clusterddp.system.files import read_record, write_json
from clusterddp.wire import build

Event = Literal["start", "end", "fail", "requeue", "hang"]
SEND_S = 10.0
"""How long one try may take."""
STALE_S = 60.0
"""After so long without a result the process of a try has been killed."""
_PAUSES_S = (60.0, 60.0, 600.0, 3600.0)
"""How long after a failed try the next may begin; the second begins at once on another host. There is one try more."""
_MAX_REASON = 1000
_FAILED = frozenset({RunState.FAILED, RunState.LOST})
_COMMAND = (sys.executable, "-m", "clusterddp.node.notify")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What is sent about one event."""

    event: Event
    run: str
    """Of a run, or of a sweep, which has one message at its end."""
    run_dir: str
    attempt: int
    """Of a sweep the sum of its runs' attempts."""
    state: str
    reason: str
    time: float
    """Of the event, in seconds since the epoch."""

    @property
    def text(self) -> str:
        """The message in one line, for people."""
        attempt = f" (attempt {self.attempt})" if self.attempt else ""
        return f"{self.run} {self.state}{attempt}" + (f": {self.reason}" if self.reason else "")

    def to_json(self) -> dict[str, Any]:
        # In a webhook's text < begins a link or a mention, as <!channel>; Slack and Mattermost decode the entities.
        text = self.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"schema": 1, "text": text, **dataclasses.asdict(self)}

    def variables(self) -> dict[str, str]:
        """Return what the environment of a command has."""
        fields = dataclasses.asdict(self) | {"time": f"{self.time:.3f}"}
        return {f"CLUSTERDDP_{name.upper()}": str(value) for name, value in fields.items()}


def message(
    event: Event, run: RunDir, attempt: int, state: RunState, reason: str, *, at: float | None = None
) -> Message:
    """Make the message about an event; the reason becomes one line."""
    line = "".join(char if char.isprintable() else " " for char in " ".join(reason.split()))[:_MAX_REASON]
    return Message(
        event=event,
        run=run.name,
        run_dir=str(run.path),
        attempt=attempt,
        state=state.value,
        reason=line,
        time=time.time() if at is None else at,
    )


def message_of_end(notify: Notify, run: RunDir, attempt: int, end: AttemptEnd) -> Message | None:
    """Return the message about the end of an attempt; None: the spec asks for none."""
    if end.will_restart:
        wanted = "requeue" in notify.on
        return message("requeue", run, attempt, RunState.REQUEUED, end.reason, at=end.ended or None) if wanted else None
    return message_of_view(notify, run, final_view(run.attempt(attempt), end))


def message_of_view(notify: Notify, run: RunDir, view: RunView, *, at: float | None = None) -> Message | None:
    """Return the message about the end of a run that has ended; None: the spec asks for none.

    `at`: when it ended, where no end is recorded.
    """
    failed = view.state in _FAILED
    if "end" not in notify.on and not (failed and "fail" in notify.on):
        return None
    event: Event = "fail" if failed and "fail" in notify.on else "end"
    cause = view.end.root_cause if view.end else None
    at = (view.end.ended if view.end else None) or at
    return message(event, run, view.attempt or 0, view.state, cause.error if cause else view.reason, at=at)


def read_views(sweep: SweepDir) -> list[RunView] | None:
    """Read the recorded ends of a sweep's runs; None: one has none."""
    views = []
    for run in reversed(sweep.runs()):  # the last ones usually end last
        newest = run.newest_attempt()
        end = read_end(newest)
        if end is None or end.will_restart:
            return None
        views.append(final_view(newest, end))
    return views


def message_of_sweep(
    notify: Notify, sweep: SweepDir, views: Sequence[RunView], *, at: float | None = None
) -> Message | None:
    """Return the message about the end of a sweep, all of whose runs have ended; None: the spec asks for none."""
    states = {view.state for view in views}
    failed = bool(states & _FAILED)
    if "end" not in notify.on and not (failed and "fail" in notify.on):
        return None
    event: Event = "fail" if failed and "fail" in notify.on else "end"
    state = RunState.FAILED if failed else RunState.COMPLETED if states == {RunState.COMPLETED} else RunState.CANCELLED
    attempts = sum(view.attempt or 0 for view in views)
    return message(event, RunDir(sweep.path), attempts, state, spell_states(views), at=at)


@dataclass(frozen=True, kw_only=True, slots=True)
class SendOrder:
    """What the process that sends a message gets on standard input."""

    folder: Path
    """Of the tries."""
    notify: Notify
    message: Message
    channels: tuple[str, ...]
    is_first: bool
    """True for the head and its guard, which try at once."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"folder": str(self.folder)}

    @classmethod
    def from_json(cls, data: Any) -> SendOrder:
        """Read an order that `to_json` wrote.

        Raises: ValueError: the data is invalid; see `build`.
        """
        return build(cls, data, "order")


def webhook_address(webhook: str, environ: Mapping[str, str]) -> str:
    """Return the address in the spec, or in the variable that the spec names; empty: that is not set here."""
    named = re.fullmatch(r"\$\{(\w+)\}", webhook)
    return environ.get(named[1], "").strip() if named else webhook


def start_sending(order: SendOrder, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process that sends a message by each channel; it ends by itself soon after `SEND_S`.

    Raises: OSError: it cannot be started.
    """
    process = subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=dict(environ),
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(order.to_json()).encode())
    return process


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """`notices/end-0-webhook.0.json`: one try to send a message by one channel."""

    time: float
    host: str
    pid: int
    sent: bool | None = None
    """None: the process is at it, or was killed."""
    error: str = ""


def claim(order: SendOrder, channel: str) -> Path | None:
    """Claim the next try of a message by a channel; None: it is sent, another process is at it, or no try is left.

    Raises: ClusterddpError, OSError: the run's storage refuses.
    """
    path = next_try(order, channel)
    if path is None:
        return None
    order.folder.mkdir(mode=0o700, exist_ok=True)
    mine = Try(time=time.time(), host=socket.gethostname(), pid=os.getpid())
    return path if write_json(path, dataclasses.asdict(mine), exclusive=True) else None


def next_try(order: SendOrder, channel: str) -> Path | None:
    """Return the file of the try that may begin now; None: none may.

    Raises: ClusterddpError: a file of an earlier try is damaged.
    """
    now = time.time()
    for number, path in enumerate(_paths(order.folder, order.message, channel)):
        earlier = read_record(Try, path)
        if earlier is None:
            if number == 0 and not order.is_first and abs(now - order.message.time) < SEND_S:
                return None  # the head is about to try
            return path
        if not _is_over(earlier, now) or earlier.sent:
            return None
        elsewhere = number == 0 and earlier.host != socket.gethostname()
        if earlier.sent is False and not elsewhere and now < earlier.time + (*_PAUSES_S, 0.0)[number]:
            return None
    return None


def settle(order: SendOrder, channel: str, path: Path, error: str | None) -> None:
    """Record the result of a try, in its file and in the run's history; `error` None: the message is sent."""
    mine = Try(time=time.time(), host=socket.gethostname(), pid=os.getpid(), sent=error is None, error=error or "")
    with contextlib.suppress(ClusterddpError, OSError):
        write_json(path, dataclasses.asdict(mine))
    facts = {"attempt": order.message.attempt, "what": order.message.event, "by": channel}
    run = RunDir(order.folder.parent)
    if run.record.exists():  # a sweep has no history
        log_event(run, "notified" if error is None else "notify_failed", **facts, **({"error": error} if error else {}))


def is_settled(folder: Path, wanted: Message, channel: str) -> bool:
    """Return whether no process is about to send the message: it is sent, or its newest try has failed."""
    found = [read_record(Try, path) for path in _paths(folder, wanted, channel)]
    tries = [each for each in found if each is not None]
    return bool(tries) and _is_over(tries[-1], time.time())


def _is_over(earlier: Try, now: float) -> bool:
    return earlier.sent is not None or now > earlier.time + STALE_S


def _paths(folder: Path, wanted: Message, channel: str) -> Sequence[Path]:
    event = "end" if wanted.event == "fail" else wanted.event
    return [folder / f"{event}-{wanted.attempt}-{channel}.{number}.json" for number in range(len(_PAUSES_S) + 1)]
