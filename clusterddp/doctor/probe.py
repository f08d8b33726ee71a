"""The program of the doctor's job on each node: read its facts, connect to the first node, write a report.

    python -m clusterddp.doctor.probe DIRECTORY NONCE FIRST_NODE JOB_ID

The report is a file in DIRECTORY, which the submitting machine has made in the runs directory: a node whose report
arrives sees the same directory. A node that does not see it says so on standard error, and reports nothing.
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
from pathlib import Path
from typing import Any

from clusterddp.facts.machine import Machine, read_machine
from clusterddp.facts.torch import import_torch
from clusterddp.network.interface import is_loopback, resolve
from clusterddp.network.port import bind_port
from clusterddp.network.rendezvous.client import Found, NotFound, Search
from clusterddp.network.rendezvous.connection import Connection, Message, Protocol, flush_all
from clusterddp.network.rendezvous.server import Server
from clusterddp.wire import build

_FIRST_PORT, _NUM_PORTS, _PORT_SPAN = 20_000, 4, 3_000
"""Below the ephemeral range, from which the kernel takes ports."""
_WAY_S = 20.0
_ANSWER_S = 2.0
_PROBE = Protocol(name="probe", key="nonce", max_bytes_to_server=4096, max_bytes_to_client=4096)
"""Its key is the nonce of the job."""


def main(arguments: list[str]) -> int:
    """Read the facts, try the connection, report; without torch first, whose import may take longer than the job."""
    directory, nonce, first_node, job_id = Path(arguments[0]), arguments[1], arguments[2], arguments[3]
    node_rank, num_nodes = int(os.environ.get("SLURM_NODEID", "0")), int(os.environ.get("SLURM_NNODES", "1"))
    machine = read_machine(directory, os.environ)
    node = os.environ.get("SLURMD_NODENAME") or machine.host
    report = {"node_rank": node_rank, "node": node, "machine": machine.to_json(), "way": None, "done": False}
    port = _FIRST_PORT + int(job_id) % _PORT_SPAN * _NUM_PORTS
    ports = range(port, port + _NUM_PORTS)
    listening = None
    if node_rank == 0 and num_nodes > 1:
        listening = threading.Thread(target=_answer_nodes, args=(nonce, ports, num_nodes - 1), daemon=True)
        listening.start()
    elif num_nodes > 1:
        report["way"] = _try_way(first_node, nonce, ports, machine)
    try:
        _write_report(report, directory)
        torch = dataclasses.asdict(import_torch())
        _write_report(report | {"machine": machine.to_json() | {"torch": torch}, "done": True}, directory)
    except OSError as error:
        print(f"{node}: {directory}: {error.strerror}", file=sys.stderr, flush=True)
    if listening is not None:
        listening.join(_WAY_S)
    return 0


def _write_report(report: dict[str, Any], directory: Path) -> None:
    path = directory / f"node-{report['node_rank']}.json"
    path.with_suffix(".new").write_text(json.dumps(report))
    os.replace(path.with_suffix(".new"), path)


def _answer_nodes(nonce: str, ports: range, num_nodes: int) -> None:
    """Send every other node that connects the time here."""
    answered: list[Connection] = []
    deadline = time.monotonic() + _WAY_S
    with _listen(ports) as listener, selectors.DefaultSelector() as selector:
        server = Server(
            listener, selector, protocol=_PROBE, key=nonce, num_expected=num_nodes, report=lambda refused: None
        )
        while len(answered) < num_nodes and time.monotonic() < deadline:
            selector.select(0.2)
            for connection, _ in server.accept(time.monotonic()):
                connection.send({"kind": "here", "time": time.time()})
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
    """Connect to the first node by its name; return the result, a `Way` of doctor/cluster.py."""
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
        with contextlib.closing(found.connection) as connection:
            answered_at = time.time()
            try:
                there = build({"time": float}, found.messages[0])["time"]
            except ValueError as error:
                return way | {"error": f"{connection.peer_address}: {error}"}
            return way | {
                "reached": connection.peer_address,
                "source": connection.own_address,
                "interface": machine.interface_of(connection.own_address),
                "clock_offset_s": round(there - (asked_at + answered_at) / 2, 3),
                "error": "",
            }


def _explain(failure: NotFound | None, first_node: str) -> str:
    if failure is None:
        return f"the name {first_node} is not known"
    if failure.loss.kind in {"closed", "stranger", "unproven", "version"}:
        return f"{failure.address}: another program listens on port {failure.port}"
    return f"{failure.address}: {failure.loss}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
