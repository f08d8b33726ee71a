"""A straight-line Slurm batch script as a spec: its #SBATCH lines, its exports, and the one command that trains.

It reads lines of words: `export NAME=value`, and `[NAME=value] [srun OPTIONS] [torchrun OPTIONS] PROGRAM ARG...`.
Whatever else of a shell is met (conditions, loops, pipes, a computed value that the spec needs) is refused with its
line: bash reads bash, when `clusterddp submit` runs the script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath

from clusterddp.errors import UsageError
from clusterddp.importing.files import PASSED_ON, Findings, set_variable
from clusterddp.importing.job import SUBMIT_THERE, set_program, set_sizes, translate_options
from clusterddp.ranks.environment import PLACE_VARIABLES
from clusterddp.spec.batch_script import spec_name
from clusterddp.spec.launch_options import Option, Word, words
from clusterddp.spec.launchers import Launch, name_launcher, read_launch
from clusterddp.spec.sbatch_lines import (
    GPU_OPTIONS,
    SIZES,
    Given,
    GivenOptions,
    Sizes,
    read_sbatch_lines,
    read_sizes,
)
from clusterddp.spec.secret_values import hide_in_text, hide_secret_arguments, is_secret
from clusterddp.spec.slurm_options import KNOWN, OWNED, SRUN_OPTIONS

_IN_BRACKETS = r"(?:[^()'\"`]|'[^'()]*'|\"[^\"()]*\"|\([^()'\"`]*\))*"
_EXPANSION = rf"\$\({_IN_BRACKETS}\)|\$\{{[^{{}}'\"`]*\}}|\$[A-Za-z_][A-Za-z0-9_]*|\$(?![({{])|`[^`\"]*`"
_PART = rf"'[^']*'|\"(?:[^\"\\$`]|\\.|{_EXPANSION})*\"|\\.|{_EXPANSION}|[^\s'\"\\;|&()<>$`#]"
_WORD = re.compile(
    rf"(?P<output>(?:[12]|&)?>>?(?:&[12](?!\S))?)|(?P<word>(?:{_PART})(?:{_PART}|#)*)|(?P<rest>\s+|\s*#.*)"
)
_PLAIN = re.compile(r"""'[^']*'|"(?:[^"\\$`]|\\.)*"|\\.|[^'"\\$`*?\[{~]+""")
"""A part of a word that no shell computes."""
_VARIABLE = re.compile(r"(?<!\\)\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
_CONTROL = words(
    """
    if then elif else fi for while until do done case esac select function { } ! [ [[ coproc time eval exec exit return
    trap alias unalias declare typeset readonly local let read mapfile shopt shift break continue test
    """
)
_ENVIRONMENTS = words("module ml conda mamba micromamba spack pyenv deactivate")
_DIRECTORIES = frozenset({"cd", "pushd", "popd"})
_SOURCED = (
    "a job does not have all variables of your shell, and a setup line may need one of them: in the shell that submits"
)
_ACTIVATE = re.compile(r"(?:source|\.) ([^\s$'\"]+)/bin/activate|conda activate ([^\s$'\"]+)")
_ON_EACH_NODE = words("HOME USER LOGNAME TMPDIR SLURM_JOB_ID")
"""Variables that a job has on its nodes, besides those that are passed on."""
_OTHER = "a command other than the one that trains; what a node needs first goes into a script that entry.command runs"
_NO_EFFECT = words(
    "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr master_port node_rank local_addr standalone "
    "monitor_interval role log_dir redirects tee local_ranks_filter "
    "output error label unbuffered open_mode quiet verbose kill_on_bad_exit wait overlap exact jobid"
)
"""Options of torchrun and srun for the rendezvous, for logs, and for the end of all ranks after a failure."""
_OURS = "clusterddp has its own rendezvous and logs, and ends all ranks after a failure"
_OF_THE_JOB = (KNOWN - OWNED.keys() - SRUN_OPTIONS) | {"time"}
"""Options by which srun requests a job when it runs outside of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A line of the script, with the lines that continue it."""

    line: int
    text: str
    words: tuple[Word, ...]
    outputs: tuple[str, ...]
    """Redirections of the output."""

    @property
    def assigned(self) -> dict[str, Word]:
        """The assignments `NAME=value` at its begin."""
        matches = takewhile(bool, (_ASSIGNMENT.match(word.text) for word in self.words))
        return {
            match[1]: Word(match.string[match.end() :], word.computed)
            for match, word in zip(matches, self.words, strict=False)
            if match
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A command that may be the one that trains, with the variables that are exported before it."""

    statement: Statement
    launch: Launch
    exports: Mapping[str, tuple[Word, int]]
    setup: tuple[Statement, ...] = ()
    """What sets up the environment before it, in order."""


def read_batch_script(text: str, findings: Findings) -> None:
    """Read a batch script into `findings`; nothing of it is executed.

    Raises: UsageError: no command that trains is found, or more than one, or what only a shell can read.
    """
    job = read_sbatch_lines(text, findings.source, findings.lose)
    known = read_sizes(job, lambda *_: None).as_variables(job) if SIZES & job.keys() else {}
    chosen = _choose(_read_statements(split_statements(text, known, findings), findings), findings)
    launch, line = chosen.launch, chosen.statement.line
    for word in launch.program:
        if word.computed:
            findings.refuse(word.text, "a shell computes it", line)
    program = [word.text for word in launch.program]
    if hide_secret_arguments({"args": program})["args"] != program:
        findings.refuse(program[0], "an argument that looks like a secret", line)
    if inner := name_launcher(launch.program if launch.kind == "command" else launch.program[:1]):
        findings.refuse(chosen.statement.text, f"{inner} inside another command", line)
    given = _read_srun(launch.srun or [], job, line, findings)
    sizes = read_sizes(given, findings.refuse)
    _name(given, findings)
    _set_up(chosen.setup, "" if launch.kind == "command" else launch.python, findings)
    for name, (value, exported_at) in chosen.exports.items():
        if not set_variable(name, value, findings, exported_at, cores=sizes.cpus_per_task):
            findings.refuse(f"{name}={value.text}", "a shell computes the value", exported_at)
    translate_options(given, findings)
    ranks_per_node = _count_ranks(launch, sizes, chosen.statement.text, line, findings)
    set_sizes(given, sizes, ranks_per_node, findings, findings.refuse)
    set_program(launch.kind, program, findings)
    for aside, why in launch.asides:
        findings.lose(aside, why, line)
    for output in chosen.statement.outputs:
        findings.lose(output, "clusterddp logs RUN shows the output of ranks", line, fate="ours")


def split_statements(text: str, known: Mapping[str, str], findings: Findings) -> Iterator[Statement]:
    """Split a script into its statements; `known`: variables whose values the #SBATCH lines have."""
    whole, begin = "", 1
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        begin = begin if whole else number
        whole += line
        is_continued = (len(line) - len(line.rstrip("\\"))) % 2 == 1  # of two backslashes the first quotes the second
        if is_continued and whole.count("'") % 2 == 0 and not whole.lstrip().startswith("#"):
            whole = whole[:-1]
            continue
        found, outputs, at = list[Word](), list[str](), 0
        while at < len(whole):
            match = _WORD.match(whole, at)
            if match is None:
                is_quote = whole[at] in "'\"`"
                findings.refuse(whole[at:], "a quote not closed" if is_quote else "an operator of the shell", begin)
            if match["output"]:
                outputs.append(match[0])
            elif match["word"] and outputs and outputs[-1].endswith(">"):
                outputs[-1] += f" {match[0]}"
            elif match["word"]:
                found.append(_read_word(match[0], known))
            at = match.end()
        if outputs and outputs[-1].endswith(">"):
            findings.refuse(whole, "a redirection without a file", begin)
        if found or outputs:
            shown = " ".join(whole.split())
            yield Statement(line=begin, text=shown, words=tuple(found), outputs=tuple(outputs))
        whole = ""


def _read_word(text: str, known: Mapping[str, str]) -> Word:
    filled = text if "'" in text else _VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[0]), text)
    parts = _PLAIN.findall(filled)
    return Word("".join(map(_unquote, parts))) if "".join(parts) == filled else Word(text, computed=True)


