"""A command, and a shell, beside a rank of this machine: real supervisors, ranks without torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.cleanup import end_processes, find_processes, read_cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_rank, read_run
from tests.support.person import Person
from tests.support.typist import Typist, typing_into
from tests.support.waiting import wait_until

SPEC = """name: job
resources: {nodes: 2, procs_per_node: 2}
device: cpu
entry: {script: entry.py}
env: {SHELL: /bin/sh, PS1: "% "}
"""
ENTRY = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


class Place(Person):
    """A user with a run on this machine."""

    def start_run(self) -> RunDir:
        (self.path / "entry.py").write_text(ENTRY)
        run = self.submit(SPEC)
        logs = [run.attempt(0).stdout(rank) for rank in range(4)]
        wait_until(lambda: all(log.exists() and log.read_text() == "up\n" for log in logs))
        return run

    def commands(self, run: RunDir) -> list[int]:
        """List the processes of commands beside the ranks."""
        family = find_processes(f"{read_run(run).token}.")
        return [each.pid for each in family if read_cookie(each).rpartition(".")[2].startswith("x")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(path=tmp_path, checks=False)
    yield place
    end_processes(f"{place.record().token}.", timeout_s=5)


@pytest.fixture
def run(place: Place) -> RunDir:
    return place.start_run()


def shell_of(place: Place, run: RunDir, *words: str) -> list[str]:
    return place.command("shell", run.name, *words)


def test_a_command_is_beside_its_rank_and_is_none(place: Place, run: RunDir) -> None:
    program = (
        "import os, sys; print(sys.stdin.read(), os.getcwd(), *sorted(n for n in os.environ if 'RANK' in n)); "
        "print(os.environ['CLUSTERDDP_EXEC_RANK'], os.environ['CLUSTERDDP_RUN']); sys.exit(7)"
    )
    done = place.clusterddp("exec", run.name, "--rank", "3", "--", "python3", "-c", program, stdin="typed")
    assert done.returncode == 7, done.stderr
    first, second = done.stdout.splitlines()
    rank = read_rank(run.attempt(0), 3)
    assert rank is not None
    words = first.split()
    assert words[:2] == ["typed", str(Path(f"/proc/{rank.pid}/cwd").readlink())]
    assert {word.startswith("CLUSTERDDP_EXEC_") for word in words[2:]} == {True}
    assert (second, done.returncode) == (f"3 {run.name}", 7)

    several = place.clusterddp("exec", run.name, "--rank", "0-2", "--", "sh", "-c", "exit $CLUSTERDDP_EXEC_RANK")
    assert several.returncode == 2
    lines = place.clusterddp("exec", run.name, "--rank", "all", "--", "echo", "here").stdout.splitlines()
    assert sorted(line.split()[0] + line.split()[2] for line in lines) == [f"[r{rank}here" for rank in range(4)]

    left = place.clusterddp("exec", run.name, "--", "sh", "-c", "nohup sleep 600 >/dev/null 2>&1 & echo started")
    assert (left.stdout, place.commands(run), place.status(run)["state"]) == ("started\n", [], "RUNNING")


def test_a_command_ends_with_the_run_and_hinders_no_end_of_it(place: Place, run: RunDir) -> None:
    stubborn = place.start("exec", run.name, "--rank", "2", "--", "sh", "-c", "trap '' TERM HUP; sleep 600; sleep 600")
    wait_until(lambda: len(place.commands(run)) == 2)
    assert place.clusterddp("gc", run.name, "-n").stderr == "no orphaned processes\n"
    place.clusterddp("cancel", run.name)
    assert stubborn.wait(60) == 129
    assert place.commands(run) == []
    assert place.status(run)["state"] == "CANCELLED"
    refused = place.clusterddp("exec", run.name, "--", "true")
    assert refused.returncode == 2
    assert "has no running rank: it is CANCELLED" in refused.stderr
    assert f"clusterddp rerun {run.name}" in refused.stderr


def test_a_command_ends_with_the_one_that_started_it(place: Place, run: RunDir) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = place.start("exec", run.name, "--", "sleep", "600")
        wait_until(lambda: place.commands(run))
        os.kill(left.pid, number)
        wait_until(lambda: not place.commands(run))
    assert place.status(run)["state"] == "RUNNING"


def test_ctrl_c_goes_to_the_program_in_a_shell_and_the_terminal_is_restored(place: Place, run: RunDir) -> None:
    with typing_into(shell_of(place, run, "--node", "1"), environ=place.variables(), cwd=place.path) as person:
        modes = person.modes()
        person.type("echo rank $CLUSTERDDP_EXEC_RANK; sleep 600\n")
        person.await_text("rank 2")
        wait_until(lambda: len(place.commands(run)) == 2)
        person.type("\x03")
        person.type("stty raw -echo; exit 5\n")
        assert person.await_exit() == 5
        assert person.modes() == modes
    assert place.status(run)["state"] == "RUNNING"


def test_a_shell_ends_with_the_run_and_the_terminal_is_restored(place: Place, run: RunDir) -> None:
    with typing_into(shell_of(place, run), environ=place.variables(), cwd=place.path) as person:
        modes = person.modes()
        person.type("echo rank $CLUSTERDDP_EXEC_RANK; stty raw -echo\n")
        person.await_text("rank 0")
        end_shell_of(person, place, run)
        assert person.modes() == modes


def end_shell_of(person: Typist, place: Place, run: RunDir) -> None:
    place.clusterddp("cancel", run.name)
    assert person.await_exit() == 129
    assert "rank 0 has ended, and the command with it" in person.look()
