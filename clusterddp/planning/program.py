"""The program of a run: what the spec's entry names, which file that is, and which code is kept for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.snapshot import SnapshotPlan, plan_script_snapshot, plan_snapshot

if TYPE_CHECKING:
    from clusterddp.spec.entry_section import EntrySpec
    from clusterddp.spec.model import JobSpec

TRAINER = "clusterddp.train.main"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the ranks execute, with paths as they are at submit; `entry_of` says where they lie in a run."""

    kind: Literal["module", "script", "function", "command"]
    target: str
    words: tuple[str, ...] = ()
    file: Path | None = None
    """The file that `target` is or names, where it is one."""
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
    if job.entry is None:
        snapshot, notes = _trainer_snapshot(job, working_dir, runs_dir, environ)
        return Program(kind="module", target=TRAINER, import_paths=(), snapshot=snapshot, notes=notes)
    kind, target, words = what_runs(job.entry)
    if job.launcher == "ssh" and not job.snapshot:
        return _program_on_hosts(kind, target, words, working_dir)
    file = _find_file(kind, target, working_dir)
    home = file.parent if file and kind != "command" else working_dir.resolve()
    snapshot, notes = _code_snapshot(job, home, file, runs_dir=runs_dir, environ=environ)
    if job.launcher == "ssh" and snapshot is None:
        raise UsageError(
            f"{home} is in no git repository: there is no telling which code the hosts need",
            hint="git init there; or snapshot: false, where the hosts have the same code at the same path",
        )
    if kind == "command" and file and snapshot and not _holds(snapshot, file):
        file = None  # git ignores it: it runs in place
    # Python puts the script's directory first, and for a module the working directory; PYTHONPATH follows.
    others = [Path(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    followers = [str((working_dir / path).resolve()) for path in others]
    inside = [path for path in followers if snapshot and Path(path).is_relative_to(snapshot.root)]
    return Program(
        kind=kind,
        target=with_file(kind, target, file),
        words=words,
        file=file,
        import_paths=tuple(dict.fromkeys([*([] if kind == "command" else [str(home)]), *inside])),
        snapshot=snapshot,
        notes=(*notes, *_command_notes(job.entry, snapshot, working_dir)),
    )


def what_runs(entry: EntrySpec) -> tuple[Literal["module", "script", "function", "command"], str, tuple[str, ...]]:
    """Return the kind of an entry, what it runs, and, of a command, the words that follow its program."""
    if entry.script is not None:
        return "script", entry.script, ()
    if entry.module is not None:
        return "module", entry.module, ()
    if entry.function is not None:
        return "function", entry.function, ()
    assert entry.command is not None
    if entry.shell:
        return "command", str(entry.command), ()
    from clusterddp.spec.entry_section import command_words

    program, *words = command_words(entry)
    return "command", program, tuple(words)


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


def _holds(snapshot: SnapshotPlan, file: Path) -> bool:
    return os.path.relpath(file, snapshot.root) in snapshot.files


def _program_on_hosts(
    kind: Literal["module", "script", "function", "command"], target: str, words: tuple[str, ...], working_dir: Path
) -> Program:
    """Take the code to be where the spec says, on the hosts: nobody here can look."""
    named = _file_named(kind, target)
    file = Path(named if named.startswith("~/") else working_dir / named) if named else None
    home = str(file.parent if file else working_dir)
    return Program(
        kind=kind,
        target=target if kind == "command" else with_file(kind, target, file),
        words=words,
        file=None if kind == "command" else file,
        import_paths=() if kind == "command" else (home,),
        snapshot=None,
        notes=("snapshot is false: each host runs the code that lies there, at the same path as here",),
    )


def _file_named(kind: str, target: str) -> str | None:
    """Return the path that the target is or begins with, if it names a file."""
    if kind == "script":
        return target
    if kind == "function":
        file = target.rpartition(":")[0]
        return file if file.endswith(".py") else None
    return target if kind == "command" and os.sep in target and len(target.split()) == 1 else None


def with_file(kind: str, target: str, file: Path | str | None) -> str:
    """Return the target with another path of its file."""
    if file is None:
        return target
    return f"{file}:{target.rpartition(':')[2]}" if kind == "function" else str(file)


def _find_file(kind: str, target: str, working_dir: Path) -> Path | None:
    """Find the file that the target names.

    Raises: UsageError: it is not there.
    """
    named = _file_named(kind, target)
    if named is None:
        return None
    file = working_dir / Path(named).expanduser()
    if kind == "command" and not (file.is_file() and file.resolve().is_relative_to(working_dir.resolve())):
        return None  # no code of this project; it may be there where the ranks run
    if file.is_file():
        return file.resolve()
    found = "is a directory" if file.is_dir() else "no such file"
    raise UsageError(
        f"entry.{kind}: {file}: {found}",
        hint="the path is taken from where you submit; entry.module names a module instead",
    )


def _command_notes(entry: EntrySpec, snapshot: SnapshotPlan | None, working_dir: Path) -> tuple[str, ...]:
    if entry.command is None or snapshot is None:
        return ()
    return (
        f"the command works in {working_dir}: files that it names there are read when it runs; "
        "{code_dir} is the same place in the copy of the code",
    )


def _code_snapshot(
    job: JobSpec, home: Path, file: Path | None, *, runs_dir: Path, environ: Mapping[str, str]
) -> tuple[SnapshotPlan | None, tuple[str, ...]]:
    if not job.snapshot:
        return None, ("snapshot is false: the code runs in place, later edits reach ranks that start after them",)
    snapshot = plan_snapshot(home, runs_dir=runs_dir, environ=environ)
    if file and (snapshot is None or not (_holds(snapshot, file) or job.entry is None or job.entry.command)):
        # In no repository, or git ignores it.
        snapshot = plan_script_snapshot(file, runs_dir=runs_dir)
    if snapshot is None:
        what = "command" if job.entry and job.entry.command else "module"
        return None, (f"{home} is in no git repository: no snapshot of the code, the {what} runs in place",)
    notes = snapshot.notes
    if job.launcher == "ssh" and snapshot.source != "git":
        note = f"{snapshot.root} is in no git repository: the hosts get its *.py files alone; after git init there, all"
        notes = (note, *notes)
    return snapshot, notes


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
