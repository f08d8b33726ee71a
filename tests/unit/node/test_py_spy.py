"""The stacks of a command's Python, as py-spy writes them, and which of its processes is asked."""

from __future__ import annotations

import os
import subprocess
import sys

from clusterddp.node.rank_probe import find_python, parse_py_spy, start_py_spy
from tests.support.waiting import wait_until

TEXT = """\
Process 20960: /usr/bin/python3 train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 20961 (idle): "pin memory"
    wait (/usr/lib/python3.11/threading.py:320)
Thread 20960 (active+gil): "MainThread"
    all_reduce (/x/site-packages/torch/distributed/distributed_c10d.py:3252)
    <module> (/home/ana/a (b).py:6)
"""


def test_the_main_thread_is_the_one_with_the_number_of_the_process():
    assert [(frame.function, frame.file, frame.line) for frame in parse_py_spy(TEXT)] == [
        ("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 3252),
        ("<module>", "/home/ana/a (b).py", 6),
    ]
    assert parse_py_spy("") == parse_py_spy("Permission denied") == ()


def test_the_first_python_is_asked_that_starts_no_other_program():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    launcher = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True)
    try:
        children = wait_until(lambda: _children(launcher.pid))
        wait_until(lambda: find_python([launcher.pid, *children]) == children[0])
    finally:
        launcher.communicate("\n")


def test_without_py_spy_there_is_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start_py_spy(os.getpid()) is None


def test_what_py_spy_prints_is_in_memory(monkeypatch, tmp_path):
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho $@\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    memory = start_py_spy(4)
    assert memory is not None
    wait_until(lambda: os.pread(memory, 100, 0) == b"dump --nonblocking --full-filenames --pid 4\n")
    os.close(memory)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]
