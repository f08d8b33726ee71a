"""What git knows of a directory: the root of its repository, the repository's files, the commit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.run.sent import find_sent

TIMEOUT_S = 60.0


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


def list_ignored(root: Path, environ: Mapping[str, str]) -> list[str]:
    """List what git ignores; sorted, relative to `root`. A directory without a tracked file is one name, with `/`."""
    arguments = ["ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"]
    names = sorted({os.fsdecode(name) for name in run_git(arguments, root, environ).split(b"\0") if name})
    kept: list[str] = []
    for name in names:  # git lists the files of some directories beside the directory
        if not (kept and kept[-1].endswith("/") and name.startswith(kept[-1])):
            kept.append(name)
    return kept


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
        status = run_git(["status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal"], root, environ)
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

    It runs without the caller's GIT_* variables, which inside a hook name another repository, and without the file
    system monitor, a program that the repository itself names.
    Raises: ClusterddpError: git cannot be run, fails, or takes more than `TIMEOUT_S`.
    """
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments]
    clean = {name: value for name, value in environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            command,
            env=clean | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
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
