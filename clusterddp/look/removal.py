"""Which runs `rm` removes, why others stay, and the removal: here, and on the hosts of runs over SSH."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError, SshError, UsageError
from clusterddp.launchers.state import announce, read_state
from clusterddp.results.sync import Synchroniser
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.leftovers import find_runs
from clusterddp.run.record import RunRecord, read_run
from clusterddp.run.removal import check_inside, fingerprint, remove_place
from clusterddp.run.state import RunState, RunView
from clusterddp.run.sweep import SweepDir, find_sweep, read_queue
from clusterddp.run.usage import Usage, expires_at, measure_run

if TYPE_CHECKING:
    from clusterddp.planning.ssh.plan import HostAccess
    from clusterddp.results.host_run import HostRun

_HOSTS_TIMEOUT_S = 6.0
"""How long the hosts of runs that have not ended may take to answer."""
_LOOKS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Selector:
    """Which of the runs are meant; without any of these all are."""

    states: tuple[str, ...] = ()
    spec_name: str | None = None
    older_than_s: float | None = None
    expired: bool = False

    @property
    def selects(self) -> bool:
        return bool(self.states or self.spec_name is not None or self.older_than_s is not None or self.expired)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A run that has ended and can be removed."""

    run: RunDir
    record: RunRecord
    view: RunView
    ended: float
    """Seconds since the epoch."""
    usage: Usage
    hosts: tuple[str, ...]
    """The hosts over SSH that have a directory of it."""
    seen: tuple[object, ...]


@dataclass(kw_only=True)
class Removal:
    """One removal of runs: `look` comes first, then `carry_out`."""

    runs_dir: Path
    environ: Mapping[str, str]
    report: Callable[[str], None]
    here_only: bool = False
    """Hosts that do not answer keep their directories."""
    candidates: list[Candidate] = field(default_factory=list)
    sweeps: list[SweepDir] = field(default_factory=list)
    """Sweeps of which every run is removed."""
    refused: dict[str, ClusterddpError] = field(default_factory=dict)
    """Run -> why it stays: those that were named, or could not be removed."""
    unfinished: int = 0
    """Selected runs that have not ended."""
    removed: list[Candidate] = field(default_factory=list)

    def look(self, names: Sequence[str], selector: Selector) -> None:
        """Find the runs. Raises: RunNotFoundError, UsageError: a name is none of a run."""
        named = [run for name in dict.fromkeys(names) for run in self._named(name)]
        runs = {run.path: run for run in (named if names else list_runs(self.runs_dir))}
        explicit = bool(names) and not selector.selects
        for run in self._ended(list(runs.values()), explicit=explicit):
            if _matches(run, selector):
                self.candidates.append(run)
        self._refuse_left_over()
        chosen = {candidate.run.path for candidate in self.candidates}
        for folder in dict.fromkeys(path.parent for path in chosen):
            sweep = SweepDir(folder)
            if sweep.record.is_file() and {run.path for run in list_runs(folder)} <= chosen:
                self.sweeps.append(sweep)

    @property
    def places(self) -> list[Path]:
        """The directories that are removed."""
        return [*(candidate.run.path for candidate in self.candidates), *(sweep.path for sweep in self.sweeps)]

    def carry_out(self) -> None:
        """Remove the runs, those over SSH on their hosts first; what cannot be removed is in `refused`."""
        self.refused |= {} if self.here_only else _remove_on_hosts(self.candidates, self.environ)
        for candidate in [each for each in self.candidates if each.run.name not in self.refused]:
            with self._keeping(candidate.run.name):
                remove_place(candidate.run.path, self.runs_dir, seen=candidate.seen)
                self.removed.append(candidate)
        for sweep in [each for each in self.sweeps if not list_runs(each.path)]:
            with self._keeping(sweep.name):
                _refuse_live_queue(sweep)
                remove_place(sweep.path, self.runs_dir, seen=fingerprint(sweep.path))

    @contextlib.contextmanager
    def _keeping(self, name: str) -> Iterator[None]:
        """Keep a run that cannot be removed, and the reason."""
        try:
            yield
        except ClusterddpError as error:
            self.refused[name] = error

    def _named(self, name: str) -> list[RunDir]:
        """Return the run of a name, or all runs of a sweep; a name of a spec is not enough to remove a run."""
        sweep = find_sweep(self.runs_dir, name)
        if sweep:
            check_inside(sweep.path, self.runs_dir)
            _refuse_live_queue(sweep)
            return list_runs(sweep.path)
        run = find_run(self.runs_dir, name)
        if name != "@last" and "/" not in name and not run.name.startswith(name):
            raise UsageError(f"{name} is the name of a spec, not of a run", hint=f"--name {name} removes all its runs")
        return [run]

    def _ended(self, runs: list[RunDir], *, explicit: bool) -> Iterator[Candidate]:
        """Yield the runs that have ended; the others are refused if the user named them."""
        with Synchroniser(runs, self.environ, report=self.report) as sync:
            sync.update(timeout_s=_HOSTS_TIMEOUT_S)
        records: list[tuple[RunDir, RunRecord]] = []
        for run in runs:
            with self._refusing(run, explicit=explicit):
                check_inside(run.path, self.runs_dir)
                records.append((run, _own_record(run)))
        announce(records)
        for run, record in records:
            with self._refusing(run, explicit=explicit):
                view, seen = _read_settled(run, record)
                if view.finished:
                    yield _candidate(run, record, view, seen)
                elif explicit:
                    raise _not_ended(run, view)
                else:
                    self.unfinished += 1

    @contextlib.contextmanager
    def _refusing(self, run: RunDir, *, explicit: bool) -> Iterator[None]:
        """Refuse a run that cannot be read, or leave it out if it was not named."""
        try:
            yield
        except (ClusterddpError, OSError, TypeError) as error:
            if explicit:
                unread = ClusterddpError(f"{run.path}: cannot be read: {error}")
                self.refused[run.name] = error if isinstance(error, ClusterddpError) else unread

    def _refuse_left_over(self) -> None:
        """Refuse runs of which processes live on this machine."""
        alive = {run.token: run for run in find_runs(only={each.record.token for each in self.candidates})}
        for candidate in [each for each in self.candidates if each.record.token in alive]:
            self.candidates.remove(candidate)
            count = len(alive[candidate.record.token].processes)
            name = candidate.run.name
            self.refused[name] = UsageError(
                f"{name} has ended, and {count} of its processes are alive here", hint=f"clusterddp gc {name} ends them"
            )


