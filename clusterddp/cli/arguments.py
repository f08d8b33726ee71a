"""Arguments and options that several commands share (SPEC, RUN, hosts, `--runs`, `-o`, where a run is started).

The types of their values are here too, with how a shell completes them.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from clusterddp.cli.terminal import HELP_OPTIONS, Terminal
from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_places, list_runs, newest_run
from clusterddp.run.seal import is_ours
from clusterddp.run.sweep import sweep_of
from clusterddp.system.units import parse_age

if TYPE_CHECKING:
    from clusterddp.cli.login_command import Argument
    from clusterddp.spec.layers import Override

_F = TypeVar("_F", bound=Callable[..., Any])
PLANNED_NAME = "RUN"
"""Stands for the name of the run in a plan that is only shown; the name is chosen at the submit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a run is started, as the options of the command line ask for it; they override its spec."""

    launcher: str | None = None
    cpu: bool = False
    hosts: str | None = None
    hostfile: Path | None = None

    @property
    def names_hosts(self) -> bool:
        return self.hosts is not None or self.hostfile is not None

    @property
    def flags(self) -> dict[str, str]:
        """The values of the spec that these options set."""
        launcher = self.launcher or ("ssh" if self.names_hosts else None)
        return ({"launcher": launcher} if launcher else {}) | ({"device": "cpu"} if self.cpu else {})

    def read_hosts(self) -> Override | None:
        """Read the hosts that the options name; None when they name none.

        Raises: UsageError: two options name them, or the launcher takes no hosts. SpecError: the hostfile names none.
        """
        from clusterddp.spec.hosts import parse_hosts, read_hostfile

        if not self.names_hosts:
            return None
        option = "--hosts" if self.hosts is not None else "--hostfile"
        if self.hosts is not None and self.hostfile is not None:
            raise click.UsageError("--hosts and --hostfile both name the hosts, expected one of them")
        if self.launcher not in (None, "ssh"):
            raise click.UsageError(f"{option} names hosts for launcher ssh, and --launcher is {self.launcher}")
        return read_hostfile(self.hostfile) if self.hostfile is not None else parse_hosts(self.hosts or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """What the commands that start ranks share: where the runs lie, and how long the command stays with its run."""

    runs_dir: Path
    output: str
    follow: bool = False
    wait: bool = False
    dry_run: bool = False
    verbose: bool = False
    hold: str | None = None
    """The hold to start it in."""


END_OF_OPTIONS = "--"
_ASSIGNMENT = re.compile(r"[+~]?[A-Za-z_][\w.-]*=")
_HOST = re.compile(r"[A-Za-z0-9][\w.,\[\]-]*")


class Command(click.Command):
    """A command whose KEY=VALUE arguments may stand before its first argument, too."""

    keeps_end_of_options = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = [param for param in self.params if isinstance(param, click.Argument)]
        if ctx.resilient_parsing or not any(param.name == "overrides" for param in arguments):
            return super().parse_args(ctx, args)
        at = args.index(END_OF_OPTIONS) if END_OF_OPTIONS in args else len(args)
        given, _, _ = self.make_parser(ctx).parse_args(args[:at])
        # What is not given is an object of click's own.
        words = list(given["overrides"]) if isinstance(given["overrides"], tuple) else []
        first = given.get(arguments[0].name or "")
        if at < len(args) and self.keeps_end_of_options and isinstance(first, str):  # click leaves the first one out
            args = [*args[:at], END_OF_OPTIONS, *args[at:]]
        rest = super().parse_args(ctx, args)
        if isinstance(first, str) and _ASSIGNMENT.match(first) and not Path(first).exists():
            meant = next((word for word in words if not _ASSIGNMENT.match(word)), None)
            if meant is None:
                metavar = arguments[0].make_metavar(ctx)
                hint = " ".join([ctx.command_path, metavar, first, *words])
                raise UsageError(f"{first}: is a value for a spec, and {metavar} is missing", hint=hint)
            overrides = [first, *ctx.params["overrides"]]
            overrides.remove(meant)
            ctx.params |= {arguments[0].name: arguments[0].type_cast_value(ctx, meant), "overrides": tuple(overrides)}
        stray = next((word for word in ctx.params["overrides"] if word == END_OF_OPTIONS or "=" not in word), None)
        if isinstance(given.get("hosts"), str) and stray and _HOST.fullmatch(stray):
            hint = f"--hosts takes one word: --hosts {given['hosts']},{stray}"
            raise UsageError(f"{stray}: expected KEY=VALUE", hint=hint)
        return rest


class WithArguments(Command):
    """A command that sees the `--` after its first argument, which click leaves out."""

    keeps_end_of_options = True


def command(name: str, cls: type[click.Command] = Command) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command that also takes the options of `clusterddp` itself, which users type anywhere."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        for option, help_text in (("--no-color", "No colour."), ("--debug", "Show the traceback of an error.")):
            function = click.option(
                option, is_flag=True, hidden=True, expose_value=False, callback=_set_on_terminal, help=help_text
            )(function)
        # click keeps the help option's names of the first context that is made.
        return click.command(name, cls, context_settings={"help_option_names": HELP_OPTIONS})(function)

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
        default=_usual_runs_dir,
        is_eager=True,
        help="Directory of the runs (CLUSTERDDP_RUNS; runs_dir of clusterddp.yaml; ./runs).",
    )(function)


def output_option(function: _F) -> _F:
    """Declare `-o text|json`."""
    return click.option(
        "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Print text, or JSON for scripts."
    )(function)


def place_options(function: _F) -> _F:
    """Declare the options that choose where a run is started; the command receives them as `place`, a `Place`."""
    launchers = click.Choice(["local", "ssh", "slurm"])
    hostfile = click.Path(allow_dash=True, path_type=Path)
    return _declare(
        collected("place", Place)(function),
        click.option("--launcher", type=launchers, help="What starts the ranks; overrides the spec."),
        click.option("--cpu", is_flag=True, help="Run the same ranks on the CPU, with gloo."),
        click.option("--hosts", metavar="H,H", type=HostName(), help="Run over SSH on hosts such as gpu01,gpu[03-04]."),
        click.option(
            "--hostfile", metavar="FILE", type=hostfile,
            help="Run over SSH on the hosts of FILE: a line `host slots=N` each.",
        ),
    )  # fmt: skip


def plan_options(function: _F) -> _F:
    """Declare the options of a command that can also only plan a run."""
    return _declare(
        function,
        click.option("-n", "--dry-run", is_flag=True, help="Show the plan; start and write nothing."),
        click.option("-v", "--verbose", is_flag=True, help="With -n: show values, variables, files and commands."),
    )


def hold_option(function: _F) -> _F:
    """Declare `--in HOLD`, a field of `StartOptions`."""
    help_text = "Start it on the machines that clusterddp hold keeps."
    return click.option("--in", "hold", metavar="HOLD", type=RunName(), help=help_text)(function)


def start_options(function: _F) -> _F:
    """Declare the options of commands that start a run; the command receives them as `options`, a `StartOptions`."""
    return _declare(
        collected("options", StartOptions)(function),
        click.option("--wait", is_flag=True, help="Wait until the run has ended; exit code 0, 5 failed, 6 cancelled."),
        click.option("-f", "--follow", is_flag=True, help="Wait, and show what rank 0 prints."),
        output_option,
        runs_option,
    )


def collected(name: str, values_class: type[Any]) -> Callable[[_F], _F]:
    """Pass the options that are fields of a frozen class to a command as one value of that class."""
    fields = {field.name for field in dataclasses.fields(values_class)}

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            own = {key: values.pop(key) for key in fields & values.keys()}
            return function(**values, **{name: values_class(**own)})

        return call

    return decorate


def _usual_runs_dir() -> Path | None:
    from clusterddp.spec.layers import default_runs_dir

    ctx = click.get_current_context()
    return None if ctx.resilient_parsing else default_runs_dir(ctx.obj.environ if ctx.obj else {})


def address(run: RunDir, terminal: Terminal) -> str:
    """Return how the next command names this run: by its name, or by its path when it is not where runs usually lie."""
    from clusterddp.spec.layers import default_runs_dir

    sweep = sweep_of(run)
    place = sweep.path if sweep else run.path
    if place.parent.resolve() == default_runs_dir(terminal.environ).resolve():
        return run.name
    return shlex.quote(str(run.path.resolve()))


def _declare(function: _F, *options: Callable[[_F], _F]) -> _F:
    """Declare options, in the order in which `--help` lists them."""
    for option in reversed(options):
        function = option(function)
    return function


def _set_on_terminal(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name == "debug":
        ctx.obj.debug = True
    elif value:
        ctx.obj.no_color = True
        ctx.color = False


def given_arguments(context: click.Context, changed: Mapping[str, Any], more: list[str]) -> list[Argument]:
    """Return the current command's arguments, with some values changed, without those that are for this machine."""
    options: list[Argument] = []
    positional: list[Argument] = []
    for param in context.command.params:
        name = param.name or ""
        usual = context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
        value = changed.get(name, context.params.get(name))
        if name in ("profile", "runs_dir") or not param.expose_value or value is None:
            continue
        if usual and name not in changed:
            continue
        values = list(value) if isinstance(value, tuple | list) else [value]
        if isinstance(param, click.Argument):
            positional += values
        elif isinstance(param, click.Option) and param.is_flag:
            options += [param.opts[-1]] if value else []
        else:
            options += [text for each in values for text in (param.opts[-1], str(each))]
    return [context.info_name or "", *options, *more, "--", *positional]


