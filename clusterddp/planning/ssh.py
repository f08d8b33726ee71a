"""The SSH part of a plan: the hosts and their Pythons, the ranks on each, the uploads, the downloads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import UsageError
from clusterddp.planning.placement import Placement, Request
from clusterddp.run.gang import Node
from clusterddp.run.node_marks import read_marks
from clusterddp.system.templates import read_template
from clusterddp.wire import UNWRITTEN, Written

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.spec.hosts import Share
    from clusterddp.spec.model import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SshNode:
    """A host, how it is reached, and which Python runs the agent there; and what one run has on it.

    Hosts of several runs are equal when they are reached in the same way.
    """

    host: str
    """The name that `ssh` takes."""
    node_rank: int = field(default=0, compare=False)
    gpus: int = field(default=0, compare=False)
    """How many GPUs it leases; 0: its ranks compute on the CPU."""
    python: str | None = None
    venv: str | None = None
    conda: str | None = None
    modules: tuple[str, ...] = ()
    host_key: str | None = None
    """The host key that it must present."""
    root: str = field(default="~/.clusterddp", metadata=UNWRITTEN)
    """The directory of all of clusterddp's files there; in a plan it is that of all hosts."""

    @property
    def python_words(self) -> str:
        """Return its Python's path, or the command if only the host knows the path."""
        if self.python:
            return self.python
        home = self.venv or (self.conda if self.conda and self.conda.startswith(("/", "~/")) else None)
        return f"{home}/bin/python" if home else "python" if self.conda else "python3"


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """A file or directory that is uploaded to every host before the start."""

    source: str
    target: str
    """From / or ~/."""
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SshPlan(Written):
    """The part of a run's plan about hosts over SSH."""

    hosts: tuple[SshNode, ...]
    """In the order of the node ranks."""
    root: str
    """The directory of all of clusterddp's files on a host, from / or ~/."""
    send: tuple[Send, ...] = ()
    fetch: tuple[str, ...] = ()
    """Which of logs, metrics and checkpoints are downloaded at the end."""
    home: str | None = None
    """In a host's copy of the plan: the home directory there; all paths are then absolute."""

    def __post_init__(self) -> None:
        hosts = tuple(dataclasses.replace(node, root=self.root) for node in self.hosts)
        object.__setattr__(self, "hosts", hosts)


def constant_command() -> str:
    """Return the command that every host runs, the same for all runs: one line, for any login shell."""
    lines = (line.strip() for line in read_template("ssh_host.sh").splitlines())
    text = " ".join(line for line in lines if line and not line.startswith("#"))
    assert not set("'!") & set(text)  # csh reads them otherwise
    return f"exec /bin/sh -c '{text}'"


def place_ssh(plan: SshPlan, home: str | None) -> SshPlan:
    """Return the plan with its paths on a host whose home directory is `home`."""
    if home is None:
        return plan
    send = tuple(dataclasses.replace(one, target=at_home(one.target, home)) for one in plan.send)
    return dataclasses.replace(plan, home=home, root=at_home(plan.root, home), send=send)


def at_home(path: str, home: str) -> str:
    """Return a path on a host, from / or ~/, as an absolute one."""
    return f"{home}{path[1:]}" if path == "~" or path.startswith("~/") else path


def spec_at_home(spec: dict[str, Any], home: str) -> dict[str, Any]:
    """Return the spec of a run with the place of its data as a path on a host."""
    train = spec.get("train")
    return spec | {"train": train | {"data_dir": at_home(train["data_dir"], home)}} if train else spec


def directory_name(run: str, token: str) -> str:
    """Name a run's directory on hosts; the token keeps runs of several submitting machines apart."""
    return f"{run}.{token[:8]}"


def place(job: JobSpec, request: Request) -> Placement:
    """Distribute the ranks over the hosts of the spec; its local paths are absolute already.

    Raises: PreflightError: see `place_nodes`. UsageError: a file of `ssh.send` does not exist.
    """
    from clusterddp.spec.hosts import share_out

    job, left_out = (job, ()) if request.keeps_hosts else _leave_out_marked(job, request.hold)
    ssh = SshPlan(
        hosts=tuple(_node(node_rank, share, job) for node_rank, share in enumerate(share_out(job))),
        root=job.ssh.dir,
        send=tuple(_send(source, target) for source, target in job.ssh.send.items()),
        fetch=tuple(job.ssh.fetch),
    )
    placement = place_nodes(job)
    return dataclasses.replace(placement, ssh=ssh, notes=(*left_out, *placement.notes))


