"""The laptop is cut off from hosts in the middle of a run, or the user presses Ctrl-C; others on the hosts stay."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.places.ssh.connections import SILENCE_S
from clusterddp.places.ssh.host_run import read_reports
from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from tests.support.ssh_kill_kinds import CHILD, GANG, LAN, NODES, ORPHAN, SPEC
from tests.support.ssh_place import HostProcess, SshPlace, send, ssh_place_on
from tests.support.ssh_traces import is_up
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root]

UNTIL_ASKED = "import os, time\nwhile not os.path.exists('/tmp/asked'):\n    time.sleep(0.1)\n"
NO_WAY_OUT = "add table inet cut\n" + "".join(
    f"add chain inet cut {way} {{ type filter hook {way} priority 0; policy drop; }}\n"
    f"add rule inet cut {way} {side} lo accept\n"
    for way, side in (("input", "iifname"), ("output", "oifname"))
)


@pytest.fixture(scope="module")
def rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack(LAN) as rack:
        yield rack


@pytest.fixture
def place(rack: Rack) -> Iterator[SshPlace]:
    with ssh_place_on(rack) as place:
        (place.path / "gang.py").write_text(GANG)
        (place.path / "job.yaml").write_text(SPEC)
        yield place


@contextlib.contextmanager
def cut_off(rack: Rack) -> Iterator[None]:
    """Let nothing out of the laptop or in; the hosts still reach each other."""
    rack.run(HEAD, ["nft", "-f", "-"], stdin=NO_WAY_OUT)
    try:
        yield
    finally:
        rack.run(HEAD, ["nft", "delete", "table", "inet", "cut"])


def await_run(place: SshPlace) -> RunDir:
    wait_until(lambda: place.runs_dir.exists() and bool(list_runs(place.runs_dir)), 30)
    return place.run_dir()


def start(place: SshPlace, *options: str) -> tuple[subprocess.Popen[str], RunDir]:
    """Submit in a terminal of its own, and wait until all ranks and what they started are there."""
    command = place.start("submit", "job.yaml", *options)
    run = await_run(place)
    wait_until(lambda: is_up(place, run), 60)
    return command, run


def is_seen(run: RunDir) -> bool:
    """Say whether a command has heard of a run from its hosts."""
    return any(report.reached for report in read_reports(run).values())


def ranks_of(place: SshPlace, run: RunDir) -> set[int]:
    found = place.all_processes(place.record(run).token)
    return {each.pid for each in found if each.role.startswith("n")}


def test_a_detached_run_and_the_command_that_waits_for_it_survive_a_laptop_without_a_network(place: SshPlace) -> None:
    (place.path / "gang.py").write_text(UNTIL_ASKED)
    run = place.submit(SPEC)
    wait_until(place.host_run_dir("node1", run).attempt(0).start.exists, 40)
    waiting = place.start("wait", run.name)
    wait_until(lambda: is_seen(run), 20)
    with cut_off(place.rack):
        time.sleep(SILENCE_S + 4)
        for node in NODES:
            place.rack.outside(node, "/tmp/asked").touch()
        wait_until(lambda: read_end(place.host_run_dir("node1", run).attempt(0)) is not None, 20)
    _, said = waiting.communicate(timeout=240)
    assert (waiting.returncode, place.status(run)["state"]) == (0, "COMPLETED"), said


def test_ctrl_c_while_a_run_is_being_started_leaves_nothing_of_it(place: SshPlace) -> None:
    command = place.start("submit", "job.yaml")
    run = await_run(place)
    wait_until(lambda: bool(place.all_processes(place.record(run).token)), 30)
    send(command, signal.SIGINT)
    command.communicate(timeout=240)
    wait_until(lambda: not place.all_processes(place.record(run).token), 20)
    assert (place.status(run)["state"], command.returncode) == ("CANCELLED", 130)


def test_ctrl_c_at_a_command_that_waits_for_a_detached_run_leaves_it_alone(place: SshPlace) -> None:
    command, run = start(place, "--wait")
    before = ranks_of(place, run)
    send(command, signal.SIGINT)
    command.communicate(timeout=240)
    assert (command.returncode, place.status(run)["state"], ranks_of(place, run)) == (130, "RUNNING", before)


class Lookalikes:
    """Processes of ana that have the command line and the environment of a run's, its cookie among it."""

    def __init__(self, rack: Rack) -> None:
        self.rack = rack
        self.entered: list[subprocess.Popen[bytes]] = []

    def copy(self, process: HostProcess) -> None:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
        variables = dict(word.partition("=")[::2] for word in environment if word)
        argv = self.rack.argv(process.host, process.command.split(), user="ana", env=variables)
        self.entered.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL))

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.entered)

    def pids(self, place: SshPlace, token: str) -> set[int]:
        found = place.all_processes(token)
        return {each.pid for each in found if Path(f"/proc/{each.pid}").stat().st_uid != 0}

    def end(self) -> None:
        for process in self.entered:
            process.kill()
            process.wait()


@pytest.fixture
def lookalikes(rack: Rack) -> Iterator[Lookalikes]:
    lookalikes = Lookalikes(rack)
    yield lookalikes
    lookalikes.end()


def mimic(place: SshPlace, lookalikes: Lookalikes, run: RunDir) -> set[int]:
    """Have ana start the like of a run's process on each host; return them."""
    token = place.record(run).token
    for node in NODES:
        lookalikes.copy(next(each for each in place.processes(node, token) if each.command == CHILD))
    wait_until(lambda: len(lookalikes.pids(place, token)) == len(NODES), 10)
    return lookalikes.pids(place, token)


def test_cancel_ends_no_other_run_and_no_lookalike_of_another_user(place: SshPlace, lookalikes: Lookalikes) -> None:
    _, other = start(place)
    others = ranks_of(place, other)
    run = place.submit(SPEC)
    wait_until(lambda: is_up(place, run), 60)
    theirs = mimic(place, lookalikes, run)
    place.clusterddp("cancel", run.name)
    left = {each.pid for each in place.all_processes(place.record(run).token)}
    assert (left, lookalikes.alive, ranks_of(place, other)) == (theirs, True, others)


def test_gc_ends_what_is_left_over_and_nothing_else(place: SshPlace, lookalikes: Lookalikes) -> None:
    _, other = start(place)
    others = ranks_of(place, other)
    run = place.submit(SPEC)
    wait_until(lambda: is_up(place, run), 60)
    theirs = mimic(place, lookalikes, run)
    leave_over(place, run)
    place.clusterddp("gc", "--hosts", ",".join(NODES), "--yes")
    left = {each.pid for each in place.all_processes(place.record(run).token)}
    assert (left, lookalikes.alive, ranks_of(place, other)) == (theirs, True, others)


def leave_over(place: SshPlace, run: RunDir) -> None:
    """Kill all who answer for a run on all hosts at once, so that what its ranks have started stays."""
    token = place.record(run).token
    answering = [each for each in place.all_processes(token) if each.role[0] in "sg"]
    for word in (signal.SIGSTOP, signal.SIGKILL):
        for process in answering:
            os.kill(process.pid, word)
    wait_until(lambda: {each.command for each in place.all_processes(token)} == {CHILD, ORPHAN}, 20)
