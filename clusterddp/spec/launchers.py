"""Programs that start ranks (torchrun, srun, accelerate ...), and how to find one in a command, in wrappers or not."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from clusterddp.errors import UsageError
from clusterddp.spec.launch_options import MPIRUN, SRUN, TORCHRUN, Option, Word, take_options, words

_OF_TORCH = words("torchrun torch.distributed.run torch.distributed.launch")
_OF_MPI = words("mpirun mpiexec mpiexec.hydra orterun prterun")
_PROGRAMS = _OF_MPI | words("srun torchrun deepspeed horovodrun composer")
_SUBCOMMANDS = {"accelerate": "launch", "tune": "run", "lightning": "run", "fabric": "run", "colossalai": "run"}
"""Programs that start ranks by one of their commands only."""
_MODULES = words(
    "torch.distributed.run torch.distributed.launch accelerate.commands.launch accelerate.commands.accelerate_cli "
    "deepspeed deepspeed.launcher.runner deepspeed.launcher.launch horovod.runner.launch composer.cli.launcher"
)
NAMES = _PROGRAMS | _MODULES | words("accelerate sbatch salloc")
"""Words that name a launcher, or what queues a job."""
_SHELLS = words("sh bash dash zsh")
_SETUP_MODULES = words(
    "pip venv virtualenv ensurepip conda spacy nltk.downloader wandb ipykernel huggingface_hub build"
)
"""Modules that install, log in or download: never the training."""
OTHER_PYTHON = "ranks take the activated environment; python: PATH in the spec names it"

_MANAGERS = ("conda", "mamba", "micromamba", "pixi", "poetry", "pdm", "pipenv", "rye")
_IN_ENVIRONMENT = "-n -p -e -C --name --prefix --cwd --environment --manifest-path --directory --project --env-file"
_WRAPPERS = {
    **dict.fromkeys(("nohup", "setsid", "exec", "command", "taskset"), ""),
    **dict.fromkeys(_MANAGERS, _IN_ENVIRONMENT),
    **dict.fromkeys(("apptainer", "singularity"), "-B -H -W --bind --env --home --pwd --workdir --overlay"),
    "env": "-u -C --unset --chdir",
    "timeout": "-s -k --signal --kill-after",
    "nice": "-n --adjustment",
    "ionice": "-c -n --class --classdata",
    "stdbuf": "-i -o -e --input --output --error",
    "numactl": "-N -m -C -i -p --cpunodebind --membind --physcpubind --interleave --preferred",
    "time": "-f -o --format --output",
    "nsys": "-t -o -s -w -y -d --trace --output",
    "uv": f"{_IN_ENVIRONMENT} --with --with-editable --with-requirements --python --extra --group --package",
}
"""Programs that start the command behind their options -> those options whose value is the next word."""
_WRAP_BY = {**dict.fromkeys(("uv", *_MANAGERS), "run"), "apptainer": "exec", "singularity": "exec", "nsys": "profile"}
"""Those that do so by one of their commands only."""
_WORDS_BEFORE = dict.fromkeys(("timeout", "taskset", "apptainer", "singularity"), 1)
"""Those that take so many words before the command: a time, a mask, an image."""
_PYTHON_VALUES = words("-W -X")
_SHELL_VALUES = words("-o -eo -uo -xo -euo -ueo -exo -euxo -exuo -xeuo --rcfile --init-file")
_BEFORE_A_COMMAND = re.compile(r"if|then|elif|else|while|until|do|!|\{|\w+=.*", re.DOTALL)
_CONTROL = words("if case for while until select function {")


@dataclass(slots=True)
class Launch:
    """A command that starts Python or ranks."""

    srun: list[Option] | None = None
    """Its options; None: the command has no srun."""
    torchrun: list[Option] | None = None
    kind: Literal["script", "module", "command"] = "command"
    """How the spec names the program."""
    program: list[Word] = field(default_factory=list)
    """The script or module, or the first word of a command; then its arguments."""
    python: str = ""
    """The path of the Python that the command names; empty: the first on PATH."""
    asides: list[tuple[str, str]] = field(default_factory=list)
    """Parts that are not in the spec: as written, and the reason."""


def read_launch(given: Sequence[Word]) -> Launch | None:
    """Parse a command; None: it starts neither ranks nor Python.

    Raises: UsageError: an option is unknown, and so is where it ends.
    """
    launch, rest = Launch(), list(given)
    if _name(rest[0].text) == "srun":
        launch.srun, rest = take_options(rest[1:], SRUN)
    if not rest:
        return None
    name = _name(rest[0].text.rstrip('"'))
    if _is_python(name) or name == "torchrun":
        launch.python = _path_of_python(rest[0], name, launch.asides)
        if name != "torchrun":
            launch.kind, launch.program = _skip_python(rest, launch.asides)
            target = launch.program[0].text if launch.program else ""
            if launch.kind != "module" or target != "torch.distributed.run":
                is_setup = launch.kind == "module" and target in _SETUP_MODULES and launch.srun is None
                return None if is_setup or not target else launch
            rest = launch.program
        launch.torchrun, launch.program = take_options(rest[1:], TORCHRUN)
        flags = {option.name for option in launch.torchrun}
        launch.kind = "command" if "no_python" in flags else "module" if "module" in flags else "script"
        return launch if launch.program else None
    launch.program = rest
    return None if launch.srun is None else launch


def _path_of_python(word: Word, name: str, asides: list[tuple[str, str]]) -> str:
    """Return the path of a Python, or of the one beside torchrun, with `~` for the home; empty: the word has no path.

    Raises: UsageError: a shell computes more of it than the home.
    """
    path = re.sub(r"^\$(HOME|\{HOME\})/", "~/", word.text.replace('"', "")) if word.computed else word.text
    if word.computed and not re.fullmatch(r"~/[^$`*?\[{'\\]+", path):
        raise UsageError("a shell computes the path of the Python")
    directory = path.rpartition("/")[0]
    is_apart = name == "torchrun" and re.fullmatch(r"/usr/local/bin|.*/\.local/bin", directory)
    if is_apart or (not directory and name not in ("python", "python3", "torchrun")):
        asides.append((path, OTHER_PYTHON))
        return ""
    return directory and f"{directory}/{'python3' if name == 'torchrun' else name}"


def _skip_python(
    given: Sequence[Word], asides: list[tuple[str, str]]
) -> tuple[Literal["script", "module", "command"], list[Word]]:
    """Skip Python's options; with `-c` and options that the spec has not, Python itself is the program."""
    for index, word in enumerate(given[1:], 1):
        if word.text == "-m":
            return "module", list(given[index + 1 :])
        if not word.text.startswith("-"):
            return "script", list(given[index:])
        if word.text != "-u":
            return "command", list(given)
        asides.append(("python -u", "the output of ranks is always unbuffered"))
    return "script", []


