"""The messages of `clusterddp join` between node 0 and each other machine, over one connection per machine.

    node N    {"kind": "join", "node_rank", "host", "pid", "facts", "spec"}       once node 0 is authenticated
              {"kind": "join", "node_rank", "host", "pid", "facts", "digests"}    without a key
    node 0    {"kind": "waiting", "for": [str]}                                   when a machine joins or disconnects
              {"kind": "refused", "reason": str, "hint": str | null}              the last message to this machine
              {"kind": "begin", "run", "token", "attempt", "master_addr", "link"} the token is masked with the key
              {"kind": "started", "attempt": int, "record": start.json}
              {"kind": "ended", "attempt": int, "record": end.json}

Without a key (CLUSTERDDP_JOIN_KEY) no process is authenticated, and any process that reaches the port can join as a
node. Then digests are sent in place of the values of the spec.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp import __version__
from clusterddp.errors import PreflightError
from clusterddp.rendezvous.connection import Message, Protocol
from clusterddp.rendezvous.handshake import JOIN_KEY, Signer
from clusterddp.run.directory import MAX_ATTEMPTS, is_run_name, is_token
from clusterddp.run.supervisors import Link
from clusterddp.wire import build

JOIN = Protocol(name="join", key=JOIN_KEY, max_bytes_to_server=1_000_000, max_bytes_to_client=1_000_000)


def read_facts() -> dict[str, str | None]:
    """Return what has to be the same on all machines: its name in messages -> its version."""
    try:
        torch: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    major, minor, _ = platform.python_version_tuple()
    return {"clusterddp": __version__, "torch": torch, "Python": f"{major}.{minor}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """The run, as node 0 sends it once all machines have joined."""

    run: str
    token: str
    attempt: int
    master_addr: str
    link: Link

    @classmethod
    def from_json(cls, message: Message, signer: Signer) -> Beginning:
        """Read the message and unmask the token; without a key any process may have sent it.

        Raises: PreflightError: the message is not one that node 0 sends.
        """
        try:
            beginning: Beginning = build(cls, message, "the message")
            fits = is_run_name(beginning.run) and is_token(beginning.token) and 0 <= beginning.attempt < MAX_ATTEMPTS
        except ValueError as error:
            raise PreflightError(f"the process that answers is not node 0: {error}") from error
        addresses_fit = beginning.master_addr.isprintable() and beginning.link["host"].isprintable()
        if not (fits and addresses_fit and 0 < beginning.link["port"] < 65536):
            raise PreflightError(f"the process that answers is not node 0: it names the run {beginning.run!r:.60}")
        return dataclasses.replace(beginning, token=signer.mask(beginning.token))


def digests_of(spec: Mapping[str, Any], signer: Signer) -> dict[str, str]:
    """Return a digest of each value, by dotted key; the digests differ between connections."""
    return {key: signer.digest(f"{key} {json.dumps(value, sort_keys=True)}") for key, value in spec.items()}
