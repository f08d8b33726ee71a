"""The facts of a cluster, read from Slurm's commands; each of them may be missing."""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterddp.errors import PreflightError, SlurmError
from clusterddp.places.slurm.commands import run_slurm
from clusterddp.places.slurm.partitions import (
    ASSOCIATION_FIELDS,
    SEPARATOR,
    SINFO_FIELDS,
    Association,
    Partition,
    parse_associations,
    parse_node_groups,
    parse_partitions,
    read_number,
)


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
    min_job_age_s: int | None = None
    max_array_size: int | None = None
    proctrack: str | None = None
    select: str | None = None
    preempt_mode: str | None = None
    signals_before_preemption: bool | None = None
    """True: Slurm sends a job its `--signal` before preemption, too."""
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
    """Read the facts of this cluster with six commands at most.

    Raises: SlurmError: there is no Slurm here, or its controller does not answer.
    """
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
    return describe_cluster(
        config,
        user=user,
        partitions=partitions,
        associations=associations,
        default_account=default_account,
        unanswered=unanswered,
    )


def describe_cluster(
    config: Mapping[str, str],
    *,
    user: User,
    partitions: Sequence[Partition] = (),
    associations: Sequence[Association] = (),
    default_account: str | None = None,
    unanswered: Sequence[str] = (),
) -> Cluster:
    """Make a `Cluster` of the output of the commands."""
    enforced = config.get("AccountingStorageEnforce")
    requeue = config.get("JobRequeue")
    signals = [config.get(key) for key in ("PreemptParameters", "SlurmctldParameters")]
    return Cluster(
        name=config.get("ClusterName"),
        version=config.get("SLURM_VERSION"),
        user=user,
        partitions=tuple(partitions),
        associations=tuple(associations),
        default_account=default_account,
        has_accounting=has_accounting(config),
        needs_account=None if enforced is None else bool({"associations", "limits", "all"} & set(enforced.split(","))),
        job_requeue=None if requeue is None else requeue not in {"0", "NO", "No"},
        kill_wait_s=read_number(config.get("KillWait")),
        min_job_age_s=read_number(config.get("MinJobAge")),
        max_array_size=read_number(config.get("MaxArraySize")),
        proctrack=config.get("ProctrackType"),
        select=config.get("SelectType"),
        preempt_mode=config.get("PreemptMode"),
        # Until 23.11 the word was preempt_send_user_signal, in SlurmctldParameters.
        signals_before_preemption=None if not config else any("send_user_signal" in (text or "") for text in signals),
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
    config = run_slurm(["scontrol", "show", "config"], environ=environ)
    for key, most in array_limits(config).items():
        if num_tasks > most:
            raise PreflightError(
                f"a sweep of {num_tasks} runs: this cluster takes a job array of at most {most} tasks ({key})",
                hint="nothing was written; sweep fewer values at a time: train.seed=0,1 --sweep, then train.seed=2,3",
            )


def array_limits(config: str) -> dict[str, int]:
    """Read from `scontrol show config` how many tasks an array may have: `KEY=VALUE` of each limit -> number.

    Source: slurm.conf(5): the highest index is MaxArraySize - 1; max_array_tasks is below it or not set; each task
    that is started is one of MaxJobCount jobs.
    """
    limits: dict[str, int] = {}
    for key in ("MaxArraySize", "MaxJobCount"):
        match = re.search(rf"^{key}\s*=\s*(\d{{1,18}})\s*$", config, re.MULTILINE)
        if match:
            limits[f"{key}={match[1]}"] = int(match[1])
    match = re.search(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d{1,18})\b", config, re.MULTILINE)
    if match:
        limits[f"SchedulerParameters=max_array_tasks={match[1]}"] = int(match[1])
    return limits
