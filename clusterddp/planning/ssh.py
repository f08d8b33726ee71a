"""The plan of a run over SSH: its hosts with the Python of each, what is uploaded, what is downloaded."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clusterddp.errors import PreflightError, UsageError
from clusterddp.planning.placement import Placed, Placement, Request
from clusterddp.run.gang import Node
from clusterddp.wire import build

if TYPE_CHECKING:
    from clusterddp.spec.hosts import Share
    from clusterddp.spec.model import JobSpec
    from clusterddp.spec.ssh_section import SshPython
    from clusterddp.ssh.session import HostAccess


@dataclass(frozen=True, kw_only=True, slots=True)
class SshNode:
    """One host of the run."""

    host: str
    """As `ssh` knows it."""
    node_rank: int
    gpus: int
    """How many it leases; 0: its ranks compute on the CPU."""
    python: str | None = None
    venv: str | None = None
    conda: str | None = None
    modules: tuple[str, ...] = ()
    host_key: str | None = None
    """The key that it must show."""

    @property
    def python_words(self) -> str:
        """Name its Python as far as can be told from here."""
        if self.python:
            return self.python
        home = self.venv or (self.conda if self.conda and self.conda.startswith(("/", "~/")) else None)
        return f"{home}/bin/python" if home else "python" if self.conda else "python3"


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """A file or directory that is sent to every host before the start."""

    source: str
    target: str
    """From / or ~/."""
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SshPlan:
    """What of a run's plan is about hosts over SSH."""

    hosts: tuple[SshNode, ...]
    """In the order of the node ranks."""
    root: str
    """Directory of everything that is ours on a host, from / or ~/."""
    send: tuple[Send, ...] = ()
    fetch: tuple[str, ...] = ()
    """What is downloaded at the end, of logs, metrics and checkpoints."""
    when_busy: Literal["refuse", "wait"] = "refuse"
    attached: bool = False
    """True: the run ends with the process that started it."""
    home: str | None = None
    """In the plan as it lies on a host: the home directory there; the paths are absolute then."""

    def accesses(self) -> list[HostAccess]:
        """Say how each host is reached, in the order of the nodes."""
        from clusterddp.ssh.session import HostAccess

        names = ("host", "python", "venv", "conda", "modules", "host_key")
        return [HostAccess(root=self.root, **{name: getattr(node, name) for name in names}) for node in self.hosts]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SshPlan:
        """Rebuild a plan from JSON.

        Raises: ValueError: it is none; see `build`.
        """
        return build(cls, data, "ssh")


def place(job: JobSpec, request: Request) -> Placed:
    """Share the ranks out over the hosts of the spec.

    Raises: PreflightError: see `plan_ssh_placement`. UsageError: see `plan_ssh`.
    """
    from clusterddp.spec.hosts import share_out, unused_hosts

    shares = share_out(job)
    placement = plan_ssh_placement(job, shares, unused_hosts(job))
    return Placed(placement=placement, ssh=dataclasses.replace(plan_ssh(job, shares), attached=request.attached))


def plan_ssh_placement(job: JobSpec, shares: Sequence[Share], unused: Sequence[str] = ()) -> Placement:
    """Lay out the nodes over hosts, whose GPUs are leased and whose interfaces are chosen at the start.

    `unused`: the hosts that the spec names besides.

    Raises: PreflightError: nccl is asked for, and no GPUs.
    """
    firsts = itertools.accumulate((share.ranks for share in shares), initial=0)
    nodes = tuple(
        Node(node_rank=node_rank, host=share.host.host, ranks=tuple(range(first, first + share.ranks)))
        for node_rank, (share, first) in enumerate(zip(shares, firsts, strict=False))
    )
    gpus = any(share.gpus for share in shares)
    if job.network.backend == "nccl" and not gpus:
        raise PreflightError(
            f"{job.name}: network.backend nccl needs GPUs, and none are asked for",
            hint="resources.gpus_per_node or a host's gpus asks for them; network.backend=auto takes gloo on the CPU",
        )
    return Placement(
        nodes=nodes,
        threads_per_rank=job.resources.cpus_per_task or 1,
        backend="nccl" if gpus and job.network.backend != "gloo" else "gloo",
        on_cpu=not gpus,
        interface=None if job.network.interface == "auto" else job.network.interface,
        notes=tuple(_ssh_notes(job, unused, gpus=gpus)),
    )


def plan_ssh(job: JobSpec, shares: Sequence[Share]) -> SshPlan:
    """Plan what is about the hosts; local paths of the spec are absolute by now.

    Raises: UsageError: what is to be sent is not there.
    """
    return SshPlan(
        hosts=tuple(_node(node_rank, share, job.ssh) for node_rank, share in enumerate(shares)),
        root=job.ssh.dir,
        send=tuple(_send(source, target) for source, target in job.ssh.send.items()),
        fetch=tuple(job.ssh.fetch),
        when_busy=job.ssh.when_busy,
    )


def place_ssh(plan: SshPlan, home: str | None) -> SshPlan:
    """Return the plan as it is on a host whose home directory is `home`."""
    if home is None:
        return plan
    send = tuple(dataclasses.replace(one, target=at_home(one.target, home)) for one in plan.send)
    return dataclasses.replace(plan, home=home, root=at_home(plan.root, home), send=send)


def at_home(path: str, home: str) -> str:
    """Return a path on a host, from / or ~/, as an absolute one."""
    return f"{home}{path[1:]}" if path == "~" or path.startswith("~/") else path


def directory_name(run: str, token: str) -> str:
    """Name a run's directory on hosts, which several submitting machines may share."""
    return f"{run}.{token[:8]}"


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
            yield f"{name} is for the slurm launcher: it does nothing here"


def _node(node_rank: int, share: Share, of_all: SshPython) -> SshNode:
    """A host that names an environment of its own, or a Python, does not get the one of all hosts in addition."""
    host = share.host
    own = host.python or host.venv or host.conda
    chosen = host if own else of_all
    return SshNode(
        host=host.host,
        node_rank=node_rank,
        gpus=share.gpus,
        python=chosen.python,
        venv=chosen.venv,
        conda=chosen.conda,
        modules=host.modules or of_all.modules,
        host_key=host.host_key,
    )


def _send(source: str, target: str) -> Send:
    path = Path(source)
    if path.is_file():
        return Send(source=source, target=target, files=1, bytes=path.stat().st_size)
    if not path.is_dir():
        raise UsageError(
            f"ssh.send: {source}: no such file or directory",
            hint="the path is taken from where you submit; ssh: {send: {LOCAL: ON_HOST}}",
        )
    files = size = 0
    for directory, _, names in os.walk(path):
        for name in names:
            files += 1
            size += os.lstat(os.path.join(directory, name)).st_size
    return Send(source=source, target=target, files=files, bytes=size)
