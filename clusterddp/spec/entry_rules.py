"""The rules between the keys of the `entry` section, and its placeholders."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from clusterddp.ranks.placeholders import VARIABLES, find_placeholders
from clusterddp.spec.conflict import Conflict
from clusterddp.spec.problems import did_you_mean

if TYPE_CHECKING:
    from clusterddp.spec.entry_section import EntrySpec
    from clusterddp.spec.model import JobSpec

PROGRAMS = ("script", "module", "function", "command")
"""The keys that say what is run; an entry has one of them."""
_ONE_OF_THEM = "expected one of script, module, function and command"


def entry_conflicts(entry: EntrySpec) -> Iterator[Conflict]:
    """Yield what does not go together."""
    named = [kind for kind in PROGRAMS if getattr(entry, kind) is not None]
    if not named:
        yield Conflict(keys=("entry",), message=f"names nothing to run, {_ONE_OF_THEM}")
    if len(named) > 1:
        words = f"has {', '.join(named[:-1])} and {named[-1]}, {_ONE_OF_THEM}"
        yield Conflict(keys=tuple(f"entry.{kind}" for kind in reversed(named)), message=words)
    if entry.kwargs and entry.function is None:
        yield Conflict(
            keys=("entry.kwargs",),
            message="is for a function, and there is none",
            hint="args: [--lr, 0.1] is for programs",
        )
    if entry.stop_signal != "none" and entry.command is None:
        yield Conflict(
            keys=("entry.stop_signal",),
            message="is for a command",
            hint="Python code asks clusterddp.should_stop(), or looks for the file $CLUSTERDDP_STOP_FILE",
        )
    yield from _shell_conflicts(entry)
    yield from _local_rank_conflicts(entry)
    for key, text in _texts(entry):
        yield from _placeholder_conflicts(entry, key, text)


def init_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Yield why ranks cannot meet as network.init says."""
    if job.network.init == "file" and job.launcher == "ssh" and job.resources.nodes > 1:
        yield Conflict(
            keys=("network.init", "launcher"),
            message="file needs a directory that all ranks share, and hosts over SSH share none",
            hint="init: tcp, or env",
        )


def start_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Yield why torchrun cannot start the ranks, or the ranks not meet where it does."""
    if job.start != "torchrun":
        return
    if job.entry is not None and job.entry.owns_ranks:
        yield Conflict(
            keys=("start", "entry.owns_ranks"),
            message="torchrun starts the ranks, and so does a program that owns its ranks",
            hint="~start, or entry.owns_ranks=false",
        )


def command_words(entry: EntrySpec) -> tuple[str, ...]:
    """Return the words of a command that no shell reads."""
    return tuple(shlex.split(entry.command)) if isinstance(entry.command, str) else tuple(entry.command or ())


def _shell_conflicts(entry: EntrySpec) -> Iterator[Conflict]:
    if not entry.shell:
        return
    if not isinstance(entry.command, str):
        what = "a list of words" if entry.command else "no command"
        yield Conflict(
            keys=("entry.shell", "entry.command"), message=f"a shell reads text, found {what}", hint='command: "a && b"'
        )
        return
    for name in find_placeholders(entry.command):
        if name in VARIABLES:
            yield Conflict(
                keys=("entry.command",),
                message=f"{{{name}}} stays as it is in text for a shell",
                hint=f"a shell has variables: ${VARIABLES[name][0]}",
            )


def _local_rank_conflicts(entry: EntrySpec) -> Iterator[Conflict]:
    if not entry.local_rank_arg:
        return
    if entry.script is None and entry.module is None:
        yield Conflict(
            keys=("entry.local_rank_arg",),
            message="is for a script or a module",
            hint='"{local_rank}" among the arguments of a command or function becomes the number',
        )
    if entry.owns_ranks:
        yield Conflict(
            keys=("entry.local_rank_arg", "entry.owns_ranks"),
            message="a program that starts its ranks itself is no local rank",
        )


def _placeholder_conflicts(entry: EntrySpec, key: str, text: str) -> Iterator[Conflict]:
    for name in find_placeholders(text):
        if name not in VARIABLES:
            meant = did_you_mean(name, VARIABLES)
            yield Conflict(
                keys=(key,),
                message=f"unknown placeholder {{{name}}}{meant}",
                hint=f"there are {', '.join(VARIABLES)}; {{{{{name}}}}} stands for the text {{{name}}}",
            )
        elif name == "data_dir" and entry.data_dir is None:
            yield Conflict(keys=(key,), message="{data_dir} has no value", hint="entry.data_dir sets it")
        elif name == "local_rank" and entry.owns_ranks:
            yield Conflict(
                keys=(key, "entry.owns_ranks"),
                message="{local_rank} has no value: the program starts its ranks itself",
                hint="{procs_per_node} is how many to start on each node",
            )


def _texts(entry: EntrySpec) -> Iterator[tuple[str, str]]:
    """List the texts in which placeholders are looked for, with their keys."""
    if entry.command is not None and not entry.shell:
        listed = not isinstance(entry.command, str)
        for index, word in enumerate(command_words(entry)):
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
