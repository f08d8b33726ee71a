"""Leases over SSH: real hosts, agents, launchers and runs; the GPUs are those of a fake nvidia-smi on the hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda_hosts import cuda_hosts
from tests.support.fake_gpus import FakeGpus
from tests.support.ssh_person import SshPerson
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

LAUNCHER = """
import contextlib, json, os, sys
from clusterddp.errors import PreflightError
from clusterddp.places.ssh.launcher import lease_gpus
from clusterddp.planning.ssh import SshNode
from clusterddp.places.ssh.sessions import open_sessions
order = json.loads(sys.argv[1])
nodes = [SshNode(host=host, venv=order["venv"]) for host in order["gpus"]]
sessions = open_sessions(nodes, environ=os.environ)
say = lambda **words: print(json.dumps(words), flush=True)
say(pid=os.getpid())
try:
    grants = lease_gpus(sessions, order["gpus"], run=order["run"])
    say(gpus=[grant.gpus for grant in grants.values()])
    sys.stdin.read()
except PreflightError as error:
    say(refused=error.message, hint=error.hint)
finally:
    for session in sessions.values():
        session.close()
"""


class Launchers:
    """Launchers on the head; each holds what it has leased until it is let go."""

    def __init__(self, person: SshPerson, gpus: FakeGpus) -> None:
        self.person = person
        self.gpus = gpus
        self.started: list[subprocess.Popen[bytes]] = []
        self.pids: dict[int, int] = {}
        """The pid on the head of each launcher, by the pid of what entered the head."""

    def start(self, run: str, gpus: dict[str, int]) -> subprocess.Popen[bytes]:
        order = {"run": run, "gpus": gpus, "venv": str(self.gpus.place.parent)}
        argv = self.person.rack.argv(
            HEAD, [sys.executable, "-c", LAUNCHER, json.dumps(order)], env=self.person.variables()
        )
        self.started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
        self.pids[self.started[-1].pid] = self.says(self.started[-1])["pid"]
        return self.started[-1]

    def kill(self, launcher: subprocess.Popen[bytes]) -> None:
        self.person.rack.run(HEAD, ["kill", "-KILL", str(self.pids[launcher.pid])])
        launcher.wait()

    def says(self, launcher: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert launcher.stdout is not None
        return json.loads(launcher.stdout.readline())

    def lease(self, run: str, gpus: dict[str, int]) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        launcher = self.start(run, gpus)
        return launcher, self.says(launcher)

    def let_go(self, launcher: subprocess.Popen[bytes]) -> None:
        launcher.stdin.close()
        launcher.wait()


@pytest.fixture
def launchers(person: SshPerson, tmp_path: Path) -> Iterator[Launchers]:
    """Each host has two GPUs, and nothing of an earlier test holds them."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    launchers = Launchers(person, FakeGpus(venv / "bin"))
    yield launchers
    for launcher in launchers.started:  # all of them first: one may wait for another
        launcher.stdin.close()
    for launcher in launchers.started:
        launcher.wait()
        launcher.stdout.close()


def test_two_runs_get_different_gpus_and_a_third_is_refused(launchers: Launchers) -> None:
    _, first = launchers.lease("brisk-otter-3", {"node1": 1})
    _, second = launchers.lease("shy-lynx-1", {"node1": 1})
    _, third = launchers.lease("calm-wren-2", {"node1": 1})
    assert (first, second) == ({"gpus": [["0"]]}, {"gpus": [["1"]]})
    assert third == {
        "refused": "calm-wren-2: GPUs are in use\nnode1: GPU 0: run brisk-otter-3; GPU 1: run shy-lynx-1",
        "hint": "submit it when they are free",
    }


def test_all_hosts_that_are_busy_are_named(launchers: Launchers) -> None:
    launchers.lease("brisk-otter-3", {"node1": 2, "node2": 1})
    _, other = launchers.lease("shy-lynx-1", {"node3": 2, "node1": 1, "node2": 2})
    assert other["refused"].splitlines()[1:] == [
        "node1: GPUs 0 and 1: run brisk-otter-3",
        "node2: GPU 0: run brisk-otter-3",
    ]


def test_a_run_that_is_refused_holds_nothing(launchers: Launchers) -> None:
    launchers.lease("brisk-otter-3", {"node2": 1})
    launchers.lease("shy-lynx-1", {"node1": 2, "node2": 2})
    assert launchers.lease("calm-wren-2", {"node1": 2})[1] == {"gpus": [["0", "1"]]}


def test_a_process_that_computes_without_a_lease_is_named(launchers: Launchers) -> None:
    launchers.gpus.compute({0: 1, 1: 1})
    _, said = launchers.lease("brisk-otter-3", {"node1": 1})
    assert said["refused"].splitlines()[1] == "node1: GPUs 0 and 1: pid 1 of root"


def test_the_leases_of_a_killed_launcher_are_free(launchers: Launchers) -> None:
    first, _ = launchers.lease("brisk-otter-3", {"node1": 2})
    launchers.kill(first)
    assert launchers.lease("shy-lynx-1", {"node1": 2})[1] == {"gpus": [["0", "1"]]}


def test_a_host_with_two_names_is_one_machine(launchers: Launchers) -> None:
    launchers.person.configure("Host box\n  HostName node1\n  HostKeyAlias node1\n")
    first, said = launchers.lease("brisk-otter-3", {"node1": 1, "box": 1})
    assert sorted(said["gpus"]) == [["0"], ["1"]]
    launchers.let_go(first)
    assert len(launchers.lease("shy-lynx-1", {"box": 1, "node1": 1})[1]["gpus"]) == 2


SPEC = """
name: lan
launcher: ssh
network: {backend: gloo}
resources: {gpus_per_node: 1}
ssh: {hosts: [node1, node2]}
python: ~/claims-cuda/bin/python
entry: {script: sleep.py}
"""


@pytest.fixture
def place(ssh_place: SshPlace) -> Iterator[SshPlace]:
    """Two hosts have one GPU each, and a torch that says it was built for CUDA."""
    (ssh_place.path / "sleep.py").write_text(
        "import os, time\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\ntime.sleep(600)\n"
    )
    with cuda_hosts(ssh_place.rack, {"node1": 1, "node2": 1}):
        yield ssh_place


def test_a_detached_run_keeps_its_gpus_and_another_submit_is_refused_with_its_name(place: SshPlace) -> None:
    first = place.submit(SPEC)
    stdout = place.host_run_dir("node2", first).attempt(0).stdout(1)
    wait_until(lambda: stdout.exists() and stdout.read_text() == "0\n", 40)
    refused = place.clusterddp("submit", "job.yaml", check=False)
    assert refused.returncode == 3
    assert f"node1: GPU 0: run {first.name}" in refused.stderr
    assert f"node2: GPU 0: run {first.name}" in refused.stderr


def test_the_gpus_of_a_run_whose_every_process_was_killed_are_free(place: SshPlace) -> None:
    first = place.submit(SPEC)
    for process in place.all_processes():
        with contextlib.suppress(ProcessLookupError):  # it dies with one that was killed before it
            os.kill(process.pid, signal.SIGKILL)
    place.await_gone()
    assert place.submit(SPEC).name != first.name
