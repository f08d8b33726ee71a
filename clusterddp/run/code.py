"""The code of a run: which files it has, the copy that a submit makes, and the store of copies.

In a git repository the files are the tracked ones, with uncommitted changes, and the untracked ones that are not
ignored, also those of submodules; around a script outside git they are what lies beside and below the script. What git
ignores and a program may need (data, checkpoints, compiled modules) is linked. The store is addressed by content, so
runs of the same code share one copy; a run has hard links to it, and what a program writes beside itself never reaches
it.

Code that was uploaded to a login node to be submitted there lies in `trees/<number>/`, one for each submit:
tree/        the files, or directories above them; a job may write beside them
sent.json    the names of the files, their directory below tree/, and of the machine that they came from the git commit
             and the directories that packages are imported from
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import STAGING_PREFIX, STORE_NAME, SWEEP_RECORD, RunDir
from clusterddp.run.find import list_places
from clusterddp.system.file_set import has_digest, leads_out, list_files
from clusterddp.system.files import read_json, sync_directory
from clusterddp.system.own_directory import demand_own

FOLDER = "trees"
TREE = "tree"
RECORD = "sent.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SentCode:
    """Uploaded code."""

    root: Path
    files: tuple[str, ...]
    """The uploaded files, relative to `root`; other files there were not uploaded."""
    git: dict[str, Any] | None
    """The result of `describe_commit` on the machine they came from."""
    import_paths: tuple[str, ...]
    """The directories from which that machine imports packages of the code, relative to `root`."""


def find_sent(start: Path) -> SentCode | None:
    """Find the uploaded code that `start` belongs to; None: it belongs to none."""
    here = start.resolve()
    for folder in (here, *here.parents):
        if folder.parent.name == FOLDER and (record := read_json(folder / RECORD)):
            root = folder / TREE / record["at"]
            paths = tuple(record.get("import_paths", ()))  # an older version does not send them
            return SentCode(root=root, files=tuple(record["files"]), git=record["git"], import_paths=paths)
    return None


TIMEOUT_S = 60.0
_SHUT = (
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "safe.bareRepository=explicit",
    "protocol.allow=never",
    "submodule.recurse=false",
)
_SHUT_VARIABLES = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


def find_root(start: Path, environ: Mapping[str, str]) -> Path | None:
    """Find the root of the git work tree around `start`; None if there is none.

    Raises: ClusterddpError: git fails there (it is not installed, or distrusts the owner).
    """
    here = start.resolve()
    if not any((folder / ".git").exists() for folder in (here, *here.parents)):
        return None
    answer = run_git(["rev-parse", "--show-toplevel"], here, environ).rstrip(b"\n")
    return Path(os.fsdecode(answer)).resolve() if answer else None


def list_git_files(root: Path, environ: Mapping[str, str]) -> list[str]:
    """List the tracked files and the untracked files that are not ignored; sorted, relative to `root`."""
    listing = run_git(["ls-files", "-z", "--cached", "--others", "--exclude-standard"], root, environ)
    # git lists a file in conflict once per stage; the set makes the names unique.
    return sorted({os.fsdecode(name) for name in listing.split(b"\0") if name})


def list_submodules(root: Path, names: Collection[str], environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files of each submodule that is checked out, also of those in submodules, relative to `root`.

    `names`: what `list_git_files` returns for `root`. A submodule that git cannot read is left out.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        place = root / name
        if name.endswith("/") or place.is_symlink() or not (place / ".git").exists():
            continue
        with contextlib.suppress(ClusterddpError):
            files = list_git_files(place, environ)
            for below, inner in ({"": files} | list_submodules(place, files, environ)).items():
                found[f"{name}/{below}".rstrip("/")] = [f"{name}/{file}" for file in inner]
    return found


def list_ignored(root: Path, environ: Mapping[str, str]) -> list[str]:
    """List what git ignores; sorted, relative to `root`. A directory without a tracked file is one name, with `/`.

    Of some directories git lists the files, too.
    """
    arguments = ["ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"]
    return sorted({os.fsdecode(name) for name in run_git(arguments, root, environ).split(b"\0") if name})


def describe_commit(start: Path, environ: Mapping[str, str]) -> dict[str, object] | None:
    """Return the commit of the work tree around `start`, and whether files were changed since; None: no repository.

    A commit of None means that there is none yet. The remote is left out, since its URL may contain a password. For
    uploaded code it is the commit on the machine that it came from.
    """
    if sent := find_sent(start):
        return sent.git
    try:
        root = find_root(start, environ)
        if root is None:
            return None
        arguments = ["--porcelain=v2", "--branch", "-z", "--untracked-files=normal", "--ignore-submodules=dirty"]
        status = run_git(["status", *arguments], root, environ)
    except ClusterddpError:
        return None
    lines = os.fsdecode(status).split("\0")
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    commit = heads.get("branch.oid")
    return {
        "root": str(root),
        "commit": None if commit in (None, "(initial)") else commit,
        "branch": heads.get("branch.head"),
        "dirty": any(line and not line.startswith("# ") for line in lines),
    }


def run_git(arguments: list[str], directory: Path, environ: Mapping[str, str]) -> bytes:
    """Run git and return its output.

    It runs without the caller's GIT_* variables, which inside a hook name another repository, and starts no program
    that a repository can name: no hook, no monitor of the file system, no transport that would fetch an object that is
    missing. It opens no bare repository, which may be plain files of another one, and enters no submodule by itself.
    Raises: ClusterddpError: git cannot be run, fails, or takes more than `TIMEOUT_S`.
    """
    shut = (word for setting in _SHUT for word in ("-c", setting))
    command = ["git", *shut, "-C", str(directory), *arguments]
    clean = {name: value for name, value in environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            command,
            env=clean | _SHUT_VARIABLES | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterddpError(f"{directory}: git did not answer within {TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise ClusterddpError(f"{directory}: a git repository, but git cannot be run: {error.strerror}") from error
    if answer.returncode != 0:
        reason = answer.stderr.decode(errors="replace").strip().splitlines()[:1] or ["no reason given"]
        raise ClusterddpError(f"{directory}: git {arguments[0]} failed: {reason[0]}")
    return answer.stdout


_MAX_LINKS = 200
_CACHES = ("__pycache__", "node_modules")
_MARKS = ("pyvenv.cfg", "conda-meta", RunDir(Path()).record.name, SWEEP_RECORD)
_COMPILED = (".pyc", ".pyo", ".egg-info")
MAX_BYTES = 200 * 1000 * 1000
MAX_SCRIPT_FILES = 2_000
"""The most files that the snapshot of a script outside git contains."""
MAX_SCRIPT_BYTES = 50 * 1000 * 1000
_MAX_WALKED = 10_000
_KEY = re.compile(
    r"(\.(pem|key|p12|pfx|jks|kdbx|ppk)|(^|/)(id_(rsa|dsa|ecdsa|ed25519)|credentials\.json|kaggle\.json))$"
)
"""Names of private keys and of credentials, which a snapshot of a directory that git does not know leaves out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlan:
    """Which files a snapshot takes, relative to `root`."""

    source: str
    """`git`, or the path of the script around which the files were chosen."""
    root: Path
    files: tuple[str, ...]
    total_bytes: int
    notes: tuple[str, ...] = ()
    """What is not in the snapshot, and why."""
    ignored: tuple[str, ...] = ()
    """What git ignores, and `repositories`: a run on this file system gets links to them."""
    repositories: tuple[str, ...] = ()
    """Repositories within the repository that are no submodules, and submodules that are too large for a snapshot."""
    unlinked: tuple[str, ...] = ()
    """Directories in which git ignores too many single files for a link to each."""
    left_out: str | None = None
    """Of a script outside git: what is left out since all of it would be too much, for people."""


