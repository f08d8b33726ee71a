"""ps and gc on hosts over SSH, and on a node of a Slurm cluster: a machine of its own each, without other users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.planning.ssh import SshNode, SshPlan
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord, write_run
from clusterddp.system.files import write_json
from tests.support.gang_runs import processes_with
from tests.support.paths import ROOT
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_person import SshPerson
from tests.support.stored_runs import COMPLETED, RUN, make_run
from tests.support.waiting import wait_until
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SLEEPER = ("sleep", "600")
LOSES_ITS_CONNECTION = """
import os, sys
from clusterddp.view.ps import Hosts
from clusterddp.planning.ssh import SshNode
access = SshNode(host="node1")
with Hosts([access], os.environ) as hosts:
    hosts.look()
    hosts._pool._hosts[access].session.transport.close()
    print(hosts.end({"node1": [sys.argv[1]]})["node1"][0].ended)
"""
FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.05)\n"
SPEC = (
    "name: job\nlauncher: slurm\nresources: {nodes: 1, procs_per_node: 2}\nentry: {script: entry.py}\nsnapshot: false\n"
)


@pytest.fixture
def token() -> str:
    return os.urandom(16).hex()


class Carriers:
    """Processes on nodes that carry the cookie of a run."""

    def __init__(self, rack: Rack, token: str) -> None:
        self.rack = rack
        self.token = token
        self.entered: list[subprocess.Popen[bytes]] = []

    def start(self, node: str, role: str, *, user: str = "root", token: str = "") -> None:
        """Start one, and wait until it is there."""
        cookie = f"{token or self.token}.{role}"
        environment = {"CLUSTERDDP_COOKIE": cookie, "CLUSTERDDP_RUN": "brisk-otter-3"}
        before = len(processes_with(cookie))
        argv = self.rack.argv(node, SLEEPER, user=user, env=environment)
        self.entered.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL))
        wait_until(lambda: len(processes_with(cookie)) == before + 1)

    def alive(self, token: str = "") -> int:
        return len(processes_with(f"CLUSTERDDP_COOKIE={token or self.token}."))

    def end(self) -> None:
        for process in self.entered:
            process.kill()
            process.wait()
        for pid, _ in processes_with(self.token):
            os.kill(pid, 9)


@pytest.fixture
def carriers(hosts: Rack, token: str) -> Iterator[Carriers]:
    carriers = Carriers(hosts, token)
    yield carriers
    carriers.end()


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.stdout, done.stderr
    return {row["host"]: row for row in json.loads(done.stdout)["hosts"]}


def test_ps_shows_the_runs_of_each_host(person: SshPerson, carriers: Carriers) -> None:
    carriers.start("node1", "n0")
    carriers.start("node2", "s1")
    found = rows(person.clusterddp("ps", "--hosts", "node[1-3]", "-o", "json"))
    left_over = {host: [run["left_over"] for run in row["runs"]] for host, row in found.items()}
    assert left_over == {"node1": [True], "node2": [False], "node3": []}


def test_gc_ends_what_is_left_over_on_each_host(person: SshPerson, carriers: Carriers) -> None:
    carriers.start("node1", "n0")
    carriers.start("node1", "n0")
    carriers.start("node2", "n1")
    done = person.clusterddp("gc", "--hosts", "node1,node2", "--yes")
    assert done.stdout.splitlines()[-2:] == [
        "2 processes of brisk-otter-3 ended on node1",
        "1 process of brisk-otter-3 ended on node2",
    ]
    assert (carriers.alive(), done.returncode) == (0, 0)


def test_gc_leaves_a_live_run_alone_on_a_host_with_a_left_over_one(person: SshPerson, carriers: Carriers) -> None:
    live = os.urandom(16).hex()
    carriers.start("node1", "n0", token=live)
    carriers.start("node1", "g0", token=live)
    carriers.start("node1", "n0")
    person.clusterddp("gc", "--hosts", "node1", "--yes")
    assert (carriers.alive(), carriers.alive(live)) == (0, 2)


def test_gc_leaves_other_people_alone_on_a_host(person: SshPerson, carriers: Carriers) -> None:
    carriers.start("node1", "n0", user="ana")
    done = person.clusterddp("gc", "--hosts", "node1", "--yes", "-o", "json")
    assert (rows(done)["node1"]["left_over"], carriers.alive()) == ([], 1)


def test_hosts_that_cannot_be_asked_are_listed_as_such(person: SshPerson, carriers: Carriers) -> None:
    carriers.start("node1", "n0")
    done = person.clusterddp("gc", "--hosts", "node1,nowhere", "--yes", "-o", "json")
    found = rows(done)
    assert (done.returncode, found["nowhere"]["ok"], found["node1"]["ended"][0]["ended"]) == (3, False, 1)


def test_ps_says_which_host_cannot_be_asked(person: SshPerson) -> None:
    done = person.clusterddp("ps", "--hosts", "node1,nowhere")
    assert (done.returncode, "nowhere  failed" in done.stdout) == (3, True)


def test_the_hosts_of_a_run_are_those_of_its_plan(person: SshPerson, carriers: Carriers) -> None:
    carriers.start("node2", "n0")
    carriers.start("node2", "n0", token=os.urandom(16).hex())
    run = make_ssh_run(person, person.rack.dir / "shared" / carriers.token, carriers.token)
    (row,) = rows(person.clusterddp("ps", str(run), "-o", "json")).values()
    assert (row["host"], [found["key"] for found in row["runs"]]) == ("node2", [carriers.token[:8]])


def test_a_connection_that_was_lost_while_gc_asked_is_made_again(person: SshPerson, carriers: Carriers) -> None:
    carriers.start("node1", "n0")
    program = [sys.executable, "-c", LOSES_ITS_CONNECTION, carriers.token]
    assert person.rack.run("head", program, env=person.variables()).stdout == "1\n"


def test_an_old_run_is_removed_from_a_host(person: SshPerson) -> None:
    root = person.rack.dir / "shared" / f"root-{os.urandom(4).hex()}"
    root.mkdir(mode=0o700)
    old = make_run(root, end=COMPLETED)
    done = person.clusterddp("gc", "--hosts", "node1", "--dir", str(root), "--older-than", "30d", "--yes", "-o", "json")
    (removed,) = rows(done)["node1"]["removed"]
    assert (removed["place"], removed["error"], old.exists()) == (f"runs/{RUN}", None, False)


def test_ranks_on_slurm_are_not_left_over_while_their_tasks_live(rack: Rack) -> None:
    place = SlurmPerson.at(rack, "gc")
    (place.path / "entry.py").write_text(FOREVER)
    run = place.submit(SPEC)
    try:
        place.await_status(run, lambda status: status["state"] == "RUNNING" and len(status["ranks"]) == 2)
        (node,) = {rank["host"] for rank in place.status(run)["ranks"]}
        before = sorted(place.processes(run))
        done = rack.run(node, command("gc", "--yes", "-o", "json"), env=person_environment())
        assert (rows(done)[node]["left_over"], sorted(place.processes(run))) == ([], before)
    finally:
        place.clusterddp("cancel", run.name)


def test_a_step_that_a_rank_has_on_another_node_is_slurms(rack: Rack, token: str) -> None:
    """`srun` in a rank hands its environment on to nodes where no supervisor of the run is."""
    step = ["srun", "-N1", "-w", "node2", "--export", f"ALL,CLUSTERDDP_COOKIE={token}.n0", "sleep", "600"]
    with subprocess.Popen(rack.argv("head", step), stdin=subprocess.DEVNULL) as srun:
        try:
            wait_until(lambda: any("sleep 600" in line for _, line in processes_with(token)), 30)
            done = rack.run("node2", command("ps", "-o", "json"), env=person_environment())
            assert rows(done)["node2"]["runs"][0]["answered_by"].startswith("Slurm (slurmstepd")
        finally:
            srun.terminate()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "clusterddp", *arguments]


def person_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


SEAL = """
import json, pathlib
from clusterddp.run.seal import sealed
path = pathlib.Path({path!r})
path.write_text(json.dumps(sealed(json.loads(path.read_text()))))
"""


def make_ssh_run(person: SshPerson, path: Path, token: str) -> Path:
    """Make the record that a launcher of this person keeps of a run on node2."""
    path.mkdir()
    run = RunRecord(run="brisk-otter-3", token=token, name="job", launcher="ssh", created_ns=1)
    write_run(RunDir(path), run)
    hosts = SshPlan(hosts=(SshNode(host="node2", node_rank=0, gpus=0),), root="~/.clusterddp")
    write_json(RunDir(path).plan, {"gang": {"token": token}, "ssh": hosts.to_json()})
    person.python(SEAL.format(path=str(RunDir(path).plan)))
    return path
