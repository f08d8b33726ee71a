"""`python -m clusterddp.node.notify`: send one message about a run by each of its channels, within `SEND_S`.

It reads a `SendOrder` as JSON from standard input. A channel is a thread of its own, so that one that hangs, in a
look-up of a name for instance, delays no other. A channel that fails is tried once more. The results are in the run's
history; nothing is printed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clusterddp.run.directory import RunDir
from clusterddp.run.notices import SEND_S, SendOrder, webhook_address
from clusterddp.run.record import log_event
from clusterddp.wire import build, read_object

_PAUSE_S = 2.0
"""Before the second try."""
_MAX_ERROR = 300


class NotSentError(Exception):
    """Why a message was not sent, in one line that holds no secret."""


def main() -> int:
    """Send the message by the channels of the order, and record the results."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a batch system signals every process of a job
    order = build(SendOrder, read_object(sys.stdin.buffer.read()))
    environ = dict(os.environ)
    deadline = time.monotonic() + SEND_S
    results: dict[str, str] = {}
    senders = [
        threading.Thread(target=_try_twice, args=(order, name, environ, deadline, results), daemon=True)
        for name in order.channels
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(max(0.0, deadline + 1.0 - time.monotonic()))
    run, secret = RunDir(Path(order.message.run_dir)), webhook_address(order.notify.webhook or "", environ)
    for name in order.channels:
        facts = {"attempt": order.message.attempt, "what": order.message.event, "by": name}
        error = results.get(name, f"no answer within {SEND_S:g} s")[:_MAX_ERROR]
        if error:
            log_event(run, "notify_failed", **facts, error=error.replace(secret, "...") if secret else error)
        else:
            log_event(run, "notified", **facts)
    return 0


def _try_twice(
    order: SendOrder, channel: str, environ: Mapping[str, str], deadline: float, results: dict[str, str]
) -> None:
    """Send by one channel, and again when it fails and time is left; put the error into `results`, empty: none."""
    send = {"command": start_command, "webhook": post, "mail": send_mail}[channel]
    for pause_s in (0.0, _PAUSE_S):
        time.sleep(pause_s)
        left_s = deadline - time.monotonic()
        if left_s < _PAUSE_S:
            return
        try:
            send(order, environ, left_s)
            results[channel] = ""
            return
        except NotSentError as error:
            results[channel] = str(error)
        except Exception as error:  # its text may have the address
            results[channel] = type(error).__name__


def post(order: SendOrder, environ: Mapping[str, str], timeout_s: float) -> None:
    """POST the message as JSON to the webhook; redirects are not followed.

    Raises: NotSentError.
    """
    url = webhook_address(order.notify.webhook or "", environ)
    if not url:
        raise NotSentError(f"{order.notify.webhook} is not set here")
    if not re.fullmatch(r"https?://[^\s/?#]+\S*", url):
        raise NotSentError("the address of the webhook is none: expected https://...")
    request = urllib.request.Request(  # noqa: S310  the address begins with http
        url,
        data=json.dumps(order.message.to_json()).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "clusterddp"},
        method="POST",
    )
    host = urlsplit(url).hostname
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s):
            return
    except urllib.error.HTTPError as error:
        redirected = ", a redirect, which is not followed" if 300 <= error.code < 400 else ""
        raise NotSentError(f"{host} answers with HTTP {error.code}{redirected}") from error
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else None
        raise NotSentError(f"{host} cannot be reached: {reason or type(error.reason).__name__}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: another place would get what is meant for the address of the user."""

    def redirect_request(self, *_: Any) -> None:
        return None


def start_command(order: SendOrder, environ: Mapping[str, str], timeout_s: float) -> None:
    """Run the command with the message on its standard input and in its environment.

    Raises: NotSentError.
    """
    facts = {f"CLUSTERDDP_{name.upper()}": str(value) for name, value in dataclasses.asdict(order.message).items()}
    data = json.dumps(order.message.to_json()).encode()
    _run(order.notify.command, data, {**environ, **facts}, timeout_s, cwd=order.message.run_dir)


def send_mail(order: SendOrder, environ: Mapping[str, str], timeout_s: float) -> None:
    """Send the message by sendmail.

    Raises: NotSentError.
    """
    mail = EmailMessage()
    mail["To"] = order.notify.mail
    mail["Subject"] = f"clusterddp: {order.message.run} {order.message.state}"
    mail.set_content(f"{order.message.text}\n\n{order.message.run_dir}\n")
    path = f"{environ.get('PATH', os.defpath)}:/usr/sbin:/usr/lib"
    _run(("sendmail", "-i", str(order.notify.mail)), mail.as_bytes(), {**environ, "PATH": path}, timeout_s, cwd="/")


def _run(words: tuple[str, ...], data: bytes, environ: Mapping[str, str], timeout_s: float, *, cwd: str) -> None:
    """Run a program; it is killed when it takes too long.

    Raises: NotSentError.
    """
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


if __name__ == "__main__":
    sys.exit(main())
