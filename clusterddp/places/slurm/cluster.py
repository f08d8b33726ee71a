"""The facts of a cluster: what Slurm's commands print about partitions, nodes and accounts. Each may be missing."""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterddp.errors import PreflightError, SlurmError
from clusterddp.places.slurm.commands import read_duration_s, run_slurm

SEPARATOR = "\x1f"
"""No name or reason contains it, unlike the bar and the space."""
SINFO_FIELDS = ("%R", "%D", "%c", "%m", "%t", "%G")
ASSOCIATION_FIELDS = ("cluster", "account", "partition", "qos", "maxsubmit", "maxwall")
_UNUSABLE = frozenset({"down", "drain", "drng", "fail", "failg", "maint", "inval", "unk", "futr", "no_respond"})
"""sinfo's abbreviations of states in which no job can start on a node. Source: sinfo(1), node state codes."""
_STATE_MARKS = "*~#!%$@^-+"


def is_usable(state: str) -> bool:
    """Return whether a job can start on a node whose state sinfo abbreviates so."""
    return state.rstrip(_STATE_MARKS) not in _UNUSABLE


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
        return is_usable(self.state)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition and its limits; None: no limit, or not known."""

    name: str
    is_default: bool = False
    state: str = "UP"
    max_time_s: int | None = None
    preempt_mode: str | None = None
    grace_s: int = 0
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
                    state=state.rstrip(_STATE_MARKS),
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
                preempt_mode=values.get("PreemptMode"),
                grace_s=read_number(values.get("GraceTime")) or 0,
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
        if len(fields) < len(ASSOCIATION_FIELDS) or not fields[1] or (cluster and fields[0] != cluster):
            continue
        found.append(
            Association(
                account=fields[1],
                partition=fields[2] or None,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """The user whose view of the cluster is read."""

    name: str
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster as a user sees it; None: not known."""

    name: str | None = None
    version: str | None = None
    user: User = field(default_factory=lambda: User(name=""))
    partitions: tuple[Partition, ...] = ()
    associations: tuple[Association, ...] = ()
    default_account: str | None = None
    has_accounting: bool | None = None
    needs_account: bool | None = None
    """True: Slurm refuses jobs of users without an account (AccountingStorageEnforce)."""
    job_requeue: bool | None = None
    kill_wait_s: int | None = None
    max_array_size: int | None = None
    proctrack: str | None = None
    preempt_mode: str | None = None
    unanswered: tuple[str, ...] = ()
    """The errors of commands that failed."""

    @property
    def accounts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(association.account for association in self.associations))

    @property
    def version_number(self) -> tuple[int, int] | None:
        """Year and month of the release: (22, 5)."""
        match = re.match(r"(\d{1,9})\.(\d{1,9})", self.version or "")
        return (int(match[1]), int(match[2])) if match else None

    def partition(self, name: str) -> Partition | None:
        return next((partition for partition in self.partitions if partition.name == name), None)

    def may_use(self, partition: Partition) -> bool:
        """Return whether jobs of this user can run in a partition."""
        groups = partition.allow_groups
        in_group = groups is None or self.user.name == "root" or any(group in groups for group in self.user.groups)
        has_account = not self.accounts or any(map(partition.takes_account, self.accounts))
        return partition.state == "UP" and in_group and has_account


def current_user() -> User:
    """Return the user of this process."""
    number = os.getuid()
    try:
        name = pwd.getpwuid(number).pw_name
    except KeyError:
        name = str(number)
    groups = []
    for group in {os.getgid(), *os.getgroups()}:
        try:
            groups.append(grp.getgrgid(group).gr_name)
        except KeyError:  # a number without a name
            continue
    return User(name=name, groups=tuple(sorted(groups)))


def read_cluster(environ: Mapping[str, str], *, user: User | None = None) -> Cluster:
    """Read the facts of this cluster with six commands at most."""
    user = user or current_user()
    config = parse_config(run_slurm(["scontrol", "show", "config"], environ=environ))
    unanswered: list[str] = []

    def ask(*argv: str) -> str:
        try:
            return run_slurm(argv, environ=environ)
        except SlurmError as error:
            unanswered.append(error.message)
            return ""

    sinfo = ask("sinfo", "-h", "-e", "-o", SEPARATOR.join(SINFO_FIELDS))
    partitions = parse_partitions(ask("scontrol", "show", "partition", "-o"), parse_node_groups(sinfo))
    associations: tuple[Association, ...] = ()
    default_account = None
    if has_accounting(config):
        rows = ask("sacctmgr", "-nP", "show", "assoc", f"user={user.name}", f"format={','.join(ASSOCIATION_FIELDS)}")
        associations = parse_associations(rows, cluster=config.get("ClusterName"))
        if len({association.account for association in associations}) > 1:
            default_account = ask("sacctmgr", "-nP", "show", "user", user.name, "format=defaultaccount").strip() or None
        ask("sacct", "-nXP", "-S", "now", "-o", "jobid")
    enforced = config.get("AccountingStorageEnforce")
    requeue = config.get("JobRequeue")
    return Cluster(
        name=config.get("ClusterName"),
        version=config.get("SLURM_VERSION"),
        user=user,
        partitions=partitions,
        associations=associations,
        default_account=default_account,
        has_accounting=has_accounting(config),
        needs_account=None if enforced is None else bool({"associations", "limits", "all"} & set(enforced.split(","))),
        job_requeue=None if requeue is None else requeue not in {"0", "NO", "No"},
        kill_wait_s=read_number(config.get("KillWait")),
        max_array_size=read_number(config.get("MaxArraySize")),
        proctrack=config.get("ProctrackType"),
        preempt_mode=config.get("PreemptMode"),
        unanswered=tuple(unanswered),
    )


def has_accounting(config: Mapping[str, str]) -> bool | None:
    """Return whether a database records jobs; without one `sacct` has no answer."""
    kind = config.get("AccountingStorageType")
    return None if kind is None else kind.endswith("slurmdbd")


def parse_config(text: str) -> dict[str, str]:
    """Read `scontrol show config`; the first value of a repeated key counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found.setdefault(key.strip(), value.strip())
    return found


def check_array_size(num_tasks: int, environ: Mapping[str, str]) -> None:
    """Check that the cluster accepts a job array of this size.

    Raises: PreflightError: it does not; the message names the limit. SlurmError: Slurm did not answer.
    """
    config = parse_config(run_slurm(["scontrol", "show", "config"], environ=environ))
    for key, most in array_limits(config).items():
        if num_tasks > most:
            raise PreflightError(
                f"a sweep of {num_tasks} runs: this cluster takes a job array of at most {most} tasks ({key})",
                hint="nothing was written; sweep fewer values at a time: train.seed=0,1 --sweep, then train.seed=2,3",
            )


def array_limits(config: Mapping[str, str]) -> dict[str, int]:
    """Return how many tasks an array may have: `KEY=VALUE` of each limit -> number.

    Source: slurm.conf(5): the highest index is MaxArraySize - 1; max_array_tasks is below it or not set; each task
    that is started is one of MaxJobCount jobs.
    """
    most = re.search(r"\bmax_array_tasks=(\d{1,18})\b", config.get("SchedulerParameters", ""))
    texts = {key: config.get(key) for key in ("MaxArraySize", "MaxJobCount")}
    texts["SchedulerParameters=max_array_tasks"] = most[1] if most else None
    limits = {key: read_number(text) for key, text in texts.items()}
    return {f"{key}={limit}": limit for key, limit in limits.items() if limit is not None}
