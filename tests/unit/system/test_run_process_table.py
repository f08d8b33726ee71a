"""The process table: what /proc says, in a form that no later process of the same pid can be taken for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from clusterddp.system.processes import (
    Process,
    find_carriers,
    find_descendants,
    read_command,
    read_environment,
    read_owner,
    read_process,
)

SLEEPER = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
AWKWARD = 'CPU "(x) Z 1'


@pytest.fixture
def sleeper(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A child that sleeps, in an environment with TABLE_TEST=<the test's name>."""
    environment = dict(os.environ) | {"TABLE_TEST": request.node.name}
    process = subprocess.Popen(SLEEPER, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def carriers(value: str) -> list[int]:
    return [process.pid for process in find_carriers("TABLE_TEST", value.__eq__, uid=os.getuid())]


def test_a_process_is_seen_as_psutil_sees_it(sleeper: subprocess.Popen[str]) -> None:
    process, other = read_process(sleeper.pid), psutil.Process(sleeper.pid)
    seen = (process.parent, read_owner(process.pid), read_command(process.pid), read_environment(process.pid))
    assert seen == (other.ppid(), other.uids().real, other.cmdline(), other.environ())


def test_a_process_without_a_number_of_its_own_does_not_exist() -> None:
    with pytest.raises(ProcessLookupError):
        read_process(2**22 + 1)


def test_a_name_that_looks_like_other_fields_is_read_right() -> None:
    program = (
        f"import ctypes, time; ctypes.CDLL(None).prctl(15, {AWKWARD.encode()!r}); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert read_process(process.pid).parent == os.getpid()
        process.kill()


def test_the_carrier_of_a_variable_is_found(sleeper: subprocess.Popen[str], request: pytest.FixtureRequest) -> None:
    assert carriers(request.node.name) == [sleeper.pid]


def test_a_carrier_of_another_user_is_not_found(sleeper: subprocess.Popen[str], request: pytest.FixtureRequest) -> None:
    assert find_carriers("TABLE_TEST", request.node.name.__eq__, uid=os.getuid() + 1) == []


def test_a_variable_whose_name_ends_likewise_is_another(sleeper: subprocess.Popen[str]) -> None:
    assert [found.pid for found in find_carriers("TEST", bool, uid=os.getuid()) if found.pid == sleeper.pid] == []


def test_an_environment_larger_than_one_read_is_searched_whole() -> None:
    environment = {f"V{number}": "x" * 60_000 for number in range(3)} | {"TABLE_TEST": "at the end"}
    with subprocess.Popen(SLEEPER, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert carriers("at the end") == [process.pid]
        process.kill()


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[str]) -> None:
    process = read_process(sleeper.pid)
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive()


def test_a_successor_of_the_same_pid_is_not_signalled(sleeper: subprocess.Popen[str]) -> None:
    now = read_process(sleeper.pid)
    before = Process(pid=now.pid, parent=now.parent, started=now.started - 1, zombie=False)
    assert not before.send_signal(signal.SIGKILL)
    assert sleeper.poll() is None


def test_descendants_are_found_through_generations(sleeper: subprocess.Popen[str]) -> None:
    program = f"import subprocess; subprocess.run({SLEEPER!r})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        found = set(find_descendants([parent.pid]))
        assert (len(found), sleeper.pid in found) == (1, False)
        assert found < set(find_descendants([os.getpid()]))
        for process in [*find_descendants([parent.pid]).values(), read_process(parent.pid)]:
            process.send_signal(signal.SIGKILL)


def test_start_times_come_from_the_clock_of_the_boot(sleeper: subprocess.Popen[str]) -> None:
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - read_process(sleeper.pid).started
    assert 0 <= age < 3600
