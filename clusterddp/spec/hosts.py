"""The spec's `ssh` section: hosts, the Python of each, what is copied there and back; hosts from the command line.

Hostfiles have the formats of mpirun, DeepSpeed, Horovod and MPICH: a line is `host`, `host slots=N` or `host:N`.
`--hosts a:4,b:4` is Horovod's -H.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import SerializerFunctionWrapHandler, field_validator, model_serializer

from clusterddp.errors import ClusterddpError, Problem, UsageError
from clusterddp.network.hostlist import count, expand
from clusterddp.spec import fields
from clusterddp.spec.fields import FETCHABLE, MAX_HOSTS, MAX_RANKS, Conflict, Section, key, problem
from clusterddp.spec.layers import Override
from clusterddp.spec.tree import (
    LINE_BREAK,
    ListNode,
    Mapping,
    Node,
    Place,
    Scalar,
    decode,
    did_you_mean,
    problem_at,
    read_bytes,
    read_stdin,
    show,
    spec_error,
)
from clusterddp.system.units import format_count

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec


_HOST_DIR = "~/.clusterddp"
_NAME_HOSTS = (
    "--hosts gpu01,gpu02 or --hostfile FILE names them, in a spec or a profile ssh: {hosts: [gpu01, gpu02]}, "
    "in the order of the nodes"
)


class PythonThere(Section):
    """Which Python is used on one host."""

    python: fields.Line | None = key(
        None, "Python there, 3.10 or newer and with torch: a command or a path; default: python3."
    )
    venv: fields.Line | None = key(None, "Virtual environment there, from / or ~/.")
    conda: fields.Line | None = key(None, "Conda environment there, by its name or its path.")
    modules: tuple[fields.ModuleName, ...] = key(
        (), "Environment modules that are loaded there first, as for module load."
    )

    @property
    def python_problem(self) -> str | None:
        """Why these keys do not choose one Python; None: they do."""
        return "has both venv and conda, expected one of them" if self.venv and self.conda else None


class SshHost(PythonThere):
    """A machine that is reached by SSH; its own Python replaces the one that the spec names for all."""

    aliases: ClassVar = {"slots": "gpus"}

    host: fields.Host = key(..., 'Name or alias from ssh_config, or a set of them such as "gpu[02-04]".')
    gpus: fields.GpuCount | None = key(
        None, "GPUs to use on each of them, one rank each; default: gpus_per_node. Alias: slots."
    )
    host_key: fields.HostKey | None = key(None, "Its host key, which must be this one: SHA256:... or a public key.")

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"host": self.host} | {key: value for key, value in to_dict(self).items() if value not in (None, (), [])}


class Ssh(Section):
    """Where the ssh launcher starts the nodes."""

    hosts: tuple[SshHost, ...] = key(
        (),
        "Hosts in the order of the nodes: names, sets, or {host, gpus, ...}; --hosts and --hostfile name them on the "
        "command line. At most 4,096 hosts.",
    )
    dir: fields.RemotePath = key(_HOST_DIR, "Directory of everything that clusterddp writes on a host, from / or ~/.")
    modules: tuple[fields.ModuleName, ...] = key(
        (), "Environment modules that are loaded on every host before Python is looked for there, as for module load."
    )
    send: dict[fields.Line, fields.RemotePath] = key(
        {},
        "Files and directories that are sent before the start, {LOCAL: ON_HOST}, ON_HOST from / or ~/. Files with the "
        "same content on the host are not sent again.",
    )
    fetch: fields.Fetch = key(
        FETCHABLE,
        "What is copied back into the run's directory when the run has ended: a list of logs, metrics and checkpoints "
        "(with the first host's output/), or all, or none.",
    )

    @field_validator("hosts", mode="before")
    @classmethod
    def _accept_names(cls, hosts: Any) -> Any:
        if not isinstance(hosts, list | tuple):
            return hosts
        refuse_too_many(hosts)
        return [{"host": host} if isinstance(host, Scalar | str) else host for host in hosts]


class Login(PythonThere):
    """A host that the user's own ssh reaches, from which jobs are submitted."""

    host: fields.Host = key(..., "Name or alias from ssh_config.")
    dir: fields.RemotePath = key(_HOST_DIR, "Directory there for clusterddp and the code; the nodes have to see it.")
    runs_dir: fields.RemotePath = key("~/clusterddp-runs", "Directory of the runs there; the nodes have to see it.")


