"""Which commands run on a login node: the profile decides, or the run; and what of this shell goes along."""

from __future__ import annotations

import functools
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.login_streams import Output, RunNote
from clusterddp.cli.terminal import Terminal, say
from clusterddp.errors import RunNotFoundError, SpecError, SshError, UsageError
from clusterddp.login.record import SentRun, find_sent_run, list_sent_runs, write_sent_run
from clusterddp.run.directory import find_run
from clusterddp.run.sweep_dir import find_sweep

if TYPE_CHECKING:
    from clusterddp.login.commands import Errand, Word
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.ssh_section import Login

_F = TypeVar("_F", bound=Callable[..., Any])
_AT_LOGIN = "CLUSTERDDP_AT_LOGIN"
_SPEC, _CONFIG = "spec.yaml", "config.yaml"
_STARTING = frozenset({"submit", "rerun", "resume"})
"""Commands that write the name of a run, or of a sweep, as the first line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A login node, and the profile that names it."""

    profile: str
    login: Login
    secrets: tuple[str, ...] = ()


def profile_option(function: _F) -> _F:
    """Declare `--profile NAME`."""
    return click.option(
        "--profile", metavar="NAME", help="Where to run: a profile of ~/.config/clusterddp/config.yaml."
    )(function)


def works_at_login(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command about runs go where its run is: to the login node of --profile, or to that of the run itself.

    A run that is not known here is looked for on the login node of the default profile.
    """

    @functools.wraps(function)
    def decide(*, profile: str | None, **values: Any) -> Any:
        context = click.get_current_context()
        terminal: Terminal = context.obj
        if _AT_LOGIN in terminal.environ:
            return function(**values)
        if profile is not None:
            return _go(demand_node(profile, terminal), context, {})
        if "names" in values:
            return _each_where_it_is(function, context, values)
        if values["name"] is None:
            result = function(**values)
            _say_what_is_elsewhere(values["runs_dir"], quiet=values.get("output") == "json")
            return result
        return _where_it_is(function, context, values)

    return profile_option(decide)


def find_node(profile: str | None, terminal: Terminal) -> Node | None:
    """Find the login node of a profile, by default of the default one; None: it has none, or we are there."""
    if _AT_LOGIN in terminal.environ:
        return None
    from clusterddp.spec.profiles import read_profile_login

    found = read_profile_login(terminal.environ, profile)
    return Node(profile=found[0], login=found[1]) if found else None


def demand_node(profile: str, terminal: Terminal) -> Node:
    """Find the login node of a profile.

    Raises: UsageError: it has none.
    """
    node = find_node(profile, terminal)
    if node is None:
        hint = f"without --profile this is asked here; `login: HOST` below profiles.{profile} of the configuration"
        raise UsageError(f"profile {profile} names no login node", hint=hint)
    return node


def start_at_login(node: Node, resolved: ResolvedSpec | None, *, runs_dir: Path, discard: bool) -> int:
    """Run the command that is being run, which has read a spec, on the login node, with its code."""
    from clusterddp.login.commands import Errand, Sent, plan_code
    from clusterddp.spec.profiles import config_path

    context = click.get_current_context()
    terminal: Terminal = context.obj
    if resolved is None:
        return _go(node, context, {})
    code = plan_code(resolved.job, working_dir=Path.cwd(), runs_dir=runs_dir.absolute(), environ=terminal.environ)
    config = config_path(terminal.environ)
    files = {_SPEC: resolved.text, _CONFIG: config.read_text() if config else ""}
    errand = Errand(
        arguments=_words(context, {"spec": Sent(_SPEC)}, ["--profile", node.profile]),
        variables=_variables(terminal, resolved.job.secrets) | {"CLUSTERDDP_CONFIG": Sent(_CONFIG)},
        code=code,
        files=files,
        discard=discard,
    )
    return _run(Node(profile=node.profile, login=node.login, secrets=resolved.job.secrets), errand, context)


def ask_login(node: Node, arguments: Sequence[str]) -> bytes:
    """Run a command on the login node for what it writes to standard output.

    Raises: click.exceptions.Exit: with its exit code, when that is not 0.
    """
    from clusterddp.login.commands import Errand

    context = click.get_current_context()
    said = bytearray()
    errand = Errand(arguments=arguments, variables=_variables(context.obj, ()))
    if code := _run(node, errand, context, write_out=said.extend):
        raise click.exceptions.Exit(code)
    return bytes(said)


def _go(node: Node, context: click.Context, changed: Mapping[str, Any]) -> int:
    """Run the command that is being run on the login node, about a run that is there."""
    from clusterddp.login.commands import Errand

    variables = _variables(context.obj, node.secrets)
    return _run(node, Errand(arguments=_words(context, changed, []), variables=variables), context)


def _run(
    node: Node, errand: Errand, context: click.Context, *, write_out: Callable[[bytes], object] | None = None
) -> int:
    from clusterddp.login.commands import run_at_login

    terminal: Terminal = context.obj
    note = None
    if context.info_name in _STARTING and not context.params.get("dry_run"):
        note = RunNote(lambda run: _note(node, run, context.params["runs_dir"]))
    output = Output(context.params, note)
    code = run_at_login(
        node.login,
        errand,
        environ=terminal.environ,
        write_out=write_out or output.write_out,
        write_err=output.write_err,
        watch=output.watch,
    )
    output.finish()
    if code is None:
        raise _cut(node, context, errand, note)
    return code


def _cut(node: Node, context: click.Context, errand: Errand, note: RunNote | None) -> SshError:
    """Say what is known when the connection broke."""
    found, hint = "the connection broke", "try again"
    if note and note.run is None:
        found += "; whether a job was submitted is not known here"
        hint = f"clusterddp list --profile {node.profile}"
    elif note or {"name", "names"} & context.params.keys():
        found += "; that does not touch the run, which goes on"
        name = note.run if note else str(errand.arguments[-1])
        hint = f"clusterddp status {shlex.quote(name or '')} --profile {node.profile}"
    return SshError(node.login.host, "ask", found, hint=hint, dropped=True)


def _note(node: Node, run: str, runs_dir: Path) -> None:
    """Keep in mind where a run is, so that the next command finds it by its name."""
    login = node.login.model_dump(mode="json")
    write_sent_run(
        runs_dir, SentRun(run=run, profile=node.profile, login=login, secrets=node.secrets, created_ns=time.time_ns())
    )


def _node_of(sent: SentRun, terminal: Terminal) -> Node:
    """Find the login node of a run: as the profile has it now, if it still names that host.

    A host that no profile of the user's names gets none of the run's secrets.
    """
    from clusterddp.spec.ssh_section import Login

    login = Login.model_validate(sent.login)
    try:
        node = find_node(sent.profile, terminal)
    except SpecError:  # there is no such profile any more
        node = None
    if node is None or node.login.host != login.host:
        return Node(profile=sent.profile, login=login)
    login = node.login.model_copy(update={"runs_dir": login.runs_dir})
    return Node(profile=sent.profile, login=login, secrets=sent.secrets)


def _where_it_is(function: Callable[..., Any], context: click.Context, values: dict[str, Any]) -> Any:
    """Run a command about one run."""
    if sent := find_sent_run(values["runs_dir"], values["name"]):
        return _go(_node_of(sent, context.obj), context, {"name": sent.name_there(values["name"])})
    try:
        return function(**values)
    except RunNotFoundError:
        node = find_node(None, context.obj)
        if node is None:
            raise
    return _go(node, context, {})


def _each_where_it_is(function: Callable[..., Any], context: click.Context, values: dict[str, Any]) -> int:
    """Run a command about several runs, here and on login nodes; return the worst exit code."""
    terminal, runs_dir = context.obj, values["runs_dir"]
    here: list[str] = []
    there: dict[str, tuple[Node, list[str]]] = {}
    for name in values["names"]:
        sent = find_sent_run(runs_dir, name)
        node = _node_of(sent, terminal) if sent else None
        if node is None and not _is_here(runs_dir, name):
            node = find_node(None, terminal)
        if node is None:
            here.append(name)
        else:
            there.setdefault(f"{node.login.host} {node.login.runs_dir}", (node, []))[1].append(
                sent.name_there(name) if sent else name
            )
    codes = [_go(node, context, {"names": tuple(names)}) for node, names in there.values()]
    if here:
        codes.append(function(**values | {"names": tuple(here)}))
    return max(codes)


def _is_here(runs_dir: Path, name: str) -> bool:
    try:
        return bool(find_sweep(runs_dir, name) or find_run(runs_dir, name))
    except RunNotFoundError:
        return False


def _say_what_is_elsewhere(runs_dir: Path, *, quiet: bool) -> None:
    sent_runs = [] if quiet else list_sent_runs(runs_dir)
    for profile in dict.fromkeys(sent.profile for sent in sent_runs):
        own = [sent for sent in sent_runs if sent.profile == profile]
        count = "1 run is" if len(own) == 1 else f"{len(own)} runs are"
        say(f"{count} on {own[-1].login['host']}: clusterddp list --profile {profile}")


def _words(context: click.Context, changed: Mapping[str, Any], more: list[str]) -> list[Word]:
    """Write the command that is being run as words, with some values changed, without what means something here."""
    options: list[Word] = []
    arguments: list[Word] = []
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
            arguments += values
        elif isinstance(param, click.Option) and param.is_flag:
            options += [param.opts[-1]] if value else []
        else:
            options += [word for each in values for word in (param.opts[-1], str(each))]
    return [context.info_name or "", *options, *more, "--", *arguments]


def _variables(terminal: Terminal, secrets: Sequence[str]) -> dict[str, Word]:
    """Choose what goes along of this shell: values of the spec, the run's secrets by name, how text is shown."""
    environ = terminal.environ
    chosen: dict[str, Word] = {name: environ[name] for name in secrets if name in environ}
    chosen |= {name: value for name, value in environ.items() if name.startswith("CLUSTERDDP__")}
    chosen["CLUSTERDDP_CONFIG"] = ""
    if terminal.debug:
        chosen["CLUSTERDDP_DEBUG"] = "1"
    if terminal.no_color:
        chosen["NO_COLOR"] = "1"
    elif terminal.color or (sys.stdout.isatty() and sys.stderr.isatty()):
        chosen["FORCE_COLOR"] = "1"
    return chosen
