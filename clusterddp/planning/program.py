"""What the ranks of a run execute: the program, its files and values, and the code that the run copies."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import platformdirs

from clusterddp.errors import ClusterddpError, SpecError, UsageError
from clusterddp.run.code import (
    MAX_SCRIPT_BYTES,
    MAX_SCRIPT_FILES,
    SnapshotPlan,
    find_sent,
    plan_script_snapshot,
    plan_snapshot,
)
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry, is_call
from clusterddp.spec.batch_script import demand_batch_script
from clusterddp.spec.train import GENERATED
from clusterddp.spec.tree import read_bytes
from clusterddp.system.files import read_json

if TYPE_CHECKING:
    from clusterddp.spec.entry_section import EntrySpec
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec


TRAINER = "clusterddp.train.main"
_Kind = Literal["module", "script", "function", "command", "batch_script"]
_SCRIPT_LIMITS = f"{MAX_SCRIPT_FILES:,} files and {MAX_SCRIPT_BYTES / 1e6:.0f} MB"
_SHOWN = 5
"""How many names a note lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the ranks execute, with paths at the submit; `plan_entry` returns the paths in the run."""

    kind: _Kind
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
            "left_out": self.snapshot.left_out,
        }


def plan_program(
    job: JobSpec,
    *,
    working_dir: Path,
    runs_dir: Path,
    environ: Mapping[str, str],
    uploads: bool = False,
    packages: Sequence[str] = (),
) -> Program:
    """Find what the ranks execute, and choose the files of its snapshot.

    `packages`: the directories of their Python's packages; empty: those of this process.
    `uploads`: the code goes to another machine before the job is planned there.
    Raises: ClusterddpError: the code has no snapshot.
    """
    if job.entry is None:
        # The trainer executes none of the code beside it, so a failure is only a note.
        code, why = None, ""
        try:
            code = plan_snapshot(working_dir, runs_dir=runs_dir, environ=environ) if job.snapshot else None
        except ClusterddpError as error:
            why = f"no snapshot of the code: {error.message}"
        notes = (why,) if why else code.notes if code else ()
        return Program(kind="module", target=TRAINER, import_paths=(), snapshot=code, notes=notes)
    if job.entry.batch_script:
        return Program(kind="batch_script", target=job.entry.batch_script, import_paths=(), snapshot=None, notes=())
    kind, target, words = _what_runs(job.entry)
    if job.launcher == "ssh" and not job.snapshot:
        return _program_on_hosts(kind, target, words, working_dir)
    file = _find_file(kind, target, working_dir)
    home = file.parent if file and kind != "command" else working_dir.resolve()
    uploads = uploads or job.launcher == "ssh"
    snapshot, notes = _code_snapshot(job, home, file, runs_dir=runs_dir, environ=environ, uploads=uploads)
    if job.launcher == "ssh" and snapshot is None and not is_call(target):
        raise UsageError(
            f"{home} is in no git repository, so clusterddp cannot choose the code for the hosts",
            hint="run git init there; or set snapshot: false if the hosts have the same code at the same path",
        )
    if kind == "command" and file and snapshot and not _holds(snapshot, file):
        file = None  # git ignores the file, so it runs in place
    if kind == "command" and snapshot:
        notes = (
            *notes,
            f"the command works in {working_dir} and reads files there when it runs; "
            "{code_dir} is the same directory in the copy of the code",
        )
    if kind == "script" and file and job.resources.world_size > 1 and not (job.entry and job.entry.owns_ranks):
        notes = (*notes, *_spawn_notes(file, job.resources.world_size))
    # Python puts the script's directory first, and for a module the working directory; PYTHONPATH follows.
    others = [Path(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    followers = [str((working_dir / path).resolve()) for path in others]
    inside = [path for path in followers if snapshot and Path(path).is_relative_to(snapshot.root)]
    if snapshot:
        roots, missing = _editable_installs(snapshot, packages or sys.path, uploads=uploads)
        inside, notes = [*inside, *map(str, roots)], (*notes, *missing)
    return Program(
        kind=kind,
        target=_with_file(kind, target, file),
        words=words,
        file=file,
        import_paths=tuple(dict.fromkeys([*([] if kind == "command" else [str(home)]), *inside])),
        snapshot=snapshot,
        notes=notes,
    )


def read_batch_script(path: Path) -> bytes:
    """Read a batch script. Raises: SpecError: it cannot be read. UsageError: sbatch would refuse it."""
    data = read_bytes(path, expected="a batch script")
    demand_batch_script(path, data)
    return data


def refuse_by_files(resolved: ResolvedSpec, *, working_dir: Path, environ: Mapping[str, str]) -> None:
    """Refuse a spec that cannot be submitted from here. Raises: SpecError: with every problem of `conflicts_here`."""
    from clusterddp.spec.check import conflicts_here, problem_of

    found = conflicts_here(resolved.job, working_dir=working_dir, environ=environ)
    if problems := tuple(problem_of(conflict, resolved.tree) for conflict in found):
        raise SpecError(problems)


def _what_runs(entry: EntrySpec) -> tuple[_Kind, str, tuple[str, ...]]:
    """Return the kind of an entry, its target, and, for a command, the words after its program."""
    if entry.script is not None:
        return "script", entry.script, ()
    if entry.module is not None:
        return "module", entry.module, ()
    if entry.function is not None:
        return "function", entry.function, ()
    if entry.shell:
        return "command", str(entry.command), ()
    program, *words = entry.command_words
    return "command", program, tuple(words)


def choose_snapshot(summary: dict[str, Any], *, runs_dir: Path, environ: Mapping[str, str]) -> SnapshotPlan:
    """Choose the files of a planned snapshot again, as they are now."""
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


def _program_on_hosts(kind: _Kind, target: str, words: tuple[str, ...], working_dir: Path) -> Program:
    """Plan a program whose code is on the hosts at the paths of the spec; this machine cannot check them."""
    named = _file_named(kind, target)
    file = Path(named if named.startswith("~/") else working_dir / named) if named else None
    home = str(file.parent if file else working_dir)
    return Program(
        kind=kind,
        target=target if kind == "command" else _with_file(kind, target, file),
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
        file = target.partition(":")[0]
        return file if file.endswith(".py") else None
    return target if kind == "command" and os.sep in target and len(target.split()) == 1 else None


def _with_file(kind: str, target: str, file: Path | str | None) -> str:
    """Return the target with the path of its file replaced."""
    if file is None:
        return target
    return f"{file}:{target.partition(':')[2]}" if kind == "function" else str(file)


def _find_file(kind: str, target: str, working_dir: Path) -> Path | None:
    """Find the file that the target names; `refuse_by_files` has refused a script that does not exist."""
    named = _file_named(kind, target)
    if named is None:
        return None
    file = working_dir / Path(named).expanduser()
    if kind == "command" and not (file.is_file() and file.resolve().is_relative_to(working_dir.resolve())):
        return None  # a program outside this project; it may exist where the ranks run
    return file.resolve()


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
            return None, (
                f"{snapshot.root} is in no git repository, where a snapshot takes {_SCRIPT_LIMITS}, and would lack "
                f"{snapshot.left_out}: the script runs where it is, and ranks that start after an edit run the new "
                "code; for a snapshot run git init there with the data in .gitignore, or move the script to a "
                "directory of its own",
            )
    if snapshot is None:
        what = "command" if job.entry and job.entry.command else "module"
        return None, (f"{home} is in no git repository: no snapshot of the code, the {what} runs in place",)
    return snapshot, (*snapshot.notes, *absent_notes(snapshot, uploads=uploads))


def _spawn_notes(file: Path, world_size: int) -> Iterator[str]:
    """Note that a script starts ranks itself, where it does so under no condition."""
    calls = None
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        calls = next(_spawns(ast.parse(file.read_bytes())), None)
    if calls:
        yield (
            f"{file.name}:{calls} calls mp.spawn: if each of the {world_size} ranks does, entry.owns_ranks: true "
            "starts the script once on each node instead"
        )


def _spawns(node: ast.AST) -> Iterator[int]:
    """Yield the lines of calls of torch.multiprocessing.spawn that are under no `if`, but that of `__main__`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and re.fullmatch(r"(.*\.)?(mp|multiprocessing)\.spawn", ast.unparse(child.func)):
            yield child.lineno
        if not isinstance(child, ast.If) or "__name__" in ast.unparse(child.test):
            yield from _spawns(child)


