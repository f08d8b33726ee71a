"""The spec's `entry` section: the user's program, how it is started, and the rules between its keys."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from clusterddp.ranks.environment import VARIABLES, find_placeholders
from clusterddp.spec import fields
from clusterddp.spec.fields import (
    Conflict,
    Matching,
    Section,
    Word,
    key,
    plain,
    read_filled_text,
    read_loose_text,
    read_text,
    refuse,
)
from clusterddp.spec.launchers import Starter, commands_in, commands_started, find_starter
from clusterddp.spec.tree import did_you_mean

PROGRAMS = ("script", "module", "function", "command", "batch_script")
"""The keys that name the program; an entry has exactly one of them."""
_ONE_OF_THEM = "expected one of script, module, function and command"

_FUNCTION = Matching(
    r"^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*|[^:\x00]+\.py):[A-Za-z_][A-Za-z0-9_.]*(\(.*\))?$",
    "package.module:function or path/file.py:function",
)


@dataclass(frozen=True, slots=True)
class Value:
    """An argument of a function: a value of any kind, typed as written; not a command's word."""

    written: object


def read_argument(value: object) -> Any:
    """Read an argument: text for a program; any JSON value for a function."""
    return _data(value.written) if isinstance(value, Value) else read_loose_text(value)


def read_data(value: object) -> dict[str, Any]:
    """Read the named arguments of a function."""
    if not isinstance(value, dict):
        refuse(value, "a mapping")
    for name in value:
        if not str(name).isidentifier():
            refuse(name, "names of arguments")
    return {name: _data(item) for name, item in value.items()}


def read_command(value: object) -> str | tuple[str, ...]:
    """Read a command: its words, or text that is split as a shell would."""
    if isinstance(value, list | tuple):
        words = tuple(read_loose_text(item) for item in value)
        return words if words and words[0] else refuse(value, "a program and its arguments")
    text = read_filled_text(value)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        refuse(value, f"words that a shell can split ({str(error)[:1].lower()}{str(error)[1:]})")
    return text if words else refuse(value, "a program and its arguments")


def read_function(value: object) -> object:
    """Refuse a function that is written with dots only, and suggest the form with a colon."""
    text = read_text(value)
    module, _, name = text.rpartition(".")
    if ":" not in text and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*", module):
        refuse(value, _FUNCTION.expected, f"write {module}:{name}")
    return value


def _data(value: object) -> Any:
    """Return a value as YAML 1.2 types it; refuse one that JSON cannot express."""
    found = plain(value)
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError):
        refuse(value, "text, a number, true or false, nothing, or lists and mappings of them")
    return found


Function = Annotated[str, _FUNCTION, BeforeValidator(read_function)]
Command = Annotated[
    str | tuple[str, ...],
    PlainValidator(read_command),
    PlainSerializer(lambda command: command if isinstance(command, str) else list(command)),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": ["string", "number", "boolean"]}},
            ]
        }
    ),
]
Argument = Annotated[Any, BeforeValidator(read_argument), WithJsonSchema({})]
Data = Annotated[dict[str, Any], BeforeValidator(read_data), WithJsonSchema({"type": "object"})]


