"""A command beside a rank over SSH: the agent on the rank's host runs it, over a connection of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from clusterddp.errors import SshError
from clusterddp.launchers.beside import MODULE, Beside, Write
from clusterddp.planning.plan import Plan
from clusterddp.planning.ssh.plan import directory_name
from clusterddp.remote.package import package
from clusterddp.run.directory import AttemptDir
from clusterddp.ssh.command import Command, open_command
from clusterddp.ssh.sessions import open_sessions


def run_on_host(plan: Plan, attempt: AttemptDir, beside: Beside, environ: Mapping[str, str]) -> int:
    """Run a command on a host of the run; return its exit code.

    Raises: SshError: the host cannot be reached, or the connection broke, which has ended the command.
    """
    assert plan.ssh is not None
    access = plan.ssh.accesses()[beside.node_rank]
    agent = open_sessions([access], environ=environ, package=package())[access.host]
    if isinstance(agent, SshError):
        raise agent
    with agent, open_command(agent, access, package()) as command:
        runs_dir = f"{agent.hello['root']}/runs"
        run_dir = f"{runs_dir}/{directory_name(plan.run, plan.token)}"
        command.start(_order(beside, beside.arguments(run_dir, attempt), runs_dir, environ))
        if beside.interrupted is not None:
            threading.Thread(target=_interrupt, args=(command, beside.interrupted), daemon=True).start()
        code = command.wait(agent, *_writers(beside), beside.keyboard)
    if code is None:
        found = "the connection broke, which ends the command; the run goes on"
        raise SshError(beside.host, "ask", found, dropped=True)
    return code


def _order(beside: Beside, arguments: list[str], runs_dir: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Write the order for the agent (agent/command.py)."""
    return {
        "module": MODULE,
        "arguments": arguments,
        "variables": {"TERM": environ["TERM"]} if "TERM" in environ else {},
        "needs": [],
        "directory": None,
        "runs_dir": runs_dir,
        "discard": None,
        "input": beside.keyboard.facts() if beside.keyboard else None,
    }


def _interrupt(command: Command, interrupted: threading.Event) -> None:
    interrupted.wait()
    command.interrupt()


def _writers(beside: Beside) -> tuple[Write, Write]:
    if beside.lines is None:
        return _write_out, _write_err
    out, err = beside.lines
    return _Lines(out), _Lines(err)


class _Lines:
    """Passes on whole lines."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._write(line + b"\n")


def _write_out(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _write_err(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()