def plan_snapshot(start: Path, *, runs_dir: Path, environ: Mapping[str, str]) -> SnapshotPlan | None:
    """Choose the files of the git repository around `start`; None if there is none.

    Uploaded code counts as a repository: all its files are chosen.
    Raises: ClusterddpError: git fails, or the files are larger than `MAX_BYTES`.
    """
    if sent := find_sent(start):
        return _plan_files(sent.root, _measure(sent.root, sent.files))
    root = find_root(start, environ)
    if root is None:
        return None
    places = _places_of_runs(root, runs_dir.resolve())
    names = list_git_files(root, environ)
    submodules = list_submodules(root, names, environ)
    inner = {name for files in submodules.values() for name in files}

    def measure(names: Collection[str]) -> _Measured:
        return _measure(root, sorted(name for name in names if not _below(root / name, places)))

    measured = measure({*names, *inner} - submodules.keys())
    if submodules and sum(measured.sizes.values()) > MAX_BYTES:
        submodules, measured = {}, measure(names)
    ignored, unlinked = _list_linked(root, measured.sizes, places, environ, submodules)
    return _plan_files(root, measured, ignored=ignored, unlinked=unlinked)


def plan_script_snapshot(script: Path, *, runs_dir: Path) -> SnapshotPlan:
    """Choose a script that belongs to no git repository, and the files beside and below it.

    Of more than `MAX_SCRIPT_FILES` files or `MAX_SCRIPT_BYTES` bytes it takes the *.py files, then the smallest ones.
    """
    root = script.resolve().parent
    places = _places_of_runs(root, runs_dir.resolve())
    names, walked = {script.name}, 0
    for folder, folders, files in os.walk(root):
        walked += len(folders) + len(files)
        here = Path(folder)
        kept = [name for name in folders if _is_wanted_directory(here / name) and not _below(here / name, places)]
        folders[:] = [name for name in kept if not (here / name).is_symlink()]
        links = set(kept) - set(folders)
        names |= {os.path.relpath(here / name, root) for name in (*files, *links) if _is_wanted(name)}
        if walked > _MAX_WALKED:
            break
    keys = {name for name in names if _KEY.search(name.lower())} - {script.name}
    measured = _measure(root, sorted(names - keys), needs_reading=True)
    sizes = measured.sizes
    if walked > _MAX_WALKED:  # the script may lie in a home directory, which must not be copied
        beside = {name for name in names if os.sep not in name and name.endswith(".py")} | {script.name}
        sizes = {name: size for name, size in sizes.items() if name in beside}
    chosen = _those_that_fit(script.name, sizes)
    others = {name: size for name, size in measured.sizes.items() if name not in chosen}
    left_out = None
    if others:
        count = f"{len(others):,} file{'s' * (len(others) != 1)}, {_megabytes(sum(others.values()))}"
        largest = f"{count} (largest: {', '.join(_largest(others))})"
        left_out = f"more than {largest}" if walked > _MAX_WALKED else largest
    return SnapshotPlan(
        source=str(script),
        root=root,
        files=tuple(name for name in measured.sizes if name in chosen),
        total_bytes=sum(measured.sizes[name] for name in chosen),
        notes=(*measured.notes, *_key_notes(sorted(keys))),
        left_out=left_out,
    )


