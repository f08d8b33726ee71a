"""Copies of the newest checkpoint on a second host: the first one, where rank 0 writes, may be lost for good.

`python -m clusterddp.node.copies` reads a `Transfer` as JSON from standard input, and is one end of a transfer: it
sends a checkpoint to whoever proves to know the run's token, or receives one. Supervisors start both ends (`Copies`),
as processes of their own, so that no heartbeat waits; the head says when and between which nodes (`CopyWatch`).

The bytes of the files follow one handshake and the signed manifest (connection.py), unencrypted like all else. The
receiver checks every sum before it writes the manifest, without which there is no checkpoint. On storage that both
nodes share it finds the manifest, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import LOOPBACK_ADDRESS
from clusterddp.network.rendezvous.connection import Connection, Message, Protocol
from clusterddp.node.link import listen
from clusterddp.node.log import log, log_line
from clusterddp.node.processes import leave_to_reap
from clusterddp.ranks.environment import COOKIE, cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.supervisors import SupervisorOrder
from clusterddp.system.files import read_regular, sync_directory, write_bytes
from clusterddp.system.processes import die_with_parent
from clusterddp.system.python import module_command
from clusterddp.system.units import format_bytes
from clusterddp.wire import build, read_object

_LOOK_EVERY_S = 2.0
_AGAIN_S = 30.0
"""After a copy that failed."""
_NO_ANSWER_S = 60.0
"""How long the other end of a transfer may send or take no byte, and a node may not report its part of one."""
_KEEP = 2
_SPARE_BYTES = 64 << 20
"""How much of the receiver's disk stays free."""
_MAX_MANIFEST_BYTES = 256 * 1024
_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d{8,})-a(\d+)")
_FILE = {"file": str, "sha256": str, "bytes": int}
_PROTOCOL = Protocol(
    name="copy",
    key="token",
    max_bytes_to_server=4096,
    max_bytes_to_client=2 * _MAX_MANIFEST_BYTES,
    fields={"have": {"name": str, "manifest": str}},
)
Age = tuple[int, int]
"""The attempt and the step of a checkpoint; a later one is newer."""


def age_of(name: str) -> Age:
    """Return the age of a checkpoint by its name; that of no checkpoint is the least."""
    found = _NAME.fullmatch(name)
    return (int(found[2]), int(found[1])) if found else (-1, -1)


def newest_here(run: RunDir) -> str:
    """Return the name of the newest checkpoint in this host's copy of a run; empty: it has none."""
    try:
        names = [name.removesuffix(".json") for name in os.listdir(run.checkpoints) if name.endswith(".json")]
    except OSError:
        return ""
    return max((name for name in names if _NAME.fullmatch(name)), key=age_of, default="")


