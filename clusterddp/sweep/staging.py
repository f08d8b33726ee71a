"""Make the directory of a sweep: write up to a thousand runs in a staging directory, sync once, rename once."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.planning.program import choose_snapshot
from clusterddp.run.code import CodeCopy, plan_copy, replace_link, store_of, write_snapshot
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity, RunRecord
from clusterddp.run.surroundings import capture_surroundings
from clusterddp.run.sweep import SweepDir, SweepRecord, write_sweep
from clusterddp.submission.staging import put_in_place, staged
from clusterddp.system.directories import remove_directory
from clusterddp.system.files import write_json

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.run.code import SnapshotPlan
    from clusterddp.sweep.plan import SweepPlan


def make_sweep(plan: SweepPlan, environ: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Write the directory of a sweep with all its runs; `variables`: passed on to their ranks.

    Raises: FileExistsError: the name has been taken meanwhile. ClusterddpError: the directory cannot be made (full,
    read-only). In both cases nothing is left behind.
    """
    with staged(plan.path.parent) as staging:
        _fill(SweepDir(staging), plan, environ, variables)
        sync_file_system(staging)
        is_placed = put_in_place(staging, plan.path)
    if not is_placed:
        raise FileExistsError(plan.path)


def take_back(sweep: SweepDir) -> None:
    """Remove a sweep that was not submitted.

    Raises: OSError: the file system refuses.
    """
    remove_directory(sweep.path)


def replace_files(texts: Mapping[Path, str]) -> None:
    """Replace files, each atomically; after a power loss a file may have its old content."""
    for path, text in texts.items():
        temporary = path.with_name(f".{path.name}.new")
        _write(temporary, text)
        os.replace(temporary, path)


def record_text(record: RunRecord) -> str:
    """Return a run's record as `write_run` writes it, but on one line, which Python writes faster."""
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False) + "\n"


def sync_file_system(path: Path) -> None:
    """Make everything that was written to the file system of `path` survive a power loss, in one call.

    Raises: OSError: the file system could not write all of it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "syncfs"):
            os.sync()
        elif libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def _fill(sweep: SweepDir, plan: SweepPlan, environ: Mapping[str, str], variables: Mapping[str, str]) -> None:
    record = _sweep_record(plan)
    write_sweep(sweep, record)  # first: other submits read from it whether this process lives
    sweep.launcher_dir.mkdir(mode=0o700)
    surroundings = capture_surroundings(plan.base.working_dir, environ)
    copy = None
    if plan.base.snapshot is not None:
        chosen = choose_snapshot(plan.base.snapshot, runs_dir=plan.path.parent, environ=environ)
        digest = write_snapshot(chosen, store_of(plan.path.parent), sweep.code)
        copy = _plan_copies(sweep, plan, chosen)
        surroundings["code"] = {"sha256": digest, "files": len(chosen.files), "bytes": chosen.total_bytes}
    write_json(sweep.environment, surroundings)
    hidden: dict[str, str] = {}
    if plan.job:
        write_json(sweep.job_environment, dict(variables))
        hidden = {name: environ[name] for name in plan.base.secrets}
    for index, run in enumerate(plan.runs):
        _fill_run(sweep, run, _run_record(plan, record, index), hidden, copy)
    _write(sweep.tasks, "".join(f"{run.run}\n" for run in plan.runs))


def _plan_copies(sweep: SweepDir, plan: SweepPlan, snapshot: SnapshotPlan) -> CodeCopy | None:
    """Plan the copy of the code that each run gets; None: the runs share the sweep's code."""
    if not plan.base.has_own_code:
        return None
    if plan.shares_code:
        replace_link(sweep.code, snapshot)
        return None
    return plan_copy(sweep.code.resolve(), snapshot)


def _fill_run(sweep: SweepDir, plan: Plan, record: RunRecord, hidden: Mapping[str, str], copy: CodeCopy | None) -> None:
    """Write one run as `submission.staging.make_run` does, without syncs, and with links to the shared files."""
    from clusterddp.planning.plan import plan_json

    run = RunDir(sweep.path / plan.run)
    attempt = run.attempt(0)
    for directory in (run.path, run.checkpoints, run.tensorboard, run.launcher_dir, attempt.path.parent, attempt.path):
        directory.mkdir(mode=0o700)
    for directory in (attempt.ranks, attempt.logs):
        directory.mkdir(mode=0o700)
    _write(run.record, record_text(record))
    _write(run.plan, json.dumps(plan_json(plan), ensure_ascii=False) + "\n")
    _write(run.spec, plan.spec_text)
    if hidden:
        _write(run.job_secrets, json.dumps(hidden))
    run.environment.symlink_to(os.path.relpath(sweep.environment, run.path))
    if plan.slurm:
        run.job_environment.symlink_to(os.path.relpath(sweep.job_environment, run.launcher_dir))
    _give_code(sweep, run, plan, copy)


def _give_code(sweep: SweepDir, run: RunDir, plan: Plan, copy: CodeCopy | None) -> None:
    if copy is not None:
        copy.write(run.code)
        run.snapshot.symlink_to(Path("..", sweep.code.readlink()))
    elif plan.has_own_code:
        run.code.symlink_to(Path("..", sweep.code.name))
        run.snapshot.symlink_to(Path("..", RunDir(sweep.path).snapshot.readlink()))
    elif plan.snapshot is not None:
        run.code.symlink_to(Path("..", sweep.code.readlink()))


def _sweep_record(plan: SweepPlan) -> SweepRecord:
    return SweepRecord(
        sweep=plan.sweep,
        token=plan.token,
        name=plan.base.name,
        launcher=plan.base.launcher,
        created_ns=time.time_ns(),
        keys=plan.keys,
        size=len(plan.runs),
        throttle=plan.throttle,
        job_tag=plan.tag,
        submitter=dataclasses.asdict(ProcessIdentity.of()),
    )


def _run_record(plan: SweepPlan, sweep: SweepRecord, index: int) -> RunRecord:
    return RunRecord(
        run=plan.runs[index].run,
        token=plan.runs[index].token,
        name=plan.base.name,
        launcher=plan.base.launcher,
        # One nanosecond apart, so the runs are listed in the order of their tasks.
        created_ns=sweep.created_ns + index,
        submitter=sweep.submitter,
        job_tag=plan.tag,
        array_index=index if plan.job else None,
        variant=plan.labels[index],
        queued=plan.job is None,
    )


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
