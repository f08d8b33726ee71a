"""Commands that run on a login node, by --profile or because their run is there, and how their output is shown here.

`RUNS/.login/<run>.json` records for each run that is there which profile has its login node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp.cli.arguments import given_arguments
from clusterddp.cli.terminal import Terminal, say, say_note, writing_stdout
from clusterddp.errors import ClusterddpError, RunNotFoundError, SshError, UsageError
from clusterddp.run.directory import is_run_name
from clusterddp.run.find import created_ns, find_run, list_places, list_runs, newest_run
from clusterddp.run.seal import is_sealed, sealed
from clusterddp.run.sweep import find_sweep
from clusterddp.system.files import build_record, read_json, write_json, write_text
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.cli.login_command import Argument, LoginCommand
    from clusterddp.spec.hosts import Login
    from clusterddp.spec.load import ResolvedSpec

_F = TypeVar("_F", bound=Callable[..., Any])
_STARTING = frozenset({"submit", "resume", "hold"})
"""Commands that write the name of a run, or of a sweep, as the first line."""
FOLDER = ".login"
AT_LOGIN = "CLUSTERDDP_AT_LOGIN"
"""Set for a command that runs on a login node for a laptop: it uses no other login node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A login node, and the profile that names it."""

    profile: str
    login: Login
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SentRun:
    """A run, or a sweep, whose directory is on a cluster."""

    run: str
    profile: str
    secrets: tuple[str, ...]
    """Names of the variables whose values the run needs again when it is resumed."""
    created_ns: int

    def name_there(self, name: str) -> str:
        """Complete a name that was found to be that of this run, or of one of this sweep."""
        return name if name.startswith(f"{self.run}.") else self.run

    def node(self, environ: Mapping[str, str]) -> Node:
        """Return its login node, as the profile names it now."""
        return dataclasses.replace(demand_node(self.profile, environ), secrets=self.secrets)


def find_node(profile: str | None, environ: Mapping[str, str]) -> Node | None:
    """Find the login node of a profile, or of the default profile; None: it has none, or this is the login node."""
    if AT_LOGIN in environ:
        return None
    from clusterddp.spec.layers import read_profile_login

    found = read_profile_login(environ, profile)
    return Node(profile=found[0], login=found[1]) if found else None


def demand_node(profile: str, environ: Mapping[str, str]) -> Node:
    """Find the login node of a profile.

    Raises: UsageError: it has none.
    """
    node = find_node(profile, environ)
    if node is None:
        hint = f"without --profile this is asked here; `login: HOST` below profiles.{profile} of the configuration"
        raise UsageError(f"profile {profile} names no login node", hint=hint)
    return node


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
            return run_same(demand_node(profile, terminal.environ), context, {})
        if values.get("names") or values.get("name") is not None:
            return _run_where_they_are(function, context, values)
        result = function(**values)
        sent_runs = [] if values.get("output") == "json" else list_sent_runs(values["runs_dir"])
        for each, number in Counter(sent.profile for sent in sent_runs).items():
            count = "1 run is" if number == 1 else f"{number} runs are"
            say(f"{count} on the cluster of profile {each}: clusterddp list --profile {each}")
        return result

    return profile_option(decide)


def start_at_login(node: Node, resolved: ResolvedSpec | None, *, runs_dir: Path, discard: bool) -> int:
    """Run the current command, which has read a spec, on the login node, with its code."""
    from clusterddp.cli.login_command import SPEC, plan_command

    context = click.get_current_context()
    terminal: Terminal = context.obj
    if resolved is None:
        return run_same(node, context, {})
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
    from clusterddp.cli.login_command import LoginCommand

    context = click.get_current_context()
    answer = bytearray()
    login_command = LoginCommand(arguments=arguments, variables=_variables(context.obj, node))
    if code := _run(node, login_command, context, write_out=answer.extend):
        raise click.exceptions.Exit(code)
    return bytes(answer)


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
            node, name_there = sent.node(environ), sent.name_there(name)
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
        node = self._node
        sent = SentRun(run=line, profile=node.profile, secrets=node.secrets, created_ns=time.time_ns())
        write_sent_run(self._runs_dir, sent)

    def _put(self, data: bytes) -> None:
        with writing_stdout():
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def run_same(node: Node, context: click.Context, changed: Mapping[str, Any]) -> int:
    """Run the current command on the login node, with some values changed."""
    from clusterddp.cli.login_command import LoginCommand, exec_at_login

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
    from clusterddp.cli.login_command import run_at_login

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


def _run_where_they_are(function: Callable[..., Any], context: click.Context, values: dict[str, Any]) -> int:
    """Run a command about a run or several, here and on login nodes; return the worst exit code."""
    runs_dir, codes = values["runs_dir"], list[int]()
    places = _places_of(values.get("names") or [values["name"]], runs_dir, context.obj.environ)
    for node, names in sorted(places, key=lambda place: place[0] is None):
        named = {"names": names} if "names" in values else {"name": names[0]}
        if node is None:
            codes.append(function(**values | named) or 0)
            continue
        codes.append(run_same(node, context, named))
        if context.info_name == "rm" and not values["dry_run"] and not codes[-1]:
            for name in names:
                if is_run_name(name):
                    (runs_dir / FOLDER / f"{name}.json").unlink(missing_ok=True)
    return max(codes)


def _variables(terminal: Terminal, node: Node) -> dict[str, Argument]:
    """Choose the variables that go to the login node: the run's secrets, how text is shown."""
    environ, color = terminal.environ, terminal.color
    chosen: dict[str, Argument] = {name: environ[name] for name in node.secrets if name in environ}
    chosen |= {"CLUSTERDDP_CONFIG": "", "CLUSTERDDP_PROJECT": ""}
    if terminal.debug:
        chosen["CLUSTERDDP_DEBUG"] = "1"
    if color is None and sys.stdout.isatty() and sys.stderr.isatty():
        color = True
    if color is not None:
        chosen["FORCE_COLOR" if color else "NO_COLOR"] = "1"
    return chosen