class EntrySpec(Section):
    """Your program that every rank runs: a script, a module, a function or a command."""

    script: fields.Text | None = key(None, "Path of a Python script, from where you submit.")
    module: fields.Module | None = key(None, "Dotted name of a module, as for python -m.")
    function: Function | None = key(
        None,
        "A Python function that is called with args and kwargs: package.module:function, or path/file.py:function. "
        "With arguments in parentheses it is one that was submitted from Python, and is pickled in the run.",
    )
    command: Command | None = key(
        None,
        "A command of any kind: a list of words, or text that is split into words as a shell would; no shell reads it "
        "unless shell is true.",
    )
    batch_script: fields.Text | None = key(
        None,
        "Path of a batch script for sbatch, from where you submit; bash runs it as it is, and the ranks are those that "
        "srun, torchrun or mpirun start in it. clusterddp submit train.slurm writes this key.",
    )
    shell: fields.Switch = key(
        False,
        "Hand command to /bin/sh as it is: it has variables ($RANK, $MASTER_ADDR, $CLUSTERDDP_INIT_METHOD, ...) in "
        "place of placeholders, and args as $1, $2, ...",
    )
    args: tuple[Argument, ...] = key(
        (),
        "Arguments of the program, each passed on unchanged but for placeholders such as {rank} or {init_method}; for "
        "a function: values of any kind.",
    )
    kwargs: Data = key({}, "Arguments of a function by their names.")
    owns_ranks: fields.Switch = key(
        False,
        "The program starts its ranks itself (torch.multiprocessing.spawn, torchrun): it is started once on each "
        "node, and its variables have the node's rank and the number of ranks to start there.",
    )
    world_size: Annotated[Literal["auto", "processes", "machines"], Word] = key(
        "auto",
        "What {world_size} and {rank} count; with owns_ranks the variables WORLD_SIZE and RANK, too. auto: processes; "
        "machines with owns_ranks.",
    )
    fork: fields.Switch = key(
        True,
        "A node's ranks are forked from one process that has imported torch and numpy for all of them, where a "
        "supervisor starts several ranks of a Python program; false: each rank is a Python of its own, which imports "
        "nothing before the program.",
    )
    stop_signal: Annotated[Literal["none", "TERM", "INT", "HUP", "USR1", "USR2"], Word] = key(
        "none",
        "Signal that asks a command to stop, for one that does not look at $CLUSTERDDP_STOP_FILE; ending by it is no "
        "failure then.",
    )
    data_dir: fields.Text | None = key(
        None, "Directory of the data on every node, for {data_dir}; over SSH a path on the hosts."
    )
    output_dir: fields.Text | None = key(
        None, "Directory for results, for {output_dir}; it is made. Default: output/ in the run's directory."
    )

    @property
    def counts(self) -> Literal["processes", "machines"]:
        """What {rank} and {world_size} count."""
        if self.world_size == "auto":
            return "machines" if self.owns_ranks else "processes"
        return self.world_size

    @property
    def command_words(self) -> tuple[str, ...]:
        """The words of a command that is started without a shell."""
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command or ()

    @model_validator(mode="before")
    @classmethod
    def _type_what_a_function_takes(cls, data: Any) -> Any:
        """A program's arguments are words; a function's are values, typed as YAML has them."""
        args = data.get("args") if isinstance(data, dict) else None
        if isinstance(args, list | tuple) and data.get("function") is not None:
            return data | {"args": [Value(item) for item in args]}
        return data


def entry_conflicts(entry: EntrySpec, *, world_size: int, in_step: bool) -> Iterator[Conflict]:
    """Yield values that conflict. `in_step`: the ranks run in a step of Slurm, on its nodes themselves."""
    named = [kind for kind in PROGRAMS if getattr(entry, kind) is not None]
    if not named:
        yield Conflict(("entry",), f"names nothing to run, {_ONE_OF_THEM}")
    if len(named) > 1:
        found = f"has {', '.join(named[:-1])} and {named[-1]}"
        yield Conflict(tuple(f"entry.{kind}" for kind in reversed(named)), f"{found}, {_ONE_OF_THEM}")
    if entry.kwargs and entry.function is None:
        yield Conflict(
            ("entry.kwargs",),
            "is for a function, and there is none",
            f"entry.args.{next(iter(entry.kwargs))}=... sets the option --{next(iter(entry.kwargs))} of a program",
        )
    if entry.stop_signal != "none" and entry.command is None:
        yield Conflict(
            ("entry.stop_signal",),
            "is for a command",
            "Python code asks clusterddp.should_stop(), or looks for the file $CLUSTERDDP_STOP_FILE",
        )
    if entry.shell and not isinstance(entry.command, str):
        what = "a list of words" if entry.command else "no command"
        yield Conflict(("entry.shell", "entry.command"), f"a shell reads text, found {what}", 'command: "a && b"')
    if (
        isinstance(entry.command, str)
        and not entry.shell
        and (mark := _FOR_A_SHELL.search(_QUOTED.sub("", entry.command)))
    ):
        yield Conflict(
            ("entry.command", "entry.shell"),
            f"no shell reads this command: {mark[1] or mark[2]} would be an argument of {entry.command_words[0]}",
            "setup: takes lines such as module load cuda; shell: true hands the text to /bin/sh",
        )
    for name in find_placeholders(entry.command) if entry.shell and isinstance(entry.command, str) else ():
        if name in VARIABLES:
            yield Conflict(
                ("entry.command",),
                f"{{{name}}} stays as it is in text for a shell",
                f"a shell has variables: ${VARIABLES[name][0]}",
            )
    yield from _starter_conflicts(entry, world_size, in_step=in_step)
    yield from _function_conflicts(entry) if in_step else ()
    for dotted, text in _texts(entry):
        yield from _placeholder_conflicts(entry, dotted, text)