def _places_of_runs(root: Path, runs_dir: Path) -> tuple[Path, ...]:
    """Return the paths of runs, which are not code: usually the runs directory lies in the repository."""
    if runs_dir != root and runs_dir.is_relative_to(root):
        return (runs_dir,)
    with contextlib.suppress(OSError):
        ours = (STORE_NAME, STAGING_PREFIX)
        hidden = [Path(entry.path) for entry in os.scandir(runs_dir) if entry.name.startswith(ours)]
        return (runs_dir / STORE_NAME, *hidden, *list_places(runs_dir))
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    sizes: dict[str, int]
    """The names that exist and can be copied."""
    repositories: tuple[str, ...]
    notes: tuple[str, ...]


def _measure(root: Path, names: Collection[str], *, needs_reading: bool = False) -> _Measured:
    """Read the sizes of files and links; `needs_reading`: leave out what this user may not read."""
    sizes: dict[str, int] = {}
    repositories, notes, closed = [], [], []
    for name in names:
        try:
            status = os.lstat(root / name)
        except (FileNotFoundError, NotADirectoryError):
            continue  # tracked, and deleted in the work tree
        if stat.S_ISREG(status.st_mode) and needs_reading and not os.access(root / name, os.R_OK):
            closed.append(name)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            sizes[name] = status.st_size
        elif stat.S_ISDIR(status.st_mode) and (root / name / ".git").exists():
            repositories.append(name.rstrip("/"))
        elif stat.S_ISDIR(status.st_mode):
            hint = f"`git submodule update --init {name}` brings its files"
            notes.append(f"{name}: a submodule that is not checked out; {hint}")
        else:
            notes.append(f"{name}: neither a file nor a link, not in the snapshot of the code")
    if closed:
        more = f" and {len(closed) - 1} more" if len(closed) > 1 else ""
        notes.append(f"{closed[0]}{more}: you may not read it, not in the snapshot of the code")
    return _Measured(sizes=sizes, repositories=tuple(repositories), notes=tuple(notes))


