"""Arguments and options that several commands share: RUN, `--runs`, `-o`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from clusterddp.cli.terminal import Terminal
from clusterddp.run.directory import RunDir
from clusterddp.run.sweep_dir import SweepDir, sweep_of

_F = TypeVar("_F", bound=Callable[..., Any])
_DEFAULT_RUNS = "runs"


class RunName(click.types.StringParamType):
    """A run or a sweep: its name, the beginning of it, `@last`, or its directory."""

    name = "run"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        runs_dir = ctx.params.get("runs_dir") or default_runs_dir(ctx.obj)
        try:
            names = sorted(entry.name for entry in os.scandir(runs_dir) if not entry.name.startswith("."))
        except OSError:
            return []
        names += [path.stem for path in Path(runs_dir, ".login").glob("*.json")]  # those on clusters
        sweep = SweepDir(Path(runs_dir) / incomplete.rpartition(".")[0])
        names += sweep.run_names() if sweep.tasks.is_file() else []
        return [CompletionItem(name) for name in [*names, "@last"] if name.startswith(incomplete)]


def command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command that also takes the options of `clusterddp` itself, for they are typed anywhere."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        for option, help_text in (("--no-color", "No colour."), ("--debug", "Show the traceback of an error.")):
            function = click.option(
                option, is_flag=True, hidden=True, expose_value=False, callback=_set_on_terminal, help=help_text
            )(function)
        return click.command(name)(function)

    return decorate


def run_argument(*, default: str | None = "@last") -> Callable[[_F], _F]:
    """Declare the argument RUN; the newest run when it is left out, unless `default` is None."""
    return click.argument("name", metavar="RUN" if default is None else "[RUN]", type=RunName(), default=default)


def runs_option(function: _F) -> _F:
    """Declare `--runs DIR`."""
    return click.option(
        "--runs",
        "runs_dir",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="CLUSTERDDP_RUNS",
        default=_DEFAULT_RUNS,
        is_eager=True,
        help="Where the runs lie (CLUSTERDDP_RUNS; ./runs).",
    )(function)


def output_option(function: _F) -> _F:
    """Declare `-o text|json`."""
    return click.option(
        "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="What stdout carries."
    )(function)


def default_runs_dir(terminal: Terminal | None) -> Path:
    """Return where runs lie when the command line does not say."""
    return Path((terminal.environ.get("CLUSTERDDP_RUNS") if terminal else None) or _DEFAULT_RUNS)


def address(run: RunDir, terminal: Terminal) -> str:
    """Return how the next command names this run: by its name, or by its path when it is not where runs usually lie."""
    sweep = sweep_of(run)
    place = sweep.path if sweep else run.path
    if place.parent.resolve() == default_runs_dir(terminal).resolve():
        return run.name
    return shlex.quote(str(run.path.resolve()))


def _set_on_terminal(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name == "debug":
        ctx.obj.debug = True
    elif value:
        ctx.obj.no_color = True
        ctx.color = False
