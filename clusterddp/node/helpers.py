"""The head's helpers: processes that send a message of `notify` and write the report, on which the run does not depend.

`python -m clusterddp.node.helpers` reads a `HelperOrder` as JSON from standard input, and ends by itself within
seconds. Each channel is a process of its own, so that one that hangs delays no other. A channel that fails is tried
once more. The results are in the run's history; nothing is printed.

A helper has no cookie: no cleanup ends it, and no process of the run is left for it. Outside a batch job it may outlive
the supervisor: the end of a run, and the release of its GPUs, wait for none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.log import log_line
from clusterddp.node.processes import reap
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import SWEEP_RECORD, RunDir
from clusterddp.run.gang import Notify
from clusterddp.run.notices import (
    SEND_S,
    Event,
    HelperOrder,
    Message,
    claim,
    message,
    message_of_end,
    start_helper,
    view_of_sweep,
    webhook_address,
)
from clusterddp.run.record import log_event
from clusterddp.run.state import RunState, RunView, final_view
from clusterddp.run.sweep import SweepDir
from clusterddp.system.python import module_command
from clusterddp.wire import build, read_object

if TYPE_CHECKING:
    from clusterddp.run.attempts import AttemptEnd
    from clusterddp.run.supervisors import SupervisorOrder

_FINISH_S = 15.0
"""How long a batch job waits for helpers, which end with it."""
_PAUSE_S = 2.0
"""Before the second try."""
_REPORT_S = 30.0
_MAX_ERROR = 300


class Helpers:
    """Starts the helpers of a run, and knows those that have not ended."""

    def __init__(self, order: SupervisorOrder, environment: Mapping[str, str]) -> None:
        self.pids: set[int] = set()
        self._run = order.run
        self._in_sweep = (order.run.path.parent / SWEEP_RECORD).exists()
        self._notify = order.gang.notify or Notify(on=())
        if order.over_ssh:  # users have commands where they submit
            self._notify = dataclasses.replace(self._notify, command=())
        # Over SSH the host has no package to draw it with; the copy of the run where it was submitted gets one.
        self._writes_report = not (order.over_ssh or self._in_sweep or order.step)
        self._environ = dict(environment)

    def on_event(self, event: Event, attempt: int, reason: str) -> None:
        """Send the message about an event while the run goes on, if the spec asks for it."""
        if event in self._notify.on and not self._in_sweep:
            self._send(message(event, self._run, attempt, RunState.RUNNING, reason))

    def on_end(self, attempt: int, end: AttemptEnd) -> None:
        """Send the message about the end of an attempt, and write the report."""
        about = None
        if self._in_sweep:
            about = _message_of_last(self._notify, SweepDir(self._run.path.parent)) if self._notify.channels else None
        elif end.will_restart:
            view = RunView(state=RunState.REQUEUED, attempt=attempt, end=None, reason=end.reason)
            about = message_of_end(self._notify, self._run, view, at=end.ended)
        else:
            about = message_of_end(self._notify, self._run, final_view(self._run.attempt(attempt), end))
        self._send(about)
        if self._writes_report:
            self._start(HelperOrder(report=str(self._run.path)))

    def on_exits(self, exits: Mapping[int, int]) -> None:
        self.pids.difference_update(exits)

    def finish(self) -> None:
        """Wait until no helper is left; kill those that take too long."""
        deadline = time.monotonic() + _FINISH_S
        while self.pids and time.monotonic() < deadline:
            self.on_exits(reap())
            time.sleep(0.05)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _send(self, about: Message | None) -> None:
        for channel in self._notify.channels if about is not None else ():
            self._start(HelperOrder(notify=self._notify, message=about, channel=channel))

    def _start(self, order: HelperOrder) -> None:
        try:
            process = start_helper(order, self._environ)
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
        return message_of_end(notify, place, view_of_sweep(views)) if claim(place, "end") else None
    return None


class NotSentError(Exception):
    """Why a message was not sent, in one line that holds no secret."""


def main() -> int:
    """Do what the order says, and record the result."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a batch system signals every process of a job
    order = build(HelperOrder, read_object(sys.stdin.buffer.read()))
    if order.report is not None:
        write_report(RunDir(Path(order.report)))
    if order.notify is not None and order.message is not None:
        signal.alarm(int(SEND_S) + 1)  # a look-up of a name may hang; a later command then finds no result
        about = order.message
        error = try_twice(order.notify, about, order.channel)
        result = {"error": error[:_MAX_ERROR]} if error else {}
        facts = {"attempt": about.attempt, "what": about.event, "by": order.channel}
        log_event(RunDir(Path(about.run_dir)), "notify_failed" if error else "notified", **facts, **result)
    return 0


