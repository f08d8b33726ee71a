"""The entry of a run: its program as the ranks execute it, from the snapshot of the code or in place; or a trial."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clusterddp.errors import UsageError
from clusterddp.planning.program import Program, with_file
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry
from clusterddp.run.snapshot import SnapshotPlan

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec

Trial = Literal["smoke test", "deep check", "hang"]
"""What the ranks of a run may do in place of its entry."""
_TRIALS: dict[Trial, tuple[str, tuple[str, ...]]] = {
    "smoke test": ("clusterddp.train.smoke_test", ()),
    "deep check": ("clusterddp.train.deep_check", ()),
    "hang": ("clusterddp.train.deep_check", ("hang",)),
}
_SMOKE_BATCH = 8
"""Images of a rank on the CPU: a smoke test there proves that a step can be taken, not how long it takes."""


def entry_of(
    program: Program, job: JobSpec, *, run_dir: Path, working_dir: Path, spawns: tuple[int, ...] = ()
) -> Entry:
    """Return the program as the ranks of one run execute it: what the snapshot holds is taken from there.

    Over SSH the ranks run on hosts that have nothing but the snapshot, so they work in it. `spawns`: how many ranks
    the program itself starts on each node, if it does.
    """

    if job.entry is None:
        return _trainer_entry(program, job, run_dir)

    def moved(path: str) -> str:
        root = program.snapshot.root if program.snapshot else None
        if root is None or not Path(path).is_relative_to(root):
            return path
        return str(RunDir(run_dir).code / Path(path).relative_to(root))

    code_dir = working_dir
    if program.snapshot:
        code_dir = RunDir(run_dir).code / _place_within(program.snapshot, working_dir)
    file = moved(str(program.file)) if program.file else None
    if job.network.init == "file":
        _refuse_in_address(run_dir)
    return Entry(
        kind=program.kind,
        target=with_file(program.kind, program.target, file),
        words=program.words,
        args=tuple(job.entry.args),
        kwargs=dict(job.entry.kwargs),
        shell=job.entry.shell,
        working_dir=str(code_dir if job.launcher == "ssh" else working_dir),
        import_paths=tuple(moved(path) for path in program.import_paths),
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


def _trainer_entry(program: Program, job: JobSpec, run_dir: Path) -> Entry:
    # The working directory is on a module's path. The trainer needs nothing from there, and a `random.py` in the
    # directory of the submit must not take the place of Python's own; so it works where no code lies.
    return Entry(
        kind=program.kind,
        target=program.target,
        working_dir=str(RunDir(run_dir).launcher_dir),
        stop_aware=True,
        init="env" if job.network.init == "auto" else job.network.init,
    )


def trial_of(trial: Trial, entry: Entry, spec: dict[str, Any], *, on_cpu: bool) -> tuple[Entry, dict[str, Any]]:
    """Return the entry of a trial, which takes the place of `entry`, and the spec that its ranks get."""
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
    """Refuse a directory that torch would not find behind file://."""
    odd = next((char for char in str(run_dir) if char in "?#"), None)
    if odd:
        raise UsageError(
            f"network.init file: {run_dir} has {odd!r}, which ends a path in an address",
            hint="--runs DIR or CLUSTERDDP_RUNS takes another directory; or network.init=tcp",
        )


def move_entry(entry: Entry, moved: Callable[[str], str]) -> Entry:
    """Return the entry of a run whose directory is elsewhere; `moved` says where a path is then."""

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
    """Return where the directory is in the snapshot; the top of it where it has nothing of the directory."""
    within = os.path.relpath(directory.resolve(), snapshot.root)
    return Path(within if any(name.startswith(f"{within}/") for name in snapshot.files) else ".")
