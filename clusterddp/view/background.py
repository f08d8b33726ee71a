"""What a run was made of: its configuration, packages, code and hosts, and how the code differs from other code.

Two runs that differ are explained by these."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.code import find_stored, run_git
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord
from clusterddp.spec.program_arguments import named_arguments
from clusterddp.spec.secret_values import HIDDEN, hide_secret_arguments, is_secret
from clusterddp.system.file_set import FileSet, list_files, read_sum, show
from clusterddp.system.files import read_json, read_regular

_MAX_FILE_BYTES = 200_000
"""A larger file is named and not shown."""
_MAX_FILE_LINES = 400
_MAX_FILES_SHOWN = 50
_MAX_CODE_BYTES = 10**9
_MAX_DIFF_WORK = 2_000_000
"""The most pairs of equal lines times lines for which the smallest difference is searched: about a second."""
_DIFF_CONTEXT = 3
_HUNK = re.compile(r"([-+])(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Background:
    """What a run was made of; each part is empty where the run does not have its file."""

    config: Mapping[str, str]
    """The resolved spec, a key for each value: `train.lr` -> `0.1`."""
    packages: Mapping[str, str]
    machine: Mapping[str, str]
    """The machine that submitted: Python, torch, GPUs, driver."""
    places: Mapping[str, str]
    """Launcher, hosts, ranks, backend."""
    commit: str | None
    branch: str | None
    is_dirty: bool
    """The work tree had changes that were not committed."""
    root: Path | None
    """The work tree of the commit, on the machine that submitted."""
    code: Path | None
    """The snapshot of the code; None: the run has none, or it is not here."""

    @property
    def parts(self) -> dict[str, Mapping[str, str]]:
        """The facts in which runs may differ, by the keys of `compare -o json`."""
        facts = {"spec": self.config, "packages": self.packages, "machine": self.machine, "places": self.places}
        return facts | {"code": self.code_facts}

    @property
    def code_facts(self) -> dict[str, str]:
        """Of which commit and snapshot the code is; what is not known is left out."""
        facts = {
            "commit": self.commit,
            "branch": self.branch,
            "uncommitted changes": "yes" if self.is_dirty else "no" if self.commit else None,
            "snapshot": self.code and self.code.name[:12],
        }
        return {name: fact for name, fact in facts.items() if fact}


def read_background(run: RunDir, record: RunRecord) -> Background:
    """Read what a run was made of; a file that is missing or damaged leaves its part empty."""
    plan, environment = read_part(run.plan), read_part(run.environment)
    git, directory = _inner(environment, "git"), plan.get("working_dir")
    # Paths below the directory of the submit are relative ones: each upload to a login node has its own.
    above = f"{directory.rstrip('/')}/" if isinstance(directory, str) and directory.strip("/") else ""
    config = config_texts(_inner(plan, "spec"))
    return Background(
        config={key: value.removeprefix(above) for key, value in config.items()},
        packages={str(name): str(version) for name, version in _inner(environment, "packages").items()},
        machine=_machine(environment),
        places=_places(record, _inner(plan, "gang")),
        commit=git["commit"] if isinstance(git.get("commit"), str) else None,
        branch=git["branch"] if isinstance(git.get("branch"), str) else None,
        is_dirty=git.get("dirty") is True,
        root=Path(git["root"]) if isinstance(git.get("root"), str) else None,
        code=find_stored(run),
    )


def config_texts(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Write nested values as texts, a key each, `train.lr`; unset ones are left out, secret ones hidden."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name == "entry" and isinstance(value, dict):
            flat |= config_texts(hide_secret_arguments(value), "entry.")
        elif isinstance(value, dict) and value and name.count(".") < 16:
            flat |= config_texts(value, f"{name}.")
        elif name == "entry.args" and (arguments := _arguments(value)):
            flat |= {f"{name}.{argument}": text for argument, text in arguments.items()}
        elif value not in (None, {}, []):
            hidden = prefix == "env." and is_secret(str(key), value_text(value))
            hidden |= name == "notify.webhook" and not str(value).startswith("${")
            flat[name] = HIDDEN if hidden else value_text(value)
    return flat


def _arguments(words: Any) -> dict[str, str] | None:
    """Write the arguments of a program one by one; None: they are not words, or cannot be distinguished."""
    return named_arguments(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def value_text(value: Any) -> str:
    """Write a value of a spec in one line, text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _machine(environment: Mapping[str, Any]) -> dict[str, str]:
    python, torch = _inner(environment, "python"), _inner(environment, "torch")
    gpus = environment.get("gpus")
    gpus = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    names = dict.fromkeys(str(gpu.get("name")) for gpu in gpus)
    facts = {
        "host": environment.get("host"),
        "platform": environment.get("platform"),
        "cpus": environment.get("cpus"),
        "python": python.get("version"),
        "torch": torch.get("version"),
        "cuda": torch.get("cuda"),
        "gpus": f"{len(gpus)} x {', '.join(names)}" if gpus else None,
        "driver": gpus[0].get("driver_version") if gpus else None,
        "directory": environment.get("working_dir"),
    }
    return {name: str(fact) for name, fact in facts.items() if fact is not None}