def _unquote(part: str) -> str:
    if part[0] == '"':
        return re.sub(r"\\([$`\"\\])", r"\1", part[1:-1])
    return part[1:-1] if part[0] == "'" else part.removeprefix("\\")


def _read_statements(statements: Iterator[Statement], findings: Findings) -> Iterator[Candidate]:
    """Read the statements in their order; yield the commands that may be the one that trains."""
    exports: dict[str, tuple[Word, int]] = {}
    setup: list[Statement] = []
    for statement in statements:
        line, text, assigned = statement.line, statement.text, statement.assigned
        rest = statement.words[len(assigned) :]
        head = rest[0].text if rest else ""
        if head in _CONTROL or not statement.words:
            findings.refuse(text, "control flow of the script", line)
        is_setup = head in _ENVIRONMENTS | {"source", ".", "unset"} and text.split()[1:2] != ["run"]
        if (is_setup or head == "export") and _is_known_there(statement, exports):
            setup.append(statement)
            if head == "unset":
                for word in rest:
                    exports.pop(word.text, None)
        elif head == "export" or not rest:
            _assign(statement, exports, findings)
        elif head in _DIRECTORIES or is_setup:
            findings.lose(text, SUBMIT_THERE if head in _DIRECTORIES else _SOURCED, line, fate="before")
        elif launch := _read_command(rest, statement, findings):
            own = {name: (value, line) for name, value in assigned.items()}
            yield Candidate(statement=statement, launch=launch, exports=exports | own, setup=tuple(setup))


