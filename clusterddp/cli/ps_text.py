"""How the runs and the old directories on several machines are laid out for people and for scripts (ps and gc)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import duration, table
from clusterddp.errors import SshError
from clusterddp.look.printable import printable
from clusterddp.system.byte_sizes import format_bytes

if TYPE_CHECKING:
    from clusterddp.run.leftovers import RunHere
    from clusterddp.run.stored import Storage, Stored

_PIDS_SHOWN = 6
_KINDS = {"run": "run", "code": "snapshot of code", "package": "clusterddp", "remnant": "transfer that was cut off"}


def process_lines(found: Mapping[str, list[RunHere] | SshError]) -> list[str]:
    """Lay out the runs of each machine as one table; machines that could not be asked follow."""
    rows = [["HOST", "RUN", "STATE", "PROCESSES", "GPUS", "SINCE", "ANSWERED FOR BY"]]
    for host, runs in found.items():
        if isinstance(runs, SshError):
            continue
        rows += [_row(host, run) for run in runs] or [[printable(host), "-", "nothing runs", "-", "-", "-", "-"]]
    lines = table(rows) if len(rows) > 1 else []
    return lines + failure_lines(found)


def failure_lines(found: Mapping[str, Any]) -> list[str]:
    """Say which machines could not be asked, and what mends that."""
    lines = []
    for host, error in found.items():
        if isinstance(error, SshError):
            failed = click.style("failed", fg="red", bold=True)
            lines.append(f"{printable(host)}  {failed}  {error.phase}: {printable(error.found)}")
            if error.hint:
                lines.append(f"      {click.style('fix:', bold=True)} {printable(error.hint)}")
    return lines


def stored_lines(found: Mapping[str, Storage | SshError]) -> list[str]:
    """Lay out what can be removed on each machine."""
    rows = [["HOST", "WHAT", "PLACE", "AGE", "SIZE", ""]]
    for host, storage in found.items():
        if isinstance(storage, SshError):
            continue
        rows += [_stored_row(host, storage.root, each) for each in storage.removable]
    return table(rows) if len(rows) > 1 else []


def run_json(run: RunHere) -> dict[str, Any]:
    """Describe a run on one machine for scripts; its token is a secret and not part of that."""
    now = time.time()
    return {
        "run": run.run,
        "key": run.token[:8],
        "left_over": run.answered_by is None,
        "answered_by": run.answered_by,
        "gpus": list(run.gpus),
        "processes": [
            {"pid": each.pid, "role": each.role, "started": round(now - each.age_s, 1), "command": each.command}
            for each in run.processes
        ],
        "without_cookie": list(run.unmarked),
    }


def failure_json(host: str, error: SshError) -> dict[str, Any]:
    """Describe a machine that could not be asked."""
    return {"host": host, "ok": False, "phase": error.phase, "found": error.found, "fix": error.hint}


def spell_processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _row(host: str, run: RunHere) -> list[str]:
    left_over = run.answered_by is None
    state = click.style("left over", fg="red", bold=True) if left_over else "running"
    return [
        printable(host),
        printable(run.label),
        state,
        _processes(run),
        ",".join(run.gpus) or "-",
        duration(run.age_s),
        "nobody" if run.answered_by is None else printable(run.answered_by),
    ]


def _processes(run: RunHere) -> str:
    """Name the processes of ranks by their number, and those of a run that is left over by their pids."""
    if run.answered_by is not None:
        return str(len(run.processes))
    pids = [str(process.pid) for process in run.processes]
    more = f" and {len(pids) - _PIDS_SHOWN} more" if len(pids) > _PIDS_SHOWN else ""
    return f"{len(pids)}: {' '.join(pids[:_PIDS_SHOWN])}{more}"


def _stored_row(host: str, root: str, stored: Stored) -> list[str]:
    note = f"with {format_bytes(stored.checkpoints)} of checkpoints" if stored.checkpoints else ""
    place = stored.place if stored.kind == "run" else stored.place[:24]
    age = duration(stored.age_s)
    return [printable(host), _KINDS[stored.kind], printable(f"{root}/{place}"), age, format_bytes(stored.size), note]
