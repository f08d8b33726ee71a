"""A Slurm batch script as a spec: its #SBATCH lines, its variables, and the one command that trains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from clusterddp.errors import UsageError
from clusterddp.importing.command import Command, read_command
from clusterddp.importing.files import Findings, set_hosts, set_variable
from clusterddp.importing.job import SIZES, GivenOptions, read_sbatch_lines, read_sizes, set_sizes
from clusterddp.importing.launch import count_ranks, read_launch_line, translate_levels
from clusterddp.importing.shell import (
    Statement,
    Text,
    Variables,
    Word,
    as_argument,
    as_written,
    split_assignment,
    split_statements,
)
from clusterddp.spec.slurm_options import OWNED

_BEFORE = frozenset(
    {"module", "ml", "conda", "mamba", "micromamba", "source", ".", "spack", "load", "pyenv", "deactivate"}
)
_DIRECTORIES = frozenset({"cd", "pushd", "popd"})
_EXPORTS = frozenset({"export", "declare", "typeset", "readonly"})
_BLOCKS = frozenset({"if", "for", "while", "until", "case", "select", "{"})
_KEYWORDS = _BLOCKS | {"then", "elif", "else", "do", "function", "!"}
_ENDS = frozenset({"fi", "done", "esac", "}"})
_MARKS = _ENDS | {"then", "else", "do", "{"}
"""Keywords within a block that other keywords begin."""
_MAX_PLACES = 10
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A command that may be the one that trains, with the variables that are set before it."""

    statement: Statement
    command: Command
    exports: Mapping[str, tuple[Text, int]]
    inside: str
    """The keyword of the block that it is in, if any."""


def read_batch_script(text: str, findings: Findings, *, line: int | None = None, place: Path = Path()) -> None:
    """Read a batch script into `findings`; nothing of it is executed.

    `line`: that of the command that trains, when there are several. `place`: the directory of hostfiles.
    Raises: UsageError: no command that trains is found, or more than one.
    """
    job = read_sbatch_lines(text, findings)
    of_job = read_sizes(job, Findings(source=findings.source))
    variables = Variables(given=of_job.as_variables if SIZES & job.keys() else {})
    candidates = _Reader(findings, variables).read(split_statements(text))
    chosen = _choose(candidates, findings, line)
    launch = read_launch_line(chosen.command, job, findings, chosen.statement.line, place)
    given = launch.given
    sizes = read_sizes(given, findings)
    _name(given, findings)
    for name, (value, at) in chosen.exports.items():
        known = name == "OMP_NUM_THREADS" and value.text == str(sizes.cpus_per_task)
        set_variable(name, Text(value.text, ("SLURM_CPUS_PER_TASK",)) if known else value, findings, at)
    for name, value in chosen.command.env.items():
        set_variable(name, value, findings, chosen.statement.line)
    _translate_options(given, findings)
    ranks = count_ranks(chosen.command, sizes, launch)
    for doubt in ranks.doubts:
        findings.lose(chosen.statement.text, doubt, chosen.statement.line)
    set_sizes(given, sizes, ranks.per_node, findings)
    if launch.hosts and not job:
        set_hosts(launch.hosts_to_write(ranks.per_node), findings)
    translate_levels(chosen.command, findings, chosen.statement.line, settled=launch.settled)
    _translate_entry(chosen, findings)
    for raw, default in variables.defaults.items():
        findings.lose(raw, f'the default is taken: "{default}"')