def _assign(statement: Statement, exports: dict[str, tuple[Word, int]], findings: Findings) -> None:
    line, text, assigned = statement.line, statement.text, statement.assigned
    if statement.words[0].text == "export":
        assigned = replace(statement, words=statement.words[1:]).assigned
        exports |= {name: (value, line) for name, value in assigned.items()}
    if len(assigned) + (statement.words[0].text == "export") < len(statement.words):
        findings.refuse(text, "not the plain form export NAME=value", line)
    for name, value in assigned.items():
        if name.startswith("SLURM_"):
            findings.refuse(text, "it changes a variable of Slurm", line)
        if name in exports:
            exports[name] = value, line
        else:
            findings.lose(f"{name}={value.text}", "a variable that ranks do not get: no export", line)


def _is_known_there(statement: Statement, exports: Mapping[str, tuple[Word, int]]) -> bool:
    """Return whether a line means on each node what it means in the script; of an export, that a shell computes it."""
    text = statement.text
    is_export = statement.words[0].text == "export"
    names = {match[1] or match[2] for match in _VARIABLE.finditer(text)}
    known = all(name in _ON_EACH_NODE or PASSED_ON.fullmatch(name) or name in exports for name in names)
    if not known or re.search(r"`|\$[^A-Za-z_{]|\$\{[^}]*[^A-Za-z0-9_}]", text) or hide_in_text(text) != text:
        return False
    targets = [match[1] for word in statement.words[1:] if (match := _ASSIGNMENT.match(word.text))]
    is_computed = any(word.computed for word in statement.words)
    return not is_export or (
        is_computed
        and len(targets) == len(statement.words) - 1
        and not any(name in PLACE_VARIABLES or name.startswith("SLURM_") or is_secret(name, text) for name in targets)
    )


def _set_up(statements: Sequence[Statement], python: str, findings: Findings) -> None:
    """Write the lines that set up the environment; an activated environment is a key where no line comes before it.

    `python`: the path that the command has; unless it is in that environment, it is the key.
    """
    lines = [statement.text for statement in statements]
    named = [line for line in lines if re.match(r"(conda|mamba|micromamba) activate |(source|\.) .*activate", line)]
    found = _ACTIVATE.fullmatch(named[0]) if len(named) == 1 else None
    venv, conda = found.groups() if found else (None, None)
    if venv and python.rpartition("/")[0] in ("", f"{venv}/bin"):
        findings.set("venv", venv)
        lines.remove(named[0])
    elif python:
        findings.set("python", python)
    elif conda and lines[0] == named[0]:
        findings.set("conda", conda)
        lines.remove(named[0])
    if lines:
        findings.set("setup", lines)


def _read_command(rest: Sequence[Word], statement: Statement, findings: Findings) -> Launch | None:
    try:
        launch = read_launch(rest)
    except UsageError as error:
        findings.refuse(statement.text, error.message, statement.line)
    is_computed = rest[0].computed and not (launch and launch.python)
    if is_computed or re.match(r"\w+(\+|\[.*\])?=", rest[0].text):
        findings.refuse(statement.text, "a shell computes the command", statement.line)
    if launch is None:
        if rest[0].text not in {"echo", "printf"} and (
            inner := name_launcher(rest) or name_launcher(rest[1:], or_python=True)
        ):
            findings.refuse(statement.text, f"{inner} in a command that import does not read", statement.line)
        findings.lose(statement.text, _OTHER, statement.line)
    return launch


