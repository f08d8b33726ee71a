"""Supervisors as children of whoever carries a run's nodes on this machine: started, told, heard."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterddp.planning.command_lines import supervisor_command
from clusterddp.planning.environment import process_environment
from clusterddp.ranks.environment import cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang, Node


def supervisor_log(run: RunDir, node_rank: int) -> Path:
    """Return where the supervisor of a node writes what it has to say."""
    return run.launcher_dir / f"supervisor-{node_rank}.log"


def start_supervisor(
    run: RunDir, gang: Gang, node: Node, hold: tuple[int, ...], environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the supervisor of a node, in a session of its own; it waits for its order.

    Raises: OSError: it cannot be started.
    """
    descriptor = os.open(supervisor_log(run, node.node_rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        return subprocess.Popen(
            supervisor_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if node.node_rank == 0 else descriptor,
            stderr=descriptor,
            cwd=run.launcher_dir,
            env=process_environment(cookie(gang.token, f"s{node.node_rank}"), environ),
            start_new_session=True,
            pass_fds=hold,
        )
    finally:
        os.close(descriptor)


def tell(supervisor: subprocess.Popen[bytes], words: dict[str, Any]) -> None:
    """Give a supervisor its order, or news; the pipe stays open, for its end would mean that we have died."""
    assert supervisor.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: the wait tells how
        supervisor.stdin.write(json.dumps(words).encode() + b"\n")
        supervisor.stdin.flush()


def read_link(head: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
    """Read where the head listens; None when it has ended, or says nothing in time."""
    assert head.stdout is not None
    readable, _, _ = select.select([head.stdout], [], [], timeout_s)
    try:
        return dict(json.loads(head.stdout.readline())["link"]) if readable else None
    except (ValueError, KeyError, TypeError):
        return None