def _editable_installs(
    snapshot: SnapshotPlan, packages: Sequence[str], *, uploads: bool
) -> tuple[list[Path], list[str]]:
    """Find the packages that pip has installed as editable within a snapshot's code.

    Returns the directories of the snapshot from which they are imported, and notes on those that it does not have.
    Sources: PEP 610; setuptools/command/editable_wheel.py.
    """
    if sent := find_sent(snapshot.root):
        return [snapshot.root / path for path in sent.import_paths], []
    sites = [Path(path) for path in packages if Path(path).name in ("site-packages", "dist-packages")]
    found = [path.resolve() for site in sites for path in (*_paths_of_pth(site), *_paths_of_finders(site))]
    folders = {snapshot.root, *(snapshot.root / folder for name in snapshot.files for folder in Path(name).parents)}
    roots = [path for path in found if path in folders]
    notes = []
    for file in [file for site in sites for file in site.glob("*.dist-info/direct_url.json")]:
        record = read_json(file) or {}
        place = Path(urllib.parse.unquote(urllib.parse.urlsplit(record.get("url", "")).path)).resolve()
        is_within = record.get("dir_info", {}).get("editable") and place.is_relative_to(snapshot.root)
        if is_within and not any(root.is_relative_to(place) for root in roots):
            instead = "the hosts do not have it" if uploads else "ranks import it from there, as it is when they start"
            name = file.parent.name.partition("-")[0]
            notes.append(f"{name} is an editable install of {place}, which is not in the snapshot: {instead}")
    return roots, notes


