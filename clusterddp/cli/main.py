"""The entry point `clusterddp`: the index of all commands, and how an error is printed."""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from clusterddp import __version__
from clusterddp.cli.terminal import HELP_OPTIONS, Terminal, say, say_error, writing_stdout
from clusterddp.errors import NOT_SUBMITTED, ClusterddpError, SpecError, UsageError

_DAILY, _BEFORE, _HANGS, _RESULTS, _OTHERS, _OWN = (
    *("Every day", "Before a run", "When it hangs", "Results", "Other launchers", "This command"),
)
_COMMANDS = {
    "submit": ("submit", _DAILY, "start what a spec describes, or the spec of an earlier run again"),
    "status": ("runs", _DAILY, "show one run: state, progress, ranks, why it failed"),
    "logs": ("runs", _DAILY, "show what ranks printed"),
    "list": ("list_", _DAILY, "show all runs, newest first"),
    "cancel": ("runs", _DAILY, "end runs"),
    "resume": ("submit", _DAILY, "continue a run from its newest checkpoint"),
    "wait": ("runs", _DAILY, "wait until a run has ended"),
    "hold": ("submit", _DAILY, "keep the machines of a spec; submit --in starts runs there in seconds"),
    "init": ("init", _BEFORE, "write a commented spec to start from"),
    "import": ("import_", _BEFORE, "write a spec from a batch script, a hostfile, a config of another launcher"),
    "doctor": ("doctor", _BEFORE, "look at this machine, the cluster and its nodes before a run"),
    "hosts": ("hosts", _BEFORE, "list the hosts that SSH reaches, and check them"),
    "demo": ("setup", _BEFORE, "two ranks learn on this machine, in under a minute"),
    "stacks": ("stacks", _HANGS, "show where each rank is: who waits for whom, and why a run hangs"),
    "exec": ("exec_", _HANGS, "run a command, or a shell, beside a running rank, on its machine and in its job"),
    "ps": ("ps", _HANGS, "show the processes of runs on this machine or on hosts, and those without a supervisor"),
    "nodes": ("nodes", _HANGS, "list the nodes that later runs leave out, and why; let them in again"),
    "gc": ("ps", _HANGS, "kill orphaned processes of runs on this machine or on hosts"),
    "report": ("report", _RESULTS, "write a page about runs: curves, what differs, attempts, ranks, why it failed"),
    "dash": ("dash", _RESULTS, "serve live pages about all runs for a browser on this machine"),
    "compare": ("report", _RESULTS, "show what differs between runs, and their results"),
    "rm": ("removal", _RESULTS, "remove runs that have ended"),
    "worker": ("worker", _OTHERS, "take part in a run: a rank of torchrun, srun, mpirun, or a machine of ssh.hosts"),
    "manifest": ("import_", _OTHERS, "print a Kubeflow PyTorchJob that runs a spec"),
    "help": ("help_", _OWN, "print a page of the reference: exit codes, keys of a spec, variables, launchers"),
    "schema": ("setup", _OWN, "print the JSON Schema of a spec, for editors"),
    "completion": ("setup", _OWN, "print the completion script of a shell"),
}
"""Command -> its module in this package, the group in `--help`, what it does."""

