"""Downloads from the runs on this host: their live processes, the list of their files, pieces of files."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterddp.agent.types import Body, Host, Operation, Reply
from clusterddp.run.cleanup import find_processes, read_cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.outcome import read_spooled
from clusterddp.run.record import boot_id
from clusterddp.system.files import read_json

MAX_REPLY_BYTES = 8 << 20
"""Most data in one answer: it is held in memory on both sides."""
_FILES = ("metrics.jsonl", "events.jsonl", "summary.json")
_FOLDERS = ["attempts", "launcher", "checkpoints", "output", "tb"]
"""What the run writes; the rest was uploaded, or is the user's own."""


def list_files(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """List the live processes of runs, and their files: path -> [size, time of the last change in ns].

    `files` is null when they are those of the last list on this connection.
    """
    asked = {each["name"]: each["token"] for each in request["runs"]}
    # Processes are listed first: the last one that exits has written its files before.
    cookies = {read_cookie(process) for process in find_processes(*(f"{token}." for token in asked.values()))}
    answers = {}
    for name, token in asked.items():
        run = RunDir(host.run_dir(name))
        roles = {cookie.rpartition(".")[2] for cookie in cookies if cookie.startswith(f"{token}.")}
        files = dict(_files_of(run.path))
        end_attempt, end = _newest_end(run, token)
        answers[name] = {
            "boot": boot_id(),
            "alive": sorted(role for role in roles if role),
            "has_run": run.path.is_dir(),
            "end_attempt": end_attempt,
            "end": end,
            "files": None if host.listed.get(name) == files else files,
        }
        host.listed[name] = files
    return {"runs": answers}


def read(host: Host, request: dict[str, Any], body: Body) -> Reply:
    """Send pieces of files of the run `name`: of each of `parts` at most `limit` bytes from `offset` on.

    The answer on each part: `length` sent, `size` and `mtime_ns` of the file; and `gone` when it cannot be read.
    """
    run = RunDir(host.run_dir(request["name"]))
    answers, pieces, left = [], [], MAX_REPLY_BYTES
    for part in request["parts"]:
        facts, piece = _read_part(run, part, left)
        answers.append(facts)
        pieces.append(piece)
        left -= len(piece)
    return Reply(facts={"parts": answers}, chunks=pieces, size=sum(map(len, pieces)))


OPERATIONS: dict[str, Operation] = {"results.list": list_files, "results.read": read}


def _newest_end(run: RunDir, token: str) -> tuple[int | None, dict[str, Any] | None]:
    try:
        attempts = run.attempts()
    except OSError:
        return None, None
    for attempt in reversed(attempts):
        end = read_json(attempt.end)
        if end is None and (spooled := read_spooled(token, attempt.number)) is not None:
            end = dataclasses.asdict(spooled)
        if end is not None:
            return attempt.number, end
    return None, None


def _files_of(root: Path) -> Iterator[tuple[str, list[int]]]:
    for folder, folders, names in os.walk(root):
        here = os.path.relpath(folder, root)
        if here == ".":
            folders[:] = _FOLDERS
        for name in sorted(names):
            if name.startswith(".") or (here == "." and name not in _FILES):
                continue  # a file that is being written, or not the run's
            try:
                found = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield os.path.normpath(os.path.join(here, name)), [found.st_size, found.st_mtime_ns]


def _read_part(run: RunDir, part: dict[str, Any], left: int) -> tuple[dict[str, Any], bytes]:
    path = Path(part["path"])
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"not a file of a run: {part['path']!r}")
    try:
        descriptor = os.open(run.path / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {"gone": True, "length": 0, "size": 0, "mtime_ns": 0}, b""
    try:
        found = os.fstat(descriptor)
        data = os.pread(descriptor, min(part["limit"], left), part["offset"]) if left > 0 else b""
    finally:
        os.close(descriptor)
    facts = {"gone": False, "length": len(data), "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    return facts, data
