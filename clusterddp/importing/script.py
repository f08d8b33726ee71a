"""A Slurm batch script as a spec: its #SBATCH lines, its plain lines, and the one command that trains.

It reads words, quotes, `export NAME=value`, and commands. Whatever else of a shell is met (expansion, conditions,
loops, pipes) is refused with its line: what it does is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import PurePath
from typing import NoReturn

from clusterddp.errors import UsageError
from clusterddp.importing.files import Findings, set_variable
from clusterddp.importing.job import set_sizes
from clusterddp.importing.launch import (
    Command,
    count_ranks,
    names_program,
    read_command,
    read_launch_line,
    starts_more,
    translate_levels,
)
from clusterddp.spec.batch_script import spec_name
from clusterddp.spec.launch_options import Word, words
from clusterddp.spec.sbatch_lines import SIZES, Given, GivenOptions, read_sbatch_lines, read_sizes
from clusterddp.spec.secret_values import hide_secret_arguments
from clusterddp.spec.slurm_options import MEMORY_OPTIONS, OWNED

_IN_BRACKETS = r"(?:[^()'\"`]|'[^'()]*'|\"[^\"()]*\"|\([^()'\"`]*\))*"
_EXPANSION = rf"\$\({_IN_BRACKETS}\)|\$\{{[^{{}}'\"`]*\}}|\$[A-Za-z_][A-Za-z0-9_]*|\$(?![({{])"
_TOKEN = re.compile(
    rf"""(?P<blank>(?:[ \t]|\\\n)+)
    | (?P<end>[\n;])
    | (?P<output>(?:[12]|&)?>>?(?:&[12])?)
    | (?P<single>'[^']*')
    | (?P<double>"(?:[^"\\$`]|\\.|{_EXPANSION}|`[^`"]*`)*")
    | (?P<escaped>\\.)
    | (?P<expansion>{_EXPANSION}|`[^`]*`)
    | (?P<plain>[^\s'"\\;|&()<>$`#]+|\#)""",
    re.VERBOSE | re.DOTALL,
)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_CONTROL = words(
    """
    if then elif else fi for while until do done case esac select function { } ! [ [[ coproc time eval exec exit return
    trap alias unalias declare typeset readonly local let read mapfile shopt shift break continue test
    """
)
_ENVIRONMENTS = words("module ml conda mamba micromamba spack pyenv deactivate")
_DIRECTORIES = frozenset({"cd", "pushd", "popd"})
_ENVIRONMENT = "in the shell that submits; ranks run the Python that clusterddp is installed in: install it there"
_SOURCED = "in the shell that submits; only known kinds of variables reach ranks from there: env sets others"
_SUBMIT_THERE = "submit from there: ranks run in the directory that you submit from"
_OTHER = "a command other than the one that trains; what a node needs first goes into a script that entry.command runs"
_HINT = (
    "keep it in a script that entry.command runs, such as entry: {command: [bash, train.sh]}, and import a file with "
    "the #SBATCH lines and a plain command"
)
_MAX_PLACES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One command with its words."""

    line: int
    """Counts from 1."""
    text: str
    """As it is written, on one line."""
    words: tuple[Word, ...]
    assignments: tuple[str, ...]
    """Of the first words, and of those after `export`: the names in `NAME=value`; empty where it is none."""
    outputs: tuple[str, ...]
    """Redirections of the output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A command that may be the one that trains, with the variables that are exported before it."""

    statement: Statement
    command: Command
    exports: Mapping[str, tuple[Word, int]]


Refuse = Callable[[int, str, str], NoReturn]


def read_batch_script(text: str, findings: Findings, *, line: int | None = None) -> None:
    """Read a batch script into `findings`; nothing of it is executed.

    `line`: that of the command that trains, when there are several.
    Raises: UsageError: no command that trains is found, or more than one, or what only a shell can read.
    """

    def refuse(at: int, text: str, why: str) -> NoReturn:
        raise UsageError(f"{findings.source}:{at}: {text[:80]}: {why}, which import does not read", hint=_HINT)

    job = read_sbatch_lines(text, findings.source, findings.lose)
    of_job = read_sizes(job, Findings(source=findings.source).lose)
    known = of_job.as_variables(job) if SIZES & job.keys() else {}
    reader = _Reader(findings, refuse)
    for statement in split_statements(text.replace("\r\n", "\n"), known, refuse):
        reader.read(statement)
    chosen = _choose(reader.candidates, findings, line)
    command, at = chosen.command, chosen.statement.line
    _check_words(chosen, refuse)
    launch = read_launch_line(command, job, findings, at, refuse=refuse)
    sizes = read_sizes(launch.given, findings.lose)
    _name(launch.given, findings)
    for name, (value, exported_at) in chosen.exports.items():
        if not set_variable(name, value, findings, exported_at, cores=sizes.cpus_per_task):
            refuse(exported_at, f"{name}={value.text}", "a shell computes the value")
    _translate_options(launch.given, findings)
    ranks = count_ranks(command, sizes)
    for doubt in ranks.doubts:
        findings.lose(chosen.statement.text, doubt, at)
    set_sizes(launch.given, sizes, ranks.per_node, findings)
    translate_levels(command, findings, at, settled=launch.settled)
    _translate_entry(chosen, findings)


def _check_words(chosen: Candidate, refuse: Refuse) -> None:
    """Refuse a command whose words are not those that ranks would get."""
    command, at = chosen.command, chosen.statement.line
    for word in command.target, *command.args:
        if word.computed:
            refuse(at, word.text, "a shell computes it")
    if hide_secret_arguments({"args": (args := [word.text for word in command.args])})["args"] != args:
        refuse(at, command.target.text, "an argument that looks like a secret")
    if command.kind == "command" and (inner := starts_more((command.target, *command.args))):
        refuse(at, chosen.statement.text, f"{inner} inside another command")


def split_statements(text: str, known: Mapping[str, str], refuse: Refuse) -> Iterator[Statement]:
    """Split a script into its statements; `known`: variables whose values the #SBATCH lines have."""
    tokens: list[_Token] = []
    for token in (*_tokens(text, refuse), _Token("end", "\n", 0)):
        if token.kind != "end":
            tokens.append(token)
            continue
        words, raws, outputs, takes_target = list[Word](), list[str](), list[str](), False
        for kind, group in groupby(tokens, key=lambda each: each.kind if each.kind in {"blank", "output"} else "word"):
            parts = list(group)
            raw = "".join(part.text for part in parts)
            if kind == "output":
                outputs.append(raw)
                takes_target = not raw[-1].isdigit()
            elif kind == "word" and takes_target:
                outputs[-1] += f" {raw}"
                takes_target = False
            elif kind == "word":
                values = [_value(part, known) for part in parts]
                plain = "".join(value for value in values if value is not None)
                words.append(Word(raw, computed=True) if None in values else Word(plain))
                raws.append(raw)
        if words or outputs:
            names = (_ASSIGNMENT.match(raw) for raw in raws)
            yield Statement(
                line=next(part.line for part in tokens if part.kind != "blank"),
                text=" ".join("".join(part.text for part in tokens).replace("\\\n", " ").split()),
                words=tuple(words),
                assignments=tuple(name[1] + name[2] if name else "" for name in names),
                outputs=tuple(outputs),
            )
        tokens = []


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """The name of its group in `_TOKEN`."""
    text: str
    line: int