def name_launcher(given: Iterable[Word], *, or_python: bool = False) -> str | None:
    """Return the first word that names a launcher, a shell with `-c`, or Python; None: there is none."""
    is_shell = False
    for word in given:
        name = _name(word.text)
        if name in NAMES or (is_shell and re.fullmatch("-[a-z]*c", name)):
            return word.text
        if or_python and _is_python(name):
            return word.text
        is_shell = name in _SHELLS
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Starter:
    """A launcher that a command starts."""

    name: str
    """As a user types it: `torchrun`, `accelerate launch`, `torch.distributed.run`."""
    arguments: tuple[str, ...]

    @property
    def program(self) -> str | None:
        """What it starts, as keys of `entry`: `script: train.py, args: [--lr, 0.1]`; None: not known."""
        given, launch = [Word(word) for word in self.arguments], None
        with contextlib.suppress(UsageError):
            if self.name in _OF_MPI:
                given = take_options(given, MPIRUN)[1]
            first = {"srun": "srun", **dict.fromkeys(_OF_TORCH, "torchrun")}.get(self.name)
            launch = read_launch([*([Word(first)] if first else []), *given]) if given else None
        if launch is None:  # its options are not known here
            program = list(itertools.dropwhile(lambda word: not word.text.endswith(".py"), given))
            launch = Launch(kind="script", program=program)
        if not launch.program:
            return None
        target, *args = [_in_yaml(word.text) for word in launch.program]
        if launch.kind == "command":
            return f"command: [{', '.join([target, *args])}]"
        return f"{launch.kind}: {target}" + (f", args: [{', '.join(args)}]" if args else "")