def ssh_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find values that conflict in the ssh section and, for the ssh launcher, with other sections."""
    # Hosts that are named twice: the first of each item of the list is reported.
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
            (f"ssh.hosts.{index}",),
            f"{host.host} is named twice" + (f", and so are {len(more)} more" if more else ""),
            f"{sums}: each host is one node",
        )
    for index, host in enumerate(job.ssh.hosts):
        if host.python_problem:
            yield Conflict((f"ssh.hosts.{index}.conda", f"ssh.hosts.{index}.venv"), host.python_problem)
    for (_, one), (source, other) in combinations(job.ssh.send.items(), 2):
        if one == other or f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/"):
            yield Conflict(
                (f"ssh.send.{source}", "ssh.send"), f"{other} on the hosts is or holds another's place, {one}"
            )
    if job.launcher == "ssh" and not job.ssh.hosts:
        yield Conflict(("ssh.hosts", "launcher"), "launcher ssh has no hosts", _NAME_HOSTS)
    elif job.launcher == "ssh":
        yield from _launcher_conflicts(job)


def _launcher_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find values of other sections with which the ssh launcher cannot start."""
    shares = share_out(job)
    if len(shares) < job.resources.nodes + job.num_spares:
        hosts = "1 host" if len(shares) == 1 else f"{len(shares)} hosts"
        spares = f" and {format_count(job.num_spares, 'spare')}" if job.num_spares else ""
        yield Conflict(
            ("ssh.hosts", "resources.nodes"),
            f"{hosts} for {format_count(job.resources.nodes, 'node')}{spares}",
            "each host is one node; ~resources.nodes makes as many nodes as there are hosts",
        )
    ranks = sum(share.ranks for share in shares)
    if ranks > MAX_RANKS:
        yield Conflict(
            ("ssh.hosts", "resources.gpus_per_node"),
            f"{len(shares)} hosts have {ranks} ranks, expected at most {MAX_RANKS}",
        )
    without = [share.host.host for share in shares if not share.gpus]
    if without and len(without) < len(shares):
        yield Conflict(
            ("ssh.hosts", "resources.gpus_per_node"),
            f"{without[0]} has no GPUs, and others have; nccl needs them everywhere",
            "leave that host out, or --cpu runs all ranks on the CPU",
        )
    section = "train" if job.train else "entry"
    data_dir = job.train.data_dir if job.train else job.entry.data_dir if job.entry else None
    if data_dir is not None and not data_dir.startswith(("/", "~/")):
        yield Conflict(
            (f"{section}.data_dir", "launcher"),
            f'found "{data_dir}", expected a path on the hosts, from / or ~/',
            f"ssh: {{send: {{{data_dir}: ~/data}}}} sends it, {section}.data_dir: ~/data is where it is then",
        )
    output_dir = job.entry.output_dir if job.entry else None
    if output_dir is not None and not output_dir.startswith(("/", "~/")):
        yield Conflict(
            ("entry.output_dir", "launcher"), f'found "{output_dir}", expected a path on the hosts, from / or ~/'
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The ranks and GPUs of a run on one host."""

    host: SshHost
    """The host's entry in the spec, with the name of this host only."""
    ranks: int
    gpus: int
    """0: the ranks compute on the CPU."""


def refuse_too_many(hosts: Iterable[object]) -> None:
    """Refuse a list of more than 4,096 hosts before any set in it is expanded."""
    total = 0
    for number, item in enumerate(hosts, 1):
        written = item.get("host") if isinstance(item, dict) else getattr(item, "host", item)
        text = written.text if isinstance(written, Scalar) else written if isinstance(written, str) else ""
        try:
            total += max(1, count(text))
        except ClusterddpError:  # its own reader reports it
            total += 1
        if total > MAX_HOSTS:
            raise problem(f"more than {MAX_HOSTS:,} hosts, counted up to entry {number}, {show(text)}")


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
    """Return a spec for launcher ssh with one node for each host but the spares, unless it sets the number of nodes."""
    if job.launcher != "ssh" or not job.ssh.hosts or "nodes" in job.resources.model_fields_set:
        return job
    nodes = max(1, sum(count(host.host) for host in job.ssh.hosts) - job.num_spares)
    return job.model_copy(update={"resources": job.resources.model_copy(update={"nodes": nodes})})


def share_out(job: JobSpec) -> tuple[Share, ...]:
    """Place the ranks and GPUs on the first hosts, as many as the run has nodes and spares.

    A host with a number of GPUs (slots in a hostfile) gets one rank for each, on the CPU as well.
    """
    hosts = [host for _, host in expand_hosts(job.ssh.hosts)][: job.resources.nodes + job.num_spares]
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
    """Return the hosts beyond the number of nodes and spares."""
    return tuple(host.host for _, host in expand_hosts(job.ssh.hosts))[job.resources.nodes + job.num_spares :]


_PATH = ("ssh", "hosts")
_SLOTS = ("slots", "gpus")
_WORD = re.compile(r"[^\s=]+\s*=\s*[^\s=]*|\S+")
_PART = re.compile(r"(?:[^,\s\[]|\[[^\]]*\]?)+")
"""What stands between commas and blanks outside of brackets."""
_NUMBERED = re.compile(r"(?P<host>[^:]+):(?P<slots>0{0,9}[1-9][0-9]{0,5})")
_HINTS = {
    "port": "a port belongs in ssh_config",
    "user": "a user belongs in ssh_config, or before the host: user@host",
}


def read_hostfile(path: Path) -> Override:
    """Read a hostfile: one host or set of hosts a line, then `slots=N` or `gpus=N`; `#` begins a comment.

    `-` is the standard input. What is wrong in its lines is in `problems` of what is returned.
    Raises: SpecError: it cannot be read, or names no host, or too many.
    """
    stdin = str(path) == "-"
    source = "<stdin>" if stdin else str(path)
    origin = f"--hostfile {path}"
    text = decode(read_stdin() if stdin else read_bytes(path, expected="a hostfile"), source)
    problems: list[Problem] = []
    hosts: list[Node] = []
    place = Place(source=source, origin=origin)
    for number, line in enumerate(LINE_BREAK.split(text), 1):
        node = _read_line(line, number, place, problems)
        hosts += [node] if node else []
        if len(hosts) > MAX_HOSTS:
            raise spec_error(hosts[-1].place, f"more than {MAX_HOSTS:,} hosts")
    if not hosts:
        raise spec_error(place, "names no host", "a line each: gpu01 slots=8")
    node = ListNode(items=tuple(hosts), place=place)
    return Override(path=_PATH, node=node, place=place, problems=tuple(problems))


def parse_hosts(text: str) -> Override:
    """Parse `--hosts`: hosts or sets of hosts, separated by commas, each with an optional `:N` for its slots."""
    place = Place(source=f"--hosts {show(text)}", origin="--hosts")
    items = tuple(_host_with_number(part.strip(), place) for part in _PART.findall(text) or [text])
    return Override(path=_PATH, node=ListNode(items=items, place=place), place=place)


def _read_line(line: str, number: int, whole: Place, problems: list[Problem]) -> Node | None:
    """Read one line; None when it names no host."""

    def place(column: int) -> Place:
        return Place(source=whole.source, origin=whole.origin, line=number, column=column + 1, source_line=line)

    found = _WORD.finditer(line.partition("#")[0])
    words = [("".join(match.group().split()), match.start()) for match in found]
    if not words:
        return None
    name, start = words[0]
    host = _host_with_number(name, place(start))
    if not words[1:]:
        return host
    entries: dict[str, Node] = dict(host.entries) if isinstance(host, Mapping) else {"host": host}
    keys = {key: place(start) for key in entries}
    for word, column in words[1:]:
        key, equals, value = word.partition("=")
        if key not in _SLOTS or not re.fullmatch("[0-9]{1,6}", value) or not int(value):
            problems.append(_wrong_word(place(column), word, key if equals else ""))
        elif "gpus" in entries:
            problems.append(problem_at(place(column), f"{show(word)}: the slots of {show(name)} are set already"))
        else:
            entries["gpus"] = Scalar(text=str(int(value)), quoted=False, place=place(column))
            keys["gpus"] = place(column)
    return Mapping(entries=entries, keys=keys, place=place(start))


def _host_with_number(text: str, place: Place) -> Scalar | Mapping:
    """Read `host`, or `host:N` for a host with N slots; an IPv6 address has more colons than one."""
    numbered = _NUMBERED.fullmatch(text)
    if not numbered:
        return Scalar(text=text, quoted=True, place=place)
    entries: dict[str, Node] = {
        "host": Scalar(text=numbered["host"], quoted=True, place=place),
        "gpus": Scalar(text=str(int(numbered["slots"])), quoted=False, place=place),
    }
    return Mapping(entries=entries, keys=dict.fromkeys(entries, place), place=place)


def _wrong_word(place: Place, word: str, key: str) -> Problem:
    message = f"found {show(word)}, expected slots=N with N from 1"
    known = key.lower().replace("-", "_")
    hint = _HINTS.get(known)
    if key and key not in _SLOTS and hint is None:
        message += did_you_mean(known, _SLOTS)
    if not key and re.fullmatch("[0-9]+", word):
        hint = f"write slots={word}"
    elif not key:
        hint = "a line names one host, or a set such as gpu[01-04]"
    return problem_at(place, message, hint)
