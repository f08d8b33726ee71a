"""Writes a user's first spec for a cluster: fills a template with its values; and explains its settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clusterddp.errors import SlurmError, UsageError
from clusterddp.places.slurm.cluster import Association, Cluster, NodeGroup, Partition, read_cluster
from clusterddp.system.units import format_count

_COMMENT_COLUMN = 30
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NO_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "auto"}
_FIRST_TIME_S = 2 * 3600
_CPU_RANKS, _CPU_CORES = 2, 8
_MEMORY_SHARE = 0.9
"""The share of a node's memory that is asked for: the system needs some, so a job that asks for all may never start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A value for one key of the template, and its origin."""

    key: str
    value: str
    why: str
    instead_of: str | None = None
    """The key whose line in the template is replaced."""
    is_suggestion: bool = False
    """True: the line stays a comment."""


def slurm_spec(template: str, environ: Mapping[str, str], partition_name: str | None) -> tuple[str, list[str]]:
    """Fill the template with the cluster's facts; return it with notes for the user.

    When Slurm does not answer, the template stays as it is, and a note has the reason.
    Raises: UsageError: the cluster has no partition of that name.
    """
    named = [Filled(key="partition", value=partition_name, why="as you named it")] if partition_name else []
    try:
        cluster = read_cluster(environ)
    except SlurmError as error:
        return fill_template(template, named), [f"{error.message}: the values in it are examples, check each of them"]
    partition = choose_partition(cluster, partition_name)
    restarts = Filled(key="restarts", value="1", why="after a failure, preemption or the time limit")
    notes = [f"from cluster {cluster.name or 'without a name'}, Slurm {cluster.version or 'of an unknown version'}"]
    if partition is None:
        notes.append("no partition of it takes your jobs now: the values in it are examples, check each of them")
    filled = [*(fill_in(cluster, partition) if partition else named), restarts]
    return fill_template(template, filled), [*notes, *consequences(cluster, partition)]


def choose_partition(cluster: Cluster, name: str | None = None) -> Partition | None:
    """Choose the named partition; else the default one, or the largest with GPUs when the default has none."""
    if name is not None:
        chosen = cluster.partition(name)
        if chosen is None and cluster.partitions:
            known = ", ".join(partition.name for partition in cluster.partitions)
            raise UsageError(f"--partition {name}: the cluster has {known}")
        return chosen
    usable = [partition for partition in cluster.partitions if cluster.may_use(partition)]
    with_gpus = [partition for partition in usable if partition.has_gpus]
    candidates = with_gpus or usable
    return max(candidates, key=lambda partition: (partition.is_default, partition.num_nodes), default=None)


def fill_in(cluster: Cluster, partition: Partition) -> tuple[Filled, ...]:
    """Compute the values of a first spec for one node of a partition."""
    default = "the default partition" if partition.is_default else "a partition of this cluster"
    filled = [
        Filled(key="partition", value=partition.name, why=f"{default}: {format_count(partition.num_nodes, 'node')}")
    ]
    group = typical_nodes(partition)
    if group is not None:
        filled += _fill_node(partition, group)
    account = _fill_account(cluster, partition)
    return (*filled, _fill_time(cluster, partition, account), *([account] if account else []))


def typical_nodes(partition: Partition) -> NodeGroup | None:
    """Return the most common kind of node, among those with GPUs if there are any; its state is one node's."""
    kinds: dict[tuple[object, ...], int] = {}
    groups: dict[tuple[object, ...], NodeGroup] = {}
    for group in partition.node_groups:
        kind = (group.cpus, group.memory_mb, group.gpus)
        kinds[kind] = kinds.get(kind, 0) + group.num_nodes
        groups.setdefault(kind, group)
    if not kinds:
        return None
    return groups[max(kinds, key=lambda kind: (bool(groups[kind].num_gpus), kinds[kind]))]


def consequences(cluster: Cluster, partition: Partition | None) -> Iterator[str]:
    """Yield sentences: what the facts of the cluster mean for runs."""
    if cluster.version_number is not None and cluster.version_number < (20, 11):
        yield f"Slurm {cluster.version} is older than 20.11, the oldest one that clusterddp was written for"
    if cluster.has_accounting is False:
        yield "no accounting: the states of runs come from squeue and from clusterddp's own records"
    if cluster.job_requeue is False:
        yield "JobRequeue=0: a run that is stopped goes on in a follow-up job, not in the same one"
    if cluster.kill_wait_s is not None and _is_preempted(cluster, partition):
        grace = partition.grace_s if partition else 0
        name = f"{partition.name} can be" if partition else "jobs can be"
        wait = f"{grace} s of grace and " if grace else ""
        yield f"{name} preempted: a checkpoint must fit into {wait}KillWait, {cluster.kill_wait_s} s"
    if cluster.proctrack in {"proctrack/linuxproc", "proctrack/pgid"}:
        yield f"{cluster.proctrack}: Slurm leaves grandchildren behind; clusterddp's supervisors end them"
    if cluster.max_array_size is not None:
        yield f"a sweep has at most {max(cluster.max_array_size - 1, 0)} runs (MaxArraySize)"
    limits = [association.max_submit for association in cluster.associations if association.max_submit is not None]
    if limits:
        yield f"you may have {format_count(max(limits), 'job')} queued and running at a time (MaxSubmitJobs)"
    if partition is not None and not cluster.may_use(partition):
        yield f"partition {partition.name} takes none of your jobs now: {why_not(cluster, partition)}"
    for error in cluster.unanswered:
        yield f"not known: {error}"


