"""Commands that run on a login node, by --profile or because their run is there, and how their output is shown here."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.arguments import given_arguments
from clusterddp.cli.login_node.record import (
    AT_LOGIN,
    Node,
    SentRun,
    choose_variables,
    demand_node,
    find_node,
    find_sent_run,
    forget_sent_run,
    list_sent_runs,
    node_of_run,
    write_sent_run,
)
from clusterddp.cli.terminal import Terminal, say, say_note, writing_stdout
from clusterddp.errors import RunNotFoundError, SshError, UsageError
from clusterddp.run.find import find_run
from clusterddp.run.sweep import find_sweep
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.cli.login_node.commands import Argument, LoginCommand
    from clusterddp.spec.load import ResolvedSpec

_F = TypeVar("_F", bound=Callable[..., Any])
_STARTING = frozenset({"submit", "resume"})
"""Commands that write the name of a run, or of a sweep, as the first line."""


def profile_option(function: _F) -> _F:
    """Declare `--profile NAME`."""
    return click.option(
        "--profile", metavar="NAME", help="Where to run: a profile of ~/.config/clusterddp/config.yaml."
    )(function)


def works_at_login(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a command about runs where its run is: on the login node of --profile, or on that of the run itself.

    A run that is not here is looked for on the login node of the default profile.
    """

    @functools.wraps(function)
    def decide(*, profile: str | None, **values: Any) -> Any:
        context = click.get_current_context()
        terminal: Terminal = context.obj
        if AT_LOGIN in terminal.environ:
            return function(**values)
        if profile is not None:
            return _run_same(demand_node(profile, terminal.environ), context, {})
        if values.get("names"):
            return _run_where_they_are(function, context, values)
        if values.get("name") is None:
            result = function(**values)
            _say_runs_elsewhere(values["runs_dir"], quiet=values.get("output") == "json")
            return result
        return _run_where_it_is(function, context, values)

    return profile_option(decide)


def start_at_login(node: Node, resolved: ResolvedSpec | None, *, runs_dir: Path, discard: bool) -> int:
    """Run the current command, which has read a spec, on the login node, with its code."""
    from clusterddp.cli.login_node.commands import SPEC, plan_command

    context = click.get_current_context()
    terminal: Terminal = context.obj
    if resolved is None:
        return _run_same(node, context, {})
    node = Node(profile=node.profile, login=node.login, secrets=resolved.job.all_secrets)
    login_command = plan_command(
        resolved,
        given_arguments(context, {"spec": {"file": SPEC}}, ["--profile", node.profile]),
        _variables(terminal, node),
        runs_dir=runs_dir,
        environ=terminal.environ,
        discard=discard,
    )
    for note in login_command.code.notes if login_command.code else ():
        say_note(note)
    return _run(node, login_command, context)


def ask_login(node: Node, arguments: Sequence[str]) -> bytes:
    """Run a command on the login node, and return its standard output.

    Raises: click.exceptions.Exit: with its exit code, when that is not 0.
    """
    from clusterddp.cli.login_node.commands import LoginCommand

    context = click.get_current_context()
    answer = bytearray()
    login_command = LoginCommand(arguments=arguments, variables=_variables(context.obj, node))
    if code := _run(node, login_command, context, write_out=answer.extend):
        raise click.exceptions.Exit(code)
    return bytes(answer)


def submit_again_at_login(node: Node, name: str) -> int:
    """Run the current `submit` of an earlier run on the login node that has this run, by its name there."""
    return _run_same(node, click.get_current_context(), {"spec": name})


def node_of_all(
    names: Sequence[str], runs_dir: Path, profile: str | None, environ: Mapping[str, str]
) -> tuple[Node, tuple[str, ...]] | None:
    """Find the login node that has all these runs, and their names there; None: they are here.

    Raises: UsageError: they are in several places, and a command about all of them together reads one place.
    """
    if AT_LOGIN in environ:
        return None
    if profile is not None:
        return demand_node(profile, environ), tuple(names)
    places = _places_of(names, runs_dir, environ)
    if len(places) > 1:
        where = [f"on {node.login.host}" if node else "here" for node, _ in places]
        raise UsageError(f"these runs are in several places: {', '.join(where)}", hint="name runs of one place")
    ((node, names_there),) = places
    return (node, names_there) if node else None


def _places_of(
    names: Sequence[str], runs_dir: Path, environ: Mapping[str, str]
) -> list[tuple[Node | None, tuple[str, ...]]]:
    """Return each login node that has some of these runs, with their names there; None for those that are here."""
    places: dict[str, tuple[Node | None, list[str]]] = {}
    for name in names:
        node, name_there = None, name
        if sent := find_sent_run(runs_dir, name):
            node, name_there = node_of_run(sent, environ), sent.name_there(name)
        else:
            try:
                _ = find_sweep(runs_dir, name) or find_run(runs_dir, name)
            except RunNotFoundError:
                node = find_node(None, environ)
        key = f"{node.login.host} {node.login.runs_dir}" if node else ""
        places.setdefault(key, (node, []))[1].append(name_there)
    return [(node, tuple(of_place)) for node, of_place in places.values()]