_TYPED = (
    ("run, start, launch, train, sbatch", "clusterddp submit SPEC starts a run"),
    ("show, info, describe, get, watch, job", "clusterddp status RUN shows a run; with --watch, until it has ended"),
    ("drain, exclude, blacklist, undrain, sinfo", "clusterddp nodes lists the nodes that your runs leave out"),
    ("top", "clusterddp status RUN --watch shows a run; clusterddp dash shows all in a browser"),
    ("ls, queue, squeue, jobs, runs, history, sacct", "clusterddp list shows all runs"),
    ("log, tail, output", "clusterddp logs RUN --follow shows what a run prints"),
    ("attach", "clusterddp logs RUN --follow shows what a run prints, clusterddp exec RUN opens a shell beside it"),
    ("stop, kill, scancel, abort, end", "clusterddp cancel RUN ends a run; cancel --all, all of them"),
    ("delete, remove, del, purge", "clusterddp rm RUN removes a run that has ended"),
    ("clean, cleanup", "clusterddp rm RUN removes a run that has ended; clusterddp gc kills orphaned processes"),
    ("ssh, shell, bash", "clusterddp exec RUN opens a shell beside rank 0, with --rank N beside another one"),
    ("debug", "clusterddp stacks RUN shows where each rank is; clusterddp exec RUN opens a shell beside rank 0"),
    ("salloc, reserve, alloc", "clusterddp hold SPEC keeps machines, submit --in HOLD starts runs there"),
    ("restart, continue", "clusterddp resume RUN continues a run, clusterddp submit RUN repeats it"),
    ("rerun, resubmit", "clusterddp submit RUN starts the spec of an earlier run again"),
    ("sweep", "clusterddp submit SPEC KEY=A,B --sweep makes a run of each value"),
    ("check, plan, dryrun", "clusterddp submit SPEC -n shows the plan, clusterddp doctor looks at the machines"),
    ("explain", "clusterddp submit SPEC -n -v shows each variable of rank 0, its value and where that comes from"),
    ("config", "clusterddp help spec lists the keys of a spec, clusterddp submit SPEC -n -v shows their values"),
    ("version", "clusterddp --version prints it"),
    ("share", "chgrp and chmod open a run to a group: docs/storage.md#runs-for-a-group"),
    ("du", "clusterddp list --wide shows how much disk each run takes, clusterddp rm -n what would be freed"),
    ("relay", "your script calls W&B, MLflow or Trackio: docs/trackers.md"),
    ("hosts trust", "type ssh HOST once: it shows the fingerprint, asks, and keeps the key"),
    ("join", "type clusterddp worker SPEC on each machine of ssh.hosts"),
)
_INSTEAD = {word: hint for words, hint in _TYPED for word in words.split(", ")}
"""What people type who know another program, or an earlier version -> what to type instead, in a sentence."""

_STARTING = {"submit", "resume", "hold", "worker", "demo"}
"""Commands that submit a run."""
_SCRIPTS = {".slurm", ".sbatch", ".sh"}

WITHOUT_JSON = {
    "demo": "its run is one like any other: `status -o json` has it",
    "init": "writes a spec",
    "import": "prints a spec; `-o` names the file for it",
    "manifest": "prints a manifest",
    "worker": "standard output is the rank's",
    "exec": "standard output is the command's",
    "dash": "serves pages until Ctrl-C",
    "help": "prints a page of the reference",
    "schema": "prints a JSON Schema",
    "completion": "prints a script for a shell",
}
"""Command -> why it has no `-o json`; every other command has it."""

_EXAMPLES = """\
Start here:
  clusterddp demo                       two ranks on this machine, under a minute
  clusterddp init                       write a commented job.yaml
  clusterddp submit job.yaml --follow   run it and watch rank 0
"""

_NOTES = """
A run, or a sweep of runs, is named by its name, the beginning of it, @last, or its directory.
Exit codes: 0 ok, 1 error, 2 wrong usage or spec, 3 machines not ready, 4 no such run,
            5 the run failed, 6 it was cancelled, 130 Ctrl-C
More: clusterddp help
"""

_INTERRUPTED = 128 + 2
_BROKEN_PIPE = 128 + 13
EXIT_CODES = {
    0: "It worked. With --wait, --follow and wait: the run completed. status, logs and list exit with 0 in whatever "
    "state the run is.",
    1: "An error of clusterddp or of the machine, such as a full disk. wait: --timeout is over.",
    2: "Wrong usage, or the spec is wrong.",
    3: "The machines are not ready: too few GPUs, torch is missing, Slurm refuses the job or does not answer, the "
    "connection to a login node breaks. doctor: something is red. hosts, ps, gc: a host cannot be reached, or shows "
    "the wrong key.",
    4: "No such run.",
    5: "The run failed (submit --wait, submit --follow, wait, demo). demo: also below 95 %.",
    6: "The run was cancelled, or stopped at a checkpoint.",
    _INTERRUPTED: "Ctrl-C.",
    _BROKEN_PIPE: "Broken pipe: the reader of the output has ended (clusterddp list | head -1).",
}
"""Exit code -> its meaning, for scripts; docs/reference/errors.md is made of it."""


