"""The code of a run as differences: between two snapshots, and between a snapshot and its commit."""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.run.git import run_git
from clusterddp.system.file_set import list_files, read_sum, show

_MAX_FILE_BYTES = 200_000
"""A larger file is named and not shown."""
_MAX_FILE_LINES = 400
_MAX_FILES_SHOWN = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDiff:
    """A file of the code that is not equal in two runs."""

    path: str
    change: str
    """`changed`, `added`, `removed`."""
    lines: tuple[str, ...]
    """A unified diff; empty for a file that is no text, or too large."""
    left_out_lines: int = 0


def compare_folders(old: Path, new: Path) -> tuple[FileDiff, ...]:
    """Return the files that differ between two folders, by name; at most so many of them with their lines.

    Raises: ClusterddpError, OSError: a folder or a file cannot be read.
    """
    before, after = ({entry.name: entry for entry in list_files(root).entries} for root in (old, new))
    diffs: list[FileDiff] = []
    for name in sorted(before.keys() | after.keys()):
        is_same = name in before and name in after and _content(old, name) == _content(new, name)
        if is_same:
            continue
        change = "added" if name not in before else "removed" if name not in after else "changed"
        lines: list[str] = []
        if len(diffs) < _MAX_FILES_SHOWN:
            lines = _unified(_lines(old, name), _lines(new, name))
        diffs.append(_file_diff(name, change, lines))
    return tuple(diffs)


def read_uncommitted(code: Path, root: Path, commit: str, environ: Mapping[str, str]) -> tuple[FileDiff, ...]:
    """Return the files of a snapshot that are not as they are in its commit, by name; deleted files are not found.

    Raises: ClusterddpError, OSError: the repository is not here, does not have the commit, or a file cannot be read.
    """
    listing = run_git(["ls-tree", "-r", "-z", "--full-tree", commit], root, environ)
    blobs: dict[bytes, str] = {}
    for line in listing.split(b"\0"):
        about, _, name = line.partition(b"\t")
        blobs[name] = about.split(b" ")[-1].decode("ascii", errors="replace")
    diffs: list[FileDiff] = []
    for entry in list_files(code).entries:
        blob = blobs.get(entry.name)
        if not entry.is_file or (blob and _blob_of(os.path.join(os.fsencode(code), entry.name), len(blob)) == blob):
            continue
        lines: list[str] = []
        if len(diffs) < _MAX_FILES_SHOWN:
            before = _text_lines(run_git(["cat-file", "blob", blob], root, environ)) if blob else []
            lines = _unified(before, _lines(code, entry.name))
        diffs.append(_file_diff(entry.name, "changed" if blob else "added", lines))
    return tuple(diffs)


def _blob_of(path: bytes, digits: int) -> str:
    """Compute git's name of a file's content, which has 40 or 64 digits."""
    with open(path, "rb") as file:
        digest: Callable[[bytes], hashlib._Hash] = hashlib.sha256 if digits == 64 else hashlib.sha1
        content = file.read()
    return digest(b"blob %d\0" % len(content) + content).hexdigest()


def _file_diff(name: bytes, change: str, lines: list[str]) -> FileDiff:
    shown = tuple(lines[:_MAX_FILE_LINES])
    return FileDiff(path=show(name), change=change, lines=shown, left_out_lines=len(lines) - len(shown))


def _unified(old: list[str] | None, new: list[str] | None) -> list[str]:
    """Return a unified diff without its two lines of file names; empty where one of the files is no text."""
    if old is None or new is None:
        return []
    return list(difflib.unified_diff(old, new, lineterm=""))[2:]


def _lines(root: Path, name: bytes) -> list[str] | None:
    """Return the lines of a text file; none where there is no such file, None where it is no text or too large."""
    kind, content = _content(root, name)
    if kind == "":
        return []
    return None if kind != "file" or content is None else _text_lines(content)


def _text_lines(content: bytes) -> list[str] | None:
    if b"\0" in content or len(content) > _MAX_FILE_BYTES:
        return None
    try:
        return content.decode().splitlines()
    except UnicodeDecodeError:
        return None


def _content(root: Path, name: bytes) -> tuple[str, bytes | None]:
    """Return what a file is and what it holds; of a file that is too large its sum."""
    path = os.path.join(os.fsencode(root), name)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return "", None
    if stat.S_ISLNK(found.st_mode):
        return "link", os.readlink(path)  # noqa: PTH115 - as bytes
    if not stat.S_ISREG(found.st_mode):
        return "folder", None
    if found.st_size > _MAX_FILE_BYTES:
        return "large", read_sum(path)
    with open(path, "rb") as file:
        return "file", file.read(_MAX_FILE_BYTES + 1)
