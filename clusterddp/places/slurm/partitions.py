"""Parses what Slurm's commands print about partitions, nodes and accounts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.places.slurm.control import read_duration_s

SEPARATOR = "\x1f"
"""No name or reason contains it, unlike the bar and the space."""
SINFO_FIELDS = ("%R", "%D", "%c", "%m", "%t", "%G")
ASSOCIATION_FIELDS = ("cluster", "account", "partition", "qos", "maxsubmit", "maxwall")
_UNUSABLE = frozenset({"down", "drain", "drng", "fail", "failg", "maint", "inval", "unk", "futr", "no_respond"})
"""sinfo's abbreviations of states in which no job can start on a node. Source: sinfo(1), node state codes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Nodes of a partition that are alike."""

    num_nodes: int
    cpus: int
    memory_mb: int
    gpus: tuple[tuple[str, int], ...]
    """Type and count on each node; the type is empty where the cluster does not name it."""
    state: str
    """sinfo's abbreviation, without its marks (`*`, `~`)."""

    @property
    def num_gpus(self) -> int:
        return sum(count for _, count in self.gpus)

    @property
    def usable(self) -> bool:
        return self.state not in _UNUSABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition and its limits; None: no limit, or not known."""

    name: str
    is_default: bool = False
    state: str = "UP"
    max_time_s: int | None = None
    default_time_s: int | None = None
    preempt_mode: str | None = None
    grace_s: int = 0
    max_nodes: int | None = None
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] | None = None
    node_groups: tuple[NodeGroup, ...] = ()

    @property
    def num_nodes(self) -> int:
        return sum(group.num_nodes for group in self.node_groups)

    @property
    def has_gpus(self) -> bool:
        return any(group.num_gpus for group in self.node_groups)

    def takes_account(self, account: str) -> bool:
        """Return whether jobs of this account may run here."""
        allowed = self.allow_accounts is None or account in self.allow_accounts
        return allowed and account not in self.deny_accounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Association:
    """A Slurm association: an account of the user, with its limits."""

    account: str
    partition: str | None = None
    """It counts for jobs in this partition only; None: in all."""
    qos: tuple[str, ...] = ()
    max_submit: int | None = None
    max_wall_s: int | None = None


def parse_node_groups(text: str) -> dict[str, tuple[NodeGroup, ...]]:
    """Read sinfo's rows: partition -> groups of nodes that are alike."""
    groups: dict[str, list[NodeGroup]] = {}
    for line in text.splitlines():
        fields = line.split(SEPARATOR)
        if len(fields) != len(SINFO_FIELDS):
            continue  # a plugin's message
        name, num_nodes, cpus, memory_mb, state, gres = (field.strip() for field in fields)
        if read_number(num_nodes):
            groups.setdefault(name, []).append(
                NodeGroup(
                    num_nodes=read_number(num_nodes) or 0,
                    cpus=read_number(cpus) or 0,
                    memory_mb=read_number(memory_mb) or 0,
                    gpus=parse_gpus(gres),
                    state=state.rstrip("*~#!%$@^-+"),
                )
            )
    return {name: tuple(found) for name, found in groups.items()}


def parse_gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """Read the GPUs of a node's generic resources: `gpu:a100:4(S:0-1),mps:400` has (("a100", 4),)."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^()]*\)", "", gres).split(","):
        kind, *words = (word.strip() for word in item.split(":"))
        if kind != "gpu":
            continue
        count = read_number(words.pop()) or 0 if words and words[-1].isdecimal() else 1
        name = ":".join(word for word in words if word != "no_consume")
        found[name] = found.get(name, 0) + count
    return tuple((name, count) for name, count in found.items() if count)


def parse_partitions(text: str, groups: Mapping[str, tuple[NodeGroup, ...]]) -> tuple[Partition, ...]:
    """Read `scontrol show partition -o`, one partition a line; when it is empty, sinfo's names are taken."""
    found = []
    for line in text.splitlines():
        values = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = values.get("PartitionName")
        if name is None:
            continue
        found.append(
            Partition(
                name=name,
                is_default=values.get("Default") == "YES",
                state=values.get("State", "UP"),
                max_time_s=read_duration_s(values.get("MaxTime", "")),
                default_time_s=read_duration_s(values.get("DefaultTime", "")),
                preempt_mode=values.get("PreemptMode"),
                grace_s=read_number(values.get("GraceTime")) or 0,
                max_nodes=read_number(values.get("MaxNodes")),
                allow_accounts=_names(values.get("AllowAccounts")),
                deny_accounts=_names(values.get("DenyAccounts")) or (),
                allow_groups=_names(values.get("AllowGroups")),
                node_groups=groups.get(name, ()),
            )
        )
    return tuple(found) or tuple(Partition(name=name, node_groups=of_it) for name, of_it in groups.items())


def parse_associations(text: str, *, cluster: str | None) -> tuple[Association, ...]:
    """Read the rows of `sacctmgr -nP show assoc`; one database may serve several clusters."""
    found = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 6 or not fields[1] or (cluster and fields[0] != cluster):
            continue
        found.append(
            Association(
                account=fields[1],
                partition=fields[2] or None,
                qos=tuple(name for name in fields[3].split(",") if name),
                max_submit=read_number(fields[4]),
                max_wall_s=read_duration_s(fields[5]),
            )
        )
    return tuple(found)


def read_number(text: str | None) -> int | None:
    match = re.match(r"\d{1,18}(?!\d)", text or "")
    return int(match[0]) if match else None


def _names(text: str | None) -> tuple[str, ...] | None:
    if text in {None, "", "ALL", "(null)", "N/A"}:
        return None
    return tuple(name for name in (text or "").split(",") if name)
