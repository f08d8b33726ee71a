"""`python -m clusterddp.node.notify`: send one message about a run by each of its channels, within ten seconds.

It reads a `SendOrder` as JSON from standard input. A channel is a thread of its own, so that one that hangs, in a
look-up of a name for instance, delays no other. The results are in the run's directory; nothing is printed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from typing import IO, Any
from urllib.parse import urlsplit

from clusterddp.errors import ClusterddpError
from clusterddp.run.gang import Notify
from clusterddp.run.notices import SEND_S, Message, SendOrder, claim, settle, webhook_address
from clusterddp.wire import read_object

_SENDMAIL_PATH = f"{os.defpath}:/usr/sbin:/usr/lib"
_MAX_ERROR = 300


class NotSentError(Exception):
    """Why a message was not sent, in one line that holds no secret."""


def main() -> int:
    """Send the message by the channels of the order that this process can claim."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm signals every process of a step
    order = SendOrder.from_json(read_object(sys.stdin.buffer.read()))
    environ = dict(os.environ)
    senders = [threading.Thread(target=_send, args=(order, name, environ), daemon=True) for name in order.channels]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(SEND_S + 2.0)
    return 0


def _send(order: SendOrder, channel: str, environ: Mapping[str, str]) -> None:
    with contextlib.suppress(ClusterddpError, OSError):  # the storage refuses: a later process may claim it
        path = claim(order, channel)
        if path is not None:
            settle(order, channel, path, _try(SENDERS[channel], order, environ))


def _try(
    send: Callable[[Notify, Message, Mapping[str, str]], None], order: SendOrder, environ: Mapping[str, str]
) -> str | None:
    """Run a sender in a thread of its own; return why the message was not sent, None when it was."""
    result: list[str | None] = []

    def work() -> None:
        try:
            send(order.notify, order.message, environ)
            result.append(None)
        except NotSentError as error:
            result.append(str(error)[:_MAX_ERROR])
        except Exception as error:  # its text may have the address
            result.append(type(error).__name__)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(SEND_S + 1.0)
    error = result[0] if result else f"no answer within {SEND_S:g} s"
    secret = webhook_address(order.notify.webhook or "", environ)
    return error.replace(secret, "...") if error and secret else error


def post(notify: Notify, message: Message, environ: Mapping[str, str]) -> None:
    """POST the message as JSON to the webhook; redirects are not followed.

    Raises: NotSentError.
    """
    url = _address(notify.webhook or "", environ)
    host = urlsplit(url).hostname or ""
    request = urllib.request.Request(  # noqa: S310  _address accepts http and https only
        url,
        data=json.dumps(message.to_json()).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "clusterddp"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=SEND_S):
            return
    except urllib.error.HTTPError as error:
        redirected = ", a redirect, which is not followed" if 300 <= error.code < 400 else ""
        raise NotSentError(f"{host} answers with HTTP {error.code}{redirected}") from error
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else None
        raise NotSentError(f"{host} cannot be reached: {reason or type(error.reason).__name__}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotSentError(f"{host} did not answer: {type(error).__name__}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: another place would get what is meant for the address in the spec."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _address(webhook: str, environ: Mapping[str, str]) -> str:
    url = webhook_address(webhook, environ)
    if not url:
        raise NotSentError(f"{webhook} is not set here")
    if not re.fullmatch(r"https?://[^\s/?#]+\S*", url):
        raise NotSentError("the address of the webhook is none: expected https://...")
    return url


def start_command(notify: Notify, message: Message, environ: Mapping[str, str]) -> None:
    """Run the command with the message on its standard input.

    Raises: NotSentError: it cannot be started, fails, or takes too long; then it is killed.
    """
    own = dict(environ) | message.variables()
    _run(notify.command, json.dumps(message.to_json()).encode(), own, cwd=message.run_dir)


def send_mail(notify: Notify, message: Message, environ: Mapping[str, str]) -> None:
    """Send the message by sendmail.

    Raises: NotSentError.
    """
    path = f"{environ.get('PATH', os.defpath)}:{_SENDMAIL_PATH}"
    sendmail = shutil.which("sendmail", path=path)
    if sendmail is None:
        raise NotSentError("this machine has no sendmail")
    mail = EmailMessage()
    mail["To"] = notify.mail
    mail["Subject"] = f"clusterddp: {message.run} {message.state}"
    mail.set_content(f"{message.text}\n\n{message.run_dir}\n")
    _run((sendmail, "-i", str(notify.mail)), mail.as_bytes(), environ, cwd="/")


SENDERS: dict[str, Callable[[Notify, Message, Mapping[str, str]], None]] = {
    "command": start_command,
    "webhook": post,
    "mail": send_mail,
}


def _run(words: tuple[str, ...], data: bytes, environ: Mapping[str, str], *, cwd: str) -> None:
    """Run a program; its group is killed when it takes too long.

    Raises: NotSentError.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=environ, cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise NotSentError(f"{words[0]} cannot be started: {error.strerror}") from error
        try:
            process.communicate(data, timeout=SEND_S)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise NotSentError(f"{words[0]} was killed after {SEND_S:g} s") from error
        if process.returncode != 0:
            last = _last_line(errors)
            raise NotSentError(f"{words[0]} ended with exit code {process.returncode}" + (f": {last}" if last else ""))


def _last_line(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4096))
    lines = file.read().decode(errors="replace").strip().splitlines()
    return "".join(char for char in lines[-1] if char.isprintable()) if lines else ""


if __name__ == "__main__":
    sys.exit(main())
