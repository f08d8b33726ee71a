"""Children of ranks that have lost the run's variable, over SSH and on Slurm where it knows a step by its parents."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.system.python import module_command
from tests.support.gang_runs import processes_with
from tests.support.launch_runs import read_plan
from tests.support.lost_children import KINDS, LostChildren
from tests.support.slurm_runs import await_final_end, make_slurm_run, start_run
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = """
name: loses
launcher: ssh
device: cpu
resources: {procs_per_node: 2}
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python
entry: {script: entry.py}
"""
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def children() -> Iterator[LostChildren]:
    children = LostChildren()
    yield children
    children.end()


@pytest.fixture(scope="module")
def linuxproc(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"], tracking="linuxproc")) as rack:
        yield rack


def kill_together(pids: list[int]) -> None:
    """Kill processes so that none of them can see to another's end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def submit(place: SshPlace, children: LostChildren) -> RunDir:
    (place.path / "entry.py").write_text(children.program + SLEEP)
    run = place.submit(SPEC)
    wait_until(lambda: len(children.alive()) == 4 * KINDS, 60)
    wait_until(place.host_run_dir("node1", run).attempt(0).start.exists, 40)
    return run


@pytest.mark.parametrize("role", ["s0", "s1"])
def test_over_ssh_a_killed_supervisor_leaves_no_child_that_lost_its_environment(
    ssh_place: SshPlace, children: LostChildren, role: str
) -> None:
    submit(ssh_place, children)
    ssh_place.kill(f"node{int(role[1]) + 1}", role)
    wait_until(lambda: not children.alive(), 20, what=children.alive)
    ssh_place.await_gone()


def test_over_ssh_gc_ends_what_a_killed_supervisor_and_guard_have_left(
    ssh_place: SshPlace, children: LostChildren
) -> None:
    run = submit(ssh_place, children)
    roles = {"s1", "g1"}
    victims = [each.pid for each in ssh_place.processes("node2") if each.role in roles]
    kill_together(victims)
    wait_until(lambda: len(children.alive()) == 2 * KINDS, 40, what=children.alive)
    ssh_place.await_gone()
    found = json.loads(ssh_place.clusterddp("ps", run.name, "-o", "json").stdout)["hosts"]
    left_over = {row["host"]: [(each["run"], len(each["processes"])) for each in row["runs"]] for row in found}
    assert left_over == {"node1": [], "node2": [(run.name, 2 * KINDS)]}
    assert f"{2 * KINDS} processes of {run.name} ended on node2" in ssh_place.clusterddp("gc", run.name, "--yes").stdout
    assert children.alive() == []


@pytest.mark.parametrize("roles", [("n1",), ("task",), ("s0",), ("s1", "g1"), ("s0", "g0")], ids="-".join)
def test_on_slurm_no_kill_leaves_a_child_that_lost_its_environment(
    linuxproc: Rack, children: LostChildren, roles: tuple[str, ...]
) -> None:
    code = children.program + SLEEP
    run = make_slurm_run(linuxproc, "-".join(roles), code, resources="{nodes: 2, procs_per_node: 2}")
    start_run(linuxproc, run)
    wait_until(lambda: len(children.alive()) == 4 * KINDS, 60)
    wait_until(run.attempt(0).start.exists, 20)
    token = read_plan(run)["token"]
    task = " ".join(module_command("clusterddp.places.slurm.task"))
    found = {role: processes_with(f"CLUSTERDDP_COOKIE={token}.{role}\0") for role in roles}
    victims = [next(pid for pid, words in found[role] if role != "task" or words.startswith(task)) for role in roles]
    kill_together(victims)
    assert await_final_end(run, 60).outcome == "FAILED"
    wait_until(lambda: not children.alive(), 20, what=children.alive)