def time_text(seconds: int) -> str:
    """Write a time limit as Slurm does."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock.zfill(8)}" if days else clock


def _fill_node(partition: Partition, group: NodeGroup) -> Iterator[Filled]:
    if group.num_gpus:
        kinds = " + ".join(f"{count} x {name}" if name else format_count(count, "GPU") for name, count in group.gpus)
        ranks, share = group.num_gpus, 1.0
        yield Filled(key="gpus_per_node", value=str(ranks), why=f"a node of {partition.name} has {kinds}; a rank each")
        cores = max(1, group.cpus // ranks)
        why = f"{group.cpus} CPUs shared by {format_count(ranks, 'rank')}"
    else:
        ranks = min(_CPU_RANKS, max(1, group.cpus))
        cores = max(1, min(_CPU_CORES, group.cpus // ranks))
        share = ranks * cores / max(1, group.cpus)
        why = f"of {group.cpus} CPUs"
        yield Filled(
            key="procs_per_node",
            value=str(ranks),
            why=f"ranks; no node of {partition.name} has GPUs",
            instead_of="gpus_per_node",
        )
        yield Filled(key="device", value="cpu", why=f"no GPUs in {partition.name}")
    yield Filled(key="cpus_per_task", value=str(cores), why=why)
    if group.memory_mb:
        memory_gb = max(1, int(group.memory_mb / 1024 * _MEMORY_SHARE * share))
        yield Filled(key="memory_gb", value=str(memory_gb), why=f"on each node, of {group.memory_mb // 1024}")


def _fill_time(cluster: Cluster, partition: Partition, account: Filled | None) -> Filled:
    limits = [(partition.max_time_s, partition.name)] if partition.max_time_s else []
    for association in _associations(cluster, partition):
        if association.max_wall_s and account and association.account == account.value:
            limits.append((association.max_wall_s, f"account {association.account}"))
    limit, whose = min(limits, default=(None, partition.name))
    why = f"{whose} allows {time_text(limit)}" if limit else f"{whose} has no limit"
    return Filled(key="time", value=time_text(min(_FIRST_TIME_S, limit or _FIRST_TIME_S)), why=why)


def _fill_account(cluster: Cluster, partition: Partition) -> Filled | None:
    accounts = list(dict.fromkeys(association.account for association in _associations(cluster, partition)))
    if not accounts:
        return None
    if len(accounts) == 1:
        return Filled(key="account", value=accounts[0], why="your only account here")
    chosen = cluster.default_account if cluster.default_account in accounts else None
    return Filled(
        key="account",
        value=chosen or accounts[0],
        why=f"yours: {', '.join(accounts)}",
        is_suggestion=chosen is not None and not cluster.needs_account,
    )


def _associations(cluster: Cluster, partition: Partition) -> Iterator[Association]:
    """Yield the user's associations that are valid in a partition."""
    for association in cluster.associations:
        if partition.takes_account(association.account) and association.partition in {None, partition.name}:
            yield association


def _is_preempted(cluster: Cluster, partition: Partition | None) -> bool:
    mode = partition.preempt_mode if partition and partition.preempt_mode else cluster.preempt_mode
    return cluster.preempt_mode not in {None, "OFF"} and mode not in {None, "OFF", "SUSPEND", "GANG,SUSPEND"}


def why_not(cluster: Cluster, partition: Partition) -> str:
    if partition.state != "UP":
        return f"it is {partition.state}"
    if cluster.accounts and not any(map(partition.takes_account, cluster.accounts)):
        allowed = partition.allow_accounts
        return f"it takes the accounts {', '.join(allowed)}" if allowed else "it denies your accounts"
    return f"it is for the groups {', '.join(partition.allow_groups or ())}"


def fill_template(template: str, values: Sequence[Filled]) -> str:
    """Write each value into the line of its key, which may be a comment in the template."""
    for value in values:
        line = re.compile(rf"^( *)(?:# )?{re.escape(value.instead_of or value.key)}:.*$", re.MULTILINE)
        assert line.search(template), value.key
        mark = "# " if value.is_suggestion else ""
        text = f"{mark}{value.key}: {_scalar(value.value)}"

        def written(match: re.Match[str], text: str = text, why: str = value.why) -> str:
            return f"{match[1] + text:<{_COMMENT_COLUMN}}# {why}" if why else match[1] + text

        template = line.sub(written, template, count=1)
    return template


def _scalar(text: str) -> str:
    """Write a value so that YAML reads it as the same text."""
    if text.isdecimal() or (_PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
