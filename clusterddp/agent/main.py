"""The agent: answers what a launcher asks of this host over one SSH connection, until the connection ends.

    request   {"do": operation, ..., "size": n}\n    and n bytes
    answer    {"ok": true, ..., "size": n}\n         and n bytes, or {"ok": false, "error": str, "hint": str | null}

One after the other. Nothing that the agent holds outlives it: leases, listeners, and the pipes of supervisors that were
not released end with it, however it ends. It listens to nobody else, and leaves by itself when nothing has been asked
for long.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from clusterddp.agent import facts, gpus, network, results, runs, store, table, trial
from clusterddp.agent.requests import REQUESTS
from clusterddp.agent.types import Body, Host, Operation, Reply
from clusterddp.errors import ClusterddpError
from clusterddp.wire import build, read_object

OPERATIONS: dict[str, Operation] = {
    **facts.OPERATIONS,
    **gpus.OPERATIONS,
    **results.OPERATIONS,
    **network.OPERATIONS,
    **runs.OPERATIONS,
    **store.OPERATIONS,
    **table.OPERATIONS,
    **trial.OPERATIONS,
}


def serve(root: str, package: str, patience_s: int) -> None:
    """Answer requests on standard input until it ends, or nothing has been asked for `patience_s`."""
    host = Host(root=Path(root), package=Path(package), patience_s=patience_s)
    requests = sys.stdin.buffer
    # What anything else prints must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        if not is_asked(requests, host.patience_s):
            os.kill(os.getpid(), signal.SIGALRM)
        signal.alarm(host.patience_s)
        line = requests.readline()
        if not line:
            return
        answer_one(host, line, requests, answers)


def is_asked(requests: BinaryIO, patience_s: float) -> bool:
    """Wait for a request, or the end; False: the launcher is silent, and not this host that had no time to listen."""
    return any(select.select([requests], [], [], wait_s)[0] for wait_s in (patience_s, 0))


def answer_one(host: Host, line: bytes, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one request.

    Raises: SystemExit: where the next one begins cannot be told.
    """
    try:
        request = read_object(line)
        head = build({"do": str, "size": int | None}, request, "request")
    except ValueError as error:
        raise SystemExit(f"what was asked is no request: {error}") from None
    do, size = head["do"], head["size"] or 0
    if size < 0:
        raise SystemExit(f"what was asked is no request: request.size is {size}")
    body = Body(requests, size, progress=lambda: signal.alarm(host.patience_s))
    answer: dict[str, Any] | Reply | Exception
    try:
        try:
            answer = _perform(host, do, request, body)
        except EOFError:
            raise
        except Exception as error:
            answer = error
        body.drain()
    except EOFError:
        raise SystemExit("the connection ended in the middle of a request") from None
    if isinstance(answer, Exception):
        say(answers, failure(answer))
        return
    reply = answer if isinstance(answer, Reply) else Reply(facts=answer, chunks=(), size=0)
    say(answers, {"ok": True, **reply.facts, "size": reply.size})
    for chunk in reply.chunks:
        answers.write(chunk)
    answers.flush()


def _perform(host: Host, do: str, request: dict[str, Any], body: Body) -> dict[str, Any] | Reply:
    operation = OPERATIONS.get(do)
    if operation is None:
        raise ClusterddpError(f"{do:.60}: this agent knows no such operation")
    facts = build(REQUESTS.get(do, {}), request, "request")
    signal.alarm(0 if body.size == 0 else host.patience_s)
    answer = operation(host, facts, body)
    signal.alarm(0)
    return answer


def say(answers: BinaryIO, words: dict[str, Any]) -> None:
    answers.write(json.dumps(words).encode() + b"\n")
    answers.flush()


def failure(error: Exception) -> dict[str, Any]:
    """Describe an error for the launcher; of our own mistakes with all that helps to find them."""
    if isinstance(error, ValueError):  # of what was asked: a name that cannot be one
        error = ClusterddpError(f"what was asked makes no sense: {error}")
    if isinstance(error, ClusterddpError):
        return {"ok": False, "error": error.message, "hint": error.hint}
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return {"ok": False, "error": f"{place}{error.strerror}", "hint": None}
    traceback.print_exc()
    return {"ok": False, "error": f"{type(error).__name__}: {error}", "hint": None}
