"""Runs on this host: their directories, supervisors, end, and what they have written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.guard import start_after_reboot
from clusterddp.places.ssh.agent.operations import Body, Host, Reply
from clusterddp.places.ssh.agent.store import check_out
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import read_spooled
from clusterddp.run.cleanup import end_run_here, find_processes, hashed, read_cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.leftovers import Ended, end_left_over
from clusterddp.run.record import boot_id
from clusterddp.run.stacks import request_stacks
from clusterddp.run.stop import request_stop
from clusterddp.run.supervisors import SupervisorOrder, read_answer, send, start_supervisor, supervisor_log
from clusterddp.system.devices import list_gpus
from clusterddp.system.files import open_regular, read_json, read_tail, write_bytes, write_json, write_text
from clusterddp.system.gpu_lease import take_leases

MAX_REPLY_BYTES = 8 << 20
"""Most data in one answer: it is held in memory on both sides."""
_MAX_LISTED_BYTES = 2 << 20
"""Most of the lists of files in one answer, as JSON."""
_FILES = ("metrics.jsonl", "events.jsonl", "summary.json")
_FOLDERS = ["attempts", "launcher", "checkpoints", "output", "tb"]
"""What the run writes; the rest was uploaded, or is the user's own."""


class Hold:
    """A supervisor that ends with this connection: it ends its gang when its standard input closes."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def prepare(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Make a run's directory, or bring one up to date for its next attempt; `code`: the digest of its code.

    The body is its submission file, if it has one.
    """
    run = RunDir(host.run_dir(request["name"]))
    if request["code"] is not None:
        check_out(host, request["code"], run.path)
    for directory in (run.path, run.checkpoints, run.tensorboard, run.launcher_dir):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    attempt = run.attempt(request["attempt"])
    for directory in (attempt.path, attempt.ranks, attempt.logs):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in (run.cancel_file, *run.launcher_dir.glob("guard-*.json")):
        old.unlink(missing_ok=True)
    write_json(run.plan, request["plan"])
    write_json(run.record, request["record"])
    write_text(run.spec, request["spec"])
    if body.size:
        write_bytes(run.submission, body.read_all())
    return {"run_dir": str(run.path)}