class RunName(click.types.StringParamType):
    """A run or a sweep: its name, the beginning of it, `@last`, or its directory."""

    name = "run"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from clusterddp.cli.login import list_sent_runs
        from clusterddp.spec.layers import default_runs_dir

        try:
            runs_dir = ctx.params.get("runs_dir") or default_runs_dir(ctx.obj.environ if ctx.obj else {})
            places = sorted(path for path in list_places(Path(runs_dir)) if path.name.startswith(incomplete))
            names = [path.name for path in places if newest_run([RunDir(path), *list_runs(path)])]
            names += [sent.run for sent in list_sent_runs(Path(runs_dir))]  # those on clusters
            sweep = incomplete.rpartition(".")[0]
            names += [run.name for run in list_runs(Path(runs_dir, sweep)) if is_ours(run)] if sweep else []
        except (OSError, ClusterddpError):
            return []
        return [CompletionItem(name) for name in [*names, "@last"] if name.startswith(incomplete)]


class KeyValue(click.types.StringParamType):
    """`KEY=VALUE`: completed with the keys of a spec, then with the values of a key that has a fixed choice."""

    name = "key=value"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from clusterddp.spec.keys import complete_override

        # bash takes = for the end of a word: key, = and value come apart, click leaves out a = that is the last, and
        # bash replaces the value only.
        before: tuple[str, ...] = ctx.params.get(param.name or "") or ()
        words = [word for word in before[-2:] if word != "="]
        is_parted = bool(before) and (before[-1] == "=" or not ("=" in before[-1] or before[-1].startswith("~")))
        parted = f"{words[-1]}=" if is_parted and words else ""
        found = complete_override(parted + incomplete)
        return [CompletionItem(text.removeprefix(parted), help=help_text or None) for text, help_text in found]


class SpecPath(click.Path):
    """The path of a spec; `-` is standard input."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "-" else super().convert(value, param, ctx)


class SpecOrRun(SpecPath):
    """The path of a spec, or a run whose spec is meant."""

    def __init__(self) -> None:
        click.Path.__init__(self, path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete with files, and with runs where no file begins so."""
        is_file = not incomplete or any(Path().glob(f"{glob.escape(incomplete)}*"))
        runs = [] if is_file else RunName().shell_complete(ctx, param, incomplete)
        return runs or super().shell_complete(ctx, param, incomplete)


class HostName(click.types.StringParamType):
    """A host, or a host list; completed with the names of ~/.ssh/config."""

    name = "host"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from clusterddp.places.ssh.config import config_names, home

        names = config_names(home() / ".ssh" / "config")
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class Age(click.types.StringParamType):
    """An age such as 12h, 30d or 4w, as seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = value if isinstance(value, float) else parse_age(str(value))
        if seconds is None:
            self.fail(f'"{value}": expected an age of an hour or more, such as 12h, 30d or 4w', param, ctx)
        return seconds
