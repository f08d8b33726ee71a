"""The agent: answers requests of a launcher on this host over one SSH connection, until the connection ends.

    request   {"do": operation, ..., "size": n}\n    and n bytes
    answer    {"ok": true, ..., "size": n}\n         and n bytes, or {"ok": false, "error": str, "hint": str | null}

One request at a time. Nothing that the agent holds outlives it: leases, listeners, and the pipes of supervisors that
were not released close with it, however it ends. It accepts requests on its standard input only, and ends by itself
when no request has come for `patience_s`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.agent import machine, network, runs, store
from clusterddp.places.ssh.agent.operations import OPERATIONS, Body, Handler, Host, Reply
from clusterddp.wire import build, read_object

HANDLERS: Mapping[str, Handler] = {
    "beat": machine.beat,
    "host.facts": machine.read_facts,
    "host.lease": machine.lease,
    "host.list": machine.list_here,
    "host.listen": network.listen,
    "host.probe": network.probe,
    "host.remove": machine.remove,
    "run.ask": runs.ask,
    "run.end": runs.end,
    "run.look": runs.look,
    "run.prepare": runs.prepare,
    "run.read": runs.read,
    "run.supervise": runs.supervise,
    "store.compare": store.compare,
    "store.put": store.put,
}


def serve(root: str, package: str, patience_s: int) -> None:
    """Answer requests on standard input until it ends, or no request has come for `patience_s`."""
    host = Host(root=Path(root), package=Path(package), patience_s=patience_s)
    requests = sys.stdin.buffer
    # Other output must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        # A host that was suspended looks once more: a request, or the end of the connection, may have come meanwhile.
        if not any(select.select([requests], [], [], wait_s)[0] for wait_s in (host.patience_s, 0)):
            os.kill(os.getpid(), signal.SIGALRM)
        signal.alarm(host.patience_s)
        line = requests.readline()
        if not line:
            return
        answer_one(host, line, requests, answers)


def answer_one(host: Host, line: bytes, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one request.

    Raises: SystemExit: the place where the next one begins is unknown.
    """
    try:
        request = read_object(line)
        head = build({"do": str, "size": int | None}, request, "request")
    except ValueError as error:
        raise SystemExit(f"not a request: {error}") from None
    do, size = head["do"], head["size"] or 0
    if size < 0:
        raise SystemExit(f"not a request: request.size is {size}")
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
    if do not in OPERATIONS:
        raise ClusterddpError(f"{do:.60}: this agent knows no such operation")
    facts = build(OPERATIONS[do].request, request, "request")
    signal.alarm(0 if body.size == 0 else host.patience_s)
    answer = HANDLERS[do](host, facts, body)
    signal.alarm(0)
    return answer


def say(answers: BinaryIO, words: dict[str, Any]) -> None:
    answers.write(json.dumps(words).encode() + b"\n")
    answers.flush()


def failure(error: Exception) -> dict[str, Any]:
    """Describe an error for the launcher; print the traceback of an internal one to stderr."""
    if isinstance(error, ValueError):  # a value of the request, such as a name
        error = ClusterddpError(f"the request is wrong: {error}")
    if isinstance(error, ClusterddpError):
        return {"ok": False, "error": error.message, "hint": error.hint}
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return {"ok": False, "error": f"{place}{error.strerror}", "hint": None}
    traceback.print_exc()
    return {"ok": False, "error": f"{type(error).__name__}: {error}", "hint": None}
