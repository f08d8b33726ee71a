"""The program of the doctor's job on each node: read its facts, connect to the first node, report as JSON.

    python -m clusterddp.check.probe DIRECTORY NONCE FIRST_NODE JOB_ID

A report goes to standard output, and into the directory if that exists. The first node also sends its report to every
node that connects, which includes it in its own: so it arrives even if the first node lacks the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

from clusterddp.facts.machine import Machine, read_machine
from clusterddp.facts.torch import import_torch
from clusterddp.network.interface import is_loopback, resolve
from clusterddp.network.port import bind_port
from clusterddp.rendezvous.client import Found, NotFound, Search
from clusterddp.rendezvous.connection import Connection, Message, Protocol, flush_all
from clusterddp.rendezvous.server import Server
from clusterddp.wire import build

MARK = "CLUSTERDDP-DOCTOR "
_FIRST_PORT, _NUM_PORTS, _PORT_SPAN = 20_000, 4, 3_000
"""Below the ephemeral range, from which the kernel takes ports."""
_LINE = 800
_WAY_S = 20.0
_ANSWER_S = 2.0
_PROBE = Protocol(name="probe", key="nonce", max_bytes_to_server=4096, max_bytes_to_client=1 << 20)
"""Its key is the nonce of the job."""


class _Answer(TypedDict):
    """The first node's answer."""

    time: float
    report: dict[str, Any]


def main(arguments: list[str]) -> int:
    """Read the facts, try the connection, report."""
    directory, nonce, first_node, job_id = Path(arguments[0]), arguments[1], arguments[2], arguments[3]
    node_rank, num_nodes = int(os.environ.get("SLURM_NODEID", "0")), int(os.environ.get("SLURM_NNODES", "1"))
    machine = read_machine(directory, os.environ)
    report: dict[str, Any] = {
        "node_rank": node_rank,
        "node": os.environ.get("SLURMD_NODENAME") or machine.host,
        "nonce": _read_nonce(directory, nonce),
        "machine": machine.to_json(),
        "way": None,
        "done": False,
    }
    port = _FIRST_PORT + int(job_id) % _PORT_SPAN * _NUM_PORTS
    ports = range(port, port + _NUM_PORTS)
    if node_rank == 0 and num_nodes > 1:
        listening = threading.Thread(target=_answer_peers, args=(report, nonce, ports, num_nodes - 1), daemon=True)
        listening.start()
    elif num_nodes > 1:
        report["way"] = _try_way(first_node, nonce, ports, machine)
    _write_report(report, directory)
    report["machine"]["torch"] = dataclasses.asdict(import_torch())
    report["done"] = True
    _write_report(report, directory)
    if node_rank == 0 and num_nodes > 1:
        listening.join(_WAY_S)
    return 0


def print_lines(node_rank: int, done: bool, text: str) -> list[str]:
    """Split a report into lines that srun does not mix with those of another task: it forwards 1024 bytes at a time."""
    pieces = [text[start : start + _LINE] for start in range(0, len(text), _LINE)]
    return [f"{MARK}{node_rank} {done:d} {number}/{len(pieces)} {piece}" for number, piece in enumerate(pieces, 1)]


def join_lines(lines: Iterable[str]) -> Iterator[str]:
    """Join the reports that are complete among these lines."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        words = line.removeprefix(MARK).split(" ", 3)
        if line.startswith(MARK) and len(words) == 4:
            pieces = found.setdefault((words[0], words[1]), [])
            pieces.append(words[3])
            if words[2] == f"{len(pieces)}/{len(pieces)}":
                yield "".join(pieces)


def _read_nonce(directory: Path, nonce: str) -> str:
    """Return "same" if this node sees the file that the submitting machine has written, else what it sees."""
    try:
        return "same" if (directory / "nonce").read_text() == nonce else "another file is there"
    except OSError as error:
        return error.strerror or "cannot be read"


def _answer_peers(report: dict[str, Any], nonce: str, ports: range, num_peers: int) -> None:
    """Send every other node that connects the time and this node's report."""
    answered: list[Connection] = []
    deadline = time.monotonic() + _WAY_S
    with _listen(ports) as listener, selectors.DefaultSelector() as selector:
        server = Server(
            listener, selector, protocol=_PROBE, key=nonce, num_expected=num_peers, report=lambda refused: None
        )
        while len(answered) < num_peers and time.monotonic() < deadline:
            selector.select(0.2)
            for connection, _ in server.accept(time.monotonic()):
                connection.send({"kind": "report", "time": time.time(), "report": report})
                answered.append(connection)
                deadline = time.monotonic() + _WAY_S
            flush_all(answered, 0.0)
        flush_all(answered, _ANSWER_S)


def _listen(ports: range) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return bind_port(port, shared=True, listening=True)
    return bind_port(0, shared=True, listening=True)


def _try_way(first_node: str, nonce: str, ports: range, machine: Machine) -> dict[str, Any]:
    """Connect to the first node by its name; return the result, with the first node's report."""
    addresses = resolve(first_node)
    leads_elsewhere = not addresses or not all(is_loopback(address) for address in addresses)
    deadline = time.monotonic() + (_WAY_S if leads_elsewhere else _ANSWER_S)
    asked_at = 0.0

    def introduce(connection: Connection) -> Message:
        nonlocal asked_at
        asked_at = time.time()
        return {"kind": "ask"}

    with selectors.DefaultSelector() as selector:
        search = Search(
            lambda: resolve(first_node), ports, protocol=_PROBE, key=nonce, introduce=introduce, selector=selector
        )
        with contextlib.closing(search):
            found = search.wait(deadline)
        way = {"name": first_node, "addresses": resolve(first_node), "reached": None}
        if not isinstance(found, Found):
            return way | {"error": _explain(found, first_node)}
        with contextlib.closing(found.connection):
            return way | _read_answer(found, asked_at, machine)


def _read_answer(found: Found, asked_at: float, machine: Machine) -> dict[str, Any]:
    answered_at = time.time()
    connection = found.connection
    try:
        answer = build(_Answer, found.messages[0])
    except ValueError as error:
        return {"error": f"{connection.peer_address}: {error}"}
    return {
        "reached": connection.peer_address,
        "source": connection.own_address,
        "interface": machine.interface_of(connection.own_address),
        "clock_offset_s": round(answer["time"] - (asked_at + answered_at) / 2, 3),
        "first": answer["report"],
        "error": "",
    }


def _explain(failure: NotFound | None, first_node: str) -> str:
    if failure is None:
        return f"the name {first_node} is not known"
    if failure.loss.kind in {"closed", "stranger", "unproven", "version"}:
        return f"{failure.address}: another program listens on port {failure.port}"
    return f"{failure.address}: {failure.loss}"


def _write_report(report: dict[str, Any], directory: Path) -> None:
    text = json.dumps(report)
    sys.stdout.write("".join(f"{line}\n" for line in print_lines(report["node_rank"], report["done"], text)))
    sys.stdout.flush()
    path = directory / f"node-{report['node_rank']}.json"
    with contextlib.suppress(OSError):
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
