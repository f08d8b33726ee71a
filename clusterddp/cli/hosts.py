"""The command hosts: which hosts files name, and whether SSH reaches them (check)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.arguments import HostName, command, output_option
from clusterddp.cli.terminal import Terminal, put, put_json, say, table
from clusterddp.errors import PreflightError, SshError
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.places.ssh.connections import Connector


@command("check")
@click.argument("hosts", metavar="HOST...", nargs=-1, required=True, type=HostName())
@output_option
@click.pass_obj
def check(terminal: Terminal, *, hosts: tuple[str, ...], output: str) -> int:
    """Connect to each HOST as `ssh HOST` would, and report the result.

    node[1-4] names four hosts. Exit code 3 when any host fails; the command that fixes it is printed below the host.
    """
    from clusterddp.places.ssh.connections import Connector, call_each
    from clusterddp.spec.hosts import expand_all

    with Connector(terminal.environ) as connector:
        found = call_each(lambda host: _measure(connector, host), expand_all(hosts))
    healthy = not any(isinstance(each, SshError) for each in found.values())
    if output == "json":
        rows = [
            failure_json(host, each) if isinstance(each, SshError) else {"host": host, "ok": True, **each}
            for host, each in found.items()
        ]
        put_json({"healthy": healthy, "hosts": rows})
    else:
        table_rows = [["HOST", "ADDRESS", "USER", "VIA", "KEY", "ROUND TRIP"]]
        for host, each in found.items():
            if not isinstance(each, SshError):
                where, via = f"{each['hostname']}:{each['port']}", ",".join(each["jumps"]) or "-"
                table_rows.append([host, where, each["user"], via, each["key_type"], f"{each['round_trip_ms']} ms"])
        put("\n".join([*(table(table_rows) if table_rows[1:] else []), *failure_lines(found)]))
    return 0 if healthy else PreflightError.exit_code


@click.group("hosts", invoke_without_command=True)
@click.pass_context
def hosts(ctx: click.Context) -> None:
    """Check the hosts that SSH reaches, as your own ssh does.

    Without a command, list the hosts that ssh.hosts of clusterddp.yaml and ~/.ssh/config name.
    """
    if ctx.invoked_subcommand is not None:
        return
    from clusterddp.places.ssh.config import config_names, home
    from clusterddp.spec.load import read_shared_values
    from clusterddp.spec.tree import ListNode, Scalar
    from clusterddp.spec.tree import Mapping as Section

    found = dict.fromkeys(config_names(home() / ".ssh" / "config"), "~/.ssh/config")
    given = read_shared_values(ctx.obj.environ, Path("job.yaml")).get("ssh.hosts")
    for item in given.items if isinstance(given, ListNode) else ():
        name = item.entries.get("host") if isinstance(item, Section) else item
        found |= {name.text: name.place.source} if isinstance(name, Scalar) else {}
    if found:
        put("\n".join(table([["HOST", "FROM"], *([printable(name), where] for name, where in found.items())])))
    say("clusterddp hosts check HOST... connects to them" if found else "no file names a host: ~/.ssh/config would")


hosts.add_command(check)
COMMANDS = {"hosts": hosts}


def failure_lines(found: Mapping[str, Any]) -> list[str]:
    """Write which machines did not answer, and the fix."""
    lines = []
    for host, error in found.items():
        if isinstance(error, SshError):
            failed = click.style("failed", fg="red", bold=True)
            lines.append(f"{printable(host)}  {failed}  {error.phase}: {printable(error.found)}")
            if error.hint:
                lines.append(f"      {click.style('fix:', bold=True)} {printable(error.hint)}")
    return lines


def failure_json(host: str, error: SshError) -> dict[str, Any]:
    """Describe a machine that did not answer."""
    return {"host": host, "ok": False, "phase": error.phase, "found": error.found, "fix": error.hint}


def _measure(connector: Connector, host: str) -> dict[str, Any]:
    """Connect to a host, and describe how it was reached."""
    with connector.connect(host) as session:
        way = session.destination
        return {
            "hostname": way.hostname,
            "port": way.port,
            "user": way.user,
            "jumps": [jump.host for jump in way.jumps],
            "key_type": session.key.type,
            "fingerprint": session.key.fingerprint,
            "round_trip_ms": round(1000 * session.measure_round_trip_s(), 1),
        }