def supervise(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Start the supervisor of a node; it ends with this connection until it is released.

    Returns when the head listens, and reports the address; for other nodes, when the head has accepted the supervisor.

    `order` is a `SupervisorOrder`; `variables` are added to its environment, the values of the run's secrets among
    them; `patience_s`: how long the agent waits for the launcher's next request from now on.
    """
    order = SupervisorOrder.from_json(request["order"])
    environment = inherited_environment() | {"PYTHONPATH": host.python_path(os.environ)} | request["variables"]
    process = start_supervisor(order, environment, answers=True)
    host.hold(Hold(process, order.run_dir))
    host.patience_s = request["patience_s"]
    answer = read_answer(process, order.gang.start_timeout_s)
    if answer is None:
        head = order.gang.nodes[0].host
        what = "did not report where it listens" if order.is_head else f"did not reach node 0 on {head}"
        raise ClusterddpError(f"the supervisor {what}: {_last_line(supervisor_log(order.run, order.node_rank))}")
    return {"pid": process.pid, **answer}


def ask(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Ask a run to stop (a checkpoint first), to report its stacks, or to end, by the files that supervisors watch.

    `reason`: of an end; the id of the report. Or release its supervisors: they go on when this connection ends.
    """
    run, what = RunDir(host.run_dir(request["name"])), request["what"]
    if not run.path.is_dir():
        return {"found": False}
    if what == "release":
        for hold in [hold for hold in host.find_held(Hold) if hold.run_dir == run.path]:
            send(hold.process, {"detach": True})
            host.release(hold)
    elif what == "cancel":
        write_json(run.cancel_file, {"by": request["reason"], "time": time.time()}, exclusive=True)
    elif attempts := run.attempts():
        if what == "stop":
            request_stop(attempts[-1].stop_file, request["reason"])
        else:
            request_stacks(attempts[-1], request["reason"])
    return {"found": True}


def end(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """End every process of the runs with these `tokens` on this host.

    `patience_s`: how long their supervisors have to do so themselves; null: only runs that have no live supervisor,
    guard or task are ended.
    """
    patience_s = request["patience_s"]
    if patience_s is None:
        ended = [end_left_over(token) for token in request["tokens"]]
    else:
        ended = [_end(token, patience_s) for token in request["tokens"]]
    return {"ended": [dataclasses.asdict(each) for each in ended]}


def look(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """List the live processes of runs, and their files: path -> [size, time of the last change in ns].

    `files` is null when they are those of the last list on this connection. It is a part, where there are many: `begin`
    asks for the next one of the same list. A node that ended with its host is started again where it `rejoins`.
    """
    asked = {each["name"]: each for each in request["runs"]}
    # Processes are listed first: the last one that exits has written its files before.
    found_here = find_processes(*(f"{each['token']}." for each in asked.values()))
    cookies = {hashed(read_cookie(process)) for process in found_here}
    answers, left = {}, _MAX_LISTED_BYTES
    for name, each in asked.items():
        run, token, begin = RunDir(host.run_dir(name)), each["token"], each["begin"]
        roles = {cookie.rpartition(".")[2] for cookie in cookies if cookie.startswith(hashed(f"{token}."))}
        if each["rejoins"]:
            _start_again(host, run, roles)
        files = host.listed.get(name, {}) if begin else dict(_files_of(run.path))
        is_new = begin > 0 or host.listed.get(name) != files
        part: dict[str, list[int]] = {}
        for path, found in list(files.items())[max(0, begin) :] if is_new else ():
            if left <= 0:
                break
            part[path] = found
            left -= len(json.dumps({path: found}))
        end_attempt, end = _newest_end(run, token)
        answers[name] = {
            "boot": boot_id(),
            "alive": sorted(role for role in roles if role),
            "has_run": run.path.is_dir(),
            "end_attempt": end_attempt,
            "end": end,
            "files": part if is_new else None,
            "more": is_new and begin + len(part) < len(files),
        }
        host.listed[name] = files
    return {"runs": answers}


def _start_again(host: Host, run: RunDir, alive: Collection[str]) -> None:
    """Start the nodes that have ended with this host and are to take part again.

    Not those whose GPUs others have by now, and none of a run with secrets: no file has their values.
    """
    for kept in run.launcher_dir.glob("guard-*.json"):
        node_rank = kept.stem.removeprefix("guard-")
        if not {f"s{node_rank}", f"g{node_rank}"}.isdisjoint(alive):
            continue
        with contextlib.suppress(ClusterddpError, OSError, ValueError, TypeError, KeyError):
            plan, facts = read_json(run.plan) or {}, read_json(kept) or {}
            order = SupervisorOrder.from_json(facts["order"])
            if plan["secrets"]:
                continue
            environ = inherited_environment() | {"PYTHONPATH": host.python_path(os.environ)}
            if (lease := take_leases(order.node.gpus, plan["run"], list_gpus(environ), hold=plan["hold"])) is not None:
                with contextlib.closing(lease):
                    start_after_reboot(kept, environ, lease.descriptors)


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


def _end(token: str, patience_s: float) -> Ended:
    found, left = end_run_here(token, patience_s=patience_s)
    return Ended(token=token, ended=found - len(left), left=tuple(map(str, left)))


def _last_line(log: Path) -> str:
    return read_tail(log).rpartition("\n")[2].strip() or "it wrote nothing"


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
        file = open_regular(run.path / path)
    except (OSError, ClusterddpError):
        return {"gone": True, "length": 0, "size": 0, "mtime_ns": 0}, b""
    with file:
        found = os.fstat(file.fileno())
        data = os.pread(file.fileno(), min(part["limit"], left), part["offset"]) if left > 0 else b""
    facts = {"gone": False, "length": len(data), "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    return facts, data
