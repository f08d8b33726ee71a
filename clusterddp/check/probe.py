"""What the doctor's job runs on each node: looks at the node, tries the way to the first one, reports as JSON.

    python -m clusterddp.check.probe DIRECTORY NONCE FIRST_NODE JOB_ID

A report goes to standard output, and into the directory where that is there; the first node's report also goes along
every connection that the others make to it, so that one of two nodes without the directory is still heard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

from clusterddp.facts.machine import Machine, interface_of, read_machine, resolve
from clusterddp.facts.torch import import_torch
from clusterddp.wire import build, read_object

MARK = "CLUSTERDDP-DOCTOR "
_FIRST_PORT, _NUM_PORTS, _PORT_SPAN = 20_000, 4, 3_000
"""Below the ephemeral range, where nobody gets a port by chance."""
_LINE = 800
_WAY_S = 20.0
_ANSWER_S = 2.0
_MAX_ANSWER = 1 << 20


class _Said(TypedDict):
    """What the first node answers."""

    nonce: str
    time: float
    report: dict[str, Any]


def main(arguments: list[str]) -> int:
    """Look, try, report."""
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
    _tell(report, directory)
    report["machine"]["torch"] = dataclasses.asdict(import_torch())
    report["done"] = True
    _tell(report, directory)
    if node_rank == 0 and num_nodes > 1:
        listening.join(_WAY_S)
    return 0


def print_lines(node_rank: int, done: bool, text: str) -> list[str]:
    """Cut a report into lines that srun does not mix with those of another task: it passes on 1024 bytes at a time."""
    pieces = [text[start : start + _LINE] for start in range(0, len(text), _LINE)]
    return [f"{MARK}{node_rank} {done:d} {number}/{len(pieces)} {piece}" for number, piece in enumerate(pieces, 1)]


def join_lines(lines: Iterable[str]) -> Iterator[str]:
    """Put together the reports that are complete among these lines."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        words = line.removeprefix(MARK).split(" ", 3)
        if line.startswith(MARK) and len(words) == 4:
            pieces = found.setdefault((words[0], words[1]), [])
            pieces.append(words[3])
            if words[2] == f"{len(pieces)}/{len(pieces)}":
                yield "".join(pieces)


def _read_nonce(directory: Path, nonce: str) -> str:
    """Say whether this node sees the very file that was written where the job was submitted: "same", or what is."""
    try:
        return "same" if (directory / "nonce").read_text() == nonce else "another file is there"
    except OSError as error:
        return error.strerror or "cannot be read"


def _answer_peers(report: dict[str, Any], nonce: str, ports: range, num_peers: int) -> None:
    """Tell every peer that connects the time and what is known of this node."""
    with _listen(ports) as server:
        server.settimeout(_WAY_S)
        heard = 0
        with contextlib.suppress(OSError):
            while heard < num_peers:
                peer, _ = server.accept()
                with peer, contextlib.suppress(OSError):
                    peer.settimeout(_ANSWER_S)
                    if peer.recv(256).decode(errors="replace").strip() == nonce:
                        peer.sendall((json.dumps({"nonce": nonce, "time": time.time(), "report": report})).encode())
                        heard += 1


def _listen(ports: range) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server(("", port))
        except OSError:
            continue
    return socket.create_server(("", 0))


def _try_way(first_node: str, nonce: str, ports: range, machine: Machine) -> dict[str, Any]:
    """Connect to the first node by its name; tell how that went, and what the first node said of itself."""
    deadline = time.monotonic() + _WAY_S
    addresses: tuple[str, ...] = ()
    error = ""
    while time.monotonic() < deadline:
        addresses = resolve(first_node)
        error = error if addresses else f"the name {first_node} is not known"
        for address in addresses:
            for port in ports:
                try:
                    return _ask(address, port, nonce, machine) | {"name": first_node, "addresses": addresses}
                except OSError as failure:
                    error = f"{address}: {failure.strerror or failure}"
        if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
            break  # that is this very host, and will stay so
        time.sleep(0.3)
    return {"name": first_node, "addresses": addresses, "reached": None, "error": error}


def _ask(address: str, port: int, nonce: str, machine: Machine) -> dict[str, Any]:
    with socket.create_connection((address, port), timeout=_ANSWER_S) as peer:
        source = str(peer.getsockname()[0])
        before = time.time()
        peer.sendall(nonce.encode())
        answer = b""
        while (chunk := peer.recv(65_536)) and len(answer) < _MAX_ANSWER:
            answer += chunk
        after = time.time()
    try:
        said = build(_Said, read_object(answer))
    except ValueError:
        said = None
    if said is None or said["nonce"] != nonce:
        raise OSError(0, f"a stranger listens on port {port}")
    return {
        "reached": address,
        "source": source,
        "interface": interface_of(source, machine.interfaces),
        "clock_offset_s": round(said["time"] - (before + after) / 2, 3),
        "first": said["report"],
        "error": "",
    }


def _tell(report: dict[str, Any], directory: Path) -> None:
    text = json.dumps(report)
    sys.stdout.write("".join(f"{line}\n" for line in print_lines(report["node_rank"], report["done"], text)))
    sys.stdout.flush()
    path = directory / f"node-{report['node_rank']}.json"
    with contextlib.suppress(OSError):
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