def _choose(found: Iterator[Candidate], findings: Findings) -> Candidate:
    """Choose the command that trains: the one that starts ranks, or the only one that runs Python."""
    candidates = list(found)
    starters = [each for each in candidates if each.launch.srun is not None or each.launch.torchrun is not None]
    chosen = starters or candidates
    if not chosen:
        raise UsageError(f"{findings.source}: has no plain command that starts Python (srun, torchrun, python)")
    if len(chosen) > 1:
        why = f"line {chosen[0].statement.line} is another command that may train, and a spec has one"
        findings.refuse(chosen[1].statement.text, why, chosen[1].statement.line)
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


def _read_srun(options: Sequence[Option], job: GivenOptions, line: int, findings: Findings) -> GivenOptions:
    """Return the job's options with those of srun; what contradicts the job, or has no key in a spec, is refused."""
    given = GivenOptions(job)
    for option in options:
        name, text, value = option.name, f"srun {option.text}", option.value.text if option.value else ""
        if name in _NO_EFFECT or (name == "export" and value == "ALL"):
            findings.lose(text, _OURS, line, fate="ours")
            continue
        if option.value and option.value.computed:
            findings.refuse(text, "a shell computes the value", line)
        if name in SIZES or (not job and name in _OF_THE_JOB):
            rival = next((other for other in GPU_OPTIONS if name in GPU_OPTIONS and other in job), name)
            if rival in job and (rival != name or job.value(name) != value):
                findings.refuse(text, f"the job has {job[rival].option.text}", line)
            given[name] = Given(option=option, line=line, of="srun")
        elif name in SRUN_OPTIONS:
            findings.set(f"slurm.{name}", value or True)
        else:
            findings.refuse(text, "a spec has no key for this option of srun", line)
    return given


def _read_torchrun(options: Sequence[Option], sizes: Sizes, line: int, findings: Findings) -> int:
    """Return the ranks that torchrun starts on each node; what a spec has no key for is refused."""
    nodes, ranks = Word("1"), Word("1")
    for option in options:
        text, value = f"torchrun {option.text}", option.value or Word("")
        if option.name in _NO_EFFECT:
            findings.lose(text, _OURS, line, fate="ours")
        elif value.computed:
            findings.refuse(text, "a shell computes the value", line)
        elif option.name == "nnodes":
            nodes = value
        elif option.name == "nproc_per_node":
            ranks = value
        elif option.name == "max_restarts" and re.fullmatch("[0-9]{1,6}", value.text):
            findings.set("restarts", int(value.text))
        elif option.name not in {"module", "no_python"}:
            findings.refuse(text, "a spec has no key for this option of torchrun", line)
    if nodes.number != sizes.nodes:
        findings.refuse(f"torchrun --nnodes {nodes.text}", f"the job has {sizes.nodes} nodes", line)
    each = sizes.gpus_per_node if ranks.text in {"gpu", "auto"} else ranks.number
    if each is None:
        findings.refuse(f"torchrun --nproc-per-node {ranks.text}", "the script does not have the number", line)
    return each


def _count_ranks(launch: Launch, sizes: Sizes, text: str, line: int, findings: Findings) -> int:
    """Return how many ranks a command starts on each node."""
    if launch.srun is None and sizes.nodes > 1:
        findings.refuse(text, f"without srun it runs on the first of {sizes.nodes} nodes only", line)
    if launch.torchrun is not None:
        if launch.srun is not None and sizes.tasks_per_node > 1:
            findings.refuse(text, f"srun starts it {sizes.tasks_per_node} times on each node", line)
        return _read_torchrun(launch.torchrun, sizes, line, findings)
    if launch.srun is not None:
        return sizes.tasks_per_node
    if (sizes.gpus_per_node or 1) > 1:
        why = "one process, without srun or torchrun: a program that starts its own ranks needs entry.owns_ranks: true"
        findings.lose(text, why, line)
    return 1
