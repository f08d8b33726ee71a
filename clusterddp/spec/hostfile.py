"""Hosts from the command line: `--hosts`, and hostfiles in the formats of mpirun, DeepSpeed, Horovod and MPICH.

A line is `host`, `host slots=N` or `host:N`; `--hosts a:4,b:4` is Horovod's -H.
"""

from __future__ import annotations

import re
from pathlib import Path

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.hosts import MAX_HOSTS
from clusterddp.spec.overrides import Override
from clusterddp.spec.problems import did_you_mean, problem_at
from clusterddp.spec.textfile import LINE_BREAK, decode, read_bytes, read_stdin
from clusterddp.spec.tree import ListNode, Mapping, Node, Place, Scalar, show

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
