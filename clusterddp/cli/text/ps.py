"""How runs and old directories on several machines are shown, to people and to scripts (ps and gc)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import duration, say, say_error, table
from clusterddp.errors import SshError
from clusterddp.look.clearing import answers
from clusterddp.look.printable import printable
from clusterddp.system.units import format_bytes, format_count

if TYPE_CHECKING:
    from clusterddp.look.clearing import Clearing
    from clusterddp.run.leftovers import Ended, RunHere
    from clusterddp.run.stored import Storage, Stored

_PIDS_SHOWN = 6
_KINDS = {"run": "run", "code": "snapshot of code", "package": "clusterddp", "remnant": "transfer that was cut off"}


def process_lines(found: Mapping[str, list[RunHere] | SshError]) -> list[str]:
    """Lay out the runs of each machine as one table; machines that could not be asked follow."""
    rows = [["HOST", "RUN", "STATE", "PROCESSES", "GPUS", "SINCE", "SUPERVISED BY"]]
    for host, runs in found.items():
        if isinstance(runs, SshError):
            continue
        rows += [_row(host, run) for run in runs] or [[printable(host), "-", "nothing runs", "-", "-", "-", "-"]]
    lines = table(rows) if len(rows) > 1 else []
    return lines + failure_lines(found)


def failure_lines(found: Mapping[str, Any]) -> list[str]:
    """Write which machines could not be asked, and the fix."""
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


def clearing_question(clearing: Clearing) -> str:
    """Write what is to be done, as a question; empty when there is nothing to do."""
    processes = sum(len(run.processes) for runs in clearing.left_over.values() for run in runs)
    removable = [each for storage in answers(clearing.storages).values() for each in storage.removable]
    words = [f"end {format_count(processes, 'process')}"] if processes else []
    if removable:
        size = format_bytes(sum(each.size for each in removable))
        words.append(f"remove {format_count(len(removable), 'directory')} ({size})")
    question = " and ".join(words)
    return f"{question[:1].upper()}{question[1:]}?" if words else ""


def clearing_lines(clearing: Clearing) -> list[str]:
    """Lay out what is to be ended and removed, and which machines could not be asked."""
    runs = process_lines(clearing.left_over) if clearing.left_over else []
    return [*runs, *stored_lines(clearing.storages), *failure_lines({**clearing.storages, **clearing.found})]


def say_kept(clearing: Clearing) -> None:
    """Say what gc leaves alone, though the user may expect it to go."""
    say_unmarked(clearing.left_over)
    for host, storage in answers(clearing.storages).items():
        if storage.unfinished:
            say(
                f"{printable(host)}: no end is recorded of {printable(', '.join(storage.unfinished))}: left alone; "
                f"they lie in {printable(storage.root)}/runs"
            )


def say_unmarked(left_over: Mapping[str, list[RunHere]]) -> None:
    """Say which processes of runs gc cannot prove to be theirs."""
    for host, runs in left_over.items():
        for run in runs:
            if run.unmarked:
                processes, pids = format_count(len(run.unmarked), "process"), " ".join(map(str, run.unmarked))
                say(
                    f"{printable(host)}: {processes} that {printable(run.label)} has started "
                    f"carry no cookie, gc leaves them alone: kill {pids}"
                )


def say_cleared(clearing: Clearing, put: Callable[[str], object]) -> None:
    """Say what was ended and removed, with `put`, and what was not."""
    for host, runs in clearing.left_over.items():
        ended = clearing.ended[host]
        if isinstance(ended, SshError):
            say_error(ended.message, hint=ended.hint)
            continue
        labels = {run.token: run.label for run in runs}
        for each in ended:
            _say_ended(host, labels[each.token], each, put)
    for host, removed in clearing.removed.items():
        if isinstance(removed, SshError):
            say_error(removed.message, hint=removed.hint)
            continue
        gone = [each for each in removed if each.error is None]
        if gone:
            size = format_bytes(sum(each.size for each in gone))
            put(f"{format_count(len(gone), 'directory')} removed on {printable(host)}, {size}")
        for stays in removed:
            if stays.error is not None:
                say_error(f"{host}: {stays.place} stays: {stays.error}")


def clearing_json(clearing: Clearing) -> dict[str, Any]:
    """Describe a clearing for scripts."""
    return {"hosts": [_host_json(clearing, host) for host in clearing.found]}


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
        "-" if run.answered_by is None else printable(run.answered_by),
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


def _host_json(clearing: Clearing, host: str) -> dict[str, Any]:
    storage = clearing.storages.get(host)
    ended, removed = clearing.ended.get(host, []), clearing.removed.get(host, [])
    for answer in (clearing.found[host], storage, ended, removed):
        if isinstance(answer, SshError):
            return failure_json(host, answer)
    assert not isinstance(storage, SshError)
    assert not isinstance(ended, SshError)
    assert not isinstance(removed, SshError)
    left_over = clearing.left_over.get(host, [])
    names = {run.token: {"run": run.run, "key": run.token[:8]} for run in left_over}
    return {
        "host": host,
        "ok": True,
        "left_over": [run_json(run) for run in left_over],
        "ended": [
            {**names[each.token], "ended": each.ended, "left": list(each.left), "answered_by": each.answered_by}
            for each in ended
        ],
        "removable": [
            {"place": each.place, "kind": each.kind, "age_s": each.age_s, "bytes": each.size}
            for each in (storage.removable if storage else ())
        ],
        "removed": [{"place": each.place, "bytes": each.size, "error": each.error} for each in removed],
    }


def _say_ended(host: str, label: str, ended: Ended, put: Callable[[str], object]) -> None:
    """Say it in one line: `3 processes of brisk-otter-3 ended on gpu01`."""
    if ended.ended or ended.answered_by is None:
        put(f"{format_count(ended.ended, 'process')} of {printable(label)} ended on {printable(host)}")
    if ended.answered_by is not None:
        whom = printable(ended.answered_by)
        say(f"{printable(host)}: {printable(label)} is supervised again, by {whom}: left alone")
    if ended.left:
        say_error(
            f"{host}: {format_count(len(ended.left), 'process')} of {label} cannot be ended: {', '.join(ended.left)}",
            hint="what waits for a disk or a driver ends when that answers; else the host needs a restart",
        )
