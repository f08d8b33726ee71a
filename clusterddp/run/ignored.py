"""What git ignores in a repository and a program may need beside itself: data, checkpoints, compiled modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

from clusterddp.run.directory import SWEEP_RECORD, RunDir
from clusterddp.run.find import list_places
from clusterddp.run.git import list_ignored

MAX_LINKS = 200
_CACHES = ("__pycache__", "node_modules")
_MARKS = ("pyvenv.cfg", "conda-meta", RunDir(Path()).record.name, SWEEP_RECORD)
_COMPILED = (".pyc", ".pyo", ".egg-info")


def is_wanted(name: str) -> bool:
    """Return whether a file or directory with this name may belong to a program: it is not hidden and no cache."""
    return not (name.startswith(".") or name in _CACHES or name.endswith(_COMPILED))


def is_wanted_directory(path: Path) -> bool:
    """Return whether a directory may belong to a program: it has such a name, and is no virtual environment or run."""
    return is_wanted(path.name) and not any((path / mark).exists() for mark in _MARKS)


def list_linked(
    root: Path, files: Collection[str], places: tuple[Path, ...], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List what git ignores: the names to link, and the directories of more single files than `MAX_LINKS` allow.

    `files`: those of the snapshot. `places`: of runs. A directory whose only tracked files are hidden (.gitkeep)
    counts as ignored.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in list_ignored(root, environ):
        if _may_be_needed(root, name, places):
            path = Path(name)
            by_folder[str(path.parent)].append(str(path))
    visible = {folder for name in files if not _is_hidden(name) for folder in _parents(name)}
    names: list[str] = []
    unlinked: list[str] = []
    for folder, ignored in sorted(by_folder.items(), key=lambda item: (len(item[1]), item[0])):
        whole = folder != "." and folder not in visible
        chosen = [folder] if whole else ignored
        if len(names) + len(chosen) <= MAX_LINKS:
            names += chosen
        else:
            unlinked.append(f"{folder}/ ({len(ignored):,} files)")
    return _outermost(names), tuple(unlinked)


def _may_be_needed(root: Path, name: str, places: tuple[Path, ...]) -> bool:
    path = root / name
    if any(path.is_relative_to(place) for place in places) or not all(map(is_wanted, Path(name).parts)):
        return False
    return not name.endswith("/") or (is_wanted_directory(path) and not list_places(path))


def _is_hidden(name: str) -> bool:
    return Path(name).name.startswith(".")


def _parents(name: str) -> list[str]:
    return [str(parent) for parent in Path(name).parents][:-1]


def _outermost(names: list[str]) -> tuple[str, ...]:
    """Leave out names below another one, which its link makes present."""
    kept: list[str] = []
    for name in sorted(names, key=lambda name: Path(name).parts):
        if not (kept and Path(name).is_relative_to(kept[-1])):
            kept.append(name)
    return tuple(kept)