def _plan_files(
    root: Path, measured: _Measured, *, ignored: tuple[str, ...] = (), unlinked: tuple[str, ...] = ()
) -> SnapshotPlan:
    """Plan the snapshot of all the files of a repository."""
    total = sum(measured.sizes.values())
    if total > MAX_BYTES:
        raise ClusterddpError(
            f"{root}: the snapshot of the code would hold {total / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f} MB; "
            f"largest: {', '.join(_largest(measured.sizes))}",
            hint="let .gitignore leave out what is not code, or write `snapshot: false` in the spec",
        )
    return SnapshotPlan(
        source="git",
        root=root,
        files=tuple(measured.sizes),
        total_bytes=total,
        notes=measured.notes,
        ignored=(*measured.repositories, *ignored),
        repositories=measured.repositories,
        unlinked=unlinked,
    )


def _those_that_fit(script: str, sizes: Mapping[str, int]) -> set[str]:
    """Choose within the limits: the script, then *.py files, then other files; of each kind the smallest first."""
    chosen: set[str] = set()
    total = 0
    for name in sorted(sizes, key=lambda name: (name != script, not name.endswith(".py"), sizes[name], name)):
        if len(chosen) == MAX_SCRIPT_FILES or total + sizes[name] > MAX_SCRIPT_BYTES:
            break
        chosen.add(name)
        total += sizes[name]
    return chosen


def _key_notes(names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}: a key by its name, not in the snapshot of the code"