class _Output:
    """The output of a command on the login node, as it appears here; the name of a run that starts there is recorded.

    Its first line has the name then, alone or in JSON; `run` is None until that line is complete.
    """

    def __init__(self, node: Node, params: Mapping[str, Any], *, starts: bool) -> None:
        on_terminal = sys.stdout.isatty()
        self.run: str | None = None
        self._node, self._runs_dir = node, Path(params.get("runs_dir", "runs"))
        self._awaits_name = starts
        # The login node does not know of this terminal; a line on stderr has named the run already.
        self._hides_name = on_terminal and params.get("output") != "json"
        # Control characters that ranks print must not reach the terminal.
        self._escapes = on_terminal and ("tail_lines" in params or params.get("follow")) and not params.get("raw")
        self._line = b""

    def write_out(self, data: bytes) -> None:
        if not self._awaits_name and not self._escapes:
            self._put(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if self._awaits_name:
                self._awaits_name = False
                self._record(line.decode(errors="replace"))
                if not self._hides_name:
                    self._put(line + b"\n")
            else:
                self._put((printable(line.rstrip(b"\r")).encode() if self._escapes else line) + b"\n")
        if not self._awaits_name and not self._escapes:
            self.finish()

    def finish(self) -> None:
        """Write what there is of the last line."""
        if self._line and not self._awaits_name:
            self._put(printable(self._line).encode() if self._escapes else self._line)
        self._line = b""

    def _record(self, line: str) -> None:
        with contextlib.suppress(ValueError, AttributeError):  # it is no JSON, or a name that reads as a number
            found = json.loads(line)
            line = str(found.get("run") or found.get("sweep"))
        self.run = line
        node, login = self._node, self._node.login.model_dump(mode="json")
        sent = SentRun(run=line, profile=node.profile, login=login, secrets=node.secrets, created_ns=time.time_ns())
        write_sent_run(self._runs_dir, sent)

    def _put(self, data: bytes) -> None:
        with writing_stdout():
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def _run_same(node: Node, context: click.Context, changed: Mapping[str, Any]) -> int:
    """Run the current command on the login node, with some values changed."""
    from clusterddp.cli.login_node.commands import LoginCommand, exec_at_login

    arguments = given_arguments(context, changed, [])
    if context.info_name == "exec":
        return exec_at_login(node.login, [str(each) for each in arguments], environ=context.obj.environ)
    return _run(node, LoginCommand(arguments=arguments, variables=_variables(context.obj, node)), context)


def _run(
    node: Node,
    login_command: LoginCommand,
    context: click.Context,
    *,
    write_out: Callable[[bytes], object] | None = None,
) -> int:
    from clusterddp.cli.login_node.commands import run_at_login

    params = context.params
    starts = context.info_name in _STARTING and not params.get("dry_run")
    output = _Output(node, params, starts=starts)
    code = run_at_login(
        node.login,
        login_command,
        environ=context.obj.environ,
        write_out=write_out or output.write_out,
        report=say,
    )
    output.finish()
    if code is not None:
        return code
    run, words = output.run, list(login_command.arguments)
    if not starts and (params.get("name") or params.get("names")) and "--" in words:
        run = str(words[words.index("--") + 1])
    found, hint = "the connection broke", "try again"
    if run is not None:
        found += "; the run goes on"
        hint = f"clusterddp status {shlex.quote(run)} --profile {node.profile}"
    elif starts:
        found += "; whether a job was submitted is not known here"
        hint = f"clusterddp list --profile {node.profile}"
    raise SshError(node.login.host, "ask", found, hint=hint, dropped=True)


def _run_where_it_is(function: Callable[..., Any], context: click.Context, values: dict[str, Any]) -> Any:
    """Run a command about one run."""
    if sent := find_sent_run(values["runs_dir"], values["name"]):
        return _run_same(node_of_run(sent, context.obj.environ), context, {"name": sent.name_there(values["name"])})
    try:
        return function(**values)
    except RunNotFoundError:
        node = find_node(None, context.obj.environ)
        if node is None:
            raise
    return _run_same(node, context, {})


def _run_where_they_are(function: Callable[..., Any], context: click.Context, values: dict[str, Any]) -> int:
    """Run a command about several runs, here and on login nodes; return the worst exit code."""
    runs_dir, codes = values["runs_dir"], list[int]()
    places = _places_of(values["names"], runs_dir, context.obj.environ)
    for node, names in sorted(places, key=lambda place: place[0] is None):
        if node is None:
            codes.append(function(**values | {"names": names}))
            continue
        codes.append(_run_same(node, context, {"names": names}))
        if context.info_name == "rm" and not values["dry_run"] and not codes[-1]:
            for name in names:
                forget_sent_run(runs_dir, name)
    return max(codes)


def _say_runs_elsewhere(runs_dir: Path, *, quiet: bool) -> None:
    sent_runs = [] if quiet else list_sent_runs(runs_dir)
    for profile in dict.fromkeys(sent.profile for sent in sent_runs):
        own = [sent for sent in sent_runs if sent.profile == profile]
        count = "1 run is" if len(own) == 1 else f"{len(own)} runs are"
        say(f"{count} on {own[-1].login['host']}: clusterddp list --profile {profile}")


def _variables(terminal: Terminal, node: Node) -> dict[str, Argument]:
    color = terminal.color
    if color is None and sys.stdout.isatty() and sys.stderr.isatty():
        color = True
    return {**choose_variables(terminal.environ, node.secrets, debug=terminal.debug, color=color)}
