"""Show runs and old directories on several machines as text and JSON (ps and gc)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import Column, duration, lay_out, say, say_error, to_columns
from clusterddp.errors import SshError
from clusterddp.look.printable import printable
from clusterddp.look.ps import answers
from clusterddp.system.units import format_bytes, format_count

if TYPE_CHECKING:
    from clusterddp.look.ps import Cleanup
    from clusterddp.run.leftovers import Ended, RunHere
    from clusterddp.run.stored import Storage, Stored

_PIDS_SHOWN = 6
_ORPHANED = "orphaned"
_KINDS = {"run": "run", "code": "snapshot of code", "package": "clusterddp", "remnant": "transfer that was cut off"}


def process_lines(found: Mapping[str, list[RunHere] | SshError], *, columns: int | None = None) -> list[str]:
    """Lay out the runs of each machine as one table in `columns`; machines that did not answer follow."""
    rows = []
    for host, runs in found.items():
        if isinstance(runs, SshError):
            continue
        rows += [_row(host, run) for run in runs] or [[printable(host), "-", "nothing runs", "-", "-", "-", "-"]]
    if not rows:
        return failure_lines(found)
    hosts, names, states, processes, gpus, since, supervisors = zip(*rows, strict=True)
    several = len(set(hosts)) > 1
    table_columns = [
        Column(title="HOST", cells=hosts, gives_way=0 if several else 5, least=8),
        Column(title="RUN", cells=names, least=14),
        Column(title="STATE", cells=states, paint=_painted_state),
        Column(title="PROCESSES", cells=processes, gives_way=1, least=9),
        Column(title="GPUS", cells=gpus, gives_way=2),
        Column(title="SINCE", cells=since, gives_way=3),
        Column(title="SUPERVISED BY", cells=supervisors, gives_way=4, least=13),
    ]
    return lay_out(table_columns, room=columns) + failure_lines(found)


def _painted_state(state: str) -> str:
    return click.style(state, fg="red", bold=True) if state == _ORPHANED else state


def failure_lines(found: Mapping[str, Any]) -> list[str]:
    """Write which machines did not answer, and the fix."""
    lines = []
    for host, error in found.items():
        if isinstance(error, SshError):
            failed = click.style("failed", fg="red", bold=True)
            lines.append(f"{printable(host)}  {failed}  {error.phase}: {printable(error.found)}")
            if error.hint:
                lines.append(f"      {click.style('fix:', bold=True)} {printable(error.hint)}")
    return lines


def stored_lines(found: Mapping[str, Storage | SshError], *, columns: int | None = None) -> list[str]:
    """Lay out what can be removed on each machine in `columns`; hosts and places are never cut."""
    rows = [
        _stored_row(host, storage.root, each) for host, storage in answers(found).items() for each in storage.removable
    ]
    if not rows:
        return []
    titles = (("HOST", 0), ("WHAT", 2), ("PLACE", 0), ("AGE", 3), ("SIZE", 0), ("", 1))
    return lay_out(to_columns(titles, rows), room=columns)


def run_json(run: RunHere) -> dict[str, Any]:
    """Describe a run on one machine for scripts, without its token, which is a secret."""
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
    """Describe a machine that did not answer."""
    return {"host": host, "ok": False, "phase": error.phase, "found": error.found, "fix": error.hint}


def cleanup_question(cleanup: Cleanup) -> str:
    """Write what is to be done, as a question; empty when there is nothing to do."""
    processes = sum(len(run.processes) for runs in cleanup.left_over.values() for run in runs)
    removable = [each for storage in answers(cleanup.storages).values() for each in storage.removable]
    words = [f"end {format_count(processes, 'process')}"] if processes else []
    if removable:
        size = format_bytes(sum(each.size for each in removable))
        words.append(f"remove {format_count(len(removable), 'directory')} ({size})")
    question = " and ".join(words)
    return f"{question[:1].upper()}{question[1:]}?" if words else ""


def cleanup_lines(cleanup: Cleanup, *, columns: int | None = None) -> list[str]:
    """Lay out what is to be ended and removed in `columns`, and which machines did not answer."""
    runs = process_lines(cleanup.left_over, columns=columns) if cleanup.left_over else []
    stored = stored_lines(cleanup.storages, columns=columns)
    return [*runs, *stored, *failure_lines({**cleanup.storages, **cleanup.found})]


def say_kept(cleanup: Cleanup) -> None:
    """Print what gc keeps though the user may expect its removal."""
    say_unmarked(cleanup.left_over)
    for host, storage in answers(cleanup.storages).items():
        if storage.unfinished:
            say(
                f"{printable(host)}: no end is recorded of {printable(', '.join(storage.unfinished))}: kept; "
                f"they lie in {printable(storage.root)}/runs"
            )


def say_unmarked(left_over: Mapping[str, list[RunHere]]) -> None:
    """Print which processes gc does not end, since no cookie shows that they belong to a run."""
    for host, runs in left_over.items():
        for run in runs:
            if run.unmarked:
                processes, pids = format_count(len(run.unmarked), "process"), " ".join(map(str, run.unmarked))
                say(
                    f"{printable(host)}: {processes} that {printable(run.label)} has started "
                    f"carry no cookie, so gc does not end them: kill {pids}"
                )


def say_removed(cleanup: Cleanup, put: Callable[[str], object]) -> None:
    """Print what was ended and removed, with `put`, and what was not."""
    for host, runs in cleanup.left_over.items():
        ended = cleanup.ended[host]
        if isinstance(ended, SshError):
            say_error(ended.message, hint=ended.hint)
            continue
        labels = {run.token: run.label for run in runs}
        for each in ended:
            _say_ended(host, labels[each.token], each, put)
    for host, removed in cleanup.removed.items():
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


def cleanup_json(cleanup: Cleanup) -> dict[str, Any]:
    """Describe a cleanup for scripts."""
    return {"hosts": [_host_json(cleanup, host) for host in cleanup.found]}


def _row(host: str, run: RunHere) -> list[str]:
    return [
        printable(host),
        printable(run.label),
        _ORPHANED if run.answered_by is None else "running",
        _processes(run),
        ",".join(run.gpus) or "-",
        duration(run.age_s),
        "-" if run.answered_by is None else printable(run.answered_by),
    ]


def _processes(run: RunHere) -> str:
    """Write the number of a run's processes, with their pids when it is left over."""
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


def _host_json(cleanup: Cleanup, host: str) -> dict[str, Any]:
    storage = cleanup.storages.get(host)
    ended, removed = cleanup.ended.get(host, []), cleanup.removed.get(host, [])
    for answer in (cleanup.found[host], storage, ended, removed):
        if isinstance(answer, SshError):
            return failure_json(host, answer)
    assert not isinstance(storage, SshError)
    assert not isinstance(ended, SshError)
    assert not isinstance(removed, SshError)
    left_over = cleanup.left_over.get(host, [])
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
    """Print one line: `3 processes of brisk-otter-3 ended on gpu01`."""
    if ended.ended or ended.answered_by is None:
        put(f"{format_count(ended.ended, 'process')} of {printable(label)} ended on {printable(host)}")
    if ended.answered_by is not None:
        whom = printable(ended.answered_by)
        say(f"{printable(host)}: {printable(label)} is supervised again, by {whom}: not ended")
    if ended.left:
        say_error(
            f"{host}: {format_count(len(ended.left), 'process')} of {label} cannot be ended: {', '.join(ended.left)}",
            hint="what waits for a disk or a driver ends when that answers; else the host needs a restart",
        )
