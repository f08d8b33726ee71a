"""The state of a run: its recorded end, or, where none is recorded, the state that its launcher reads.

An `end.json` is always right. The queue of a sweep answers for a run that waits in it (run/sweep.py), the
launcher for any other run.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError
from clusterddp.launchers.registry import launcher_named
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.outcome import deliver_end, read_end, read_spooled
from clusterddp.run.record import RunRecord, drop_secrets, read_run
from clusterddp.run.view import RunState, RunView, final_view

if TYPE_CHECKING:
    from clusterddp.slurm.queue import Slurm


def read_state(run: RunDir, slurm: Slurm | None = None, *, record: RunRecord | None = None) -> RunView:
    """Read the state of a run; an unreadable file makes it UNKNOWN and raises no error.

    `slurm` None: the `Slurm` that this process shares. `record`: the run's, if the caller has read it already.
    For a run that has ended, the values of its secrets are deleted and an end in the spool is moved to the run.
    """
    try:
        view = _read_state(run, record or read_run(run), slurm)
        if view.state is RunState.LOST:
            os.stat(run.path)  # an unreachable directory does not prove that the run is lost
        if view.finished:
            drop_secrets(run)
        return view
    except (ClusterddpError, OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        return RunView(state=RunState.UNKNOWN, attempt=None, end=None, reason=f"its record cannot be read: {error}")


def announce(runs: Iterable[tuple[RunDir, RunRecord]], slurm: Slurm | None = None) -> None:
    """Announce that the states of these runs will be read, so that one query to Slurm covers them all."""
    on_slurm = [(run, record) for run, record in runs if record.launcher == "slurm"]
    if on_slurm:
        from clusterddp.launchers.slurm.state import wanted_jobs

        (slurm or _slurm_here()).expect(wanted_jobs(on_slurm))


def _read_state(run: RunDir, record: RunRecord, slurm: Slurm | None = None) -> RunView:
    attempts = run.attempts()
    newest = attempts[-1] if attempts else None
    end = None
    if newest:
        end = read_end(newest) or read_spooled(record.token, newest.number)
    if newest and end and not end.will_restart:
        deliver_end(newest, record.token, end)
        return final_view(newest, end)
    if newest and record.queued:
        return _queued(run, newest)
    view = launcher_named(record.launcher, inherited_environment()).read_state(
        run, record, newest, end, slurm or _slurm_here()
    )
    return view or _read_state(run, read_run(run), slurm)


def _queued(run: RunDir, attempt: AttemptDir) -> RunView:
    from clusterddp.run.sweep import read_queued_state

    view, now = read_queued_state(run, attempt), read_run(run)
    # The queue may have started the run and exited meanwhile.
    overtaken = view.state is RunState.LOST and (not now.queued or attempt.end.exists())
    return _read_state(run, now) if overtaken else view


@functools.cache
def _slurm_here() -> Slurm:
    """Return the one `Slurm` of this process, whose answers all callers share."""
    from clusterddp.slurm.queue import Slurm

    return Slurm(inherited_environment())
