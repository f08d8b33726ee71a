"""Parse the command that trains: the nested launch programs (srun, torchrun ...), and what a rank runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from clusterddp.importing.options import (
    ACCELERATE,
    DEEPSPEED,
    HOROVODRUN,
    MPIRUN,
    PYTHON,
    SRUN,
    TORCHRUN,
    Option,
    OptionTable,
    take_options,
)
from clusterddp.importing.shell import split_statements
from clusterddp.importing.values import Text, Variables, fixed_number

LaunchProgram = Literal["srun", "mpirun", "horovodrun", "torchrun", "launch", "accelerate", "deepspeed"]
_BY_NAME: dict[str, tuple[LaunchProgram, OptionTable]] = {
    "srun": ("srun", SRUN),
    "mpirun": ("mpirun", MPIRUN),
    "mpiexec": ("mpirun", MPIRUN),
    "mpiexec.hydra": ("mpirun", MPIRUN),
    "orterun": ("mpirun", MPIRUN),
    "prterun": ("mpirun", MPIRUN),
    "horovodrun": ("horovodrun", HOROVODRUN),
    "torchrun": ("torchrun", TORCHRUN),
    "deepspeed": ("deepspeed", DEEPSPEED),
}
_BY_MODULE: dict[str, tuple[LaunchProgram, OptionTable]] = {
    "torch.distributed.run": ("torchrun", TORCHRUN),
    "torch.distributed.launch": ("launch", TORCHRUN),
    "accelerate.commands.launch": ("accelerate", ACCELERATE),
    "deepspeed.launcher.runner": ("deepspeed", DEEPSPEED),
}
_PREFIXES = frozenset({"exec", "nohup", "time", "command", "stdbuf", "setsid", "ionice", "nice", "numactl", "taskset"})
"""Commands that run the one after them; their own options are dropped."""
_SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
STARTS_RANKS: frozenset[LaunchProgram] = frozenset({"torchrun", "launch", "accelerate", "deepspeed"})
"""The launch programs that start the ranks of a node themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A launch program and its options."""

    program: LaunchProgram
    options: tuple[Option, ...]

    def value(self, name: str) -> Text | None:
        """Return the value of an option, the last one given."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def number(self, *names: str) -> int | None:
        """Return the first of these options that is a fixed number from 1."""
        values = [self.value(name) for name in names]
        return next((number for value in values if value and (number := fixed_number(value))), None)


@dataclass(slots=True)
class Command:
    """The command of a line of a script."""

    levels: list[Level] = field(default_factory=list)
    """From the outermost inwards."""
    kind: Literal["script", "module", "command"] = "command"
    target: Text = field(default_factory=lambda: Text(""))
    """The script or module; of a command its first word."""
    args: list[Text] = field(default_factory=list)
    env: dict[str, Text] = field(default_factory=dict)
    """Variables that the command line itself sets."""
    asides: list[tuple[str, str]] = field(default_factory=list)
    """Parts that are not imported: as written, and the reason."""

    @property
    def python(self) -> bool:
        return self.kind != "command"

    @property
    def programs(self) -> tuple[LaunchProgram, ...]:
        return tuple(level.program for level in self.levels)


def read_command(words: Sequence[Text], variables: Variables, depth: int = 0) -> Command:
    """Parse a command line, as far as its programs are known here."""
    command = Command()
    rest = list(words)
    while rest and (step := _step_of(rest[0], depth)) is not None:
        rest = step(command, rest, variables)
        if command.target.text:
            return command
    if rest:
        command.target, command.args = rest[0], rest[1:]
        if rest[0].text.endswith(".py"):
            command.kind = "script"
    return command


_Step = Callable[[Command, list[Text], Variables], list[Text]]


def _step_of(word: Text, depth: int) -> _Step | None:
    """Return the function that parses the first program of a command line; None: it is the program of the ranks."""
    name = word.text.rpartition("/")[2]
    steps: dict[str, _Step] = {"env": _take_env, "accelerate": _take_accelerate}
    steps |= dict.fromkeys(_BY_NAME, _take_launch_program) | dict.fromkeys(_PREFIXES, _take_prefix)
    step = steps.get(name)
    if step is None and name.rstrip("0123456789.") == "python":
        return _take_python
    if step is None and name in {"apptainer", "singularity"}:
        return _take_apptainer
    if step is None and name in _SHELLS and depth < 3:
        return lambda command, rest, variables: _take_shell(command, rest, variables, depth)
    return step