class CommandIndex(click.Group):
    """The group of all commands; each is imported when it runs, so that `--help` and TAB load nothing heavy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module_name, _, summary = _COMMANDS[cmd_name]
        module = importlib.import_module(f"clusterddp.cli.{module_name}")
        command: click.Command = module.COMMANDS[cmd_name]
        command.short_help = summary
        # click keeps the help option's names of the first context that is made.
        command.context_settings.setdefault("help_option_names", HELP_OPTIONS)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click's own "did you mean" looks only at commands that were imported.
        for name in (args[0], " ".join(args[:2])):
            if name in _INSTEAD:
                raise UsageError(f'no such command "{name}"', hint=_INSTEAD[name])
        if args[0] not in _COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            if hint := _hint_for_file(Path(args[0])):
                raise UsageError(f'no such command "{args[0]}"', hint=hint)
            matches = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            question = f' Did you mean "{matches[0]}"?' if matches else ""
            raise click.UsageError(f'no such command "{args[0]}".{question}', ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecError as error:
            name = ctx.invoked_subcommand or ""
            if error.result != NOT_SUBMITTED or name in _STARTING:
                raise
            raise SpecError(error.problems, "nothing was imported" if name == "import" else "") from error

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("clusterddp - run PyTorch DDP jobs from one YAML file\n\n")
        formatter.write("Usage: clusterddp [OPTIONS] COMMAND [ARGS]...\n\n")
        formatter.write(_EXAMPLES)
        for group in dict.fromkeys(group for _, group, _ in _COMMANDS.values()):
            formatter.write(f"\n{group}:\n")
            for name, (_, of_group, summary) in _COMMANDS.items():
                if of_group == group:
                    formatter.write(f"  {name:<12}{summary}\n")
        # click's format_options would add the list of commands.
        records = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(records)
        formatter.write(_NOTES)


@click.group(cls=CommandIndex, context_settings={"help_option_names": HELP_OPTIONS, "max_content_width": 100})
@click.version_option(__version__, prog_name="clusterddp", message="%(prog)s %(version)s")
@click.option("--no-color", is_flag=True, help="No colour (so do NO_COLOR and TERM=dumb).")
@click.option("--debug", is_flag=True, help="Show the traceback of an error (so does CLUSTERDDP_DEBUG=1).")
@click.pass_context
def cli(ctx: click.Context, *, no_color: bool, debug: bool) -> None:
    """Run PyTorch DDP jobs from one YAML file."""
    terminal: Terminal = ctx.obj
    terminal.debug = terminal.debug or debug
    terminal.no_color = terminal.no_color or no_color
    ctx.color = terminal.color


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        return _run_and_report(
            list(sys.argv[1:] if arguments is None else arguments) or ["--help"], Terminal(os.environ)
        )
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # how the interrupted start ended
            say(str(interrupt))
        return _INTERRUPTED


def _run_and_report(arguments: list[str], terminal: Terminal) -> int:
    _prepare_streams()
    try:
        exit_code = _run(arguments, terminal)
        with writing_stdout():
            sys.stdout.flush()
        return exit_code
    except BrokenPipeError:
        _drop_stdout()
        return _BROKEN_PIPE
    except Exception as error:
        with click.Context(cli) as context:
            context.color = terminal.color
            exit_code = _print_error(error, terminal, arguments)
        try:
            sys.stdout.flush()
        except OSError:  # the error may be this one, which is printed already
            _drop_stdout()
        return exit_code


def _run(arguments: list[str], terminal: Terminal) -> int:
    completion = terminal.environ.get("_CLUSTERDDP_COMPLETE")
    if completion:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {"obj": terminal}, "clusterddp", "_CLUSTERDDP_COMPLETE", completion)
    try:
        with cli.make_context("clusterddp", arguments, obj=terminal) as context:
            exit_code = cli.invoke(context)
    except click.exceptions.Exit as end:  # --help, --version
        return end.exit_code
    return exit_code if isinstance(exit_code, int) else 0


def _print_error(error: Exception, terminal: Terminal, arguments: Sequence[str]) -> int:
    """Print the error that ended the command; return its exit code."""
    if terminal.debug:
        traceback.print_exception(error)
    if isinstance(error, SpecError):
        from clusterddp.spec.tree import format_spec_error

        say(format_spec_error(error))
        return error.exit_code
    if isinstance(error, ClusterddpError):
        say_error(error.message, hint=error.hint)
        return error.exit_code
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        message = error.format_message()
        message = message[:1].lower() + message[1:].rstrip(".")
        hint = f"{context.command_path} --help" if context else None
        if context and isinstance(error, click.NoSuchOption):
            instead = _option_hint(error.option_name, context, arguments)
            message = f"no such option {error.option_name}" if instead else message
            hint = f"{instead}; {hint}" if instead else hint
        say_error(message, hint=hint)
        return error.exit_code
    if isinstance(error, OSError) and not str(error.filename or "").startswith("/") and _is_directory_gone():
        say_error("the working directory is gone: it was removed, or its file system is away", hint="cd to another one")
        return 1
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        say_error(f"{where}{error.strerror}", hint="--debug shows where")
        return 1
    say_error(
        f"internal: {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}",
        hint="a bug of clusterddp; CLUSTERDDP_DEBUG=1 shows the traceback for a report",
    )
    return 1


def _is_directory_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return True
    return False


_OPTIONS = {
    **dict.fromkeys(["json", "format"], "-o json prints JSON"),
    **dict.fromkeys(["set", "override"], "values need no option: clusterddp submit SPEC KEY=VALUE"),
    "config": "the spec needs no option: clusterddp submit SPEC",
    "yes": "leave it out, this command asks nothing",
    "dryrun": "-n, or --dry-run, shows the plan",
    "attach": "--follow shows what rank 0 prints; clusterddp cancel RUN ends the run",
    "watch": "--follow shows what rank 0 prints; clusterddp status RUN --watch shows the ranks",
}
"""Option that other programs have, without its hyphens -> what to type instead, in a sentence."""


def _option_hint(option: str, context: click.Context, arguments: Sequence[str]) -> str | None:
    """Return what to type for an option that the command does not have; it may be meant for the user's program."""
    name = option.lstrip("-")
    names = {param.name: param.opts[-1] for param in context.command.params if isinstance(param, click.Option)}
    values = [
        word.removeprefix(f"{option}=") if word.startswith(f"{option}=") else following
        for word, following in itertools.pairwise([*arguments, ""])
        if word.partition("=")[0] == option
    ]
    value = shlex.quote(values[0]) if values and values[0] and not values[0].startswith("-") else "..."
    if name == "n" and (number := names.get("limit") or names.get("tail_lines")):
        return f"{number} {value}; -n is --dry-run, where a command has one"
    if name == "json" and context.info_name in WITHOUT_JSON:
        return f"there is no JSON: {context.info_name} {WITHOUT_JSON[context.info_name]}"
    if name in _OPTIONS:
        return _OPTIONS[name]
    if option.startswith("--") and any(param.name == "overrides" for param in context.command.params):
        from clusterddp.spec.keys import key_of_option

        key = key_of_option(name)
        return f"{key}={value}" if key else f"entry.args.{name}={value} sets {option} of your program"
    return None


def _hint_for_file(path: Path) -> str | None:
    """Return what to type for a file that stands in place of a command."""
    name = shlex.quote(str(path))
    if path.suffix == ".py":
        return f"clusterddp init --script {name} writes a spec that runs it, clusterddp submit starts that"
    return f"clusterddp submit {name}" if path.suffix in {".yaml", ".yml", *_SCRIPTS} or path.is_file() else None


def _prepare_streams() -> None:
    """Open standard streams that are closed, and escape characters that their encoding lacks."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed (`>&-`): the next file that is opened must not take its place
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Redirect standard output to /dev/null, so that Python reports no error when it closes it."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