def _largest(sizes: Mapping[str, int]) -> tuple[str, ...]:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return tuple(f"{name} ({_megabytes(sizes[name])})" for name in largest)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _below(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _is_wanted(name: str) -> bool:
    """Return whether a file or directory with this name may belong to a program: it is not hidden and no cache."""
    return not (name.startswith(".") or name in _CACHES or name.endswith(_COMPILED))


def _is_wanted_directory(path: Path) -> bool:
    """Return whether a directory may belong to a program: it has such a name, and is no virtual environment or run."""
    return _is_wanted(path.name) and not any((path / mark).exists() for mark in _MARKS)


def _list_linked(
    root: Path,
    files: Collection[str],
    places: tuple[Path, ...],
    environ: Mapping[str, str],
    submodules: Collection[str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List what git ignores: the names to link, and the directories of more single files than `_MAX_LINKS` allow.

    `files`: those of the snapshot, also of `submodules`. `places`: of runs. A directory whose only tracked files are
    hidden (.gitkeep) counts as ignored.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    within = [f"{folder}/{name}" for folder in submodules for name in list_ignored(root / folder, environ)]
    for name in (*list_ignored(root, environ), *within):
        if _may_be_needed(root, name, places):
            path = Path(name)
            by_folder[str(path.parent)].append(str(path))
    shown = [Path(name) for name in files if not Path(name).name.startswith(".")]
    visible = {str(folder) for path in shown for folder in path.parents}
    names: list[str] = []
    unlinked: list[str] = []
    for folder, ignored in sorted(by_folder.items(), key=lambda item: (len(item[1]), item[0])):
        whole = folder != "." and folder not in visible
        chosen = [folder] if whole else ignored
        if len(names) + len(chosen) <= _MAX_LINKS:
            names += chosen
        else:
            unlinked.append(f"{folder}/ ({len(ignored):,} files)")
    return _outermost(names), tuple(unlinked)


def _may_be_needed(root: Path, name: str, places: tuple[Path, ...]) -> bool:
    path = root / name
    if _below(path, places) or not all(map(_is_wanted, Path(name).parts)):
        return False
    return not name.endswith("/") or (_is_wanted_directory(path) and not list_places(path))


def _outermost(names: list[str]) -> tuple[str, ...]:
    """Leave out names below another one, which its link makes present."""
    kept: list[str] = []
    for name in sorted(names, key=lambda name: Path(name).parts):
        if not (kept and Path(name).is_relative_to(kept[-1])):
            kept.append(name)
    return tuple(kept)


_MOST_LINKS, _MOST_COPIES = 50_000, 5_000
"""The most files in the copies of all runs of a sweep: a file that is copied takes as long as 10 hard links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeCopy:
    """What the copy of a run contains."""

    stored: Path
    """The snapshot in the store."""
    links: Mapping[str, str]
    """Links by their names in the copy, with their absolute targets: to what git ignores, and those that lead out."""

    def write(self, target: Path) -> None:
        """Make the copy at `target`, which does not exist."""
        copy_function = link_or_copy if _may_link() else shutil.copy2
        shutil.copytree(self.stored, target, symlinks=True, copy_function=copy_function)
        for name, original in self.links.items():
            path = target / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            path.symlink_to(original)


def plan_copy(stored: Path, snapshot: SnapshotPlan) -> CodeCopy:
    """Plan the copy of a snapshot for runs that see the file system of the original."""
    links = dict(_absolute_links(stored, snapshot.root))
    links |= {name: str(snapshot.root / name) for name in snapshot.ignored}
    return CodeCopy(stored=stored, links=links)


def replace_link(code: Path, snapshot: SnapshotPlan) -> None:
    """Rename the link `code` to a snapshot, and make a copy in its place; it survives a power loss."""
    copy = plan_copy(code.resolve(), snapshot)
    code.rename(RunDir(code.parent).snapshot)
    copy.write(code)
    for folder, _, _ in os.walk(code):
        sync_directory(Path(folder))


def is_too_much(num_files: int) -> bool:
    """Return whether the copies of a sweep have too many files, so its runs share one copy."""
    return num_files > (_MOST_LINKS if _may_link() else _MOST_COPIES)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy where no link is possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP):
            raise
        shutil.copy2(source, target)


def _may_link() -> bool:
    """Return False for root, who may write to a read-only file: through a hard link that file is the store's."""
    return os.geteuid() != 0


def _absolute_links(stored: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Find the relative links of a snapshot that lead out of it; yield them with their absolute targets."""
    for entry in list_files(stored).entries:
        if entry.kind == "link" and leads_out(entry) and not entry.link.startswith(b"/"):
            name = os.fsdecode(entry.name)
            yield name, os.path.normpath((root / name).parent / os.fsdecode(entry.link))


def write_snapshot(plan: SnapshotPlan, store: Path, link: Path) -> str:
    """Copy the files into `store` unless it has them, make `link` a symlink to them, and return their digest.

    The copy is made beside `link` and renamed, so the store never contains a partial one. The digest of a copy in the
    store is checked before it is used.
    Raises: ClusterddpError: a file cannot be read, or the disk is full.
    """
    staging = link.with_name(f".{link.name}-{secrets.token_hex(4)}")
    try:
        staging.mkdir(mode=0o700)
        for name in plan.files:
            _copy(plan.root / name, staging / name)
        digest = list_files(staging).digest()
        store.mkdir(mode=0o700, exist_ok=True)
        demand_own(store, private=True)
        if not (_mark_used(store / digest) and has_digest(store / digest, digest)):
            _install(staging, store / digest)
        link.symlink_to(os.path.relpath(store / digest, link.parent))
        return digest
    except OSError as error:
        place = error.filename or store
        raise ClusterddpError(f"{place}: the snapshot of the code failed: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def store_of(runs_dir: Path) -> Path:
    """Return the directory of this user's snapshots in a runs directory, which several users may share.

    `write_snapshot` refuses one of another user, who could change the code that the ranks execute.
    """
    store = runs_dir / STORE_NAME
    with contextlib.suppress(FileNotFoundError):
        found = store.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            return runs_dir / f"{STORE_NAME}-{os.geteuid()}"
    return store


def find_stored(run: RunDir) -> Path | None:
    """Find the snapshot of a run in its store; None where no link leads into one: there is none, or it is foreign."""
    links = [link for link in (run.snapshot, run.code) if link.is_symlink()]
    places = [Path(os.path.realpath(link)) for link in links]
    return next((path for path in places if path.parent.name.startswith(STORE_NAME) and path.is_dir()), None)


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a link; one that was deleted since it was listed is left out."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if source.is_symlink():
            target.symlink_to(source.readlink())
            return
        with open(source, "rb") as original:
            executable = os.fstat(original.fileno()).st_mode & stat.S_IXUSR
            # Read-only: an editor refuses to change the snapshot by mistake.
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o500 if executable else 0o400)
            with open(descriptor, "wb") as copy:
                shutil.copyfileobj(original, copy)
                copy.flush()
                os.fsync(copy.fileno())


def _mark_used(target: Path) -> bool:
    """Set the time of a snapshot to now, so that `rm` leaves it to this submit; return whether there is one."""
    try:
        os.utime(target)
    except FileNotFoundError:
        return False
    return True


def _install(staging: Path, target: Path) -> None:
    """Move a complete copy into the store; of several writers of the same content any may win."""
    if target.exists():
        target.rename(target.with_name(f".damaged-{target.name}-{secrets.token_hex(4)}"))
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    sync_directory(target.parent)
