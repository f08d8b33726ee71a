"""The commands hosts check and hosts trust: whether SSH reaches a host, and which host keys are trusted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.arguments import HostName, command, output_option
from clusterddp.cli.terminal import Terminal, confirm, put, put_json, say, say_error, table
from clusterddp.errors import PreflightError, SshError, UsageError
from clusterddp.system.units import format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.places.ssh.config import Destination
    from clusterddp.places.ssh.connections import Connector
    from clusterddp.places.ssh.keys import HostKey

_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


@command("check")
@click.argument("hosts", metavar="HOST...", nargs=-1, required=True, type=HostName())
@output_option
@click.pass_obj
def check(terminal: Terminal, *, hosts: tuple[str, ...], output: str) -> int:
    """Connect to each HOST as `ssh HOST` would, and report the result; node[1-4] names four.

    Exit code 3 when any host fails; the command that fixes it is printed below the host.
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
        put("\n".join(_check_lines(found)))
    return 0 if healthy else PreflightError.exit_code


@command("trust")
@click.argument("hosts", metavar="HOST[=SHA256:...]...", nargs=-1, required=True, type=HostName())
@click.option("--yes", is_flag=True, help="Do not ask; every host then needs the fingerprint that is expected.")
@click.pass_obj
def trust(terminal: Terminal, *, hosts: tuple[str, ...], yes: bool) -> int:
    """Show the keys of all HOSTs that are not known yet, ask once, and add them to your known_hosts.

    \b
    clusterddp hosts trust node[1-4]
    clusterddp hosts trust --yes node1=SHA256:...    when the fingerprint is known from elsewhere
    """
    from clusterddp.places.ssh.connections import Connector, call_each
    from clusterddp.places.ssh.keys import INTERCEPTED, add_known_hosts

    names, expected = _parse_expected(hosts)
    if yes and (missing := [name for name in names if name not in expected]):
        raise UsageError(
            f"--yes needs the fingerprint of each host, and there is none for {', '.join(missing)}",
            hint=f"--yes {missing[0]}=SHA256:...; on the host: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
        )
    unknown, failed = _unknown(names, expected, terminal)
    with Connector(terminal.environ) as connector:
        scanned = call_each(connector.scan, unknown)
    shown = {destination: key for destination, key in scanned.items() if not isinstance(key, SshError)}
    failed += [error for error in scanned.values() if isinstance(error, SshError)]
    for error in failed:
        say_error(error.message, hint=error.hint)
    if shown:
        for each, key in shown.items():
            hint = f"nothing was written; {INTERCEPTED}"
            _check_expected(each.host, f"the host shows {key.type}", [key], expected, hint)
        rows = [["HOST", "KNOWN AS", "KEY", "FINGERPRINT"]]
        rows += [[each.host, each.known_as, key.type, key.fingerprint] for each, key in shown.items()]
        put("\n".join(table(rows)))
        question = (
            "Is this the key of the host?" if len(shown) == 1 else f"Are these the keys of the {len(shown)} hosts?"
        )
        hint, refused = "--yes HOST=SHA256:..., once you compared them", "nothing was written"
        if not (yes or confirm(question, hint=hint, refused=refused)):
            say(refused)
            return 1
        for path, count in add_known_hosts(shown).items():
            say(f"added {format_count(count, 'key')} to {path}")
    return PreflightError.exit_code if failed else 0


@click.group("hosts")
def hosts() -> None:
    """Check the hosts that SSH reaches, and trust their keys, as your own ssh does."""


hosts.add_command(check)
hosts.add_command(trust)
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


def _parse_expected(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split `node1=SHA256:...` into the name and what is expected."""
    from clusterddp.spec.hosts import expand_all

    names: list[str] = []
    expected: dict[str, str] = {}
    for argument in arguments:
        text, equals, wanted = argument.partition("=")
        found = expand_all([text])
        names += found
        if equals and (len(found) != 1 or not _FINGERPRINT.fullmatch(wanted)):
            raise UsageError(
                f"{argument}: one host and its fingerprint are expected", hint="HOST=SHA256:... with 43 characters"
            )
        if equals:
            expected[found[0]] = wanted
    return list(dict.fromkeys(names)), expected


def _unknown(
    names: Sequence[str], expected: dict[str, str], terminal: Terminal
) -> tuple[list[Destination], list[SshError]]:
    """Return the hosts that known_hosts does not list, and the errors of the others."""
    from clusterddp.places.ssh.config import resolve
    from clusterddp.places.ssh.keys import read_known_keys

    unknown: list[Destination] = []
    failed: list[SshError] = []
    for name in names:
        try:
            destination = resolve(name, terminal.environ)
            known = [key for key in read_known_keys(destination) if key.marker != "revoked"]
            keys = [key for key in known if key.marker == "key"]
            _check_expected(name, "known_hosts has", keys, expected, f"clusterddp hosts check {name}")
        except SshError as error:
            failed.append(error)
            continue
        if known:
            say(f"{name}: is known already ({known[0].place})")
        else:
            unknown.append(destination)
    return unknown, failed


def _check_expected(host: str, who: str, keys: Sequence[HostKey], expected: Mapping[str, str], hint: str) -> None:
    """Compare keys of a host with its expected fingerprint.

    Raises: SshError: none is the expected one.
    """
    prints, wanted = [key.fingerprint for key in keys], expected.get(host)
    if wanted is not None and prints and wanted not in prints:
        raise SshError(host, "host key", f"{who} {', '.join(prints)}, expected is {wanted}", hint=hint)


def _measure(connector: Connector, host: str) -> dict[str, Any]:
    """Connect to a host, and describe how it was reached."""
    session = connector.connect(host)
    try:
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
    finally:
        session.close()


def _check_lines(found: Mapping[str, dict[str, Any] | SshError]) -> list[str]:
    """Lay out the hosts as one table, those that fail after the others, each with its fix."""
    rows = [["HOST", "ADDRESS", "USER", "VIA", "KEY", "ROUND TRIP"]]
    for host, each in found.items():
        if not isinstance(each, SshError):
            address, via = f"{each['hostname']}:{each['port']}", ",".join(each["jumps"]) or "-"
            rows.append([host, address, each["user"], via, each["key_type"], f"{each['round_trip_ms']} ms"])
    return [*(table(rows) if len(rows) > 1 else []), *failure_lines(found)]
