"""The directory of a command on this login node."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from clusterddp.agent.store import find_code, refusing_disk
from clusterddp.agent.types import Body, Host, Operation
from clusterddp.run.code import FOLDER, RECORD, TREE, link_or_copy
from clusterddp.run.stored import keep_package
from clusterddp.system.file_set import list_files
from clusterddp.system.files import write_json, write_text


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
            shutil.copytree(code, tree / at, symlinks=True, copy_function=link_or_copy, dirs_exist_ok=True)
            files = [os.fsdecode(entry.name) for entry in list_files(code).entries]
        (tree / _below(request["within"])).mkdir(parents=True, exist_ok=True)
        write_json(place / RECORD, {"at": str(at), "files": files, "git": request["git"]})
        keep_package(host.package)
    return {"place": str(place), "directory": str(tree / _below(request["within"]))}


OPERATIONS: dict[str, Operation] = {"login.lay_out": lay_out}


def _below(text: str) -> Path:
    path = Path(text)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"not below a tree: {text!r}")
    return path