class CopyWatch:
    """The head's part: lets one other node have the newest checkpoint, and fetches a newer one before ranks start."""

    def __init__(self, run: RunDir, gang: Gang, head: int, send: Callable[[int, Message], None]) -> None:
        self._run = run
        self._gang = gang
        self._head = head
        self._send = send
        self._newest: dict[int, str] = {}
        """The newest checkpoint that each other node is known to have."""
        self._transfer: tuple[int, int, str] | None = None
        """From which node, to which one, and what."""
        self._until = self._look_at = 0.0
        self._holder: int | None = None
        """The node that had the last copy, and will have the next one."""

    def on_join(self, node_rank: int, report: Message) -> None:
        """Note what a node has."""
        if node_rank != self._head:
            self._newest[node_rank] = str(report.get("checkpoint", ""))

    def on_report(self, node_rank: int, report: Message, now: float) -> None:
        """Go on with the transfer: its source listens, or its target has what it was to have, or does not get it."""
        if self._transfer is None or report.get("name") != self._transfer[2]:
            return
        source, target, name = self._transfer
        if report["kind"] == "sending" and node_rank == source:
            self._until = now + _NO_ANSWER_S
            where = {"host": report["host"], "port": report["port"]}
            self._send(target, {"kind": "receive", "name": name, "prunes": target != self._head, **where})
        elif report["kind"] == "copied" and node_rank == target:
            self._transfer = None
            if report.get("error"):
                self._fail(source, target, f"{name}: {report['error']}", now)
                return
            if target != self._head:
                self._newest[target], self._holder = name, target
            if report.get("bytes"):
                size = format_bytes(float(report["bytes"]))
                log(self._run, "checkpoint_copied", text=f"{name} ({size}) {self._way(source, target)}")

    def lose(self, node_rank: int) -> None:
        """Forget a node that is lost."""
        self._newest.pop(node_rank, None)
        if self._transfer is not None and node_rank in self._transfer[:2]:
            self._transfer = None
        if self._holder == node_rank:
            self._holder = None

    def fetches(self, now: float) -> bool:
        """Return whether the start has to wait, for a checkpoint that is newer than the head's own."""
        if self._goes_on(now):
            return True
        own = age_of(newest_here(self._run))
        source = max(self._newest, key=lambda each: age_of(self._newest[each]), default=self._head)
        if source == self._head or age_of(self._newest[source]) <= own:
            return False
        self._begin(source, self._head, self._newest[source], now)
        return True

    def tick(self, present: Collection[int], now: float) -> None:
        """Begin to copy the newest checkpoint when there is one and no other transfer."""
        if self._goes_on(now) or now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        others = sorted(set(present) & self._newest.keys() - {self._head})
        target = self._holder if self._holder in others else next(iter(others), None)
        name = newest_here(self._run)
        if target is not None and age_of(self._newest[target]) < age_of(name):
            self._begin(self._head, target, name, now)

    def _goes_on(self, now: float) -> bool:
        if self._transfer is not None and now >= self._until:
            source, target, name = self._transfer
            self._transfer = None
            self._fail(source, target, f"{name}: no answer within {_NO_ANSWER_S:g} s", now)
        return self._transfer is not None

    def _begin(self, source: int, target: int, name: str, now: float) -> None:
        self._transfer, self._until = (source, target, name), now + _NO_ANSWER_S
        self._send(source, {"kind": "send", "name": name})

    def _fail(self, source: int, target: int, error: str, now: float) -> None:
        """Try again later; the start does not wait for a checkpoint that could not be fetched."""
        log(self._run, "checkpoint_not_copied", text=f"{error}, {self._way(source, target)}")
        self._look_at = now + _AGAIN_S
        if source != self._head:
            self._newest[source] = ""

    def _way(self, source: int, target: int) -> str:
        return f"from {self._gang.node(source).host} to {self._gang.node(target).host}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """What one end of a transfer does."""

    run_dir: Path
    name: str
    key: str = dataclasses.field(repr=False)
    """The run's token."""
    listener: int | None = None
    """The inherited socket where the sender waits for the receiver; None: this is the receiver."""
    host: str = ""
    port: int = 0
    """Where the sender listens."""
    prunes: bool = False
    """The receiver keeps the newest two: no rank writes there, which would."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"run_dir": str(self.run_dir)}


class Copies:
    """A supervisor's part: starts the ends of transfers on its node, and reports how those that receive have ended."""

    def __init__(
        self, order: SupervisorOrder, environment: Mapping[str, str], report: Callable[[Message], None]
    ) -> None:
        self._order = order
        self._environment = dict(environment) | {COOKIE: cookie(order.gang.token, f"c{order.node_rank}")}
        self._report = report
        self._receiving: dict[int, tuple[str, int]] = {}
        """By pid: what, and the descriptor of the memory (a memfd) that gets the result."""
        self._sending: set[int] = set()

    @property
    def pids(self) -> set[int]:
        """Of processes that no cleanup of ranks may end."""
        return {*self._receiving, *self._sending}

    def obey(self, order: Message) -> None:
        """Start one end of a transfer, if that is the order."""
        if order["kind"] not in {"send", "receive"}:
            return
        name = str(order["name"])
        what = Transfer(run_dir=self._order.run_dir, name=name, key=self._order.gang.token)
        try:
            if order["kind"] == "send":
                address = self._order.node.address or self._order.gang.master_addr or LOOPBACK_ADDRESS
                with listen(address) as listener:
                    self._sending.add(self._start(dataclasses.replace(what, listener=listener.fileno()), None))
                    port = listener.getsockname()[1]
                self._report({"kind": "sending", "name": name, "host": address, "port": port})
            else:
                result = os.memfd_create("clusterddp-copy")
                what = dataclasses.replace(
                    what, host=str(order["host"]), port=int(order["port"]), prunes=bool(order["prunes"])
                )
                self._receiving[self._start(what, result)] = name, result
        except OSError as error:
            self._report({"kind": "copied", "name": name, "error": str(error)})

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Report the transfers that have ended."""
        self._sending.difference_update(exits)
        for pid in self._receiving.keys() & exits.keys():
            name, result = self._receiving.pop(pid)
            with open(result, "rb") as file:
                file.seek(0)
                said = file.read().decode(errors="replace").strip()
            facts = {"bytes": int(said)} if exits[pid] == 0 and said.isdigit() else {"error": said or "it was killed"}
            self._report({"kind": "copied", "name": name, **facts})

    def _start(self, what: Transfer, result: int | None) -> int:
        process = subprocess.Popen(
            module_command("clusterddp.node.copies"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if result is None else result,
            env=self._environment,
            pass_fds=() if what.listener is None else (what.listener,),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(what.to_json()).encode())
        return leave_to_reap(process)


def main() -> int:
    """Be one end of a transfer; the receiver prints how many bytes have come, or why they have not."""
    die_with_parent()
    os.nice(5)
    what: Transfer = build(Transfer, read_object(sys.stdin.buffer.read()))
    try:
        if what.listener is not None:
            send(what, socket.socket(fileno=what.listener))
        else:
            print(receive(what))
    except (OSError, ValueError, ClusterddpError) as error:
        print(str(error))
        log_line(f"the transfer of {what.name} has failed: {error}")
        return 1
    return 0


def send(what: Transfer, listener: socket.socket) -> None:
    """Send a checkpoint to the first that proves to know the key.

    Raises: OSError: nobody comes in time, or the connection breaks, or a file is gone.
    """
    until = time.monotonic() + _NO_ANSWER_S
    with contextlib.ExitStack() as opened:
        name, text, files = _open_newest(RunDir(what.run_dir), opened)
        while time.monotonic() < until:
            listener.settimeout(max(0.1, until - time.monotonic()))
            sock, _ = listener.accept()
            connection = Connection(sock, protocol=_PROTOCOL, key=what.key, role="server", now=time.monotonic())
            if not connection.wait(min(until, time.monotonic() + 10.0)):
                connection.close()
                continue
            connection.send({"kind": "have", "name": name, "manifest": text})
            answer = connection.wait(time.monotonic() + _NO_ANSWER_S)
            if answer and answer[0]["kind"] == "go":
                sock.settimeout(_NO_ANSWER_S)
                for file in files:
                    sock.sendfile(file)
            sock.close()
            return
    raise TimeoutError("nobody has fetched it")


def _open_newest(run: RunDir, opened: contextlib.ExitStack) -> tuple[str, str, list[BinaryIO]]:
    """Open the files of the newest checkpoint, with its name and its manifest.

    It may be newer than what was asked for, which a later one may have removed; what is open stays readable.
    Raises: OSError: files are missing.
    """
    for last_try in (False, False, True):
        name = newest_here(run)
        try:
            text = read_regular(run.checkpoints / f"{name}.json", _MAX_MANIFEST_BYTES).decode()
            files = [run.checkpoints / each["file"] for each in files_of(name, text)]
            return name, text, [opened.enter_context(open(file, "rb")) for file in files]
        except FileNotFoundError:
            if last_try:
                raise
    raise AssertionError


def receive(what: Transfer) -> int:
    """Receive a checkpoint, unless it is here; return how many bytes have come.

    Raises: OSError, ClusterddpError: the connection breaks, the disk has no space, a sum is wrong.
    """
    folder = RunDir(what.run_dir).checkpoints
    folder.mkdir(mode=0o700, exist_ok=True)
    sock = socket.create_connection((what.host, what.port), timeout=10.0)
    connection = Connection(sock, protocol=_PROTOCOL, key=what.key, role="client", now=time.monotonic())
    with contextlib.closing(connection):
        connection.send({"kind": "want", "name": what.name})
        have = connection.wait(time.monotonic() + _NO_ANSWER_S)
        if not have or have[0]["kind"] != "have":
            raise ClusterddpError(f"the sender does not answer: {connection.lost or 'no answer in time'}")
        name, text = str(have[0]["name"]), str(have[0]["manifest"])
        files = files_of(name, text)
        manifest = folder / f"{name}.json"
        with contextlib.suppress(FileNotFoundError):
            if manifest.read_text() == text:
                connection.send({"kind": "has"})
                return 0
        total = sum(int(each["bytes"]) for each in files)
        if shutil.disk_usage(folder).free < total + _SPARE_BYTES:
            raise ClusterddpError(f"{folder}: too little space for {format_bytes(total)}")
        connection.send({"kind": "go"})
        sock.settimeout(_NO_ANSWER_S)
        for each in files:
            _receive_file(sock, folder / each["file"], each)
        write_bytes(manifest, text.encode())
        if what.prunes:
            _prune(folder)
        return total


def files_of(name: str, manifest: str) -> list[dict[str, Any]]:
    """Return the files of a checkpoint with their sizes and sums.

    Raises: ValueError: it is no manifest of this checkpoint.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"not the name of a checkpoint: {name!r}")
    whole = build({**_FILE, "shards": list[dict[str, Any]] | None}, read_object(manifest))
    files = [{key: whole[key] for key in _FILE}, *(build(_FILE, each) for each in whole["shards"] or ())]
    for each in files:
        if not re.fullmatch(rf"{re.escape(name)}\.(pt|shard-\d{{5}})", each["file"]) or each["bytes"] < 0:
            raise ValueError(f"the manifest of {name} names {each['file']!r}")
    return files


def _receive_file(sock: socket.socket, path: Path, expected: Mapping[str, Any]) -> None:
    partial, left, digest = path.with_name(f".{path.name}.part"), expected["bytes"], hashlib.sha256()
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        while left:
            data = sock.recv(min(left, _CHUNK_BYTES))
            if not data:
                raise ClusterddpError(f"the connection ended {left:,} bytes before the end of {path.name}")
            left -= len(data)
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != expected["sha256"]:
        partial.unlink()
        raise ClusterddpError(f"{path.name} has come damaged: its sha256 is not the manifest's")
    partial.replace(path)
    sync_directory(path.parent)


def _prune(folder: Path) -> None:
    """Keep the newest generations; a manifest is removed before its data."""
    names = sorted({path.stem for path in folder.glob("step-*.json")}, key=age_of)
    for name in names[:-_KEEP]:
        (folder / f"{name}.json").unlink(missing_ok=True)
        for path in _data_of(folder, name):
            path.unlink(missing_ok=True)


def _data_of(folder: Path, name: str) -> Iterable[Path]:
    return (*folder.glob(f"{name}.pt"), *folder.glob(f"{name}.shard-*"))


if __name__ == "__main__":
    sys.exit(main())
