"""The spec's `ssh` section: hosts, the Python of each, what is copied there and back, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from clusterddp.spec import fields
from clusterddp.spec.hosts import expand_hosts, refuse_too_many, share_out
from clusterddp.spec.scalars import FETCHABLE
from clusterddp.spec.section import MAX_RANKS, Conflict, Section
from clusterddp.spec.tree import Scalar

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec

_HOST_DIR = "~/.clusterddp"
_NAME_HOSTS = (
    "--hosts gpu01,gpu02 or --hostfile FILE names them, in a spec or a profile ssh: {hosts: [gpu01, gpu02]}, "
    "in the order of the nodes"
)


class SshPython(Section):
    """Which Python runs the ranks on a host."""

    python: fields.Line | None = Field(
        default=None, description="Python there, 3.10 or newer and with torch: a command or a path; default: python3."
    )
    venv: fields.Line | None = Field(default=None, description="Virtual environment there, from / or ~/.")
    conda: fields.Line | None = Field(default=None, description="Conda environment there, by its name or its path.")
    modules: tuple[fields.ModuleName, ...] = Field(
        default=(), description="Environment modules that are loaded there first, as for module load."
    )

    @property
    def python_problem(self) -> str | None:
        """Why these keys do not choose one Python; None: they do."""
        return "has both venv and conda, expected one of them" if self.venv and self.conda else None


class SshHost(SshPython):
    """A machine that is reached by SSH; the section has the defaults of its Python."""

    host: fields.Host = Field(description='Name or alias from ssh_config, or a set of them such as "gpu[02-04]".')
    gpus: fields.GpuCount | None = Field(
        default=None,
        validation_alias=AliasChoices("gpus", "slots"),
        description="GPUs to use on each of them, one rank each; default: gpus_per_node. Alias: slots.",
    )
    host_key: fields.HostKey | None = Field(
        default=None, description="Its host key, which must be this one: SHA256:... or a public key."
    )

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"host": self.host} | {key: value for key, value in to_dict(self).items() if value not in (None, (), [])}


class Ssh(SshPython):
    """Where the ssh launcher starts the nodes."""

    hosts: tuple[SshHost, ...] = Field(
        default=(),
        description="Hosts in the order of the nodes: names, sets, or {host, gpus, ...}; --hosts and --hostfile "
        "name them on the command line. At most 4,096 hosts.",
    )
    dir: fields.RemotePath = Field(
        default=_HOST_DIR, description="Directory of everything that clusterddp writes on a host, from / or ~/."
    )
    send: dict[fields.Line, fields.RemotePath] = Field(
        default={},
        description="Files and directories that are sent before the start, {LOCAL: ON_HOST}, ON_HOST from / or ~/. "
        "Files with the same content on the host are not sent again.",
    )
    fetch: fields.Fetch = Field(
        default=FETCHABLE,
        description="What is copied back into the run's directory when the run has ended: a list of logs, metrics and "
        "checkpoints (with the first host's output/), or all, or none.",
    )

    @field_validator("hosts", mode="before")
    @classmethod
    def _accept_names(cls, hosts: Any) -> Any:
        if not isinstance(hosts, list | tuple):
            return hosts
        refuse_too_many(hosts)
        return [{"host": host} if isinstance(host, Scalar | str) else host for host in hosts]


class Login(SshPython):
    """A host that the user's own ssh reaches, from which jobs are submitted."""

    host: fields.Host = Field(description="Name or alias from ssh_config.")
    dir: fields.RemotePath = Field(
        default=_HOST_DIR, description="Directory there for clusterddp and the code; the nodes have to see it."
    )
    runs_dir: fields.RemotePath = Field(
        default="~/clusterddp-runs", description="Directory of the runs there; the nodes have to see it."
    )


