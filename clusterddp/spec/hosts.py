"""The hosts of a spec, one name or a node set each, the placement of ranks on them, and hosts from the command line.

Hostfiles have the formats of mpirun, DeepSpeed, Horovod and MPICH: a line is `host`, `host slots=N` or `host:N`.
`--hosts a:4,b:4` is Horovod's -H.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError, Problem, SpecError, UsageError
from clusterddp.network.hostlist import count, expand
from clusterddp.spec.layers import Override
from clusterddp.spec.scalars import problem, read_text, refuse
from clusterddp.spec.textfile import LINE_BREAK, decode, read_bytes, read_stdin
from clusterddp.spec.tree import ListNode, Mapping, Node, Place, Scalar, did_you_mean, problem_at, show

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


_PATH = ("ssh", "hosts")
_SLOTS = ("slots", "gpus")
_WORD = re.compile(r"[^\s=]+\s*=\s*[^\s=]*|\S+")
_PART = re.compile(r"(?:[^,\s\[]|\[[^\]]*\]?)+")
_NUMBERED = re.compile(r"(?P<host>[^:]+):(?P<slots>0*[1-9][0-9]{0,5})")
_HINTS = {
    "port": "a port belongs in ssh_config",
    "user": "a user belongs in ssh_config, or before the host: user@host",
}


def read_hostfile(path: Path) -> Override:
    """Read a hostfile: one host or set of hosts a line, then `slots=N` or `gpus=N`; `#` begins a comment.

    `-` is the standard input.
    Raises: SpecError: with every line that is wrong.
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
            problems.append(problem_at(hosts[-1].place, f"more than {MAX_HOSTS:,} hosts"))
            break
    if not hosts and not problems:
        problems.append(problem_at(place, "names no host", "a line each: gpu01 slots=8"))
    if problems:
        raise SpecError(tuple(problems))
    return Override(path=_PATH, node=ListNode(items=tuple(hosts), place=place), place=place)


def parse_hosts(text: str) -> Override:
    """Parse `--hosts`: hosts or sets of hosts, separated by commas, each with an optional `:N` for its slots."""
    place = Place(source=f"--hosts {show(text)}", origin="--hosts")
    items = tuple(_host_with_number(part.strip(), place) for part in _split(text))
    return Override(path=_PATH, node=ListNode(items=items, place=place), place=place)


def _split(text: str) -> list[str]:
    """Split at commas and blanks outside of brackets."""
    return _PART.findall(text) or [text]


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