def _take_launch_program(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    return _take_level(command, _BY_NAME[rest[0].text.rpartition("/")[2]], rest[1:])


def _take_level(command: Command, known: tuple[LaunchProgram, OptionTable], given: list[Text]) -> list[Text]:
    program, table = known
    options, rest = take_options(given, table)
    command.levels.append(Level(program=program, options=tuple(options)))
    if program not in STARTS_RANKS:
        return rest
    flags = {option.name for option in options}
    if not rest or "no_python" in flags:
        return rest
    command.kind = "module" if "module" in flags else "script"
    command.target, command.args = rest[0], rest[1:]
    return []


def _take_accelerate(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    if len(rest) > 1 and rest[1].text == "launch":
        return _take_level(command, ("accelerate", ACCELERATE), rest[2:])
    command.target, command.args = rest[0], rest[1:]
    return []


def _take_python(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    interpreter, given = rest[0], rest[1:]
    options, behind = take_options(given, PYTHON)
    for option in options:
        if option.name == "u":
            command.asides.append(("python -u", "the output of ranks is always unbuffered"))
        elif option.name not in {"module", "c"}:
            command.asides.append((f"python {option.text}", "an option of Python; ranks are started without it"))
    ends = options[-1].name if options else ""
    if "/" in interpreter.text:
        command.asides.append(
            (interpreter.text, "ranks run the Python that clusterddp is installed in: submit with it")
        )
    if ends == "c" or not behind:
        command.target, command.args = interpreter, given
        return []
    if ends == "module" and behind[0].text in _BY_MODULE:
        return _take_level(command, _BY_MODULE[behind[0].text], behind[1:])
    command.kind = "module" if ends == "module" else "script"
    command.target, command.args = behind[0], behind[1:]
    return []


def _take_env(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    """Parse `env A=b`; its options are dropped."""
    rest = rest[1:]
    while rest and (rest[0].text.startswith("-") or "=" in rest[0].text):
        word = rest.pop(0)
        name, equals, value = word.text.partition("=")
        if equals and name.isidentifier():
            command.env[name] = Text(value, word.unknown)
        else:
            command.asides.append((f"env {word.text}", "an option of env"))
    return rest


def _take_prefix(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    words, rest = [rest[0].text], rest[1:]
    while rest and rest[0].text.startswith("-"):
        words.append(rest.pop(0).text)
    if words != ["exec"]:
        command.asides.append((" ".join(words), "the program runs without it"))
    return rest


def _take_apptainer(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    """Parse `apptainer exec [options] IMAGE`; its image becomes the container of the spec."""
    program, rest = rest[0].text, rest[1:]
    if not rest or rest[0].text not in {"exec", "run"}:
        command.target, command.args = Text(program), rest
        return []
    rest = rest[1:]
    given: list[Option] = []
    while rest and rest[0].text.startswith("-"):
        name, equals, value = rest.pop(0).text.partition("=")
        word = name.lstrip("-").replace("-", "_")
        takes = word in {"bind", "B", "pwd", "env", "home", "H", "overlay", "workdir", "W", "mount"}
        text = Text(value) if equals else rest.pop(0) if takes and rest else None
        given.append(Option(name=f"apptainer_{word}", value=text, text=f"{name} {text.text if text else ''}".strip()))
    if rest:
        given.append(Option(name="apptainer_image", value=rest[0], text=rest[0].text))
    command.levels.append(Level(program="srun", options=tuple(given)))
    return rest[1:]


def _take_shell(command: Command, rest: list[Text], variables: Variables, depth: int) -> list[Text]:
    """Parse `bash -c "..."`; a script file of the shell is a command like any other."""
    flags = "".join(word.text for word in rest[1:-1])
    if len(rest) < 3 or not rest[1].text.startswith("-") or not flags.endswith("c"):
        command.target, command.args = rest[0], rest[1:]
        return []
    statements = [each for each in split_statements(rest[-1].text) if each.words]
    last = statements[-1] if statements else None
    if last is None:
        command.target, command.args = rest[0], rest[1:]
        return []
    for statement in statements[:-1]:
        command.asides.append((statement.text, "runs before the program, in the same shell"))
    words = [text for word in last.words for text in variables.resolve(word)]
    while words and "=" in words[0].text and words[0].text.partition("=")[0].isidentifier():
        word = words.pop(0)
        name, _, value = word.text.partition("=")
        command.env[name] = Text(value, word.unknown)
    inner = read_command(words, variables, depth + 1)
    command.levels += inner.levels
    command.kind, command.target, command.args = inner.kind, inner.target, inner.args
    command.env |= inner.env
    command.asides += inner.asides
    for redirection in last.redirections:
        command.asides.append((redirection, "clusterddp logs RUN shows the output of ranks"))
    return []