def ssh_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find values that conflict in the ssh section and, for the ssh launcher, with other sections."""
    yield from _twice(job)
    yield from _two_pythons(job)
    yield from _same_target(job)
    if job.launcher != "ssh":
        return
    if not job.ssh.hosts:
        yield Conflict(keys=("ssh.hosts", "launcher"), message="launcher ssh has no hosts", hint=_NAME_HOSTS)
        return
    yield from _size_conflicts(job)
    yield from _path_conflicts(job)


def _twice(job: JobSpec) -> Iterator[Conflict]:
    """Find hosts that are listed twice; report the first of each item of the list."""
    first: dict[str, SshHost] = {}
    again: dict[int, list[SshHost]] = {}
    for index, host in expand_hosts(job.ssh.hosts):
        if first.setdefault(host.host, host) is not host:
            again.setdefault(index, []).append(host)
    for index, (host, *more) in again.items():
        gpus, others = host.gpus, first[host.host].gpus
        sums = (
            f"if {others} + {gpus} are meant, name it once with {others + gpus}" if gpus and others else "name it once"
        )
        yield Conflict(
            keys=(f"ssh.hosts.{index}",),
            message=f"{host.host} is named twice" + (f", and so are {len(more)} more" if more else ""),
            hint=f"{sums}: each host is one node",
        )


def _two_pythons(job: JobSpec) -> Iterator[Conflict]:
    places = [("ssh", job.ssh), *((f"ssh.hosts.{index}", host) for index, host in enumerate(job.ssh.hosts))]
    for place, python in places:
        if python.python_problem:
            yield Conflict(keys=(f"{place}.conda", f"{place}.venv"), message=python.python_problem)


def _same_target(job: JobSpec) -> Iterator[Conflict]:
    for (_, one), (source, other) in combinations(job.ssh.send.items(), 2):
        if one == other or f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/"):
            yield Conflict(
                keys=(f"ssh.send.{source}", "ssh.send"),
                message=f"{other} on the hosts is or holds another's place, {one}",
            )


def _size_conflicts(job: JobSpec) -> Iterator[Conflict]:
    shares = share_out(job)
    if len(shares) < job.resources.nodes:
        hosts = "1 host" if len(shares) == 1 else f"{len(shares)} hosts"
        yield Conflict(
            keys=("ssh.hosts", "resources.nodes"),
            message=f"{hosts} for {job.resources.nodes} nodes",
            hint="each host is one node; ~resources.nodes makes as many nodes as there are hosts",
        )
    ranks = sum(share.ranks for share in shares)
    if ranks > MAX_RANKS:
        yield Conflict(
            keys=("ssh.hosts", "resources.gpus_per_node"),
            message=f"{len(shares)} hosts have {ranks} ranks, expected at most {MAX_RANKS}",
        )
    without = [share.host.host for share in shares if not share.gpus]
    if without and len(without) < len(shares):
        yield Conflict(
            keys=("ssh.hosts", "resources.gpus_per_node"),
            message=f"{without[0]} has no GPUs, and others have; nccl needs them everywhere",
            hint="leave that host out, or --cpu runs all ranks on the CPU",
        )


def _path_conflicts(job: JobSpec) -> Iterator[Conflict]:
    section = "train" if job.train else "entry"
    data_dir = job.train.data_dir if job.train else job.entry.data_dir if job.entry else None
    if data_dir is not None and not data_dir.startswith(("/", "~/")):
        yield Conflict(
            keys=(f"{section}.data_dir", "launcher"),
            message=f'found "{data_dir}", expected a path on the hosts, from / or ~/',
            hint=f"ssh: {{send: {{{data_dir}: ~/data}}}} sends it, {section}.data_dir: ~/data is where it is then",
        )
    output_dir = job.entry.output_dir if job.entry else None
    if output_dir is not None and not output_dir.startswith(("/", "~/")):
        yield Conflict(
            keys=("entry.output_dir", "launcher"),
            message=f'found "{output_dir}", expected a path on the hosts, from / or ~/',
        )
