"""The program of the doctor's job on each node: read its facts, connect to the first node, write a report.

    python -m clusterddp.doctor.probe DIRECTORY NONCE FIRST_NODE JOB_ID

The report is a file in DIRECTORY, which the submitting machine has made in the runs directory: a node whose report
arrives sees the same directory. A node that does not see it says so on standard error, and reports nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import itertools
import json
import os
import secrets
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
from clusterddp.network.rendezvous.connection import prove
from clusterddp.wire import read_object

_FIRST_PORT, _NUM_PORTS, _PORT_SPAN = 20_000, 4, 3_000
"""Below the ephemeral range, from which the kernel takes ports."""
PYTHON = "python"
"""The file that names the Python of the ranks."""
_WAY_S = 20.0
_ANSWER_S = 2.0
_RETRY_S = 0.2
_CHALLENGE, _PROOF = 32, 64
"""Characters of what a node asks with: a random text, and the proof for it."""


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
        python = (directory / PYTHON).read_text(encoding="utf-8")
        torch = dataclasses.asdict(import_torch(python))
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
    """Send every other node that connects and knows the nonce the time here."""
    answered, deadline = 0, time.monotonic() + _WAY_S
    with _listen(ports) as listener:
        while answered < num_nodes and (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.settimeout(_ANSWER_S)
                asked = connection.recv(_CHALLENGE + _PROOF, socket.MSG_WAITALL).decode("ascii", "replace")
                challenge, proof = asked[:_CHALLENGE], asked[_CHALLENGE:]
                if hmac.compare_digest(proof.encode(), prove(nonce.encode(), challenge.encode())):
                    moment = repr(time.time())
                    answer = {"time": moment, "proof": prove(nonce.encode(), (challenge + moment).encode()).decode()}
                    connection.sendall(json.dumps(answer).encode())
                    answered, deadline = answered + 1, time.monotonic() + _WAY_S


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
    error = f"the name {first_node} is not known"
    while True:
        addresses = resolve(first_node) or ()
        way = {"name": first_node, "addresses": addresses, "reached": None}
        for address, port in itertools.product(addresses, ports):
            try:
                with socket.create_connection((address, port), timeout=_ANSWER_S) as connection:
                    asked_at, own_address = time.time(), connection.getsockname()[0]
                    challenge = secrets.token_hex(_CHALLENGE // 2)
                    connection.sendall(challenge.encode() + prove(nonce.encode(), challenge.encode()))
                    answer = read_object(connection.recv(4096))
                    moment, proof = str(answer["time"]), str(answer["proof"])
                    if not hmac.compare_digest(proof.encode(), prove(nonce.encode(), (challenge + moment).encode())):
                        raise ValueError("an answer without proof")
                    there = float(moment)
            except (ValueError, KeyError):
                error = f"{address}: another program listens on port {port}"
            except OSError as failure:
                error = f"{address}: {failure.strerror or failure}"
            else:
                owners = (link.name for link in machine.links for own in link.addresses if own.address == own_address)
                return way | {
                    "reached": address,
                    "source": own_address,
                    "interface": next(owners, None),
                    "clock_offset_s": round(there - (asked_at + time.time()) / 2, 3),
                    "error": "",
                }
        if time.monotonic() > deadline:
            return way | {"error": error}
        time.sleep(_RETRY_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
