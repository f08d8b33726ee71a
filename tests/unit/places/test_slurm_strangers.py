"""The sockets of Slurm's tasks and of the doctor's job: what a process of another user, or of no job, gets there."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.places.slurm.task import connect
from clusterddp.places.slurm.tasks import Tasks
from tests.support.waiting import wait_until

LISTENS = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(chr(0) + sys.argv[1])
listener.listen()
print(flush=True)
sys.stdin.read()
"""
CONNECTS = """
import json, os, socket, sys
os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(chr(0) + sys.argv[1])
sock.send(json.dumps({"kind": "here", "rank": 0}).encode())
try:
    got = sock.recv(1 << 16)
except ConnectionResetError:
    got = b""
print(len(got), flush=True)
"""


@pytest.mark.root
def test_a_task_and_its_supervisor_refuse_processes_of_another_user(tmp_path: Path) -> None:
    name = f"clusterddp-{tmp_path.name}-{os.getpid()}"
    argv = [sys.executable, "-c", LISTENS, name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        with pytest.raises(ClusterddpError, match=r"process \d+ of user 65534 listens in place of the supervisor"):
            connect(f"\0{name}")
        stranger.kill()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, selectors.DefaultSelector() as selector:
        listener.bind(f"\0{name}")
        listener.listen()
        tasks = Tasks(listener, [0], "node1", selector)
        for uid, answer in (65534, b"0\n"), (0, b""):
            argv = [sys.executable, "-c", CONNECTS, name, str(uid)]
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None

                def is_decided(process: subprocess.Popen[bytes] = process) -> bool:
                    tasks.updates()
                    return process.poll() is not None or tasks.missing == ()

                wait_until(is_decided)
                assert tasks.missing == ((0,) if uid else ())
                process.kill()
                assert process.stdout.read() == answer


def prove(nonce: str, text: str) -> str:
    return hmac.new(nonce.encode(), text.encode(), "sha256").hexdigest()


def test_the_first_node_of_a_doctors_job_tells_a_stranger_nothing(tmp_path: Path) -> None:
    job_id = os.getpid()
    port, challenge = 20_000 + job_id % 3_000 * 4, "c" * 32

    def ask(proof: str) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall((challenge + proof).encode())
            with contextlib.suppress(ConnectionError):
                return sock.recv(4096)
        return b""

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    argv = [sys.executable, "-m", "clusterddp.doctor.probe", str(tmp_path), "a-nonce", "localhost", str(job_id)]
    environ = os.environ | {"SLURM_NODEID": "0", "SLURM_NNODES": "2"}
    with subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL) as probe:
        wait_until(listens)
        assert ask(prove("another-nonce", challenge)) == b""
        answer = json.loads(ask(prove("a-nonce", challenge)))
        assert answer["proof"] == prove("a-nonce", challenge + answer["time"])
        probe.kill()
