"""Hostfiles of mpirun, DeepSpeed, Horovod and MPICH, and DeepSpeed's .deepspeed_env, as parts of a spec."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from clusterddp.importing.findings import Findings
from clusterddp.importing.surroundings import set_variable
from clusterddp.importing.values import Text
from clusterddp.spec.hostfile import read_hostfile
from clusterddp.spec.tree import ListNode, Mapping, Node, Scalar

Host = tuple[str, int | None]
"""A host or a set of hosts, and its slots where they are given."""


def read_hosts(path: Path, findings: Findings) -> None:
    """Read a hostfile into `findings`.

    Raises: SpecError: with every line that is wrong.
    """
    set_hosts(list_hosts(read_hostfile(path).node), findings)


def list_hosts(node: Node | None) -> list[Host]:
    """Return the hosts of a hostfile or of `a:2,b:2`, with their slots where they have some."""
    assert isinstance(node, ListNode)
    hosts: list[Host] = []
    for item in node.items:
        if isinstance(item, Scalar):
            hosts.append((item.text, None))
        elif isinstance(item, Mapping):
            entries = {key: value.text for key, value in item.entries.items() if isinstance(value, Scalar)}
            hosts.append((entries["host"], int(entries["gpus"])))
    return hosts


def set_hosts(hosts: Iterable[Host], findings: Findings) -> None:
    """Make the hosts those of a run over SSH."""
    findings.set("launcher", "ssh")
    findings.set("ssh.hosts", [host if slots is None else {"host": host, "gpus": slots} for host, slots in hosts])


def read_env_file(text: str, findings: Findings) -> None:
    """Read lines of `NAME=value`, as DeepSpeed reads its .deepspeed_env: the value is the rest of the line."""
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not equals or not name.isidentifier():
            findings.lose(line, "expected NAME=value", number)
            continue
        set_variable(name, Text(value), findings, number)
