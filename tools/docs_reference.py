"""The pages of docs/reference about commands, errors and variables, and all generated pages together."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # mypy's and pip's own
    import tomli as tomllib

import click
from docs_pictures import ROOT
from docs_records import files_page, json_page
from docs_spec import spec_page
from docs_text import CODE_WIDTH, WIDTH, cell, filled, head, items, page

from clusterddp import errors
from clusterddp.cli import main as command_line
from clusterddp.cli.terminal import Terminal
from clusterddp.ranks.launched import NAMES

PAGES = ROOT / "docs" / "reference"

READ = {
    "CLUSTERDDP_RUNS": "Directory of the runs, as `--runs`. Default: `./runs`.",
    "CLUSTERDDP_SAFE_DIRECTORIES": "Directories whose writers you trust, separated by `:`; see docs/storage.md.",
    "CLUSTERDDP_DEBUG": "`1`: errors come with a traceback, as with `--debug`.",
    "CLUSTERDDP_CONFIG": "File of the profiles. Default: `~/.config/clusterddp/config.yaml`. Empty: no profiles.",
    "CLUSTERDDP_PROJECT": "The project file. Default: the nearest `clusterddp.yaml` at the spec or above. Empty: none.",
    "CLUSTERDDP_SITE": "File with values for all users. Default: `/etc/clusterddp/site.yaml`. Empty: none.",
    "CLUSTERDDP_JOIN_KEY": "Shared secret of `worker`: both sides prove that they know it.",
    "NO_COLOR": "Set: no colour, as with `--no-color` and `TERM=dumb`.",
    "FORCE_COLOR": "`1`: colour in a pipe, too.",
    "SLURM_CONF": "Reaches sbatch, as `SLURM_JWT` does; no other `SLURM_*` variable does.",
    "XDG_STATE_HOME": "Directory of the key that seals a user's runs, and of ends that a run's storage did not take.",
}
"""What a person sets for the command."""
GIVEN = {
    "CLUSTERDDP_RUN": "Name of the run.",
    "CLUSTERDDP_RUN_DIR": "Directory of the run.",
    "CLUSTERDDP_ATTEMPT": "Number of the attempt, from 0.",
    "CLUSTERDDP_STEP": "Of a batch script: the step that the rank belongs to.",
    "CLUSTERDDP_SCRIPT_RUN": "In a batch script: the directory of its run.",
    "CLUSTERDDP_SCRIPT_ATTEMPT": "In a batch script: the number of the attempt.",
    "CLUSTERDDP_SCRIPT_PID": "In a batch script: the process that runs it, on the first node.",
    "CLUSTERDDP_BASH_ENV": "In a batch script: the user's own BASH_ENV, which clusterddp's reads.",
    "CLUSTERDDP_LINE": "In a batch script: the line, from a function of bash to the command that it runs.",
    "CLUSTERDDP_WAITED": "In a batch script: what such a function knows of ignored signals.",
    "CLUSTERDDP_HOOKED": "Of a batch script: the process that answers for the rank; its children do not.",
    "CLUSTERDDP_STOP_FILE": "When this file exists, the rank is to checkpoint and end; see `clusterddp.should_stop()`.",
    "CLUSTERDDP_INIT_METHOD": "Where torch's ranks meet, as `network.init` says: env, tcp or file and what follows `://`.",
    "CLUSTERDDP_DATA_DIR": "`entry.data_dir`.",
    "CLUSTERDDP_OUTPUT_DIR": "`entry.output_dir`, else `output/` in the run's directory.",
    "CLUSTERDDP_CODE_DIR": "Where you submitted from, in the snapshot of the code.",
    "CLUSTERDDP_BACKEND": "`nccl` or `gloo`.",
    "CLUSTERDDP_DEVICE": "`cuda` or `cpu`.",
    "CLUSTERDDP_GPU": "Which of the GPUs that the rank sees is its own, where that is not LOCAL_RANK.",
}
"""What a rank gets besides torchrun's variables."""
NOTIFIED = {
    "CLUSTERDDP_RUN": "Name of the run, or of the sweep that has ended.",
    "CLUSTERDDP_RUN_DIR": "Its directory, in which the command works.",
    "CLUSTERDDP_EVENT": "`start`, `end`, `fail`, `requeue` or `hang`.",
    "CLUSTERDDP_STATE": "State of the run, such as `COMPLETED`.",
    "CLUSTERDDP_REASON": "Why it is in this state, in one line.",
    "CLUSTERDDP_ATTEMPT": "Number of the attempt; of a sweep the sum of its runs' attempts.",
    "CLUSTERDDP_TIME": "When it happened, in seconds since the epoch.",
}
"""What a command of `notify` gets."""
EXEC = {
    "CLUSTERDDP_EXEC_RANK": "The rank; so LOCAL_RANK, WORLD_SIZE and torchrun's other variables of a rank's place.",
    "CLUSTERDDP_EXEC_MASTER_PORT": "MASTER_PORT of the rank; so MASTER_ADDR, and CLUSTERDDP_EXEC_INIT_METHOD.",
    "CLUSTERDDP_EXEC_RUN_DIR": "Directory of the run; so CLUSTERDDP_EXEC_ATTEMPT and CLUSTERDDP_EXEC_STOP_FILE.",
}
"""What a command beside a rank gets in place of a rank's variables."""
INTERNAL = {
    "CLUSTERDDP_COOKIE": "Names the run and the role of a process; cleanup finds the processes of a run by it.",
    "CLUSTERDDP_ALONE": "A rank under `worker` records its own end.",
    "CLUSTERDDP_SUPERVISOR_PID": "The process whose death ends a rank.",
    "CLUSTERDDP_PRELOAD": "The modules that a starting rank imports first.",
    "CLUSTERDDP_LISTENER_FD": "The socket that listens at the master port.",
    "CLUSTERDDP_AT_LOGIN": "The command runs on a login node for a laptop.",
}
"""What clusterddp sets for its own processes."""