class _Reader:
    """Reads the statements in their order."""

    def __init__(self, findings: Findings, variables: Variables) -> None:
        self._findings = findings
        self._variables = variables
        self._exports: dict[str, tuple[Text, int]] = {}
        self._assigned: dict[str, Statement] = {}
        self._candidates: list[Candidate] = []
        self._depth = 0

    def read(self, statements: Sequence[Statement]) -> list[Candidate]:
        """Read every statement; return the commands that may be the one that trains."""
        for statement in statements:
            self._read(statement)
        for name, statement in self._assigned.items():
            if name not in self._variables.used and name not in self._exports:
                self._findings.lose(statement.text, "a variable that nothing in the spec uses", statement.line)
        return self._candidates

    def _read(self, statement: Statement) -> None:
        inside, words = self._without_keywords(statement)
        if statement.broken:
            self._findings.lose(statement.text, "a quote or a bracket is never closed", statement.line)
            return
        head = words[0].plain if words else None
        if not words:
            if statement.redirections or any(word.plain not in _MARKS for word in statement.words):
                self._findings.lose(statement.text, "control flow of the script", statement.line)
        elif all(split_assignment(word) for word in words):
            self._assign(words, statement)
        elif head in _EXPORTS:
            self._export(words[1:], statement)
        elif head == "unset":
            for word in words[1:]:
                self._exports.pop(word.raw, None)
                self._variables.values.pop(word.raw, None)
        elif head in _BEFORE or (head or "").endswith("/activate") or (head == "eval" and "hook" in statement.text):
            why = "in the shell that submits: ranks get its environment"
            self._findings.lose(statement.text, why, statement.line, fate="before")
        elif head in _DIRECTORIES:
            why = "submit from there: ranks run in the directory that you submit from"
            self._findings.lose(statement.text, why, statement.line, fate="before")
        else:
            self._consider(words, statement, inside)

    def _without_keywords(self, statement: Statement) -> tuple[str, list[Word]]:
        words, inside = list(statement.words), ""
        while words and (words[0].plain in _KEYWORDS or words[0].plain in _ENDS):
            keyword = words.pop(0).plain or ""
            self._depth += keyword in _BLOCKS
            self._depth = max(0, self._depth - (keyword in _ENDS))
            inside = keyword
            if keyword in {"for", "case", "function", "select"}:
                words = []
        return inside or ("a block" if self._depth else ""), words

    def _assign(self, words: Sequence[Word], statement: Statement) -> None:
        for word in words:
            assigned = self._variables.assign(word)
            if assigned is None:
                continue
            name, value = assigned
            if name in self._exports:
                self._exports[name] = (value, statement.line)
            else:
                self._assigned[name] = statement

    def _export(self, words: Sequence[Word], statement: Statement) -> None:
        for word in words:
            name = word.plain or ""
            assigned = self._variables.assign(word)
            if assigned is not None:
                self._exports[assigned[0]] = (assigned[1], statement.line)
            elif name in self._variables.values:
                self._exports[name] = (self._variables.values[name][0], statement.line)
            elif not name.startswith("-"):
                why = "a variable of the shell that submits"
                self._findings.lose(f"export {word.raw}", why, statement.line, fate="before")

    def _consider(self, words: Sequence[Word], statement: Statement, inside: str) -> None:
        rest, own = list(words), dict[str, Text]()
        while rest and (split := split_assignment(rest[0])) is not None:
            own[split[0]] = self._variables.join(split[1])
            rest.pop(0)
        command = read_command([text for word in rest for text in self._variables.resolve(word)], self._variables)
        command.env = own | command.env
        if not command.levels and not command.python:
            self._findings.lose(statement.text, "a command other than the one that trains", statement.line)
            return
        self._variables.spend(len(self._exports))
        exports = dict(self._exports)
        self._candidates.append(Candidate(statement=statement, command=command, exports=exports, inside=inside))


def _choose(candidates: Sequence[Candidate], findings: Findings, line: int | None) -> Candidate:
    """Choose the command that trains: the one that starts ranks, or the only one that runs Python."""
    usable = [each for each in candidates if each.command.target.text]
    if line is not None:
        chosen = [each for each in usable if each.statement.line == line]
    else:
        chosen = [each for each in usable if each.command.levels] or usable
    if not chosen:
        where = f"line {line} has no" if line is not None else "has no"
        raise UsageError(
            f"{findings.source}: {where} command that starts Python (srun, torchrun, mpirun, accelerate, python ...)",
            hint="a script that calls another one: import that one" if line is None else None,
        )
    if len(chosen) > 1 and line is None:
        places = "; ".join(f"line {each.statement.line}: {each.statement.text[:60]}" for each in chosen[:_MAX_PLACES])
        places += "; ..." if len(chosen) > _MAX_PLACES else ""
        raise UsageError(
            f"{findings.source}: {len(chosen)} commands start ranks, and a spec is one of them: {places}",
            hint=f"--line {chosen[-1].statement.line} takes the last one",
        )
    for each in candidates:
        if each is not chosen[0]:
            findings.lose(each.statement.text, "another command: a spec runs one", each.statement.line)
    return chosen[0]