_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.", re.DOTALL)
_FOR_A_SHELL = re.compile(r"(?:^|\s)(&&|\|\|?|&|;|[0-9]?>>?(?:&[0-9])?|<)(?=\s|$)|\S(;)(?=\s|$)")
"""Words that only a shell understands."""
_LOADERS = {"module": "", "ml": "", "conda": "activate", "mamba": "activate", "micromamba": "activate", "spack": "load"}
"""Names that the files of a login shell define as functions -> the word after it with which it needs the function."""


def _starter_conflicts(entry: EntrySpec, world_size: int, *, in_step: bool) -> Iterator[Conflict]:
    """Find a program that starts ranks in each rank."""
    key = next((f"entry.{kind}" for kind in PROGRAMS if getattr(entry, kind) is not None), "entry")
    for words in started_by(entry):
        starters = filter(None, map(find_starter, commands_started(words)))
        found = [starter_conflict(starter, entry, world_size, in_step=in_step, key=key) for starter in starters]
        if conflict := next(filter(None, found), None):
            yield conflict
            return


def starter_conflict(
    starter: Starter, entry: EntrySpec, world_size: int, *, in_step: bool, key: str = "entry.command", file: str = ""
) -> Conflict | None:
    """Return why a launcher cannot run in each rank; None: it can. `file`: the script that starts it."""
    where = f"{file}: " if file else ""
    if starter.name == "srun" and in_step and "--overlap" not in starter.arguments:
        return Conflict(
            (key,),
            f"{where}srun in a rank waits until the time limit: the ranks have all cores of the job",
            "leave srun out: every rank runs the command already; or write srun --overlap, and owns_ranks: true",
        )
    if entry.owns_ranks or world_size == 1:
        return None
    own = f"write entry: {{{starter.program}}}" if starter.program else f"leave {starter.name} out"
    return Conflict(
        (key,),
        f"{where}each of the {world_size} ranks would start {starter.name}, which starts ranks itself",
        f"{own}, and every rank runs it with torchrun's variables; or owns_ranks: true, and each node starts "
        f"{starter.name} once, for resources.procs_per_node ranks",
    )


def started_by(entry: EntrySpec) -> Iterator[Sequence[str]]:
    """Yield the commands that a rank starts, as their words."""
    args = [str(arg) for arg in entry.args]
    if entry.shell and isinstance(entry.command, str):
        yield from commands_in(entry.command)
    elif entry.command:
        yield (*entry.command_words, *args)
    elif entry.script:
        yield ("python", entry.script, *args)
    elif entry.module or entry.function:
        yield ("python", "-m", entry.module or str(entry.function).partition(":")[0], *args)


def _function_conflicts(entry: EntrySpec) -> Iterator[Conflict]:
    """Find a function of a shell that no shell of a job has."""
    for words in commands_in(entry.command) if entry.shell and isinstance(entry.command, str) else ():
        if words[0] in {".", "source", "eval"}:
            break  # the function may come from there
        if words[0] in _LOADERS and _LOADERS[words[0]] in ("", *words[1:2]):
            name = f"{words[0]} {_LOADERS[words[0]]}".rstrip()
            yield Conflict(
                ("entry.command",),
                f"the /bin/sh of a rank does not know {name}: it reads no file of a login shell",
                "write the line under setup:, which bash runs on each node before the ranks start",
            )
            break


def _placeholder_conflicts(entry: EntrySpec, dotted: str, text: str) -> Iterator[Conflict]:
    for name in find_placeholders(text):
        if name not in VARIABLES:
            meant = did_you_mean(name, VARIABLES)
            yield Conflict(
                (dotted,),
                f"unknown placeholder {{{name}}}{meant}",
                f"there are {', '.join(VARIABLES)}; {{{{{name}}}}} stands for the text {{{name}}}",
            )
        elif name == "data_dir" and entry.data_dir is None:
            yield Conflict((dotted,), "{data_dir} has no value", "entry.data_dir sets it")
        elif name == "local_rank" and entry.owns_ranks:
            yield Conflict(
                (dotted, "entry.owns_ranks"),
                "{local_rank} has no value: the program starts its ranks itself",
                "{procs_per_node} is how many to start on each node",
            )


def _texts(entry: EntrySpec) -> Iterator[tuple[str, str]]:
    """Yield the texts that may have placeholders, with their keys."""
    if entry.command is not None and not entry.shell:
        listed = not isinstance(entry.command, str)
        for index, word in enumerate(entry.command_words):
            yield f"entry.command.{index}" if listed else "entry.command", word
    for index, argument in enumerate(entry.args):
        yield from ((f"entry.args.{index}", text) for text in _within(argument))
    for name, value in entry.kwargs.items():
        yield from ((f"entry.kwargs.{name}", text) for text in _within(value))


def _within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _within(item)