def _places(record: RunRecord, gang: Mapping[str, Any]) -> dict[str, str]:
    nodes = gang.get("nodes")
    nodes = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    ranks = [node["ranks"] for node in nodes if isinstance(node.get("ranks"), list)]
    facts = {
        "launcher": record.launcher,
        "hosts": ", ".join(dict.fromkeys(str(node.get("host")) for node in nodes)),
        "nodes": len(nodes),
        "ranks": sum(map(len, ranks)),
        "backend": gang.get("backend"),
        "threads per rank": gang.get("threads_per_rank"),
    }
    return {name: str(fact) for name, fact in facts.items() if fact not in (None, "", 0)}


def read_part(path: Path) -> dict[str, Any]:
    """Read an object of the run; a damaged one counts as empty: the rest of a report is worth having."""
    try:
        value = read_json(path)
    except (OSError, ClusterddpError):
        return {}
    return value if isinstance(value, dict) else {}


def _inner(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    inner = values.get(key)
    return inner if isinstance(inner, dict) else {}


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
    before, after = ({entry.name: entry for entry in _list_code(root).entries} for root in (old, new))
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
    for entry in _list_code(code).entries:
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
    digest: Callable[[bytes], hashlib._Hash] = hashlib.sha256 if digits == 64 else hashlib.sha1
    content = read_regular(path, _MAX_CODE_BYTES)
    return digest(b"blob %d\0" % len(content) + content).hexdigest()


def _list_code(root: Path) -> FileSet:
    found = list_files(root)
    if found.total_bytes > _MAX_CODE_BYTES:
        raise ClusterddpError(f"{root}: has more than {_MAX_CODE_BYTES:,} bytes, which no snapshot of code has")
    return found


def _file_diff(name: bytes, change: str, lines: list[str]) -> FileDiff:
    shown = tuple(lines[:_MAX_FILE_LINES])
    return FileDiff(path=show(name), change=change, lines=shown, left_out_lines=len(lines) - len(shown))


def _unified(old: list[str] | None, new: list[str] | None) -> list[str]:
    """Return a unified diff without its two lines of file names; empty where one of the files is no text.

    Between the lines that both begin and end with, what would take long to compare is removed and added as a whole.
    """
    if old is None or new is None:
        return []
    begin = len(os.path.commonprefix([old, new]))  # noqa: RUF071  of lines, not of characters
    end = len(os.path.commonprefix([old[begin:][::-1], new[begin:][::-1]]))  # noqa: RUF071
    before, after = old[begin : len(old) - end], new[begin : len(new) - end]
    counts = Counter(after)
    if sum(counts[line] for line in before) * min(len(before), len(after)) > _MAX_DIFF_WORK:
        hunk = f"@@ -{begin + 1},{len(before)} +{begin + 1},{len(after)} @@"
        return [hunk, *(f"-{line}" for line in before), *(f"+{line}" for line in after)]
    first, rest = max(0, begin - _DIFF_CONTEXT), max(0, end - _DIFF_CONTEXT)
    lines = difflib.unified_diff(old[first : len(old) - rest], new[first : len(new) - rest], lineterm="")
    return [
        _HUNK.sub(lambda found: f"{found[1]}{int(found[2]) + first}", line) if line[:2] == "@@" else line
        for line in list(lines)[2:]
    ]


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
    return "file", read_regular(path, _MAX_FILE_BYTES)
