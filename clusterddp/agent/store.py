"""Uploads to this host: code by its sum, once; and marks that show which hosts share a directory."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from clusterddp.agent import data
from clusterddp.agent.storage import find_existing, find_place, refusing_disk, staging
from clusterddp.agent.types import Body, Host, Operation
from clusterddp.errors import ClusterddpError
from clusterddp.run.code import link_or_copy
from clusterddp.run.sent import FOLDER, RECORD, TREE
from clusterddp.run.stored import keep_package
from clusterddp.system.file_set import has_digest, list_files, show
from clusterddp.system.file_stream import receive_files
from clusterddp.system.files import write_json, write_text
from clusterddp.wire import build

_SUM = re.compile(r"[0-9a-f]{64}")
_NONCE = re.compile(r"[0-9a-f]{16,64}")
_MARK = ".clusterddp-mark-"


def missing(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return which of some snapshots are missing or damaged here: each is read again to check its sum."""
    gone = [name for name in request["sums"] if not has_digest(find_code(host.root, name), name)]
    for name in set(request["sums"]) - set(gone):
        with contextlib.suppress(OSError):
            # gc removes old ones, and must not remove this one before its checkout.
            os.utime(find_code(host.root, name))
    return {"missing": gone}


def put(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Receive files: `kind` is `code` (a snapshot, with its `sum`), or `data` (for a `target`)."""
    if request["kind"] == "data":
        return data.put(host, build({"target": str}, request, "request"), body)
    wanted = request["sum"] or ""
    target = find_code(host.root, wanted)
    with refusing_disk(target.parent, body.size), staging(target.parent) as tree:
        receive_files(body.read, tree, read_only=True)
        found = list_files(tree).digest()
        if found != wanted:
            raise ClusterddpError(
                f"the snapshot of the code has the sum {found[:12]}, expected {wanted[:12]}",
                hint="it was changed since it was taken: submit again",
            )
        tree.chmod(0o700)
        if not has_digest(target, wanted):
            _install(tree, target)
    return {}


def check_out(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Give a run its code: a copy of a snapshot whose files are hard links; a run that has it keeps it."""
    source, run = find_code(host.root, request["sum"]), host.run_dir(request["name"])
    code = run / "code"
    with refusing_disk(run, 0):
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        if code.is_dir():
            return {"code": str(code)}
        with staging(run) as tree:
            _copy(source, tree)
            tree.chmod(0o700)
            with contextlib.suppress(FileExistsError):
                _rename_new(tree, code)
    return {"code": str(code)}


def lay_out(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Make a directory for a command on this login node: a copy of the code `sum` in its tree, `files` beside the tree.

    `at`: the place of the code in the tree. `within`: the working directory of the command in the tree.
    Jobs import this package when they start, so gc keeps it from now on.
    """
    trees = host.root / FOLDER
    place = trees / secrets.token_hex(6)
    tree, at = place / TREE, _below(request["at"])
    with refusing_disk(trees, 0):
        place.mkdir(mode=0o700, parents=True)
        for name, text in request["files"].items():
            write_text(place / Path(name).name, text)
        (tree / at).mkdir(mode=0o700, parents=True)
        files: list[str] = []
        if request["sum"] is not None:
            code = find_code(host.root, request["sum"])
            _copy(code, tree / at)
            files = [os.fsdecode(entry.name) for entry in list_files(code).entries]
        (tree / _below(request["within"])).mkdir(parents=True, exist_ok=True)
        write_json(place / RECORD, {"at": str(at), "files": files, "git": request["git"]})
        keep_package(host.package)
    return {"place": str(place), "directory": str(tree / _below(request["within"]))}


def mark(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Make a mark in the directory of a target (without one: in the root), until the agent ends.

    A directory that is read-only cannot be marked, and counts as this host's own.
    """
    marked = _mark_of(host, request.get("target"), request["nonce"])
    _remove_old_marks(marked.parent)
    try:
        host.hold(_Mark(marked))
    except OSError as error:
        return {"marked": False, "why": error.strerror}
    return {"marked": True}


def unmark(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Remove this agent's marks."""
    host.release_all(_Mark)
    return {}


def seen(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return which of these marks are seen from here: their hosts share the directory with this one."""
    marks = {nonce: _mark_of(host, request.get("target"), nonce) for nonce in request["nonces"]}
    return {"seen": [nonce for nonce, path in marks.items() if path.exists()]}


OPERATIONS: dict[str, Operation] = {
    "login.lay_out": lay_out,
    "store.missing": missing,
    "store.put": put,
    "store.compare": data.compare,
    "store.checkout": check_out,
    "store.mark": mark,
    "store.unmark": unmark,
    "store.seen": seen,
}


class _Mark:
    """A file by which other hosts recognise that they share its directory."""

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self.path = path

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def _mark_of(host: Host, target: str | None, nonce: str) -> Path:
    if not _NONCE.fullmatch(nonce):
        raise ValueError(f"not a nonce: {nonce!r}")
    return (host.root if target is None else find_existing(find_place(target))) / f"{_MARK}{nonce}"


def _remove_old_marks(folder: Path) -> None:
    """Remove marks of agents that were killed."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(_MARK) and time.time() - entry.stat(follow_symlinks=False).st_mtime > 3600:
                Path(entry.path).unlink()


def find_code(root: Path, name: str) -> Path:
    """Return the place of the snapshot with this sum, whether it is there or not."""
    if not _SUM.fullmatch(name):
        raise ValueError(f"not a sum: {name!r}")
    return root / "code" / name


def _copy(code: Path, target: Path) -> None:
    """Copy a snapshot, its files as hard links where possible."""
    if not code.is_dir():
        raise ClusterddpError(f"{code}: the snapshot of the code is gone from this host", hint="submit again")
    shutil.copytree(code, target, symlinks=True, copy_function=link_or_copy, dirs_exist_ok=True)


def _below(text: str) -> Path:
    path = Path(text)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"not below a tree: {text!r}")
    return path


def _install(tree: Path, target: Path) -> None:
    """Put a snapshot in its place; of several writers of one content any may win."""
    if os.path.lexists(target):  # its content does not match its name; runs have copies of their own
        with contextlib.suppress(FileNotFoundError):
            target.rename(tree.with_name("damaged"))
    with contextlib.suppress(FileExistsError):
        _rename_new(tree, target)


def _rename_new(tree: Path, target: Path) -> None:
    """Rename a directory to a name that is free, or is free again by now.

    Raises: FileExistsError.
    """
    try:
        tree.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(error.errno, error.strerror, show(os.fsencode(target))) from error
        raise
