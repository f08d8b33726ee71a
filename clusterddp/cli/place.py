"""Options that say where a run goes: what starts it, on which hosts, on which devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.hosts import HostName

if TYPE_CHECKING:
    from clusterddp.spec.overrides import Override

_F = TypeVar("_F", bound=Callable[..., Any])
_LAUNCHERS = click.Choice(["local", "ssh", "slurm"])


def place_options(function: _F) -> _F:
    """Declare the options of commands that plan a run."""
    for option in (
        click.option(
            "--hostfile",
            metavar="FILE",
            type=click.Path(allow_dash=True, path_type=Path),
            help="Run over SSH on the hosts of FILE: a line `host slots=N` each.",
        ),
        click.option(
            "--hosts", metavar="H,H", type=HostName(), help="Run over SSH on these hosts, such as gpu01,gpu[03-04]."
        ),
        click.option("--cpu", is_flag=True, help="Run the same ranks on the CPU, with gloo."),
        click.option("--launcher", type=_LAUNCHERS, help="What starts the ranks, whatever the spec says."),
    ):
        function = option(function)
    return function


def place_flags(launcher: str | None, *, cpu: bool, over_ssh: bool) -> dict[str, str]:
    """Return the values of the spec that these options set."""
    launcher = launcher or ("ssh" if over_ssh else None)
    flags = {"launcher": launcher} if launcher else {}
    return flags | ({"device": "cpu"} if cpu else {})


def named_hosts(launcher: str | None, hosts: str | None, hostfile: Path | None) -> Override | None:
    """Return the hosts that the command line names."""
    from clusterddp.spec.hostfile import parse_hosts, read_hostfile

    if hosts is None and hostfile is None:
        return None
    option = "--hosts" if hosts is not None else "--hostfile"
    if hosts is not None and hostfile is not None:
        raise click.UsageError("--hosts and --hostfile both name the hosts, expected one of them")
    if launcher not in (None, "ssh"):
        raise click.UsageError(f"{option} names hosts for launcher ssh, and --launcher says {launcher}")
    return read_hostfile(hostfile) if hostfile is not None else parse_hosts(hosts or "")
