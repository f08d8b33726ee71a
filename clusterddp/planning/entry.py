"""The entry of a run: how the ranks execute its program, from the snapshot of the code or in place; or a trial."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clusterddp.errors import UsageError
from clusterddp.planning.program import Program, with_file
from clusterddp.run.code import SnapshotPlan
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec

Trial = Literal["smoke test", "deep check", "hang"]
"""What the ranks of a run may execute in place of its entry."""
_TRIALS: dict[Trial, tuple[str, tuple[str, ...]]] = {
    "smoke test": ("clusterddp.train.smoke_test", ()),
    "deep check": ("clusterddp.train.deep_check", ()),
    "hang": ("clusterddp.train.deep_check", ("hang",)),
}
_SMOKE_BATCH = 8
"""Images per rank on the CPU: a smoke test there proves that a step works and measures no speed."""


def plan_entry(
    program: Program, job: JobSpec, *, run_dir: Path, working_dir: Path, spawns: tuple[int, ...] = ()
) -> Entry:
    """Plan how the ranks of one run execute the program; files that the snapshot holds are taken from it.

    Over SSH the hosts have nothing but the snapshot, so the ranks work in it. `spawns`: how many ranks the program
    itself starts on each node; empty if it starts none.
    """
    if job.entry is None:
        return _trainer_entry(program, job, run_dir)
    if job.network.init == "file":
        _refuse_in_address(run_dir)
    code = RunDir(run_dir).code
    code_dir = code / _place_within(program.snapshot, working_dir) if program.snapshot else working_dir
    file = _path_in_run(str(program.file), program.snapshot, code) if program.file else None
    return Entry(
        kind=program.kind,
        target=with_file(program.kind, program.target, file),
        words=program.words,
        args=tuple(job.entry.args),
        kwargs=dict(job.entry.kwargs),
        shell=job.entry.shell,
        working_dir=str(code_dir if job.launcher == "ssh" else working_dir),
        import_paths=tuple(_path_in_run(path, program.snapshot, code) for path in program.import_paths),
        init="tcp" if job.network.init == "auto" else job.network.init,
        spawns=spawns,
        counts=job.entry.counts,
        local_rank_arg=job.entry.local_rank_arg,
        fork=job.entry.fork,
        stop_signal=job.entry.stop_signal,
        data_dir=job.entry.data_dir,
        output_dir=job.entry.output_dir or str(RunDir(run_dir).output),
        code_dir=str(code_dir),
    )


def _path_in_run(path: str, snapshot: SnapshotPlan | None, code: Path) -> str:
    """Return where a file lies when the ranks run: in `code`, the copy of the code, if the snapshot covers its path."""
    if snapshot is None or not Path(path).is_relative_to(snapshot.root):
        return path
    return str(code / Path(path).relative_to(snapshot.root))


def _trainer_entry(program: Program, job: JobSpec, run_dir: Path) -> Entry:
    # Python imports from the working directory first, so a `random.py` of the user's would hide Python's own. The
    # trainer needs no file of the user's: it works in a directory without code.
    return Entry(
        kind=program.kind,
        target=program.target,
        working_dir=str(RunDir(run_dir).launcher_dir),
        stop_aware=True,
        init="env" if job.network.init == "auto" else job.network.init,
    )


def plan_trial_entry(trial: Trial, entry: Entry, spec: dict[str, Any], *, on_cpu: bool) -> tuple[Entry, dict[str, Any]]:
    """Return the entry of a trial, which replaces `entry`, and the spec for its ranks."""
    program = None if spec["train"] else {"kind": entry.kind, "target": entry.target, "shell": entry.shell}
    target, args = _TRIALS[trial]
    tried = dataclasses.replace(
        entry,
        kind="module",
        target=target,
        words=(),
        args=args,
        kwargs={},
        shell=False,
        stop_aware=False,
        spawns=(),
        counts="processes",
        local_rank_arg=False,
        smoke_test=program,
        stop_signal="none",
    )
    if spec["train"] and trial == "smoke test":
        batch = min(_SMOKE_BATCH, spec["train"]["batch_size"]) if on_cpu else spec["train"]["batch_size"]
        once = {"max_steps": 1, "accumulate": 1, "batch_size": batch, "compile": "never"}
        if on_cpu and spec["train"]["precision"] == "auto":
            once["precision"] = "fp32"
        spec = spec | {"train": spec["train"] | once}
    return tried, spec


def _refuse_in_address(run_dir: Path) -> None:
    """Refuse a directory that torch cannot read in a file:// address."""
    odd = next((char for char in str(run_dir) if char in "?#"), None)
    if odd:
        raise UsageError(
            f"network.init file: {run_dir} has {odd!r}, which ends a path in a file:// address",
            hint="use another directory with --runs DIR or CLUSTERDDP_RUNS; or network.init=tcp",
        )


def move_entry(entry: Entry, moved: Callable[[str], str]) -> Entry:
    """Return the entry of a run whose directory has moved; `moved` returns the new path of a file."""

    def moved_if_any(path: str | None) -> str | None:
        return None if path is None else moved(path)

    return dataclasses.replace(
        entry,
        target=entry.target if entry.shell else moved(entry.target),
        working_dir=moved(entry.working_dir),
        import_paths=tuple(moved(path) for path in entry.import_paths),
        data_dir=moved_if_any(entry.data_dir),
        output_dir=moved_if_any(entry.output_dir),
        code_dir=moved_if_any(entry.code_dir),
    )


def _place_within(snapshot: SnapshotPlan, directory: Path) -> Path:
    """Return the directory's path in the snapshot; `.` if the snapshot has no file of the directory."""
    within = os.path.relpath(directory.resolve(), snapshot.root)
    return Path(within if any(name.startswith(f"{within}/") for name in snapshot.files) else ".")
