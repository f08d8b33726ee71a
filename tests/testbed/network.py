"""What can be done to a node's network while it is on: more interfaces, other speeds, a firewall."""

from __future__ import annotations

from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

MAIN_SWITCH = "switch"
"""The one to which every host is connected from the start."""


def add_interface(
    rack: Rack, node: str, name: str, address: str | None, *, switch: str = "switch2", mtu: int = 1500
) -> None:
    """Give a node another interface (`eth1`, `10.78.0.11/24`) with a cable to a switch, which is made when it is new.

    It lasts until the node loses power. On the main switch it is one more way to the same hosts; on another switch with
    an address of the main network it is the trap of two networks that overlap.
    """
    rack.run(HEAD, ["ip", "link", "add", switch, "type", "bridge"], check=False)
    rack.run(HEAD, ["ip", "link", "set", switch, "up"])
    cable = cable_of(rack, node, name)
    peer = ["peer", "name", name, "netns", str(rack.pid_on_head(node))]
    rack.run(HEAD, ["ip", "link", "add", cable, "mtu", str(mtu), "type", "veth", *peer])
    rack.run(HEAD, ["ip", "link", "set", cable, "master", switch, "up"])
    rack.run(node, ["ip", "link", "set", name, "mtu", str(mtu), "up"])
    if address:
        rack.run(node, ["ip", "address", "add", address, "dev", name])


def remove_interface(rack: Rack, node: str, name: str) -> None:
    """Take an interface out of a node; docker0 is one, too."""
    rack.run(node, ["ip", "link", "del", name])


def pull_interface(rack: Rack, node: str, name: str, *, plugged: bool = False) -> None:
    """Pull the cable of an added interface: it keeps its address and loses the carrier. `plugged` puts it back."""
    rack.run(HEAD, ["ip", "link", "set", cable_of(rack, node, name), "up" if plugged else "down"])


def claim_speed(rack: Rack, node: str, name: str, mbit_per_s: int) -> None:
    """Let /sys/class/net/NAME/speed of a private host claim this; every virtual interface says 10000 by itself."""
    file = f"/run/speed.{name}"
    rack.run(node, ["tee", file], stdin=f"{mbit_per_s}\n")
    rack.run(node, ["mount", "--bind", file, f"/sys/devices/virtual/net/{name}/speed"])


def block_ports(rack: Rack, node: str, ports: str, *, refuse: bool = False, interface: str | None = None) -> None:
    """Let no new TCP connection to these ports (`29500`, `1024-65535`) into a node.

    Packets are dropped, as most firewalls do, or refused at once. What the node itself opens is not touched.
    """
    rule = [*(["iifname", interface] if interface else []), "tcp", "flags", "&", "(syn|ack)", "==", "syn"]
    verdict = ["reject", "with", "tcp", "reset"] if refuse else ["drop"]
    chain = "add table inet rack\nadd chain inet rack input { type filter hook input priority 0; }\n"
    text = f"{chain}add rule inet rack input {' '.join([*rule, 'tcp dport', ports, *verdict])}\n"
    rack.run(node, ["nft", "-f", "-"], stdin=text)


def open_ports(rack: Rack, node: str) -> None:
    """Take down the firewall of a node."""
    rack.run(node, ["nft", "delete", "table", "inet", "rack"], check=False)


def cable_of(rack: Rack, node: str, name: str) -> str:
    """Name the head's end of an added interface's cable."""
    return f"{rack.plan.port(node)}-{name}"