def _tokens(text: str, refuse: Refuse) -> Iterator[_Token]:
    at, line, in_word = 0, 1, False
    while at < len(text):
        if text[at] == "#" and not in_word:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            rest = text[at : at + 80].split("\n", 1)[0]
            refuse(line, rest, "a quote never closed" if rest[0] in "'\"`" else "an operator of the shell")
        kind = match.lastgroup or ""
        yield _Token(kind, match[0], line)
        at, line, in_word = match.end(), line + match[0].count("\n"), kind not in {"blank", "end", "output"}


def _value(token: _Token, known: Mapping[str, str]) -> str | None:
    """Return the text that a part of a word stands for; None where a shell computes it."""
    text = token.text
    if token.kind == "single":
        return text[1:-1]
    if token.kind == "escaped":
        return text[1:].strip("\n")
    if token.kind == "plain":
        return None if re.search(r"[*?\[{~]", text) else text
    if token.kind == "double":
        text = text[1:-1]
    text = _VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[0]), text)
    if "$" in text.replace("\\$", "") or "`" in text.replace("\\`", ""):
        return None
    return re.sub(r"\\([$`\"\\\n])", lambda match: match[1].strip("\n"), text)


class _Reader:
    """Reads the statements in their order."""

    def __init__(self, findings: Findings, refuse: Refuse) -> None:
        self._findings = findings
        self._refuse = refuse
        self._exports: dict[str, tuple[Word, int]] = {}
        self.candidates: list[Candidate] = []
        """The commands that may be the one that trains."""

    def read(self, statement: Statement) -> None:
        """Read one statement."""
        line, head = statement.line, statement.words[0].text if statement.words else ""
        if head in _CONTROL or not statement.words:
            self._refuse(line, statement.text, "control flow of the script")
        if head == "export" or all(statement.assignments):
            self._assign(statement, exports=head == "export")
        elif head == "unset":
            for word in statement.words[1:]:
                self._exports.pop(word.text, None)
            self._findings.lose(statement.text, "in the shell that submits", line, fate="before")
        elif (head in _ENVIRONMENTS or head in {"source", "."}) and [word.text for word in statement.words[1:2]] != [
            "run"
        ]:
            is_environment = head in _ENVIRONMENTS or "activate" in statement.text
            self._findings.lose(statement.text, _ENVIRONMENT if is_environment else _SOURCED, line, fate="before")
        elif head in _DIRECTORIES:
            self._findings.lose(statement.text, _SUBMIT_THERE, line, fate="before")
        else:
            self._consider(statement)

    def _assign(self, statement: Statement, *, exports: bool) -> None:
        line = statement.line
        for word, name in list(zip(statement.words, statement.assignments, strict=True))[exports:]:
            if not name or name.endswith("+") or name.startswith("SLURM_"):
                self._refuse(line, statement.text, "not the plain form NAME=value")
            if exports or name in self._exports:
                self._exports[name] = _assigned(word), line
            else:
                self._findings.lose(word.text, "a variable that ranks do not get: no export", line)

    def _consider(self, statement: Statement) -> None:
        names = list(takewhile(bool, statement.assignments))
        own = {name: (_assigned(word), statement.line) for word, name in zip(statement.words, names, strict=False)}
        rest = statement.words[len(names) :]
        if rest[0].computed or any(name.endswith("+") for name in names):
            self._refuse(statement.line, statement.text, "a shell computes the command")
        try:
            command = read_command(rest)
        except UsageError as error:
            self._refuse(statement.line, statement.text, error.message)
        if command is not None:
            self.candidates.append(Candidate(statement=statement, command=command, exports=self._exports | own))
        elif rest[0].text not in {"echo", "printf"} and (inner := next(filter(names_program, rest[1:]), None)):
            self._refuse(statement.line, statement.text, f"{inner.text} inside another command")
        else:
            self._findings.lose(statement.text, _OTHER, statement.line)