def _matches(candidate: Candidate, selector: Selector) -> bool:
    now = time.time()
    expires = expires_at(candidate.run, candidate.ended) if selector.expired else None
    return (
        (not selector.states or candidate.view.state.value in selector.states)
        and (selector.spec_name is None or candidate.record.name == selector.spec_name)
        and (selector.older_than_s is None or now - candidate.ended >= selector.older_than_s)
        and (not selector.expired or (expires is not None and expires <= now))
    )


def _candidate(run: RunDir, record: RunRecord, view: RunView, seen: tuple[object, ...]) -> Candidate:
    from clusterddp.results.host_run import find_host_runs

    hosts = tuple(access.host for access, _ in find_host_runs(run)) if record.launcher == "ssh" else ()
    ended = view.end.ended if view.end else _last_change(run)
    return Candidate(run=run, record=record, view=view, ended=ended, usage=measure_run(run), hosts=hosts, seen=seen)


def _last_change(run: RunDir) -> float:
    attempts = run.attempts()
    return max(place.stat().st_mtime for place in (run.path, *(attempt.path for attempt in attempts[-1:])))


def _own_record(run: RunDir) -> RunRecord:
    """Read the record of a run of this user. Raises: UsageError: it is another user's, for root, too."""
    if os.stat(run.path).st_uid != os.geteuid():
        raise UsageError(f"{run.name} belongs to another user, who can remove it")
    return read_run(run)


def _read_settled(run: RunDir, record: RunRecord) -> tuple[RunView, tuple[object, ...]]:
    """Read the state of a run, and its fingerprint in this state."""
    for _ in range(_LOOKS):
        seen = fingerprint(run.path)
        view = read_state(run, record=record)
        if fingerprint(run.path) == seen:
            break
        record = read_run(run)
    return view, seen


def _not_ended(run: RunDir, view: RunView) -> UsageError:
    if view.state is RunState.UNKNOWN:
        return UsageError(f"{run.name}: whether it has ended is not known: {view.reason}")
    return UsageError(f"{run.name} is {view.state.value}", hint=f"clusterddp cancel {run.name} ends it")


def _refuse_live_queue(sweep: SweepDir) -> None:
    queue = read_queue(sweep)
    if queue and queue.state in ("RUNNING", "UNKNOWN"):
        raise UsageError(f"the queue of {sweep.name} is {queue.state}", hint=f"clusterddp cancel {sweep.name} ends it")


def _remove_on_hosts(candidates: Sequence[Candidate], environ: Mapping[str, str]) -> dict[str, ClusterddpError]:
    """Remove the directories of runs on their hosts; return, by run, why one is still there."""
    from clusterddp.look.ps import Hosts
    from clusterddp.results.host_run import find_host_runs

    groups: dict[tuple[HostAccess, ...], list[HostRun]] = {}
    kept: dict[str, ClusterddpError] = {}
    for run in [each.run for each in candidates if each.record.launcher == "ssh"]:
        found = find_host_runs(run)
        if found:
            groups.setdefault(tuple(access for access, _ in found), []).append(found[0][1])
        else:
            kept[run.name] = _stays(run.name, "its hosts", "are not known: its plan cannot be read")
    for accesses, host_runs in groups.items():
        run_of = {f"runs/{each.name}": each.run.name for each in host_runs}
        with Hosts(accesses, environ) as hosts:
            answers = hosts.remove({access.host: list(run_of) for access in accesses}, None)
        for host, answer in answers.items():
            if isinstance(answer, SshError):
                kept |= {run: _stays(run, host, f"cannot be asked: {answer.message}") for run in run_of.values()}
            else:
                failed = [each for each in answer if each.error]
                kept |= {run_of[each.place]: _stays(run_of[each.place], host, str(each.error)) for each in failed}
    return kept


def _stays(run: str, where: str, why: str) -> ClusterddpError:
    return ClusterddpError(f"{run} stays: {where}: {why}", hint="--local removes it here, and leaves the hosts alone")
