"""What a submit from a laptop needs on a login node before the command itself runs there: the code, the spec."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from clusterddp.agent.place import refusing_disk
from clusterddp.agent.store import find_code, link_or_copy
from clusterddp.agent.types import Body, Host, Operation
from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import write_json, write_text
from clusterddp.run.sent import FOLDER, RECORD, TREE
from clusterddp.run.stored import keep_package
from clusterddp.system.tree import list_tree


def lay_out(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Make a directory with a copy of the code `sum` at `at` of its tree, and the texts of `files` beside the tree.

    `within`: the directory of the tree in which the command is to run. Jobs import this package later, whenever they
    start: from now on it stays.
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
            files = _copy(find_code(host.root, request["sum"]), tree / at)
        (tree / _below(request["within"])).mkdir(parents=True, exist_ok=True)
        write_json(place / RECORD, {"at": str(at), "files": files, "git": request["git"]})
        keep_package(host.package)
    return {"place": str(place), "directory": str(tree / _below(request["within"]))}


OPERATIONS: dict[str, Operation] = {"login.lay_out": lay_out}


def _copy(code: Path, target: Path) -> list[str]:
    """Copy a snapshot, its files as hard links where that can be; return their names."""
    if not code.is_dir():
        raise ClusterddpError(f"{code}: the snapshot of the code is gone from this host", hint="submit again")
    shutil.copytree(code, target, symlinks=True, copy_function=link_or_copy, dirs_exist_ok=True)
    entries, _ = list_tree(code)
    return [os.fsdecode(entry.name) for entry in entries]


def _below(text: str) -> Path:
    path = Path(text)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"not below a tree: {text!r}")
    return path
