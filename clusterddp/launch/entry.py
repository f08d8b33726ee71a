"""The entry of a run: what its ranks execute, and from where: the snapshot of the code, or the code in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry
from clusterddp.run.snapshot import SnapshotPlan, plan_script_snapshot, plan_snapshot

if TYPE_CHECKING:
    from clusterddp.spec.model import EntrySpec, JobSpec

TRAINER = "clusterddp.train.main"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the ranks execute, with paths as they are at submit; `entry_of` says where they lie in a run."""

    kind: Literal["module", "script"]
    target: str
    args: tuple[str, ...]
    import_paths: tuple[str, ...]
    snapshot: SnapshotPlan | None
    notes: tuple[str, ...]

    @property
    def snapshot_summary(self) -> dict[str, Any] | None:
        """Say in the plan which code is kept, in a form from which `choose_snapshot` finds it again."""
        if self.snapshot is None:
            return None
        return {
            "source": self.snapshot.source,
            "root": str(self.snapshot.root),
            "files": len(self.snapshot.files),
            "bytes": self.snapshot.total_bytes,
        }


def plan_program(job: JobSpec, *, working_dir: Path, runs_dir: Path, environ: Mapping[str, str]) -> Program:
    """Find what the ranks execute, and choose the files of its snapshot.

    Raises: UsageError: the script is not there. ClusterddpError: no snapshot can be made of the code.
    """
    if job.entry is not None and job.launcher == "ssh" and not job.snapshot:
        return _program_on_hosts(job.entry, working_dir)
    if job.entry is None:
        snapshot, notes = _trainer_snapshot(job, working_dir, runs_dir, environ)
        return Program(kind="module", target=TRAINER, args=(), import_paths=(), snapshot=snapshot, notes=notes)
    script = _find_script(job.entry, working_dir)
    home = script.parent if script else working_dir.resolve()
    snapshot, notes = _code_snapshot(job, home, script, runs_dir=runs_dir, environ=environ)
    if job.launcher == "ssh" and snapshot is None:
        raise UsageError(
            f"{home} is in no git repository: there is no telling which code the hosts need",
            hint="git init there; or snapshot: false, where the hosts have the same code at the same path",
        )
    # Python puts the script's directory first, and for a module the working directory; PYTHONPATH follows.
    others = [Path(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    followers = [str((working_dir / path).resolve()) for path in others]
    inside = [path for path in followers if snapshot and Path(path).is_relative_to(snapshot.root)]
    return Program(
        kind="script" if script else "module",
        target=str(script or job.entry.module),
        args=tuple(job.entry.args),
        import_paths=tuple(dict.fromkeys([str(home), *inside])),
        snapshot=snapshot,
        notes=notes,
    )


def entry_of(program: Program, *, run_dir: Path, working_dir: Path, moves: bool = False) -> Entry:
    """Return the program as the ranks of one run execute it: what the snapshot holds is taken from there.

    `moves`: the ranks run on hosts that have nothing but the snapshot, so they work in it.
    """

    def moved(path: str) -> str:
        root = program.snapshot.root if program.snapshot else None
        if root is None or not Path(path).is_relative_to(root):
            return path
        return str(RunDir(run_dir).code / Path(path).relative_to(root))

    # The working directory is on a module's path. The trainer needs nothing from there, and a `random.py` that lies
    # where somebody submits must not take the place of Python's own; so it works where no code lies.
    is_trainer = program.target == TRAINER
    if moves and program.snapshot and not is_trainer:
        working_dir = RunDir(run_dir).code / _place_within(program.snapshot, working_dir)
    return Entry(
        kind=program.kind,
        target=moved(program.target) if program.kind == "script" else program.target,
        args=program.args,
        working_dir=str(RunDir(run_dir).launcher_dir if is_trainer else working_dir),
        import_paths=tuple(moved(path) for path in program.import_paths),
        stop_aware=is_trainer,
    )


def choose_snapshot(summary: dict[str, Any], *, runs_dir: Path, environ: Mapping[str, str]) -> SnapshotPlan:
    """Choose the files of the code that a plan says is kept, as they are now.

    Raises: ClusterddpError: the code is gone, or has grown too large.
    """
    if summary["source"] != "git":
        return plan_script_snapshot(Path(summary["source"]), runs_dir=runs_dir)
    snapshot = plan_snapshot(Path(summary["root"]), runs_dir=runs_dir, environ=environ)
    if snapshot is None:
        raise ClusterddpError(f"{summary['root']}: is no git repository any more, as it was when this was planned")
    return snapshot


def _place_within(snapshot: SnapshotPlan, directory: Path) -> Path:
    """Return where the directory is in the snapshot; the top of it where it has nothing of the directory."""
    within = os.path.relpath(directory.resolve(), snapshot.root)
    return Path(within if any(name.startswith(f"{within}/") for name in snapshot.files) else ".")


def _program_on_hosts(entry: EntrySpec, working_dir: Path) -> Program:
    """Take the code to be where the spec says, on the hosts: nobody here can look."""
    at_home = (entry.script or "").startswith("~/")
    script = entry.script if at_home or entry.script is None else str(working_dir / entry.script)
    return Program(
        kind="script" if script else "module",
        target=str(script or entry.module),
        args=tuple(entry.args),
        import_paths=(str(Path(script).parent) if script else str(working_dir),),
        snapshot=None,
        notes=("snapshot is false: each host runs the code that lies there, at the same path as here",),
    )


def _find_script(entry: EntrySpec, working_dir: Path) -> Path | None:
    if entry.script is None:
        return None
    script = working_dir / Path(entry.script).expanduser()
    if not script.is_file():
        found = "is a directory" if script.is_dir() else "no such file"
        raise UsageError(
            f"entry.script: {script}: {found}",
            hint="the path is taken from where you submit; entry.module names a module instead",
        )
    return script.resolve()


def _code_snapshot(
    job: JobSpec, home: Path, script: Path | None, *, runs_dir: Path, environ: Mapping[str, str]
) -> tuple[SnapshotPlan | None, tuple[str, ...]]:
    if not job.snapshot:
        return None, ("snapshot is false: the code runs in place, later edits reach ranks that start after them",)
    snapshot = plan_snapshot(home, runs_dir=runs_dir, environ=environ)
    if script and (snapshot is None or os.path.relpath(script, snapshot.root) not in snapshot.files):
        # In no repository, or git ignores it.
        snapshot = plan_script_snapshot(script, runs_dir=runs_dir)
    if snapshot is None:
        return None, (f"{home} is in no git repository: no snapshot of the code, the module runs in place",)
    return snapshot, snapshot.notes


def _trainer_snapshot(
    job: JobSpec, working_dir: Path, runs_dir: Path, environ: Mapping[str, str]
) -> tuple[SnapshotPlan | None, tuple[str, ...]]:
    """The trainer executes none of it, so code that cannot be kept is worth a note and no more."""
    if not job.snapshot:
        return None, ()
    try:
        snapshot = plan_snapshot(working_dir, runs_dir=runs_dir, environ=environ)
    except ClusterddpError as error:
        return None, (f"no snapshot of the code: {error.message}",)
    return snapshot, snapshot.notes if snapshot else ()
