"""What a node does before its ranks start: it prepares their environment, by the setup lines of the spec."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import clusterddp
from clusterddp.node.processes import lead_group, leave_to_reap, signal_group
from clusterddp.ranks.environment import COOKIE, rank_cookies
from clusterddp.run.attempts import signal_name
from clusterddp.run.cleanup import marking
from clusterddp.run.directory import RunDir, make_attempt_dirs
from clusterddp.run.gang import RankPython
from clusterddp.run.record import RankEnd, StartedPython
from clusterddp.run.supervisors import SupervisorOrder
from clusterddp.system.files import open_log, read_tail
from clusterddp.system.python import OLDEST_PYTHON, module_command
from clusterddp.system.torch_files import find_package, read_torch_values
from clusterddp.wire import build, read_object

_SCRIPT = Path(__file__).with_name("setup.sh")
_OF_THE_SHELL = frozenset({"_", "SHLVL", "PWD", "OLDPWD", COOKIE})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = "clusterddp: "
_OF_LINE = re.compile(r"/proc/self/fd/\d+: line (\d+): ")
"""What bash puts in front of its own messages about a line."""
_LINES_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """How the ranks of a node are started."""

    python: str | None = None
    """Their Python; None: that of the process that starts them."""
    changes: Mapping[str, str | None] = field(default_factory=dict)
    """What differs from the environment that they would inherit; None: the variable is removed."""
    runs: StartedPython | None = None
    """Their Python for the record of the start; None: they are a command, which may be any program."""

    def applied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with the changes."""
        kept = {name: value for name, value in environ.items() if name not in self.changes}
        return kept | {name: value for name, value in self.changes.items() if value is not None}


