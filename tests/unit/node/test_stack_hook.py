"""What a rank answers: where its threads are, and how far its collectives, whatever torch is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from clusterddp.node.rank_probe import AskedRank
from clusterddp.node.stack_hook import read_collectives, read_threads, socket_name
from tests.support.waiting import wait_until

RECORDED = {
    "pg_status": {
        "0": {"last_enqueued_collective": "6", "last_completed_collective": "5", "last_started_collective": "-1"},
        "1": {"last_enqueued_collective": "0", "last_completed_collective": "-1", "last_started_collective": "-1"},
    },
    "entries": [
        {"pg_id": 0, "collective_seq_id": 5, "profiling_name": "gloo:broadcast"},
        {"pg_id": 0, "collective_seq_id": 6, "profiling_name": "gloo:all_reduce"},
    ],
}


def torch_that_answers(answer: object) -> SimpleNamespace:
    return SimpleNamespace(_distributed_c10d=SimpleNamespace(_dump_fr_trace_json=lambda *_: answer))


def test_the_newest_collective_of_each_group_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._C", torch_that_answers(json.dumps(RECORDED).encode()))
    assert read_collectives() == {
        "0": {"enqueued": 6, "completed": 5, "name": "all_reduce"},
        "1": {"enqueued": 0, "completed": -1, "name": ""},
    }


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"pg_status": 3}', b'{"pg_status": {"0": {}}}', None])
def test_a_torch_that_answers_otherwise_says_nothing(monkeypatch, answer):
    monkeypatch.setitem(sys.modules, "torch._C", torch_that_answers(answer))
    assert read_collectives() == {}


def test_a_torch_without_the_recorder_says_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace())
    assert read_collectives() == {}


def test_each_thread_is_listed_but_the_one_that_asks():
    asked: list[list[dict[str, object]]] = []
    done = threading.Event()

    def ask() -> None:
        asked.append(read_threads(threading.main_thread().ident or 0))
        done.set()

    thread = threading.Thread(target=ask, name="asks")
    thread.start()
    done.wait()
    thread.join()
    (main,) = [each for each in asked[0] if each["main"]]
    assert main["name"] == "MainThread"
    assert any(function.endswith("listed_but_the_one_that_asks") for _, _, function in main["frames"])
    assert "asks" not in [each["name"] for each in asked[0]]


ANSWERS = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[2].replace("@", chr(0)))
listener.listen()
print("listens", flush=True)
connection = listener.accept()[0]
heard = connection.recv(1)
if heard:
    thread = b'{"main": true, "name": "M", "frames": [["/etc/hostname", 1, "f"]]}'
    connection.sendall(b'{"threads": [' + thread + b'], "collectives": {}}')
print(len(heard), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
@pytest.mark.parametrize(("uid", "is_believed"), [(0, True), (65534, False)])
def test_a_listener_of_another_user_is_told_nothing_and_not_believed(uid: int, is_believed: bool) -> None:
    key = os.urandom(8).hex()
    name = socket_name(key).replace("\0", "@")
    with subprocess.Popen(
        [sys.executable, "-c", ANSWERS, str(uid), name], stdout=subprocess.PIPE, text=True
    ) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listens\n"
        asked = AskedRank(key)

        def is_done() -> bool:
            asked.step()
            return asked.done

        wait_until(is_done)
        assert listener.stdout.readline() == f"{int(is_believed)}\n"
    assert (asked.answer is not None) == is_believed
