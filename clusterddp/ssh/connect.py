"""Connections to many hosts at once: a result per host, a connection or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clusterddp.errors import SshError
from clusterddp.ssh.config import Destination
from clusterddp.ssh.connection import Connection
from clusterddp.ssh.fan import AT_ONCE, Fan
from clusterddp.ssh.keys import HostKey
from clusterddp.ssh.network import Network


def connect_all(
    hosts: Iterable[str],
    *,
    environ: Mapping[str, str],
    pinned: Mapping[str, str] | None = None,
    at_once: int = AT_ONCE,
    per_bastion: int = 8,
) -> dict[str, Connection | SshError]:
    """Connect to hosts, as `ssh HOST` would; whoever gets the connections closes them.

    `pinned`: host -> the key that it must have, `SHA256:...` or `TYPE BASE64`. `per_bastion`: so many at a time go
    through one host on the way, or to one sshd.
    """
    network = Network(environ, per_bastion)

    def reach(host: str) -> Connection | SshError:
        try:
            return network.connect(host, pinned=(pinned or {}).get(host))
        except SshError as error:
            return error

    with network:
        return Fan(dict.fromkeys(hosts), reach, _close_if_open).results(at_once)


def scan_all(
    destinations: Iterable[Destination], *, environ: Mapping[str, str], at_once: int = AT_ONCE, per_bastion: int = 8
) -> dict[Destination, HostKey | SshError]:
    """See which keys hosts show, whoever they are; the hosts on the way there have to be known.

    No host that is not known hears more than the handshake.
    """
    network = Network(environ, per_bastion)

    def scan(destination: Destination) -> HostKey | SshError:
        try:
            return network.scan(destination)
        except SshError as error:
            return error

    with network:
        return Fan(dict.fromkeys(destinations), scan, lambda result: None).results(at_once)


def _close_if_open(result: Connection | SshError) -> None:
    if isinstance(result, Connection):
        result.close()
