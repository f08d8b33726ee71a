"""Read the state of a run: its records, and, where they have no end, the answer of its place (run/state.py).

The queue of a sweep answers for a run that waits in it, the launcher for any other run.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError
from clusterddp.places.registry import launcher_named
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import deliver_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, drop_secrets, read_run
from clusterddp.run.seal import is_ours
from clusterddp.run.state import Answer, Records, RunState, RunView, derive_state, final_view, read_records
from clusterddp.run.sweep import ask_queue
from clusterddp.system.files import is_file

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Slurm

_MAX_READS = 5
"""How often the records of a run are read again because they changed meanwhile."""


def read_state(run: RunDir, slurm: Slurm | None = None, *, record: RunRecord | None = None) -> RunView:
    """Read the state of a run; an unreadable file makes it UNKNOWN and raises no error.

    `slurm` None: the `Slurm` that this process shares. `record`: the run's, if the caller has read it already.
    Of a run of this user's own that has ended, the values of its secrets are deleted, and an end in the spool is moved
    to the run.
    """
    try:
        view = _read_state(run, record or read_run(run), slurm)
        if view.state is RunState.LOST:
            os.stat(run.path)  # an unreachable directory does not prove that the run is lost
        if view.finished and is_file(run.job_secrets) and is_ours(run):
            drop_secrets(run)
        return view
    except (ClusterddpError, OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        return RunView(state=RunState.UNKNOWN, attempt=None, end=None, reason=f"its record cannot be read: {error}")


def announce(runs: Iterable[tuple[RunDir, RunRecord]], slurm: Slurm | None = None) -> None:
    """Announce that the states of these runs will be read, so that one query to Slurm covers them all."""
    on_slurm = [(run, record) for run, record in runs if record.launcher == "slurm"]
    if on_slurm:
        from clusterddp.places.slurm.state import wanted_jobs

        (slurm or _slurm_here()).expect(wanted_jobs(on_slurm))


def _read_state(run: RunDir, record: RunRecord, slurm: Slurm | None) -> RunView:
    records = read_records(run, record)
    for _ in range(_MAX_READS):
        if records.attempt and records.end and records.has_final_end:
            if is_ours(run):
                deliver_end(records.attempt, record.token, records.end)
            return final_view(records.attempt, records.end)
        answer = _ask(records, slurm)
        if answer.life in {"alive", "queued"}:
            break
        # The last process, job or queue may have written its last record and ended before it was looked for.
        before, records = records, read_records(run, read_run(run))
        if records == before:
            break
    return derive_state(records, answer)


def _ask(records: Records, slurm: Slurm | None) -> Answer:
    """Ask the place of a run what it knows of it."""
    if records.record.queued and records.attempt:
        return ask_queue(records)
    launcher = launcher_named(records.record.launcher, inherited_environment())
    return launcher.probe(records, slurm or _slurm_here())


@functools.cache
def _slurm_here() -> Slurm:
    """Return the one `Slurm` of this process, whose answers all callers share."""
    from clusterddp.places.slurm.queue import Slurm

    return Slurm(inherited_environment())
