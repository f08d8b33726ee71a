"""The command share: lets a group read a run, and takes it back."""

from __future__ import annotations

import grp
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from clusterddp.cli.arguments import command, output_option, run_argument, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Terminal, put_json, say
from clusterddp.errors import UsageError
from clusterddp.launchers.state import read_state
from clusterddp.run.directory import STORE_NAME
from clusterddp.run.find import find_run
from clusterddp.run.sweep import find_sweep


@command("share")
@works_at_login
@run_argument(default=None)
@click.option("--group", metavar="G", help="The group; otherwise the one that the run's directory has.")
@click.option("--private", is_flag=True, help="Take it back: no group can read the run.")
@output_option
@runs_option
@click.pass_obj
def share(terminal: Terminal, *, name: str, group: str | None, private: bool, output: str, runs_dir: Path) -> None:
    """Let a group read a run, or a sweep: status, logs, report and compare work for its members.

    They read logs, metrics, checkpoints, results and the code. Secrets, values of env: and the run's token, by which it
    is commanded, stay closed; only you can end, resume or remove the run. Files that a running run writes later are
    closed: share it again after its end.
    """
    from clusterddp.run import sharing

    sweep = find_sweep(runs_dir, name)
    runs = sweep.runs() if sweep else [find_run(runs_dir, name)]
    path = sweep.path if sweep else runs[0].path
    if private:
        if group is not None:
            raise UsageError("--private takes the run back from every group, and --group names one")
        sharing.close(path)
        shared = _Shared(path=path)
    else:
        if sweep:
            sharing.share_sweep(sweep, None if group is None else _group_number(group))
        else:
            sharing.share(runs[0], None if group is None else _group_number(group))
        number = os.stat(path).st_gid
        shared = _Shared(
            path=path,
            group=_group_name(number),
            closed=tuple(sharing.closed_parents(path, number)),
            unfinished=not all(read_state(run).finished for run in runs),
        )
    if output == "json":
        put_json(shared.to_json())
    else:
        say("\n".join(shared.lines()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """Which group can read a run or a sweep."""

    path: Path
    group: str | None = None
    """None: no group."""
    closed: tuple[tuple[Path, str], ...] = ()
    """The directories above it that the group cannot enter, each with what opens it."""
    unfinished: bool = False
    """True: it goes on, and the files that it writes from now on are closed."""

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.path.name,
            "run_dir": str(self.path.resolve()),
            "group": self.group,
            "closed": [{"directory": str(folder), "fix": remedy} for folder, remedy in self.closed],
            "unfinished": self.unfinished,
        }

    def lines(self) -> list[str]:
        name = self.path.name
        if self.group is None:
            return [f"{name} is private; the copy of its code in {STORE_NAME} stays open, other runs may share it"]
        where = shlex.quote(str(self.path.resolve()))
        lines = [f"{name} can be read by the group {self.group}: clusterddp status {where}"]
        lines += [f"  the group cannot enter {folder}: {remedy}" for folder, remedy in self.closed]
        if self.unfinished:
            lines.append("  files that it writes from now on are closed: share it again after its end")
        return lines


COMMANDS = {"share": share}


def _group_number(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError(f"--group: there is no group {name}", hint="id -Gn lists yours") from None


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
