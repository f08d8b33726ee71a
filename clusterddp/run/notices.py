"""The messages of a spec's `notify`: what they say, and the start of the process that sends one (node/helpers.py).

The head sends each message. Every result is in the run's history (of a sweep: in its directory), where a later command
of the user's reads what the head could not send (submission/notices.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clusterddp.run.cleanup import marking
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Notify
from clusterddp.run.state import RunState, RunView, spell_states
from clusterddp.system.python import module_command

Event = Literal["start", "end", "fail", "requeue", "hang"]
SEND_S = 12.0
"""How long both tries to send a message may take."""
_MAX_REASON = 1000
_FAILED = frozenset({RunState.FAILED, RunState.LOST})


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


@dataclass(frozen=True, kw_only=True, slots=True)
class HelperOrder:
    """What a helper does; it gets this on standard input."""

    notify: Notify | None = None
    message: Message | None = None
    channel: str = ""
    """The way by which the message is sent."""
    report: str | None = None
    """The directory of the run whose report is to be written."""


def message(
    event: Event, run: RunDir, attempt: int, state: RunState, reason: str, *, at: float | None = None
) -> Message:
    """Make the message about an event; the reason becomes one line."""
    line = "".join(char if char.isprintable() else " " for char in " ".join(reason.split()))[:_MAX_REASON]
    at = at or time.time()
    where = str(run.path)
    return Message(event=event, run=run.name, run_dir=where, attempt=attempt, state=state.value, reason=line, time=at)


def message_of_end(notify: Notify, run: RunDir, view: RunView, *, at: float | None = None) -> Message | None:
    """Return the message about the end of an attempt, of a run, or of a sweep in its directory.

    None: the spec asks for none. `at`: when it ended, where no end is recorded.
    """
    event: Event = "requeue" if view.state is RunState.REQUEUED else "end"
    if view.state in _FAILED and "fail" in notify.on:
        event = "fail"
    if event not in notify.on:
        return None
    reason = view.end.root_cause.error if view.end and view.end.root_cause else view.reason
    at = (view.end.ended if view.end else None) or at
    return message(event, run, view.attempt or 0, view.state, reason, at=at)


def view_of_sweep(views: Sequence[RunView]) -> RunView:
    """Return the state of a sweep all of whose runs have ended, as if it were one run."""
    states = {view.state for view in views}
    state = RunState.COMPLETED if states == {RunState.COMPLETED} else RunState.CANCELLED
    state = RunState.FAILED if states & _FAILED else state
    return RunView(state=state, attempt=sum(view.attempt or 0 for view in views), end=None, reason=spell_states(views))


def webhook_address(webhook: str, environ: Mapping[str, str]) -> str:
    """Return the address in the variable that the spec names; empty: that is not set here."""
    named = re.fullmatch(r"\$\{(\w+)\}", webhook)
    return environ.get(named[1], "").strip() if named else webhook  # a plan of an earlier version has the address


def claim(run: RunDir, what: str) -> bool:
    """Return whether this process is the first that claims a message of a run, or of a sweep's directory."""
    run.notices.mkdir(mode=0o700, exist_ok=True)
    try:
        (run.notices / what).touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True


def start_helper(order: HelperOrder, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process for an order, which nothing waits for; it ends by itself within seconds."""
    with marking(None):
        process = subprocess.Popen(
            module_command("clusterddp.node.helpers"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=dict(environ),
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(dataclasses.asdict(order)).encode())
    return process
