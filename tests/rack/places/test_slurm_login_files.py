"""A job starts at once, whatever the login shell's start-up files of its user do on the nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterddp.places.state import read_state
from clusterddp.run.state import RunState
from tests.support.handmade_slurm_runs import age, make_slurm_run
from tests.support.rack_slurm import await_state, reach_slurm, submit_job
from tests.support.slurm_person import SlurmPerson
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

PROFILES = ("exec sleep 150", "exit 1", "read x")
"""It never ends, fails, or waits for a person."""
AT_ONCE_S = 20
"""Slurm takes 27 s and more to give up a login shell that never ends."""


@pytest.fixture(scope="module")
def two_nodes(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        yield rack


@pytest.fixture(params=PROFILES)
def rack(two_nodes: Rack, request: pytest.FixtureRequest) -> Iterator[Rack]:
    """A rack on whose nodes root has such a file; the user is logged in on the head already."""
    with having(two_nodes, request.param):
        yield two_nodes


@contextmanager
def having(two_nodes: Rack, line: str) -> Iterator[None]:
    profile = two_nodes.home("node1") / ".profile"
    profile.write_text(f"{line}\n")
    try:
        yield
    finally:
        profile.unlink()
        two_nodes.run(HEAD, ["scancel", "--user=root"], check=False)
        two_nodes.await_idle()


def at(rack: Rack, name: str, more: str = "") -> SlurmPerson:
    place = rack.dir / "shared" / f"{name}{len(list((rack.dir / 'shared').iterdir()))}"
    place.mkdir()
    person = SlurmPerson(rack=rack, path=place)
    person.write_spec(more, resources="{nodes: 2, procs_per_node: 1}")
    return person


def test_a_run_and_a_sweep_start_at_once(rack: Rack) -> None:
    person = at(rack, "run")
    person.clusterddp("submit", "job.yaml", "--wait", timeout_s=AT_ONCE_S)
    sweep = person.submit_sweep("env.X=1,2")
    person.clusterddp("wait", sweep.name, timeout_s=AT_ONCE_S)


def test_the_doctors_job_starts_at_once(rack: Rack) -> None:
    person = at(rack, "doctor")
    argv = [sys.executable, "-m", "clusterddp", "doctor", "job.yaml", "--job", "-o", "json"]
    done = rack.run(HEAD, argv, cwd=person.path, env=person.variables(), check=False, timeout_s=2 * AT_ONCE_S)
    reports = [entry for entry in json.loads(done.stdout)["checks"] if entry["check"] == "size"]
    assert sorted(entry["host"] for entry in reports) == ["node1", "node2"], done.stderr


def test_a_job_that_a_login_shell_held_back_is_not_called_a_missing_directory(two_nodes: Rack, tmp_path: Path) -> None:
    """As earlier versions submitted it: Slurm gives up the node."""
    with having(two_nodes, "exec sleep 150"):
        run = make_slurm_run(two_nodes.dir / "shared" / "runs")
        await_state(two_nodes, submit_job(two_nodes, run, "--export=NONE", "--no-requeue"), "NODE_FAIL", within_s=120)
        age(run)
        view = read_state(run, reach_slurm(two_nodes, tmp_path / "bin"))
    assert view.state is RunState.FAILED
    assert "its first node was lost before the job's script began, or did not begin it in time" in view.reason