def try_twice(notify: Notify, about: Message, channel: str) -> str:
    """Send by one channel, and again when it fails and time is left; return the error, empty: none.

    The address of a webhook is a secret, which no error has.
    """
    send = {"command": run_command, "webhook": post}[channel]
    deadline, error = time.monotonic() + SEND_S, ""
    for pause_s in (0.0, _PAUSE_S):
        left_s = deadline - time.monotonic() - pause_s
        if left_s < _PAUSE_S:
            break
        time.sleep(pause_s)
        try:
            send(notify, about, left_s)
            return ""
        except NotSentError as refusal:
            error = str(refusal)
        except Exception as failure:  # its text may have the address
            error = type(failure).__name__
    secret = webhook_address(notify.webhook or "", os.environ)
    return error.replace(secret, "...") if secret else error


def post(notify: Notify, about: Message, timeout_s: float) -> None:
    """POST the message as JSON to the webhook; redirects are not followed."""
    import urllib.error
    import urllib.request
    from urllib.parse import urlsplit

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """Refuses redirects: another place would get what is meant for the address of the user."""

        def redirect_request(self, *_: Any) -> None:
            return None

    url = webhook_address(notify.webhook or "", os.environ)
    if not url:
        raise NotSentError(f"{notify.webhook} is not set here")
    if not re.fullmatch(r"https?://[^\s/?#]+\S*", url):
        raise NotSentError("the address of the webhook is none: expected https://...")
    data, headers = json.dumps(about.to_json()).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(  # noqa: S310  the address begins with http
        url, data=data, headers=headers | {"User-Agent": "clusterddp"}, method="POST"
    )
    host = urlsplit(url).hostname
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=timeout_s):
            return
    except urllib.error.HTTPError as error:
        redirected = ", a redirect, which is not followed" if 300 <= error.code < 400 else ""
        raise NotSentError(f"{host} answers with HTTP {error.code}{redirected}") from error
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else None
        raise NotSentError(f"{host} cannot be reached: {reason or type(error.reason).__name__}") from error


def run_command(notify: Notify, about: Message, timeout_s: float) -> None:
    """Run the command with the message on its standard input and in its environment."""
    facts = {f"CLUSTERDDP_{name.upper()}": str(value) for name, value in dataclasses.asdict(about).items()}
    _run(notify.command, json.dumps(about.to_json()).encode(), facts, timeout_s, cwd=about.run_dir)


def _run(words: tuple[str, ...], data: bytes, variables: Mapping[str, str], timeout_s: float, *, cwd: str) -> None:
    """Run a program with these variables, too; it is killed when it takes too long."""
    environ = {**os.environ, **variables}
    with tempfile.TemporaryFile() as errors:  # no pipe: what the program leaves behind may keep it open
        try:
            done = subprocess.run(
                words, input=data, stdout=subprocess.DEVNULL, stderr=errors, env=environ, cwd=cwd, timeout=timeout_s,
                check=False,
            )  # fmt: skip
        except OSError as error:
            raise NotSentError(f"{words[0]} cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise NotSentError(f"{words[0]} was killed after {timeout_s:.0f} s") from error
        if done.returncode != 0:
            errors.seek(0)
            last = "".join(errors.read().decode(errors="replace").strip().splitlines()[-1:])
            said = f": {''.join(filter(str.isprintable, last))}" if last else ""
            raise NotSentError(f"{words[0]} ended with exit code {done.returncode}{said}")


def write_report(run: RunDir) -> None:
    """Write the run's report by the command `report`; a failure is an event of its history.

    Where the command's packages are missing, as in a container for ranks, there is none.
    """
    if importlib.util.find_spec("click") is None or not run.record.is_file():
        return
    os.nice(5)
    command = module_command("clusterddp", "report", "--runs", str(run.path.parent), "--", run.name)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_REPORT_S, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        log_event(run, "report_failed", error=f"it was not written within {_REPORT_S:g} s")
        return
    if done.returncode != 0:
        first = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        log_event(run, "report_failed", error=first[:_MAX_ERROR])


if __name__ == "__main__":
    sys.exit(main())