def make_pages() -> dict[Path, str]:
    """Return the text of each page by its path."""
    pages = {
        "spec": spec_page(),
        "commands": commands_page(),
        "errors": errors_page(),
        "environment": environment_page(),
        "files": files_page(),
        "json": json_page(),
    }
    made = {PAGES / f"{name}.md": text for name, text in pages.items()}
    architecture = ROOT / "docs" / "architecture.md"
    return made | {architecture: _with_packages(architecture.read_text())}


def commands_page() -> str:
    lines = head("Commands", "What `clusterddp COMMAND -h` prints, without the options that most commands have:")
    lines += [
        "* `--runs DIR`: the directory of the runs (`CLUSTERDDP_RUNS`; `runs_dir` of `clusterddp.yaml`; `./runs`).",
        "* `--profile NAME`: where to run, a profile of `~/.config/clusterddp/config.yaml`.",
        "* `-o json`: print JSON, for scripts. `-h`: show this help.",
        "",
    ]
    group = command_line.cli
    context = click.Context(group, info_name="clusterddp", obj=Terminal({}), **group.context_settings)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        lines += [f"## {name}", "", *_help(command, name, context)]
    return page(lines)


def errors_page() -> str:
    lines = head(
        "Exit codes and errors",
        "An error is `error: ...` on standard error: where, what was found, what was expected. A line `hint: ...` says "
        "what to do. `--debug` adds the traceback.",
    )
    lines += ["## Exit codes", "", *items({str(code): text for code, text in command_line.EXIT_CODES.items()})]
    lines += ["", "## Errors in Python", "", "`from clusterddp.errors import ...`; each has `message` and `hint`.", ""]
    for kind, depth in _tree(errors.ClusterddpError, 0):
        first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        code = f"**`{kind.__name__}`**, exit code {kind.exit_code}: "
        indent = "  " * depth
        lines += textwrap.wrap(
            code + " ".join(first.split()), WIDTH, initial_indent=f"{indent}* ", subsequent_indent=f"{indent}  "
        )
    return page(lines)