def _assigned(word: Word) -> Word:
    return Word(word.text.partition("=")[2], word.computed)


def _choose(candidates: Sequence[Candidate], findings: Findings, line: int | None) -> Candidate:
    """Choose the command that trains: the one that starts ranks, or the only one that runs Python."""
    if line is not None:
        chosen = [each for each in candidates if each.statement.line == line]
    else:
        chosen = [each for each in candidates if each.command.levels] or list(candidates)
    if not chosen:
        where = f"line {line} has no" if line is not None else "has no"
        hint = "the first lines of a script for another scheduler, or that call another script: import that one"
        raise UsageError(
            f"{findings.source}: {where} plain command that starts Python (srun, torchrun, mpirun, accelerate, python)",
            hint=hint if line is None else None,
        )
    if len(chosen) > 1:
        places = "; ".join(f"line {each.statement.line}: {each.statement.text[:60]}" for each in chosen[:_MAX_PLACES])
        places += "; ..." if len(chosen) > _MAX_PLACES else ""
        raise UsageError(
            f"{findings.source}: {len(chosen)} commands start ranks, and a spec is one of them: {places}",
            hint=f"--line {chosen[-1].statement.line} takes the last one" if line is None else "one command a line",
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


_OF_THE_JOB = {
    "requeue": "restarts: N starts the run again, and sets --requeue itself",
    "array": "the spec runs one task of it; a sweep runs many: sweep: {values: {env.SLURM_ARRAY_TASK_ID: [0, 1]}}",
    "signal": "stop.lead sets the time before the end; the program gets no signal from Slurm: it asks "
    "clusterddp.should_stop(), or entry.stop_signal names one; restarts: N requeues",
}
"""Options that have another form in a spec, which depends on the program."""


def _translate_options(given: GivenOptions, findings: Findings) -> None:
    """Translate the options of sbatch other than sizes; those that clusterddp sets are listed."""
    for name, entry in given.items():
        value = entry.option.value.text if entry.option.value else None
        memory = re.fullmatch(r"0*([1-9][0-9]{0,6})([kmgt]?)b?", value or "", re.IGNORECASE)
        if name in SIZES or name == "job_name":
            continue
        if name == "time" and value:
            findings.set("resources.time", value)
        elif name == "mem" and memory and memory[2] in {"g", "G"}:
            findings.set("resources.memory_gb", int(memory[1]))
        elif name in MEMORY_OPTIONS and memory:
            findings.set(f"slurm.{name}", memory[1] + memory[2].upper())
        elif name in {"container_image", "container_mounts"} and value:
            section = findings.values.setdefault("container", {})
            section |= {"image": value} if name == "container_image" else {"mounts": value.split(",")}
        elif not _list_option(name, value, entry, findings):
            findings.set(f"slurm.{name}", True if value is None else value)


def _list_option(name: str, value: str | None, entry: Given, findings: Findings) -> bool:
    """List an option that a spec has in another form, or not at all; False: it stays an option of sbatch."""
    if name == "export" and value:
        why = "ranks get the variables of env and secrets, and those of known kinds of the shell that submits"
        findings.lose(entry.text, why, entry.line, fate="ours" if value == "ALL" else "lost")
    elif name in _OF_THE_JOB:
        findings.lose(entry.text, _OF_THE_JOB[name], entry.line)
    elif name == "dependency" and value == "singleton":
        findings.lose(entry.text, "each run has a name of its own; after: [RUN] waits for a run", entry.line)
    elif name == "chdir":
        findings.lose(entry.text, _SUBMIT_THERE, entry.line, fate="before")
    elif name in OWNED:
        findings.lose(entry.text, OWNED[name], entry.line, fate="ours")
    elif len(name) == 1:
        findings.lose(entry.text, "no option of sbatch that is known here", entry.line)
    else:
        return False
    return True


def _translate_entry(chosen: Candidate, findings: Findings) -> None:
    command, line = chosen.command, chosen.statement.line
    # In an argument of an entry, `{{name}}` stands for `{name}`.
    words = [re.sub(r"\{([a-z][a-z0-9_]*)\}", r"{{\1}}", word.text) for word in (command.target, *command.args)]
    if command.kind == "command":
        findings.set("entry.command", words)
    else:
        findings.set(f"entry.{command.kind}", words[0])
        if words[1:]:
            findings.set("entry.args", words[1:])
    for aside, why in command.asides:
        findings.lose(aside, why, line)
    for output in chosen.statement.outputs:
        findings.lose(output, "clusterddp logs RUN shows the output of ranks", line, fate="ours")
