"""A command, and a shell, beside a rank of this machine: real supervisors, ranks without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.cleanup import end_processes, find_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_rank
from tests.support.lost_children import KINDS, LostChildren
from tests.support.person import Person
from tests.support.typist import typing_into
from tests.support.waiting import wait_until

SPEC = """name: job
resources: {nodes: 2, procs_per_node: 2}
device: cpu
secrets: [API_KEY]
entry: {script: entry.py}
env: {SHELL: /bin/sh, PS1: "% "}
"""
ENTRY = "import sys, time\nprint('up', flush=True)\ntime.sleep(600)\n"


class Place(Person):
    """A user with a run on this machine."""

    def start_run(self) -> RunDir:
        (self.path / "entry.py").write_text(ENTRY)
        run = self.submit(SPEC)
        logs = [run.attempt(0).stdout(rank) for rank in range(4)]
        wait_until(lambda: all(log.exists() and log.read_text() == "up\n" for log in logs))
        return run

    def commands(self, node_rank: int) -> list[int]:
        """List the processes of commands beside the ranks of a node."""
        return [each.pid for each in find_processes(f"{self.record().token}.x{node_rank}")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(path=tmp_path, checks=False, environ={"API_KEY": "hunter2"})
    yield place
    end_processes(f"{place.record().token}.", timeout_s=5)


@pytest.fixture
def run(place: Place) -> RunDir:
    return place.start_run()


def test_a_command_has_the_place_of_its_rank_and_is_none(place: Place, run: RunDir) -> None:
    program = (
        "import os, sys; print(sys.stdin.read(), os.getcwd(), *sorted(n for n in os.environ if 'RANK' in n)); "
        "print(os.environ['CLUSTERDDP_EXEC_RANK'], os.environ['CLUSTERDDP_RUN'], os.environ['API_KEY']); sys.exit(7)"
    )
    asked = ("exec", run.name, "--rank", "3", "--", "python3", "-c", program)
    done = place.clusterddp(*asked, stdin="typed", environ={"API_KEY": ""})
    assert done.returncode == 7, done.stderr
    first, second = done.stdout.splitlines()
    rank = read_rank(run.attempt(0), 3)
    assert rank is not None
    words = first.split()
    assert words[:2] == ["typed", str(Path(f"/proc/{rank.pid}/cwd").readlink())]
    assert {word.startswith("CLUSTERDDP_EXEC_") for word in words[2:]} == {True}
    assert second == f"3 {run.name} hunter2"

    absent = place.clusterddp("exec", run.name, "--", "no-such-program")
    assert (absent.returncode, absent.stderr) == (127, "clusterddp: no-such-program: No such file or directory\n")
    beyond = place.clusterddp("exec", run.name, "--rank", "4", "--", "true")
    assert (beyond.returncode, beyond.stderr.splitlines()[0]) == (2, f"error: {run.name}: rank 4 does not run")


def test_a_command_ends_with_the_run_and_hinders_no_end_of_it(place: Place, run: RunDir) -> None:
    stubborn = place.start("exec", run.name, "--rank", "2", "--", "sh", "-c", "trap '' TERM HUP; sleep 600; sleep 600")
    wait_until(lambda: len(place.commands(1)) == 2)
    assert place.clusterddp("gc", run.name, "-n").stderr == "no orphaned processes\n"
    place.clusterddp("cancel", run.name)
    assert stubborn.wait(60) == -9
    assert place.commands(1) == []
    assert place.status(run)["state"] == "CANCELLED"


def test_what_a_command_starts_without_its_environment_ends_with_the_run(place: Place, run: RunDir) -> None:
    children = LostChildren()
    try:
        quiet = 'exec python3 -c "$0" > /dev/null 2>&1'  # who reads the command's output waits for the children, too
        asked = ("exec", run.name, "--rank", "2", "--", "sh", "-c", quiet, children.program)
        assert place.clusterddp(*asked).returncode == 0
        assert len(children.alive()) == KINDS
        place.clusterddp("cancel", run.name)
        wait_until(lambda: not children.alive(), 5.0)
    finally:
        children.end()


def test_without_a_command_there_is_a_shell_and_ctrl_c_goes_to_its_program(place: Place, run: RunDir) -> None:
    with typing_into(
        place.command("exec", run.name, "--rank", "2"), environ=place.variables(), cwd=place.path
    ) as person:
        person.type("echo rank $CLUSTERDDP_EXEC_RANK; sleep 600\n")
        person.await_text("rank 2")
        wait_until(lambda: len(place.commands(1)) == 2)
        person.type("\x03")
        person.type("exit 5\n")
        assert person.await_exit() == 5
    assert place.status(run)["state"] == "RUNNING"
