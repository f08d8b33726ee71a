"""Hostfiles of mpirun, DeepSpeed, Horovod and MPICH, and DeepSpeed's .deepspeed_env, as parts of a spec."""

from __future__ import annotations

from pathlib import Path

from clusterddp.launch.importing.findings import Findings
from clusterddp.launch.importing.surroundings import set_variable
from clusterddp.launch.importing.values import Text
from clusterddp.spec.hostfile import read_hostfile
from clusterddp.spec.tree import ListNode, Mapping, Scalar


def read_hosts(path: Path, findings: Findings) -> None:
    """Read a hostfile into `findings`.

    Raises: SpecError: with every line that is wrong.
    """
    hosts: list[object] = []
    node = read_hostfile(path).node
    assert isinstance(node, ListNode)
    for item in node.items:
        if isinstance(item, Scalar):
            hosts.append(item.text)
        elif isinstance(item, Mapping):
            entries = {key: value.text for key, value in item.entries.items() if isinstance(value, Scalar)}
            hosts.append({"host": entries["host"], "gpus": int(entries["gpus"])})
    findings.set("launcher", "ssh")
    findings.set("ssh.hosts", hosts)


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
