"""A batch script for sbatch, as a file: whether it is one, what sbatch refuses in it, the lines that sbatch reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.spec.launch_options import SBATCH, Option, Word
from clusterddp.spec.sbatch_lines import OTHER_MARKS, Given, GivenOptions, read_sbatch_lines

_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_RANGE = re.compile("([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
MAX_TASKS = 10_000
"""Of an array: each is a run with a directory."""
_BLANKS = b" \t\r\v\f"


def is_batch_script(path: Path, data: bytes) -> bool:
    """Return whether a file is a batch script: its first line is `#!`, and #SBATCH lines are before its first command.

    Raises: UsageError: it is a script, and not one of these.
    """
    if path.suffix in {".yaml", ".yml"}:
        return False
    lines = data.split(b"\n")
    in_force = [line for line in (lines[0], *head_of(data).split(b"\n")) if line.startswith(b"#SBATCH")]
    if in_force:
        return True
    if not data.startswith(b"#!") or b"python" in lines[0]:
        return False
    hint = "--from slurm submits it as it is; a spec with entry: {command: ..., shell: true} runs it in each rank"
    other = next((mark for mark in OTHER_MARKS if any(line.startswith(mark.encode()) for line in lines)), None)
    if any(line.startswith(b"#SBATCH") for line in lines):
        found = "its #SBATCH lines are after its first command, where sbatch ignores them"
    elif other:
        found = f"a script for another scheduler: it has {other.strip()} lines and no #SBATCH lines"
    else:
        found = "a script without #SBATCH lines, so it may not be meant for sbatch"
    raise UsageError(f"{path}: {found}", hint=hint)


def demand_batch_script(path: Path, data: bytes) -> None:
    """Refuse what sbatch refuses, with the reason.

    Raises: UsageError. Source: slurm, src/sbatch/sbatch.c, _get_script_buffer.
    """
    hint = None
    if not data.strip():
        found = "is empty"
    elif not data.startswith(b"#!"):
        found, hint = "sbatch takes no script without #! in its first line", "write #!/bin/bash there"
    elif b"\0" in data:
        found, hint = "sbatch takes no script with a NUL character", "is it a program? A script starts it"
    elif b"\r\n" in data:
        line = data[: data.index(b"\r\n")].count(b"\n") + 1
        found = f"sbatch takes no script with the line ends of DOS (CR LF), found in line {line}"
        hint = f"sed -i 's/\\r$//' {path} removes them"
    else:
        return
    raise UsageError(f"{path}: {found}", hint=hint)


def head_of(data: bytes) -> bytes:
    """Return the lines in which sbatch looks for options: from the second one up to the first command."""
    position = data.find(b"\n") + 1 or len(data)
    begin = position
    while position < len(data):
        end = data.find(b"\n", position) + 1 or len(data)
        line = data[position:end].strip(_BLANKS + b"\n")
        if line and not line.startswith(b"#"):
            break
        position = end
    return data[begin:position]


def options_of(
    data: bytes, overrides: Mapping[str, str | bool] | None = None, unknown: list[str] | None = None
) -> GivenOptions:
    """Read the #SBATCH lines, and the options of the command line, which override them (`slurm` in the spec).

    An option that is not known to be one of sbatch is left to sbatch; its line is added to `unknown`.
    """
    given, unknown = GivenOptions(), [] if unknown is None else unknown
    for line in head_of(data).decode(errors="replace").split("\n"):
        try:
            found = read_sbatch_lines(line, "", lambda *_: None)
        except UsageError:
            unknown.append(line)
            continue
        unknown += [line] if found.keys() - SBATCH.names else []
        given |= found
    for name, value in (overrides or {}).items():
        text = "" if value is True else str(value)
        given[name] = Given(option=Option(name=name, value=Word(text), text=f"--{name}={text}"), line=0, of="slurm")
    return given


def read_array(text: str) -> tuple[tuple[int, ...], int | None]:
    """Read the tasks of `--array=1,5-9:2%3`: their numbers, and how many may run at a time; None: all of them.

    Raises: UsageError: sbatch would refuse it, or it has more tasks than a sweep has runs.
    """
    indices, percent, most = text.strip().partition("%")
    parts = [_RANGE.fullmatch(part) for part in indices.removeprefix("[").removesuffix("]").split(",")]
    tasks: dict[int, None] = {}
    for part in parts:
        if part is None or (percent and not re.fullmatch("[0-9]{1,9}", most)):
            raise UsageError(f"--array={text}: expected numbers and ranges, such as 0-9, 1,5-9:2 or 0-99%4")
        numbers = range(int(part[1]), int(part[2] or part[1]) + 1, max(1, int(part[3] or 1)))
        if len(tasks) + len(numbers) > MAX_TASKS:
            hint = f"submit a part of them at a time: slurm.array={numbers[0]}-{numbers[0] + MAX_TASKS - 1}"
            raise UsageError(f"--array={text}: expected at most {MAX_TASKS} tasks: each is a run", hint=hint)
        tasks |= dict.fromkeys(numbers)
    if not tasks:
        raise UsageError(f"--array={text}: has no task")
    return tuple(sorted(tasks)), int(most) if percent and int(most) else None


def spec_of(path: Path, args: Sequence[str]) -> dict[str, object]:
    """Return the spec of a batch script that is submitted with these arguments."""
    return {
        "name": spec_name(path.stem),
        "launcher": "slurm",
        "entry": {"batch_script": str(path.absolute()), "args": list(args)},
    }


def spec_name(text: str) -> str:
    """Make a valid name of a spec from any text."""
    return _NAME.sub("_", text).lstrip("._-")[:64].rstrip("._-") or "imported"