def write_sent_run(runs_dir: Path, sent: SentRun) -> None:
    """Record where a run is.

    Raises: ClusterddpError: the host's answer is not a name, or the directory cannot be made.
    """
    if not is_run_name(sent.run):
        raise ClusterddpError(f"profile {sent.profile}: reports the run name {sent.run[:80]!r}, which is not valid")
    folder = runs_dir / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterddpError(f"{folder}: cannot be made: {error.strerror}") from error
    write_text(folder / ".gitignore", "*\n", exclusive=True)  # this directory is usually in a repository
    write_json(folder / f"{sent.run}.json", sealed(dataclasses.asdict(sent)))


def list_sent_runs(runs_dir: Path) -> list[SentRun]:
    """List the records, oldest first, without those that cannot be read or that another user has written.

    Without this user's seal they count as the oldest and name no secrets.
    """
    found = []
    for path in sorted((runs_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(ClusterddpError, OSError):
            sent = build_record(SentRun, record := read_json(path), str(path))
            if is_run_name(sent.run) and path.stat().st_uid == os.geteuid():
                found.append(sent if is_sealed(record) else dataclasses.replace(sent, secrets=(), created_ns=0))
    return sorted(found, key=lambda sent: sent.created_ns)


def find_sent_run(runs_dir: Path, name: str) -> SentRun | None:
    """Find a run that is on a cluster; None: it is here, or there is none.

    Raises: UsageError: several runs begin with this name.
    """
    sent_runs = list_sent_runs(runs_dir)
    if not sent_runs or os.sep in name:
        return None
    if name == "@last":
        here = newest_run(list_runs(runs_dir))
        return sent_runs[-1] if sent_runs[-1].created_ns > (created_ns(here) if here else 0) else None
    exact = [sent for sent in sent_runs if name == sent.run or name.startswith(f"{sent.run}.")]
    found = exact or [sent for sent in sent_runs if sent.run.startswith(name)]
    here_names = [path.name for path in list_places(runs_dir) if path.name.startswith(name)]
    if not found or (name in here_names and not exact):
        return None
    if len(found) > 1 or (here_names and not exact) or name in here_names:
        where = [f"{sent.run} with profile {sent.profile}" for sent in found] + [f"{each} here" for each in here_names]
        raise UsageError(f"{name}: {len(where)} runs begin with it: {', '.join(where)}")
    return found[0]
