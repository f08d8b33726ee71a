"""Find runs: all of a runs directory, or one by its name."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TypeVar

from clusterddp.errors import ClusterddpError, RunNotFoundError, UsageError
from clusterddp.run.directory import SWEEP_RECORD, RunDir, is_run_name
from clusterddp.run.record import JobAnswer, read_run
from clusterddp.run.seal import is_ours
from clusterddp.system.files import is_file, read_json, read_record
from clusterddp.wire import build

_T = TypeVar("_T")


def list_runs(runs_dir: Path) -> list[RunDir]:
    """List the runs in `runs_dir` and in its sweeps, oldest first; a directory without a record is no run."""
    runs: list[RunDir] = []
    for place in list_places(runs_dir):
        runs += [RunDir(place)] if is_file(RunDir(place).record) else list_runs(place)
    return sorted(runs, key=lambda run: (created_ns(run), run.name))


def list_places(runs_dir: Path) -> list[Path]:
    """List the directories in `runs_dir` that are runs or sweeps, in no order, without unreadable ones.

    Other names than clusterddp gives are none: a shell takes them as words of its own.
    """
    try:
        paths = [Path(entry.path) for entry in os.scandir(runs_dir) if is_run_name(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in paths if is_file(RunDir(path).record) or is_file(path / SWEEP_RECORD)]


def find_run(runs_dir: Path, name: str) -> RunDir:
    """Find a run by its own name, an unambiguous beginning of it, `@last`, its path, its spec's `name:`, or its job.

    A job is Slurm's id, with its task in a job array: 12345, 12345_3; elsewhere the id that status shows. Of several
    runs of one spec it is the one that has not ended, else the newest. `@last` and the name of a spec mean this user's
    own runs.
    Raises: RunNotFoundError: there is none. UsageError: several runs match.
    """
    if os.sep in name and is_run_name(Path(name).resolve().name) and RunDir(Path(name)).record.is_file():
        return RunDir(Path(name).resolve())
    runs = list_runs(runs_dir)
    if name == "@last" and (newest := newest_run(runs)):
        return newest
    exact = [run for run in runs if run.name == name]
    matches = exact or [run for run in runs if name and run.name.startswith(name)] or runs_of_spec(runs, name)
    matches = matches or ([run for run in runs if name in _jobs_of(run)] if is_job(name) else [])
    if len(matches) == 1:
        return matches[0]
    if matches:
        few = ", ".join(run.name for run in matches[:8]) + (", ..." if len(matches) > 8 else "")
        raise UsageError(f"{name} matches {len(matches)} runs: {few}")
    none = f"no run in {runs_dir} is your own" if runs else f"no runs in {runs_dir} yet"
    known = ["@last", *(run.name for run in runs), *filter(None, map(_spec_name, runs))]
    near = difflib.get_close_matches(name, known, n=1)
    job = ", and none of such a job" if is_job(name) else f'. Did you mean "{near[0]}"?' if near else ""
    raise RunNotFoundError(
        none if name == "@last" else f"no run named {name} in {runs_dir}{job}",
        hint="clusterddp list shows the runs; CLUSTERDDP_RUNS or --runs names another directory",
    )


def list_requests(hold: RunDir) -> dict[Path, RunDir]:
    """List the requests to a hold that starts its runs itself: that of the one that runs, then those that wait."""
    names = sorted(name for name in os.listdir(hold.requests) if name[0].isdigit()) if hold.requests.is_dir() else []
    parts = ((name, name.partition("-")[2]) for name in names)  # without files that are being written
    return {hold.requests / name: RunDir(hold.path.parent / run) for name, run in parts if is_run_name(run)}


def list_held(hold: RunDir) -> list[RunDir]:
    """List the runs in a hold: those that it was asked to start, else, by their records, those that have not ended."""
    if hold.requests.is_dir():
        return [*list_requests(hold).values()]
    inside = (run for run in list_runs(hold.path.parent) if run.name != hold.name == _read_value(run, "hold", str))
    return [run for run in inside if not _has_ended(run)]


def is_job(name: str) -> bool:
    """Return whether a name is that of a job: Slurm's id, or a process id; of a task in a job array, 12345_3."""
    return re.fullmatch(r"[0-9]+(_[0-9]+)?", name) is not None


def _jobs_of(run: RunDir) -> set[str | None]:
    """Return the ids of the jobs that have carried a run."""
    try:
        earlier = [read_record(JobAnswer, path) for path in run.launcher_dir.glob("job-*.json")]
        return {read_run(run).job_id, *(answer.job_id for answer in earlier if answer)}
    except (ClusterddpError, OSError):
        return set()


def newest_run(runs: list[RunDir]) -> RunDir | None:
    """Return the newest run that is this user's own."""
    return next(filter(is_ours, reversed(runs)), None)


def is_run(spec: Path | str, runs_dir: Path) -> bool:
    """Return whether a word for a spec names a run: it is none of a file's, and no such file exists.

    Raises: UsageError: there is such a file and such a run.
    """
    path = Path(spec)
    if str(spec) == "-" or path.suffix in {".yaml", ".yml"}:
        return False
    if not path.exists() or path.is_dir():
        return True
    run = RunDir(runs_dir / path)
    if path.parent == Path() and run.record.is_file():
        raise UsageError(f"{path} is a file here and a run", hint=f"{path.absolute()} is the file, {run.path} the run")
    return False


def runs_of_spec(runs: list[RunDir], name: str) -> list[RunDir]:
    """Return this user's runs of the spec with this name that have not ended; when all have, the newest one."""
    named = [run for run in runs if _spec_name(run) == name and is_ours(run)]
    return [run for run in named if not _has_ended(run)] or named[-1:]


def _spec_name(run: RunDir) -> str | None:
    return _read_value(run, "name", str)


def _has_ended(run: RunDir) -> bool:
    attempts = run.attempts()
    return bool(attempts) and is_file(attempts[-1].end)


def created_ns(run: RunDir) -> int:
    """Read when a run was made; a run with a damaged record counts as the oldest and does not hide the others."""
    return _read_value(run, "created_ns", int) or 0


def _read_value(run: RunDir, name: str, kind: type[_T]) -> _T | None:
    try:
        return build(kind, (read_json(run.record) or {}).get(name))
    except (ClusterddpError, OSError, ValueError):
        return None