def _leave_out_marked(job: JobSpec, hold: Plan | None) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the spec with the hosts that earlier runs have marked behind the others, and what becomes of each.

    In a hold its own hosts come first, marked or not. The order stays where all hosts are needed.
    """
    from clusterddp.spec.hosts import expand_hosts, share_out

    marks = {} if hold else {mark.node: mark for mark in read_marks("ssh")}
    hosts = [host for _, host in expand_hosts(job.ssh.hosts)]
    marked = [marks[host.host] for host in hosts if host.host in marks]
    last = set(marks)
    if hold and hold.ssh:
        last = {host.host for host in hosts} - {node.host for node in hold.ssh.hosts}
    if last and len(hosts) > job.resources.nodes:
        hosts.sort(key=lambda host: host.host in last)
        job = job.model_copy(update={"ssh": job.ssh.model_copy(update={"hosts": tuple(hosts)})})
    used = {share.host.host for share in share_out(job)}
    needed = "is needed all the same, as no other host is named in its place"
    return job, tuple(
        f"{mark.node} {needed}: {mark.why} (run {mark.run})" if mark.node in used else mark.spell() for mark in marked
    )


def place_nodes(job: JobSpec) -> Placement:
    """Place the nodes on hosts; the start leases their GPUs and chooses their interfaces.

    Raises: PreflightError: the spec asks for nccl and for no GPUs.
    """
    from clusterddp.spec.hosts import share_out, unused_hosts

    nodes, first = [], 0
    shares = share_out(job)
    for node_rank, share in enumerate(shares):
        is_spare = node_rank >= job.resources.nodes
        ranks = () if is_spare else tuple(range(first, first + share.ranks))
        spare = share.ranks if is_spare else 0
        nodes.append(Node(node_rank=node_rank, host=share.host.host, ranks=ranks, spare=spare))
        first += len(ranks)
    gpus = any(share.gpus for share in shares)
    return Placement.elsewhere(job, tuple(nodes), gpus=gpus, notes=tuple(_ssh_notes(job, unused_hosts(job), gpus=gpus)))


def _node(node_rank: int, share: Share, job: JobSpec) -> SshNode:
    """Plan one host; if it names a Python or an environment, that replaces the one of the spec."""
    host = share.host
    chosen = host if host.python or host.venv or host.conda else job
    return SshNode(
        host=host.host,
        node_rank=node_rank,
        gpus=share.gpus,
        python=chosen.python,
        venv=chosen.venv,
        conda=chosen.conda,
        modules=host.modules or job.ssh.modules,
        host_key=host.host_key,
    )


def _send(source: str, target: str) -> Send:
    path = Path(source)
    if path.is_file():
        return Send(source=source, target=target, files=1, bytes=path.stat().st_size)
    if not path.is_dir():
        raise UsageError(
            f"ssh.send: {source}: no such file or directory",
            hint="the path is relative to the directory of the submit; ssh: {send: {LOCAL: ON_HOST}}",
        )
    files = size = 0
    for directory, _, names in os.walk(path):
        for name in names:
            files += 1
            size += os.lstat(os.path.join(directory, name)).st_size
    return Send(source=source, target=target, files=files, bytes=size)


def _ssh_notes(job: JobSpec, unused: Sequence[str], *, gpus: bool) -> Iterator[str]:
    if unused:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        few = f"{names} {'is' if len(unused) == 1 else 'are'}"
        yield f"resources.nodes is {job.resources.nodes}: {few} not used; ~resources.nodes takes all"
    if job.device == "auto" and not gpus and job.resources.gpus_per_node is None:
        yield "no GPUs are asked for (resources.gpus_per_node, or gpus of a host): the ranks compute on the CPU"
    if job.resources.cpus_per_task is None:
        yield "resources.cpus_per_task is not set: one thread for each rank"
    if job.resources.memory_gb:
        yield "resources.memory_gb is not enforced on hosts over SSH"
    for name in ("container", "after"):
        if getattr(job, name):
            yield f"{name} is for the slurm launcher and has no effect here"
