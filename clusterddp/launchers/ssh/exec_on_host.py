"""`exec` and `shell` over SSH: the agent on the rank's host runs the command, over a connection of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from clusterddp.errors import SshError
from clusterddp.launchers.exec_command import MODULE, ExecCommand, Write
from clusterddp.planning.plan import Plan
from clusterddp.planning.ssh.plan import directory_name
from clusterddp.remote.package import package
from clusterddp.run.directory import AttemptDir
from clusterddp.ssh.command import Command, open_command
from clusterddp.ssh.sessions import open_sessions


def exec_on_host(plan: Plan, attempt: AttemptDir, command: ExecCommand, environ: Mapping[str, str]) -> int:
    """Run a command on a host of the run; return its exit code.

    Raises: SshError: the host cannot be reached, or the connection broke, which has ended the command.
    """
    assert plan.ssh is not None
    access = plan.ssh.accesses()[command.node_rank]
    agent = open_sessions([access], environ=environ, package=package())[access.host]
    if isinstance(agent, SshError):
        raise agent
    with agent, open_command(agent, access, package()) as remote:
        runs_dir = f"{agent.hello['root']}/runs"
        run_dir = f"{runs_dir}/{directory_name(plan.run, plan.token)}"
        remote.start(_order(command, command.arguments(run_dir, attempt), runs_dir, environ))
        if command.interrupted is not None:
            threading.Thread(target=_interrupt, args=(remote, command.interrupted), daemon=True).start()
        code = remote.wait(agent, *_writers(command), command.keyboard)
    if code is None:
        found = "the connection broke, which ends the command; the run goes on"
        raise SshError(command.host, "ask", found, dropped=True)
    return code


def _order(command: ExecCommand, arguments: list[str], runs_dir: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Write the order for the agent (agent/command.py)."""
    return {
        "module": MODULE,
        "arguments": arguments,
        "variables": {"TERM": environ["TERM"]} if "TERM" in environ else {},
        "needs": [],
        "directory": None,
        "runs_dir": runs_dir,
        "discard": None,
        "input": command.keyboard.facts() if command.keyboard else None,
    }


def _interrupt(remote: Command, interrupted: threading.Event) -> None:
    interrupted.wait()
    remote.interrupt()


def _writers(command: ExecCommand) -> tuple[Write, Write]:
    if command.lines is None:
        return _write_out, _write_err
    out, err = command.lines
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
