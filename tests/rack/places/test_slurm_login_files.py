"""A job starts at once, whatever the login shell's start-up files of its user do on the nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

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
    profile = two_nodes.home("node1") / ".profile"
    profile.write_text(f"{request.param}\n")
    yield two_nodes
    profile.unlink()
    two_nodes.run(HEAD, ["scancel", "--user=root"], check=False)
    two_nodes.await_idle(within_s=200)


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
