"""Sweeps over SSH: the queue is on the laptop, its runs are on hosts that share nothing with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.run.sweep import SweepDir, read_queue
from tests.support.cuda_hosts import CUDA_PYTHON, cuda_hosts
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

ENTRY = """\
import os, pathlib, time
print("run", os.environ["I"], "gpus", os.environ.get("CUDA_VISIBLE_DEVICES", ""), flush=True)
while os.environ["HOLDS"] == "yes" and not pathlib.Path(f"/tmp/go{os.environ['I']}").exists():
    time.sleep(0.05)
"""
SPEC = """
name: lan
launcher: ssh
device: cpu
resources: {procs_per_node: 1}
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python
env: {HOLDS: "yes"}
entry: {script: entry.py}
"""
ON_ONE_GPU = f"""
name: lan
launcher: ssh
network: {{backend: gloo}}
resources: {{gpus_per_node: 1}}
ssh: {{hosts: [node1]}}
python: {CUDA_PYTHON}
env: {{HOLDS: "yes"}}
entry: {{script: entry.py}}
"""


@pytest.fixture
def place(ssh_place: SshPlace) -> Iterator[SshPlace]:
    (ssh_place.path / "entry.py").write_text(ENTRY)
    (ssh_place.path / "job.yaml").write_text(SPEC)
    yield ssh_place
    for record in ssh_place.runs_dir.glob("*/sweep.json"):
        kill_queue(ssh_place, SweepDir(record.parent))
    for node in ssh_place.rack.plan.nodes:
        for path in ssh_place.rack.outside(node, "/tmp").glob("go*"):
            path.unlink()


def submit(place: SshPlace, *arguments: str) -> SweepDir:
    done = place.clusterddp("submit", "job.yaml", *arguments, "--sweep", "-o", "json")
    return SweepDir(place.runs_dir / json.loads(done.stdout)["sweep"])


def kill_queue(place: SshPlace, sweep: SweepDir) -> None:
    """Kill the queue, if it is there."""
    queue = read_queue(sweep)
    assert queue is not None
    place.rack.run(HEAD, ["kill", "-KILL", str(queue.process.pid)], check=False)


def status(place: SshPlace, sweep: SweepDir) -> dict[str, Any]:
    return dict(json.loads(place.clusterddp("status", sweep.name, "-o", "json").stdout))


def await_states(place: SshPlace, sweep: SweepDir, *expected: str) -> None:
    """Ask until the runs are reported in these states: one whose host answers late is UNKNOWN for a while."""
    wait_until(lambda: [run["state"] for run in status(place, sweep)["runs"]] == list(expected), 60)


def let_go(place: SshPlace, *numbers: int) -> None:
    for node in place.rack.plan.nodes:
        for number in numbers:
            place.rack.outside(node, f"/tmp/go{number}").touch()


def await_begun(place: SshPlace, run: RunDir) -> str:
    """Wait until rank 0 has said something on its host; return it."""

    def said() -> str:
        with suppress(FileNotFoundError):
            return place.host_run_dir("node1", run).attempt(0).stdout(0).read_text()
        return ""

    wait_until(lambda: said() != "", 60)
    return said()


def test_runs_go_one_after_the_other_and_their_logs_come_home(place: SshPlace) -> None:
    done = place.clusterddp("submit", "job.yaml", "env.I=0,1", "env.HOLDS=no", "--sweep", "--wait")
    assert "2 COMPLETED" in done.stderr
    sweep = SweepDir(place.runs_dir / done.stdout.strip())
    first, second = ([json.loads(run.attempt(0).end.read_text()), run] for run in sweep.runs())
    assert json.loads(second[1].attempt(0).start.read_text())["started"] > first[0]["ended"]
    assert [run.attempt(0).stdout(1).read_text() for run in sweep.runs()] == ["run 0 gpus \n", "run 1 gpus \n"]


def test_a_killed_queue_ends_no_run_on_the_hosts_and_resume_goes_on(place: SshPlace) -> None:
    sweep = submit(place, "env.I=0,1,2")
    await_begun(place, sweep.runs()[0])
    kill_queue(place, sweep)
    await_states(place, sweep, "RUNNING", "LOST", "LOST")
    let_go(place, 0, 1, 2)
    done = place.clusterddp("resume", sweep.name, "--wait")
    assert "3 COMPLETED" in done.stderr


def test_cancel_ends_the_queue_and_what_runs_on_the_hosts(place: SshPlace) -> None:
    sweep = submit(place, "env.I=0,1,2")
    await_begun(place, sweep.runs()[0])
    place.clusterddp("cancel", sweep.name)
    await_states(place, sweep, *["CANCELLED"] * 3)
    place.await_gone(read_run(sweep.runs()[0]).token)
    assert status(place, sweep)["queue"]["state"] == "ENDED"


def test_runs_over_ssh_never_share_a_gpu_and_use_all_there_are(place: SshPlace) -> None:
    (place.path / "job.yaml").write_text(ON_ONE_GPU)
    with cuda_hosts(place.rack, {"node1": 2}):
        sweep = submit(place, "env.I=0,1,2")
        words = [await_begun(place, run) for run in sweep.runs()[:2]]
        wait_until(lambda: status(place, sweep)["queue"]["waits_for"], 60)
        assert {text.split()[-1] for text in words} == {"0", "1"}
        await_states(place, sweep, "RUNNING", "RUNNING", "PENDING")
        assert "GPUs are in use" in status(place, sweep)["queue"]["waits_for"]
        let_go(place, 0, 1, 2)
        assert place.clusterddp("wait", sweep.name).returncode == os.EX_OK
