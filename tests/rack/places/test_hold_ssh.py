"""A hold over SSH: it keeps the GPUs of hosts that share nothing, and runs in it take them without a wait."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from tests.support.cuda_hosts import cuda_hosts
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = """
name: lan
launcher: ssh
network: {backend: gloo}
resources: {gpus_per_node: 1}
ssh: {hosts: [node1, node2]}
python: ~/claims-cuda/bin/python
entry: {script: entry.py, args: [forever]}
"""
UNTIL_STOP = """
import os, sys, time
print("GPU", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
while sys.argv[1] == "forever" and not os.path.exists(os.environ["CLUSTERDDP_STOP_FILE"]):
    time.sleep(0.05)
"""
BRIEF = "entry.args=[once]"
ON_CPU = ("--cpu", "~resources.gpus_per_node", "resources.procs_per_node=1")


@pytest.fixture
def place(ssh_place: SshPlace) -> Iterator[SshPlace]:
    (ssh_place.path / "job.yaml").write_text(SPEC)
    (ssh_place.path / "entry.py").write_text(UNTIL_STOP)
    with cuda_hosts(ssh_place.rack, {"node1": 1, "node2": 1}):
        yield ssh_place


def started(place: SshPlace, *words: str) -> RunDir:
    done = place.clusterddp(words[0], "job.yaml", *words[1:], "-o", "json")
    return find_run(place.runs_dir, json.loads(done.stdout)["run"])


def refused(place: SshPlace, *words: str) -> str:
    done = place.clusterddp(words[0], "job.yaml", *words[1:], check=False)
    assert done.returncode == 3, (done.returncode, done.stderr)
    return done.stderr


def await_gpu(place: SshPlace, run: RunDir) -> None:
    stdout = place.host_run_dir("node2", run).attempt(0).stdout(1)
    wait_until(lambda: stdout.exists() and stdout.read_text() == "GPU 0\n", 40)


def test_runs_come_and_go_in_a_hold_that_keeps_others_out_until_it_is_cancelled(place: SshPlace) -> None:
    kept = started(place, "hold", "--for", "2h")
    assert place.processes(HEAD, place.record(kept).token) == []  # the laptop may close
    for _ in range(2):
        run = started(place, "submit", "--in", kept.name, BRIEF, "--wait")
        assert place.end(run).outcome == "COMPLETED"
        assert place.host_run_dir("node1", run).attempt(0).stdout(0).read_text() == "GPU 0\n"
    assert f"node1: GPU 0: run {kept.name}" in refused(place, "submit")
    run = started(place, "submit", "--in", kept.name)
    await_gpu(place, run)
    busy = refused(place, "submit", "--in", kept.name)
    assert (f"node1: GPU 0: run {run.name}" in busy, f"node2: GPU 0: run {run.name}" in busy) == (True, True)
    state = place.status(kept)
    assert (state["state"], state["hold"], state["ranks"]) == ("RUNNING", kept.name, [])
    assert run.name in state["held"]
    assert re.search(rf"{kept.name} .*RUNNING +ssh hold", place.clusterddp("list").stdout)
    assert f"in hold {kept.name}" in place.clusterddp("status", run.name).stdout
    place.clusterddp("cancel", run.name)
    assert place.status(kept)["state"] == "RUNNING"
    run = started(place, "submit", "--in", kept.name)
    place.clusterddp("cancel", kept.name)
    assert {place.end(each).outcome for each in (run, kept)} == {"CANCELLED"}
    place.await_gone(place.record(kept).token)
    place.await_gone(place.record(run).token)
    ended = place.clusterddp("submit", "job.yaml", "--in", kept.name, check=False)
    assert (ended.returncode, f"hold {kept.name} has ended: cancelled" in ended.stderr) == (2, True)
    assert place.end(started(place, "submit", BRIEF, "--wait")).outcome == "COMPLETED"
    left = place.host_run_dir("node2", kept).path
    assert left.exists()
    place.clusterddp("rm", "--yes", kept.name)
    assert not left.exists()


def test_a_hold_whose_time_is_over_has_stopped_its_run_and_frees_its_gpus(place: SshPlace) -> None:
    kept = started(place, "hold", "resources.time=0:00:40")
    run = started(place, "submit", "--in", kept.name)
    await_gpu(place, run)
    place.await_state("CANCELLED", run=run)
    assert place.end(run).outcome == "STOPPED"
    place.await_state("COMPLETED", run=kept)
    assert place.end(started(place, "submit", BRIEF, "--wait")).outcome == "COMPLETED"
    place.clusterddp("resume", run.name, "--wait", "entry.args=[once]")
    assert place.end(run).outcome == "COMPLETED"
    assert place.record(run).hold is None


def test_the_gpus_of_a_killed_hold_are_free_once_no_run_is_in_it(place: SshPlace) -> None:
    kept = started(place, "hold")
    run = started(place, "submit", "--in", kept.name)
    await_gpu(place, run)
    for process in place.all_processes(place.record(kept).token):
        with contextlib.suppress(ProcessLookupError):  # it dies with one that was killed before it
            os.kill(process.pid, signal.SIGKILL)
    place.await_gone(place.record(kept).token)
    assert f"node1: GPU 0: run {run.name}" in refused(place, "submit")
    assert f"hold {kept.name} has ended" in refused(place, "submit", "--in", kept.name)
    place.clusterddp("cancel", run.name)
    assert place.end(started(place, "submit", BRIEF, "--wait")).outcome == "COMPLETED"


def test_a_hold_without_gpus_keeps_its_hosts_from_other_holds_and_has_one_run(place: SshPlace) -> None:
    kept = started(place, "hold", *ON_CPU)
    assert f"node1: run {kept.name}" in refused(place, "hold", *ON_CPU)
    run = started(place, "submit", *ON_CPU, "--in", kept.name)
    assert f"node1: run {run.name}" in refused(place, "submit", *ON_CPU, "--in", kept.name)
    elsewhere = place.clusterddp("submit", "job.yaml", *ON_CPU, "--hosts", "node3", "--in", kept.name, check=False)
    assert f"lan does not fit into {kept.name}: it needs node3" in elsewhere.stderr
    place.clusterddp("cancel", "--save", kept.name)
    assert (place.end(run).outcome, place.end(kept).outcome) == ("STOPPED", "STOPPED")
    started(place, "hold", *ON_CPU)
