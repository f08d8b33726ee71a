"""Make a run directory: write it as a staging directory, then rename it, so a run is complete or not there."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.planning.plan import Plan, plan_json, rename_plan
from clusterddp.planning.program import choose_snapshot
from clusterddp.run.attempts import make_attempt
from clusterddp.run.code import replace_link, store_of, write_snapshot
from clusterddp.run.directory import STAGING_PREFIX, SWEEP_RECORD, RunDir
from clusterddp.run.find import find_run
from clusterddp.run.record import ProcessIdentity, RunRecord, write_run
from clusterddp.run.surroundings import capture_surroundings
from clusterddp.system.directories import own_directories
from clusterddp.system.files import read_json, sync_directory, write_bytes, write_json, write_text
from clusterddp.system.own_directory import find_fault

_FOREIGN_AFTER_S = 24 * 3600.0
"""The age at which a staging directory of another machine is removed; its submitter cannot be checked from here."""
_NAMELESS_AFTER_S = 600.0
"""The age at which a staging directory without a record is removed; its submitter was killed before writing one."""


def make_run(plan: Plan, environ: Mapping[str, str], rename: Callable[[Plan], Plan] = rename_plan) -> Plan:
    """Write the run directory of `plan`; return the plan, renamed by `rename` if another run has taken its name.

    Raises: ClusterddpError: the directory cannot be made (full, read-only, not a directory); nothing is left behind.
    """
    with staged(plan.runs_dir) as staging:
        _fill(staging, plan, environ)
        while not put_in_place(staging, plan.run_dir):
            plan = rename(plan)
            _write_identity(RunDir(staging), plan)
    return plan


@contextlib.contextmanager
def staged(runs_dir: Path) -> Iterator[Path]:
    """Make a staging directory, which the caller fills and renames; remove it afterwards unless it was renamed.

    Raises: ClusterddpError: the directory cannot be made or filled (full, read-only, not a directory).
    """
    staging = runs_dir / f"{STAGING_PREFIX}{secrets.token_hex(8)}"
    try:
        make_runs_dir(runs_dir)
        remove_abandoned(runs_dir)
        staging.mkdir(mode=0o700)
        yield staging
    except OSError as error:
        raise refusal(runs_dir, error) from error
    except ClusterddpError as error:
        if isinstance(error.__cause__, OSError):
            raise refusal(runs_dir, error.__cause__) from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_abandoned(runs_dir: Path) -> None:
    """Remove the staging directories of killed submits; those of submits under way stay.

    Where other users can rename a run, they could give it such a name, and nothing is removed.
    """
    for path in own_directories(runs_dir) if find_fault(runs_dir) is None else ():
        with contextlib.suppress(OSError):
            if path.name.startswith(STAGING_PREFIX) and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def make_runs_dir(runs_dir: Path) -> None:
    """Make the directory of all runs, unless it exists; no group may write there, whatever the umask is."""
    try:
        runs_dir.mkdir(0o755, parents=True)
    except FileExistsError:
        if not runs_dir.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(runs_dir)) from None
        return
    # The directory usually lies in a repository, where runs should not be committed.
    write_text(runs_dir / ".gitignore", "*\n", exclusive=True)


def _fill(staging: Path, plan: Plan, environ: Mapping[str, str]) -> None:
    run = RunDir(staging)
    _write_identity(run, plan)  # first: other submits read from it whether this process lives
    write_text(run.spec, plan.spec_text)
    for directory in (run.checkpoints, run.tensorboard, run.launcher_dir):
        directory.mkdir(mode=0o700)
    make_attempt(run, 0)
    if plan.gang.entry.is_call:
        from clusterddp.places.functions import write_submission

        parent = find_run(plan.runs_dir, plan.parent) if plan.parent else None
        here = plan.launcher != "ssh"
        write_submission(run, plan.submission, parent, here=here)
    if plan.gang.entry.kind == "batch_script":
        write_bytes(run.batch_script, plan.submission or b"")
    surroundings = capture_surroundings(plan.working_dir, environ, plan.gang.python)
    if plan.snapshot is not None:
        chosen = choose_snapshot(plan.snapshot, runs_dir=plan.runs_dir, environ=environ)
        digest = write_snapshot(chosen, store_of(plan.runs_dir), run.code)
        if plan.has_own_code:
            replace_link(run.code, chosen)
        surroundings["code"] = {"sha256": digest, "files": len(chosen.files), "bytes": chosen.total_bytes}
    write_json(run.environment, surroundings)
    sync_directory(staging)


def _write_identity(run: RunDir, plan: Plan) -> None:
    record = RunRecord(
        run=plan.run,
        token=plan.token,
        name=plan.name,
        launcher=plan.launcher,
        created_ns=time.time_ns(),
        parent=plan.parent,
        hold=plan.hold,
        submitter=dataclasses.asdict(ProcessIdentity.of()),
    )
    write_run(run, record)
    write_json(run.plan, plan_json(plan))


def put_in_place(staging: Path, run_dir: Path) -> bool:
    """Rename the finished directory; False when the name is taken."""
    try:
        # A rename silently replaces an empty directory; a run is never empty.
        staging.rename(run_dir)
    except OSError as error:
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
            return False
        raise
    sync_directory(run_dir.parent)
    return True


def _is_abandoned(staging: Path) -> bool:
    age_s = time.time() - staging.stat().st_mtime
    try:
        record = read_json(staging / "run.json") or read_json(staging / SWEEP_RECORD) or {}
        alive = ProcessIdentity.from_json(record["submitter"]).alive()
    except (ClusterddpError, KeyError, TypeError):
        return age_s > _NAMELESS_AFTER_S
    return age_s > _FOREIGN_AFTER_S if alive is None else not alive


def refusal(runs_dir: Path, error: OSError) -> ClusterddpError:
    """Return the error for a submit whose directory could not be made."""
    hints = {
        errno.ENOSPC: "free some space, or use another directory with --runs DIR",
        errno.EDQUOT: "free some space, or use another directory with --runs DIR",
    }
    return ClusterddpError(
        f"{runs_dir}: nothing was submitted: {error.strerror}"
        + (f" ({error.filename})" if error.filename and str(error.filename) != str(runs_dir) else ""),
        hint=hints.get(error.errno or 0, "use another directory with --runs DIR or CLUSTERDDP_RUNS"),
    )