def _name(given: GivenOptions, findings: Findings) -> None:
    entry = given.get("job_name")
    written = entry.option.value.text if entry and entry.option.value else ""
    name = spec_name(written or PurePath(findings.source).stem)
    findings.set("name", name)
    if entry and name != written:
        findings.lose(entry.option.text, f"a name has letters, digits, dots, - and _: {name}", entry.line)


def spec_name(text: str) -> str:
    """Make a valid name of a spec from any text."""
    return _NAME.sub("_", text).lstrip("._-")[:64].rstrip("._-") or "imported"


def _translate_options(given: GivenOptions, findings: Findings) -> None:
    """Translate the options of sbatch other than sizes; those that clusterddp sets are listed."""
    for name, entry in given.items():
        option = entry.option
        value = option.value.text if option.value else None
        if name in SIZES or name == "job_name":
            continue
        if name == "time" and value:
            findings.set("resources.time", value)
        elif name == "mem" and value and (match := re.fullmatch(r"([0-9]{1,7})G[Bb]?", value)) and int(match[1]):
            findings.set("resources.memory_gb", int(match[1]))
        elif name == "export" and value:
            _translate_export(value, findings, entry.line)
        elif name.startswith("container_") and value and name in {"container_image", "container_mounts"}:
            section = findings.values.setdefault("container", {})
            section |= {"image": value} if name == "container_image" else {"mounts": value.split(",")}
        elif name in OWNED:
            findings.lose(entry.text, OWNED[name], entry.line, fate="ours")
        elif len(name) == 1:
            findings.lose(entry.text, "no option of sbatch that is known here", entry.line)
        else:
            findings.set(f"slurm.{name}", True if value is None else value)


def _translate_export(value: str, findings: Findings, line: int) -> None:
    for part in value.split(","):
        name, equals, content = part.partition("=")
        if equals:
            set_variable(name, Text(content), findings, line)
        else:
            why = "ranks get the variables of env and secrets, and those of known kinds of the shell that submits"
            findings.lose(f"#SBATCH --export={part}", why, line, fate="ours" if part == "ALL" else "lost")


def _translate_entry(chosen: Candidate, findings: Findings) -> None:
    command, line = chosen.command, chosen.statement.line
    args = [as_argument(arg.text) for arg in command.args]
    if command.kind == "command":
        findings.set("entry.command", [as_argument(command.target.text), *args])
    else:
        findings.set(f"entry.{command.kind}", as_argument(command.target.text))
        if args:
            findings.set("entry.args", args)
    for text in (command.target, *command.args):
        for unknown in dict.fromkeys(text.unknown):
            why = f"only the shell of the job knows the value of {unknown}; it is in the spec as written: replace it"
            findings.lose(as_written(text.text), why, line)
    for aside, why in command.asides:
        findings.lose(as_written(aside), why, line)
    for redirection in chosen.statement.redirections:
        findings.lose(redirection, "clusterddp logs RUN shows the output of ranks", line, fate="ours")
    if chosen.inside:
        why = f"is in a block of {chosen.inside!r} in the script: the spec runs it once, without conditions"
        findings.lose(chosen.statement.text, why, line)
    if chosen.statement.ended_by not in {"\n", ";", ")"}:
        why = "what follows it in the script is not imported"
        findings.lose(f"{chosen.statement.text} {chosen.statement.ended_by}", why, line)