def _paths_of_pth(site: Path) -> Iterator[Path]:
    """Read the directories that .pth files add to sys.path."""
    for file in sorted(site.glob("*.pth")):
        with contextlib.suppress(OSError):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            yield from (site / line.rstrip() for line in lines if not re.match(r"#|import[ \t]|\s*$", line))


def _paths_of_finders(site: Path) -> Iterator[Path]:
    """Read above which directories setuptools' finders look for packages: MAPPING has their names and places."""
    for file in sorted(site.glob("__editable__*_finder.py")):
        with contextlib.suppress(OSError, ValueError, SyntaxError):
            line = re.search(r"^MAPPING\b.*?= (\{.*\})$", file.read_text(encoding="utf-8"), re.MULTILINE)
            for name, place in ast.literal_eval(line[1] if line else "{}").items():
                parts = name.split(".")
                if Path(place).parts[-len(parts) :] == tuple(parts):
                    yield Path(place).parents[len(parts) - 1]


def absent_notes(snapshot: SnapshotPlan, *, uploads: bool) -> Iterator[str]:
    """Write what the snapshot does not contain, and what the ranks find in its place."""
    if snapshot.left_out:
        yield (
            f"{snapshot.root} is in no git repository, where a snapshot takes {_SCRIPT_LIMITS}: {snapshot.left_out} "
            "not uploaded; put data where the ranks find it (entry.data_dir, ssh.send)"
        )
    if snapshot.repositories:
        instead = "not uploaded" if uploads else "linked, not copied"
        yield f"{_few(snapshot.repositories)}: in a git repository of its own within this one: {instead}"
    ignored = [name for name in snapshot.ignored if name not in snapshot.repositories]
    if uploads and (ignored or snapshot.unlinked):
        names = _few((*ignored, *snapshot.unlinked))
        yield f"git ignores {names}: not uploaded; put data where the ranks find it (entry.data_dir, ssh.send)"
    elif ignored:
        yield f"git ignores {_few(ignored)}: linked, not copied"
    if snapshot.unlinked and not uploads:
        yield (
            f"git ignores {_few(snapshot.unlinked)}: too many for a link to each, so the copy of the code does not "
            "have them; name the directory itself in .gitignore"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


Trial = Literal["smoke test", "deep check"]
"""What the ranks of a run may execute in place of its entry."""
_TRIALS: dict[Trial, str] = {"smoke test": "clusterddp.train.smoke_test", "deep check": "clusterddp.train.deep_check"}
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
        # Python imports from the working directory first, so a `random.py` of the user's would hide Python's own. The
        # trainer needs no file of the user's: it works in a directory without code.
        return Entry(
            kind=program.kind,
            target=program.target,
            working_dir=str(RunDir(run_dir).launcher_dir),
            stop_aware=True,
            init="env" if job.network.init == "auto" else job.network.init,
        )
    odd = next((char for char in str(run_dir) if char in "?#"), None)
    if job.network.init == "file" and odd:
        raise UsageError(
            f"network.init file: {run_dir} has {odd!r}, which ends a path in a file:// address",
            hint="use another directory with --runs DIR or CLUSTERDDP_RUNS; or network.init=tcp",
        )
    if program.kind == "batch_script":
        return Entry(
            kind=program.kind,
            target=str(RunDir(run_dir).batch_script),
            args=tuple(job.entry.args),
            working_dir=str(working_dir),
            unchanged=True,
        )
    code = RunDir(run_dir).code
    snapshot, code_dir = program.snapshot, working_dir
    if snapshot:
        within = os.path.relpath(working_dir.resolve(), snapshot.root)
        has_files = any(name.startswith(f"{within}/") for name in snapshot.files)
        code_dir = code / within if has_files else code
    elif job.launcher == "ssh" and job.snapshot:
        code_dir = RunDir(run_dir).launcher_dir  # a function from Python, which needs no code

    def path_in_run(path: str) -> str:
        inside = snapshot is not None and Path(path).is_relative_to(snapshot.root)
        return str(code / Path(path).relative_to(snapshot.root)) if snapshot and inside else path

    return Entry(
        kind=program.kind,
        target=_with_file(program.kind, program.target, path_in_run(str(program.file)) if program.file else None),
        words=program.words,
        args=tuple(job.entry.args),
        kwargs=dict(job.entry.kwargs),
        shell=job.entry.shell,
        working_dir=str(code_dir if job.launcher == "ssh" else working_dir),
        import_paths=tuple(map(path_in_run, program.import_paths)),
        init="tcp" if job.network.init == "auto" else job.network.init,
        spawns=spawns,
        counts=job.entry.counts,
        fork=job.entry.fork,
        stop_signal=job.entry.stop_signal,
        data_dir=job.entry.data_dir,
        output_dir=job.entry.output_dir or str(RunDir(run_dir).output),
        code_dir=str(code_dir),
    )


def plan_trial_entry(trial: Trial, entry: Entry, spec: dict[str, Any], *, on_cpu: bool) -> tuple[Entry, dict[str, Any]]:
    """Return the entry of a trial, which replaces `entry`, and the spec for its ranks."""
    program = None if spec["train"] else {"kind": entry.kind, "target": entry.target, "shell": entry.shell}
    tried = dataclasses.replace(
        entry,
        kind="module",
        target=_TRIALS[trial],
        words=(),
        args=(),
        kwargs={},
        shell=False,
        stop_aware=False,
        spawns=(),
        counts="processes",
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


def move_entry(entry: Entry, moved: Callable[[str], str]) -> Entry:
    """Return the entry of a run whose directory has moved; `moved` returns the new path of a file."""
    return dataclasses.replace(
        entry,
        target=entry.target if entry.shell else moved(entry.target),
        working_dir=moved(entry.working_dir),
        import_paths=tuple(moved(path) for path in entry.import_paths),
        data_dir=moved(entry.data_dir) if entry.data_dir else entry.data_dir,
        output_dir=moved(entry.output_dir) if entry.output_dir else entry.output_dir,
        code_dir=moved(entry.code_dir) if entry.code_dir else entry.code_dir,
    )


def with_absolute_paths(job: JobSpec, working_dir: Path) -> JobSpec:
    """Make local paths absolute, because ranks and `submit RUN` read the spec elsewhere; paths on hosts stay."""
    if job.notify and job.notify.command:
        command = job.notify.argv(working_dir)
        job = job.model_copy(update={"notify": job.notify.model_copy(update={"command": command})})
    if job.ssh.send:
        send = {str(working_dir / Path(source).expanduser()): target for source, target in job.ssh.send.items()}
        job = job.model_copy(update={"ssh": job.ssh.model_copy(update={"send": send})})
    if job.launcher == "ssh" and not (job.snapshot and job.entry):
        return job
    if job.train and job.train.data_dir:
        data_dir = str(working_dir / Path(job.train.data_dir).expanduser())
        return job.model_copy(update={"train": dataclasses.replace(job.train, data_dir=data_dir)})
    if job.entry:
        # Over SSH the paths of its data and results are on the hosts.
        here = ("script",) if job.launcher == "ssh" else ("script", "batch_script", "data_dir", "output_dir")
        named = {name: getattr(job.entry, name) for name in here if getattr(job.entry, name)}
        paths = {name: str(working_dir / Path(path).expanduser()) for name, path in named.items()}
        file, _, function = (job.entry.function or "").partition(":")
        if file.endswith(".py"):
            paths["function"] = f"{working_dir / Path(file).expanduser()}:{function}"
        return job.model_copy(update={"entry": job.entry.model_copy(update=paths)})
    return job


def filled_in(job: JobSpec) -> dict[str, Any]:
    """Return the spec as JSON with every default filled in, for the ranks."""
    data: dict[str, Any] = job.model_dump(mode="json")
    if data["train"] is not None and data["train"]["data_dir"] is None:
        here = str(platformdirs.user_cache_path("clusterddp") / "datasets")
        data["train"]["data_dir"] = f"{job.ssh.dir}/datasets" if job.launcher == "ssh" else here
    return data


def directories_used(filled: dict[str, Any], working_dir: Path) -> tuple[str, ...]:
    """Return the directories that a spec uses, which a container has to mount; `filled`: from `filled_in`."""
    section = filled["train"] or filled["entry"] or {}
    data_dir = None if section.get("dataset") in GENERATED else section.get("data_dir")
    named = (data_dir, section.get("output_dir"))
    return tuple(dict.fromkeys([str(working_dir), *(path for path in named if path)]))


_OPTION = re.compile(
    r"o|out|output|outputs|save|save_to|ckpt|results|"
    r"(out|outputs?|save|ckpts?|checkpoints?|logs?|results?|work|exp|default_root)_?(dir|path|file|folder)"
)
"""Names of options by which programs take the place of their results, with `_` for `-`."""
_NO_PATH = re.compile(r"|[-+.\d]+(e[-+]?\d+)?|true|false|yes|no|on|off|none|null", re.IGNORECASE)


def relative_outputs(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """List the relative paths that the entry of a plan passes for its results, guessed by the names of options."""
    named = [*_pairs([str(word) for word in (*entry["words"], *entry["args"])]), *entry["kwargs"].items()]
    return tuple(
        dict.fromkeys(
            os.path.normpath(value)
            for name, value in named
            if isinstance(value, str) and _OPTION.fullmatch(name.replace("-", "_").lower()) and _is_relative(value)
        )
    )


_OF_A_SHELL = re.compile(r"\$[A-Za-z_]\w*|\$\{[A-Z_][A-Z0-9_]*\}|\$\(|(^|=)~/")
"""What a shell would replace; not `${a.b}`, which Hydra reads."""


def notes_on_words(entry: Entry) -> Iterator[str]:
    """Name the arguments that a shell would change."""
    if entry.kind == "batch_script":
        return  # a shell reads it
    given = (*([] if entry.shell else entry.words), *(() if entry.kind == "function" else entry.args))
    found = [str(word) for word in given if _OF_A_SHELL.search(str(word))]
    if found:
        yield f"entry: no shell reads {_few(found)}: the program gets this text as it is"


def notes_on_outputs(entry: Entry, working_dir: Path, *, in_copies: bool) -> Iterator[str]:
    """Write which results runs overwrite; `in_copies`: the ranks work in copies of the code on other hosts."""
    for path in relative_outputs(asdict(entry)) if entry.kind != "batch_script" else ():
        if in_copies:
            yield f"{path} is relative: it is in each host's copy of the code; {{output_dir}} is copied back"
        else:
            yield f"{working_dir / path}: other runs with this argument overwrite it; {{output_dir}} is the run's own"


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options with their values: `--out x`, `--out=x`, `-o x` and hydra's `out=x`."""
    for word, following in itertools.pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if equals:
            yield name.lstrip("-").rpartition(".")[2], value
        elif word.startswith("--") or word == "-o":
            yield name.lstrip("-").rpartition(".")[2], following


def _is_relative(value: str) -> bool:
    return not value.startswith(("/", "~", "$", "{", "-")) and "://" not in value and not _NO_PATH.fullmatch(value)
