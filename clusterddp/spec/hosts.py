"""The hosts of a spec: one name or a node set each; and the placement of ranks on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.network.hostlist import count, expand
from clusterddp.spec.scalars import problem, read_text, refuse
from clusterddp.spec.tree import Scalar, show

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec
    from clusterddp.spec.ssh_section import SshHost

HOST_SET = r"^[A-Za-z0-9_:\[][A-Za-z0-9_.:@,\[\]-]*$"
"""The pattern of a host in the JSON Schema; `read_host` is stricter."""

MAX_HOSTS = 4_096
"""The most hosts, with sets expanded, that a spec, a hostfile or a command line may name."""

_WORDS = 'a host or a set of hosts, such as gpu01 or "gpu[02-04]"'
_SET = re.compile(HOST_SET.removeprefix("^").removesuffix("$"))
_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f.]*")
_WITH_NUMBER = re.compile(r"(?P<host>[^:]+):(?P<number>[0-9]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The ranks and GPUs of a run on one host."""

    host: SshHost
    """The host's entry in the spec, with the name of this host only."""
    ranks: int
    gpus: int
    """0: the ranks compute on the CPU."""


def read_host(value: object) -> str:
    """Read a host or a set of hosts; refuse a name that `ssh` would read as an option or an address."""
    text = read_text(value)
    if not _SET.fullmatch(text):
        refuse(value, _WORDS, _slots_hint(text))
    try:
        names = expand(text, limit=MAX_HOSTS)
    except ClusterddpError as error:
        raise problem(error.message) from error
    for name in names:
        _check_name(name, value)
    return text


def refuse_too_many(hosts: Iterable[object]) -> None:
    """Refuse a list of more than 4,096 hosts before any set in it is expanded."""
    total = 0
    for number, item in enumerate(hosts, 1):
        total += max(1, _count_one(item))
        if total > MAX_HOSTS:
            raise problem(f"more than {MAX_HOSTS:,} hosts, counted up to entry {number}, {show(_written(item))}")


def expand_all(texts: Iterable[str]) -> list[str]:
    """Expand the sets of a command line; return each host once, in the order written.

    Raises: ClusterddpError: a text is no host list. UsageError: they name more than 4,096 hosts.
    """
    names: list[str] = []
    for text in texts:
        names += expand(text, limit=MAX_HOSTS)
        if len(names) > MAX_HOSTS:
            raise UsageError(f"{show(text)}: with it there are more than {MAX_HOSTS:,} hosts")
    return list(dict.fromkeys(names))


def expand_hosts(hosts: Iterable[SshHost]) -> Iterator[tuple[int, SshHost]]:
    """Expand every set: yield each host's entry, in the order written, with its index in the list."""
    for index, host in enumerate(hosts):
        for name in expand(host.host):
            yield index, host if name == host.host else host.model_copy(update={"host": name})


def with_node_for_each_host(job: JobSpec) -> JobSpec:
    """Return a spec for launcher ssh with one node for each host, unless it sets the number of nodes."""
    if job.launcher != "ssh" or not job.ssh.hosts or "nodes" in job.resources.model_fields_set:
        return job
    nodes = sum(count(host.host) for host in job.ssh.hosts)
    return job.model_copy(update={"resources": job.resources.model_copy(update={"nodes": nodes})})


def share_out(job: JobSpec) -> tuple[Share, ...]:
    """Place the ranks and GPUs on the first hosts, as many as the run has nodes.

    A host with a number of GPUs (slots in a hostfile) gets one rank for each, on the CPU as well.
    """
    hosts = [host for _, host in expand_hosts(job.ssh.hosts)][: job.resources.nodes]
    resources = job.resources
    on_cpu = job.cpu_reason is not None
    wanted = job.device == "cuda" or resources.gpus_per_node is not None or any(host.gpus for host in hosts)
    usual = 0 if on_cpu or not wanted else resources.gpus_per_node or resources.ranks_per_node
    return tuple(
        Share(
            host=host,
            ranks=host.gpus or resources.ranks_per_node,
            gpus=usual if host.gpus is None or on_cpu else host.gpus,
        )
        for host in hosts
    )


def unused_hosts(job: JobSpec) -> tuple[str, ...]:
    """Return the hosts beyond the number of nodes."""
    return tuple(host.host for _, host in expand_hosts(job.ssh.hosts))[job.resources.nodes :]


def _count_one(item: object) -> int:
    """Count the hosts of an entry that is not typed yet; an invalid entry counts as 0."""
    try:
        return count(_written(item))
    except ClusterddpError:
        return 0


def _written(item: object) -> str:
    """Return the host of an entry as written; empty where there is none."""
    written = item.get("host") if isinstance(item, dict) else getattr(item, "host", item)
    text = written.text if isinstance(written, Scalar) else written
    return text if isinstance(text, str) else ""


def _check_name(name: str, value: object) -> None:
    if _NAME.fullmatch(name) or _ADDRESS.fullmatch(name):
        return
    numbered = _WITH_NUMBER.fullmatch(name)
    if numbered:
        hint = f"{{host: {numbered['host']}, gpus: N}} sets the number of GPUs; a port belongs in ssh_config"
        raise problem(f'found "{name}", expected a host without a number behind it', hint)
    refuse(value, f"{_WORDS}; {name!r} is no host")


def _slots_hint(text: str) -> str | None:
    match = re.fullmatch(r"(\S+)\s+(?:slots|gpus)\s*=\s*([0-9]+)", text.strip())
    return f"write {{host: {match[1]}, gpus: {match[2]}}}" if match else None