def environment_page() -> str:
    lines = head("Environment variables", "What you may set, what a rank gets, and where each value comes from.")
    lines += ["## Read by the command", "", *_variables(READ)]
    lines += ["## Given to each rank", "", *filled("Besides torchrun's variables, which are below."), ""]
    lines += _variables(GIVEN)
    lines += ["## Given to a command of notify", "", *_variables(NOTIFIED)]
    renamed = "`exec` renames the variables by which a program would take itself for a rank of the run."
    lines += ["## Given to a command beside a rank", "", *filled(renamed), "", *_variables(EXEC)]
    lines += ["## Set for clusterddp's own processes", "", *filled("Do not rely on them."), "", *_variables(INTERNAL)]
    lines += ["## Read from other launchers", ""]
    lines += filled(
        "`worker` takes a rank's place from the variables of the launcher that started it; of several that are set, "
        "those of the innermost launcher, from the left. They are kept, and numbers that contradict each other are an "
        "error. `submit SPEC -n -v` shows what clusterddp sets itself, and where each value comes from."
    )
    keys = tuple(NAMES["torchrun"])
    lines += ["", f"| launcher | {' | '.join(keys)} |", f"|---|{'---|' * len(keys)}"]
    for launcher, names in NAMES.items():
        read = (", else ".join(f"`{name}`" for name in names.get(key, ())) or "counted" for key in keys)
        lines.append(f"| {launcher} | {' | '.join(read)} |")
    return page(lines)


def _with_packages(text: str) -> str:
    """Put the packages between their marks: the rows of the import contract, and the first line of each package."""
    before, start, rest = text.partition("<!-- packages: written by tools/write_docs -->\n")
    _, end, after = rest.partition("<!-- end of packages -->")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    lines = ["", "| packages, from the top | |", "|---|---|"]
    for row in rows:
        for place, package in enumerate(part.strip() for part in row.split("|")):
            name = package.removeprefix("clusterddp.")
            mark = "" if place == 0 else "beside it: "
            lines.append(f"| {mark}`{name}` | {cell(_first_line(name))} |")
    return before + start + "\n".join([*lines, "", ""]) + end + after


def _first_line(package: str) -> str:
    folder = ROOT / "clusterddp" / package
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return doc.splitlines()[0]


def _help(command: click.Command, name: str, parent: click.Context) -> list[str]:
    width = CODE_WIDTH
    short = copy.copy(command)
    short.params = [each for each in command.params if not _is_common(each)]
    short.add_help_option = isinstance(command, click.Group)
    context = click.Context(short, info_name=name, parent=parent, max_content_width=width, terminal_width=width)
    text = short.get_help(context)
    usage = f"Usage: clusterddp {name}"
    if "[OPTIONS]" not in text.splitlines()[0]:
        text = text.replace(usage, f"{usage} [OPTIONS]", 1)
    lines = ["```text", *_narrow(text.splitlines()), "```", ""]
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            lines += [f"### {name} {inner}", "", *_help(found, inner, context)]
    return lines


def _is_common(option: click.Parameter) -> bool:
    words = set(getattr(option.type, "choices", ()))
    return option.name in ("runs_dir", "profile") or (option.name == "output" and words == {"text", "json"})


def _narrow(lines: Sequence[str]) -> Iterator[str]:
    """Put the comments of examples above their commands, where a paragraph has a line that is too wide."""
    for _, paragraph in itertools.groupby(lines, key=bool):
        part = list(paragraph)
        wide = max(map(len, part)) > CODE_WIDTH
        for line in part:
            example = re.fullmatch(r"( +)(\S.*?) {2,}(\S.*)", line) if wide else None
            yield from (f"{example[1]}# {example[3]}", f"{example[1]}{example[2]}") if example else (line,)


def _tree(kind: type[errors.ClusterddpError], depth: int) -> Iterator[tuple[type[errors.ClusterddpError], int]]:
    yield kind, depth
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _tree(below, depth + 1)


def _variables(texts: Mapping[str, str]) -> list[str]:
    return [*items(texts), ""]
