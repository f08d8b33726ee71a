"""The program of a run: the target of the spec's entry, its file, and the code that the run copies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.code import (
    MAX_SCRIPT_BYTES,
    MAX_SCRIPT_FILES,
    SnapshotPlan,
    plan_script_snapshot,
    plan_snapshot,
)

if TYPE_CHECKING:
    from clusterddp.spec.entry_section import EntrySpec
    from clusterddp.spec.model import JobSpec

TRAINER = "clusterddp.train.main"
_SCRIPT_LIMITS = f"{MAX_SCRIPT_FILES:,} files and {MAX_SCRIPT_BYTES / 1e6:.0f} MB"
_SHOWN = 5
"""How many names a note lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the ranks execute, with paths at the submit; `plan_entry` returns the paths in the run."""

    kind: Literal["module", "script", "function", "command"]
    target: str
    words: tuple[str, ...] = ()
    file: Path | None = None
    """The file that `target` is or names; None if it names no file."""
    import_paths: tuple[str, ...]
    snapshot: SnapshotPlan | None
    notes: tuple[str, ...]

    @property
    def snapshot_summary(self) -> dict[str, Any] | None:
        """The copied code as the plan shows it; `choose_snapshot` takes this value."""
        if self.snapshot is None:
            return None
        return {
            "source": self.snapshot.source,
            "root": str(self.snapshot.root),
            "files": len(self.snapshot.files),
            "bytes": self.snapshot.total_bytes,
            "ignored": list(self.snapshot.ignored),
            "left_out": str(self.snapshot.left_out) if self.snapshot.left_out else None,
        }


def plan_program(
    job: JobSpec, *, working_dir: Path, runs_dir: Path, environ: Mapping[str, str], uploads: bool = False
) -> Program:
    """Find what the ranks execute, and choose the files of its snapshot.

    `uploads`: the code goes to another machine before the job is planned there.
    Raises: UsageError: the script does not exist. ClusterddpError: the code has no snapshot.
    """
    if job.entry is None:
        snapshot, notes = _trainer_snapshot(job, working_dir, runs_dir, environ)
        return Program(kind="module", target=TRAINER, import_paths=(), snapshot=snapshot, notes=notes)
    kind, target, words = what_runs(job.entry)
    if job.launcher == "ssh" and not job.snapshot:
        return _program_on_hosts(kind, target, words, working_dir)
    file = _find_file(kind, target, working_dir)
    home = file.parent if file and kind != "command" else working_dir.resolve()
    uploads = uploads or job.launcher == "ssh"
    snapshot, notes = _code_snapshot(job, home, file, runs_dir=runs_dir, environ=environ, uploads=uploads)
    if job.launcher == "ssh" and snapshot is None:
        raise UsageError(
            f"{home} is in no git repository, so clusterddp cannot choose the code for the hosts",
            hint="run git init there; or set snapshot: false if the hosts have the same code at the same path",
        )
    if kind == "command" and file and snapshot and not _holds(snapshot, file):
        file = None  # git ignores the file, so it runs in place
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
    """Return the kind of an entry, its target, and, for a command, the words after its program."""
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
    """Choose the files of a planned snapshot again, as they are now.

    Raises: ClusterddpError: the code is gone or too large.
    """
    if summary["source"] != "git":
        snapshot = plan_script_snapshot(Path(summary["source"]), runs_dir=runs_dir)
        if snapshot.left_out and not summary["left_out"]:
            raise ClusterddpError(
                f"{snapshot.root}: holds more than a snapshot takes since the run was planned: {snapshot.left_out}",
                hint="submit again",
            )
        return snapshot
    repository = plan_snapshot(Path(summary["root"]), runs_dir=runs_dir, environ=environ)
    if repository is None:
        raise ClusterddpError(f"{summary['root']}: was a git repository when the run was planned, and is none now")
    return repository


def _holds(snapshot: SnapshotPlan, file: Path) -> bool:
    return os.path.relpath(file, snapshot.root) in snapshot.files


def _program_on_hosts(
    kind: Literal["module", "script", "function", "command"], target: str, words: tuple[str, ...], working_dir: Path
) -> Program:
    """Plan a program whose code is on the hosts at the paths of the spec; this machine cannot check them."""
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
        notes=("snapshot is false: each host runs its own code at the same path as here",),
    )


def _file_named(kind: str, target: str) -> str | None:
    """Return the path that the target is or starts with; None if it names no file."""
    if kind == "script":
        return target
    if kind == "function":
        file = target.rpartition(":")[0]
        return file if file.endswith(".py") else None
    return target if kind == "command" and os.sep in target and len(target.split()) == 1 else None


def with_file(kind: str, target: str, file: Path | str | None) -> str:
    """Return the target with the path of its file replaced."""
    if file is None:
        return target
    return f"{file}:{target.rpartition(':')[2]}" if kind == "function" else str(file)


def _find_file(kind: str, target: str, working_dir: Path) -> Path | None:
    """Find the file that the target names.

    Raises: UsageError: the file does not exist.
    """
    named = _file_named(kind, target)
    if named is None:
        return None
    file = working_dir / Path(named).expanduser()
    if kind == "command" and not (file.is_file() and file.resolve().is_relative_to(working_dir.resolve())):
        return None  # a program outside this project; it may exist where the ranks run
    if file.is_file():
        return file.resolve()
    found = "is a directory" if file.is_dir() else "no such file"
    raise UsageError(
        f"entry.{kind}: {file}: {found}",
        hint="the path is relative to the directory of the submit; entry.module names a module instead",
    )


def _command_notes(entry: EntrySpec, snapshot: SnapshotPlan | None, working_dir: Path) -> tuple[str, ...]:
    if entry.command is None or snapshot is None:
        return ()
    return (
        f"the command works in {working_dir} and reads files there when it runs; "
        "{code_dir} is the same directory in the copy of the code",
    )


def _code_snapshot(
    job: JobSpec, home: Path, file: Path | None, *, runs_dir: Path, environ: Mapping[str, str], uploads: bool
) -> tuple[SnapshotPlan | None, tuple[str, ...]]:
    if not job.snapshot:
        return None, ("snapshot is false: the code runs in place, and ranks that start after an edit run the new code",)
    snapshot = plan_snapshot(home, runs_dir=runs_dir, environ=environ)
    if file and (snapshot is None or not (_holds(snapshot, file) or job.entry is None or job.entry.command)):
        # The file is in no repository, or git ignores it.
        snapshot = plan_script_snapshot(file, runs_dir=runs_dir)
        if snapshot.left_out and not uploads:
            return None, (_in_place_note(snapshot),)
    if snapshot is None:
        what = "command" if job.entry and job.entry.command else "module"
        return None, (f"{home} is in no git repository: no snapshot of the code, the {what} runs in place",)
    return snapshot, (*snapshot.notes, *absent_notes(snapshot, uploads=uploads))


def _in_place_note(snapshot: SnapshotPlan) -> str:
    assert snapshot.left_out is not None
    num_files = snapshot.left_out.files + len(snapshot.files)
    found = replace(snapshot.left_out, files=num_files, bytes=snapshot.left_out.bytes + snapshot.total_bytes)
    return (
        f"{snapshot.root} is in no git repository and holds {found}, where a snapshot takes {_SCRIPT_LIMITS}: the "
        "script runs where it lies, and ranks that start after an edit run the new code; for a snapshot run git init "
        "there with the data in .gitignore, or move the script to a directory of its own"
    )


def absent_notes(snapshot: SnapshotPlan, *, uploads: bool) -> Iterator[str]:
    """Write what the snapshot does not contain, and what the ranks find in its place."""
    if snapshot.left_out:
        yield (
            f"{snapshot.root} is in no git repository, where a snapshot takes {_SCRIPT_LIMITS}: {snapshot.left_out} "
            "not uploaded; put data where the ranks find it (entry.data_dir, ssh.send)"
        )
    if uploads and (snapshot.ignored or snapshot.unlinked):
        names = _few((*snapshot.ignored, *snapshot.unlinked))
        yield f"git ignores {names}: not uploaded; put data where the ranks find it (entry.data_dir, ssh.send)"
    elif snapshot.ignored:
        yield f"git ignores {_few(snapshot.ignored)}: linked, not copied"
    if snapshot.unlinked and not uploads:
        yield (
            f"git ignores {_few(snapshot.unlinked)}: too many for a link to each, so the copy of the code does not "
            "have them; name the directory itself in .gitignore"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _trainer_snapshot(
    job: JobSpec, working_dir: Path, runs_dir: Path, environ: Mapping[str, str]
) -> tuple[SnapshotPlan | None, tuple[str, ...]]:
    """Choose the code beside a run of the trainer; the trainer executes none of it, so a failure is only a note."""
    if not job.snapshot:
        return None, ()
    try:
        snapshot = plan_snapshot(working_dir, runs_dir=runs_dir, environ=environ)
    except ClusterddpError as error:
        return None, (f"no snapshot of the code: {error.message}",)
    return snapshot, snapshot.notes if snapshot else ()