class Preparation:
    """The preparation of a node: once, before the first start of its ranks, by a shell if there are lines for it."""

    def __init__(self, order: SupervisorOrder, environ: Mapping[str, str]) -> None:
        self._order = order
        self._environ = {**environ, **order.gang.env}
        self._pid: int | None = None
        self._result: int | None = None
        """Memory (a memfd) that gets the environment after the lines."""
        self._prepared: Prepared | None = None
        self.error: RankEnd | None = None
        """Why the ranks cannot start, once that is so."""
        self._attempt = order.run.attempt(order.attempt)
        self._log = self._attempt.setup_log(order.node.node_rank)
        python = order.gang.python
        hooks = Path(python.prefix, "etc/conda/activate.d") if python.kind == "conda" and python.is_named else None
        if order.gang.setup or (hooks is not None and hooks.is_dir()):
            try:
                self._start_shell(python)
            except OSError as error:
                self._fail(f"bash, which runs the setup lines, could not be started: {error}")
        else:
            self._prepared = _prepare(order, environ)

    @property
    def is_over(self) -> bool:
        """Whether the ranks may start."""
        return self._prepared is not None

    @property
    def prepared(self) -> Prepared:
        assert self._prepared is not None
        return self._prepared

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Take in the end of the shell."""
        if self._pid is None or self._pid not in exits:
            return
        assert self._result is not None
        returncode, self._pid = exits[self._pid], None
        with open(self._result, "rb") as file:
            file.seek(0)
            executable, *rest = file.read().split(b"\0")
        if returncode or not rest:
            self._fail(self._explain(returncode))
            return
        facts, *pairs = rest
        after = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs if pair)
        chosen = None
        if executable:
            torch = build({"python": str, "version": str | None}, read_object(facts.rpartition(b"FOUND")[2]))
            chosen = StartedPython(os.fsdecode(executable), torch["python"], torch["version"])
        self._prepared = _prepare(self._order, self._environ, after=after, chosen=chosen)

    def end(self) -> None:
        """Kill the shell, and what it has started."""
        if self._pid is not None:
            signal_group(self._pid, signal.SIGKILL)
            self._pid = None

    def _start_shell(self, python: RankPython) -> None:
        make_attempt_dirs(self._attempt)
        lines = os.memfd_create("clusterddp-setup")
        os.write(lines, "\n".join((*self._order.gang.setup, "")).encode())
        self._result = os.memfd_create("clusterddp-environment")
        own_cookie = rank_cookies(self._order.gang.token, self._order.node.node_rank)[0]
        files = [f"/proc/self/fd/{descriptor}" for descriptor in (lines, self._result)]
        package = str(_link_package(self._order.run)) if python.by_setup else ""
        ask = module_command("clusterddp.facts.torch", python="python", oldest=OLDEST_PYTHON)[2]
        is_conda = python.is_named and python.kind == "conda"
        activation = _activation(python, {}, over_ssh=False) if is_conda else {}
        shell = ("bash", "--noprofile", "--norc", "-c", _SCRIPT.read_text(encoding="utf-8"), "setup", *files)
        with open_log(self._log) as log, marking(own_cookie):
            process = subprocess.Popen(
                [*shell, package, ask, *(f"{name}={value}" for name, value in activation.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._order.gang.entry.working_dir,
                env={**self._environ, COOKIE: own_cookie},
                pass_fds=(lines, self._result),
                preexec_fn=lead_group,  # noqa: PLW1509  this process has one thread
            )
        os.close(lines)
        self._pid = leave_to_reap(process)

    def _explain(self, returncode: int) -> str:
        """Say which line has failed, and what it printed."""
        printed = read_tail(self._log).splitlines()
        told = [line.removeprefix(_OURS) for line in printed if line.startswith(_OURS)]
        rest = [line for line in printed if not line.startswith(_OURS)]
        where = told[-1] if told else "the lines"
        found = re.fullmatch(r"line (\d+)", where) or (_OF_LINE.match(rest[-1]) if rest else None)
        how = f"exit code {returncode}" if returncode >= 0 else signal_name(-returncode)
        shown = " ".join(_OF_LINE.sub("", line) for line in rest[-_LINES_SHOWN:]).strip()
        if found is None:
            return f"setup: {where} ({how})" + (f": {shown}" if shown else "")
        lines = "\n".join(self._order.gang.setup).split("\n")
        number = int(found[1])
        line = (
            lines[number - 1].strip() if number <= len(lines) else ""
        )  # bash misses the end of an `if` below the last
        return ": ".join(filter(None, (f"setup line {found[1]} ({how})", line, shown)))

    def _fail(self, error: str) -> None:
        log = str(self._log.relative_to(self._order.run.path))
        host = self._order.node.host
        self.error = RankEnd(rank=None, host=host, error=f"{host}: {error}", log=log)


def _prepare(
    order: SupervisorOrder,
    environ: Mapping[str, str],
    *,
    after: Mapping[str, str] | None = None,
    chosen: StartedPython | None = None,
) -> Prepared:
    """Prepare the start of ranks that would inherit `environ`; `after`: what the setup lines have made of it.

    `chosen`: the Python that they have put first on PATH.
    """
    gang, python, changes = order.gang, order.gang.python, dict[str, "str | None"]()
    if after is not None:
        gone = [name for name in environ.keys() - after.keys() if _NAME.fullmatch(name)]
        new = {name: value for name, value in after.items() if environ.get(name) != value}
        changes = {name: value for name, value in (dict.fromkeys(gone) | new).items() if name not in _OF_THE_SHELL}
    seen = Prepared(changes=changes).applied(environ)
    changes |= _activation(python, seen, over_ssh=order.over_ssh)
    seen = Prepared(changes=changes).applied(environ)
    runs = chosen or StartedPython(python.executable)
    is_own = runs.executable in ("", sys.executable)
    if not is_own or (gang.entry.kind == "command" and (python.prefix or python.is_named or after is not None)):
        # It may lack this package, and gets no other one of our Python.
        paths = seen.get("PYTHONPATH", "").split(os.pathsep)
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, str(_link_package(order.run))]))
    if is_own:
        torch = read_torch_values(find_package("torch")).get("__version__")
        runs = StartedPython(sys.executable, sys.version.split()[0], torch)
    is_command = gang.entry.kind == "command"
    return Prepared(python=None if is_own else runs.executable, changes=changes, runs=None if is_command else runs)


def _activation(python: RankPython, environ: Mapping[str, str], *, over_ssh: bool) -> dict[str, str | None]:
    """Return what activating the environment changes; one that was activated at the submit is so already."""
    if not python.is_named:
        return {}
    if over_ssh:  # the Python of this process has been activated, and the setup lines may have hidden it
        prefix = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
        return _first_on_path(f"{prefix}/bin", environ) if prefix else {}
    if not python.prefix and not python.executable:
        return {}
    values = {
        "VIRTUAL_ENV": python.prefix if python.kind == "venv" else None,
        "CONDA_PREFIX": python.prefix if python.kind == "conda" else None,
        "CONDA_DEFAULT_ENV": python.name if python.kind == "conda" else None,
        "PYTHONHOME": None,
    }
    changes = {name: value for name, value in values.items() if value is not None or name in environ}
    programs = f"{python.prefix}/bin" if python.prefix else str(Path(python.executable).parent)
    return changes | _first_on_path(programs, environ)


def _first_on_path(directory: str, environ: Mapping[str, str]) -> dict[str, str | None]:
    paths = environ.get("PATH", "").split(os.pathsep)
    return {} if paths[0] == directory else {"PATH": os.pathsep.join(filter(None, (directory, *paths)))}


def _link_package(run: RunDir) -> Path:
    """Return a directory of the run that has a link to this package, and nothing else that can be imported."""
    directory, package = run.launcher_dir / "import", Path(clusterddp.__file__).absolute().parent
    directory.mkdir(mode=0o700, exist_ok=True)
    link = directory / "clusterddp"
    if not (link.is_symlink() and link.readlink() == package):
        temporary = directory / f".{os.uname().nodename}.{os.getpid()}"
        temporary.symlink_to(package)
        with contextlib.suppress(FileNotFoundError):
            temporary.replace(link)
    return directory
