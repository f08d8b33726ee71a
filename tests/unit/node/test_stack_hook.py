"""What a rank answers: where its threads are, and how far its collectives, whatever torch is there."""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace

import pytest

from clusterddp.node.stack_hook import read_collectives, read_threads

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