def find_starter(command: Sequence[str]) -> Starter | None:
    """Return the launcher that a command starts itself; None: it starts none, or another program."""
    name, rest = _name(command[0]), tuple(command[1:])
    if _is_python(name):
        rest = tuple(_skip(rest, _PYTHON_VALUES, to_module=True))
        if rest[:1] == ("-m",):
            return Starter(name=rest[1], arguments=rest[2:]) if rest[1:] and rest[1] in _MODULES else None
        return find_starter(rest) if rest and "/" in rest[0] else None
    if name in _SUBCOMMANDS:
        is_it = rest[:1] == (_SUBCOMMANDS[name],)
        return Starter(name=f"{name} {rest[0]}", arguments=rest[1:]) if is_it else None
    return Starter(name=name, arguments=rest) if name in _PROGRAMS else None


def commands_started(command: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the commands that a command becomes or starts: behind `env`, `timeout`, `uv run`, in `bash -c TEXT`."""
    name = _name(command[0])
    by = _WRAP_BY.get(name)
    if name in _WRAPPERS and (by is None or by in command):
        begin = list(command).index(by) + 1 if by else 1
        rest = _skip(command[begin:], words(_WRAPPERS[name]))[_WORDS_BEFORE.get(name, 0) :]
        rest = list(itertools.dropwhile(lambda word: name == "env" and "=" in word, rest))
        yield from commands_started(rest) if rest else ()
        return
    if name in _SHELLS:
        rest = _skip(command[1:], _SHELL_VALUES)
        if any(re.fullmatch("-[a-z]*c", word) for word in command[1 : len(command) - len(rest)]):
            yield from (each for found in commands_in("".join(rest[:1])) for each in commands_started(found))
            return
    yield command


def script_of(command: Sequence[str]) -> str | None:
    """Return the file that a command may have a shell read: `./run.sh`, `bash run.sh`; None: there is none."""
    if _name(command[0]) in _SHELLS:
        return next(iter(_skip(command[1:], _SHELL_VALUES)), None)
    return command[0] if "/" in command[0] else None


def commands_in(text: str, *, always: bool = False) -> Iterator[Sequence[str]]:
    """Yield the words of each command in text for a shell; none where it has a here-document or cannot be split.

    `always`: only those before the first condition, loop or function; after `&&` is no condition.
    """
    text = re.sub(r"(?m)(^|\s)#.*$", "", text.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        tokens = [] if "<<" in text else list(lexer)
    except ValueError:
        return
    for is_separator, group in itertools.groupby(tokens, key=lambda token: token[:1] in "();|&\n"):
        found = list(group)
        if always and (found[0] in _CONTROL or found[0].startswith(("(", "||"))):
            return
        command = list(itertools.dropwhile(_BEFORE_A_COMMAND.fullmatch, found))
        if command and not is_separator:
            yield command


def _skip(given: Sequence[str], values: frozenset[str], *, to_module: bool = False) -> list[str]:
    """Return the words behind options; `to_module`: with `-m` first, if it is there."""
    rest = list(given)
    while rest and rest[0].startswith("-") and not (to_module and rest[0] == "-m"):
        option = rest.pop(0)
        if option == "--":
            break
        del rest[: option in values]
    return rest


def _in_yaml(word: str) -> str:
    """Write a word for a list in one line."""
    return word if re.fullmatch(r"-{0,2}[\w./+][\w./=@%+-]*", word) else json.dumps(word, ensure_ascii=False)


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _is_python(name: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", name) is not None
