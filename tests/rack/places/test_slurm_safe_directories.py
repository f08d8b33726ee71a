"""A runs directory whose writers the user trusts: a job, its nodes and its restart take it, too."""

from __future__ import annotations

import os

import pytest

from tests.support.slurm_person import SlurmPerson
from tests.testbed.plan import RackPlan
from tests.testbed.rack import running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
ONCE = "import os, sys\nsys.exit(os.environ['CLUSTERDDP_ATTEMPT'] == '0')\n"


def test_a_job_restarts_in_a_directory_whose_writers_the_user_trusts() -> None:
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        place = rack.dir / "shared" / "lab"
        place.mkdir()
        os.chown(place, 0, 2003)
        place.chmod(0o2770)
        person = SlurmPerson(rack=rack, path=place, checks=False)
        person.write_spec("restarts: 1", resources="{nodes: 2, procs_per_node: 1}")
        (place / "entry.py").write_text(ONCE)
        refused = person.clusterddp("submit", "job.yaml", "--wait")
        assert refused.returncode == 1
        assert f"export CLUSTERDDP_SAFE_DIRECTORIES={place}" in refused.stderr
        done = person.clusterddp("submit", "job.yaml", "--wait", environ={"CLUSTERDDP_SAFE_DIRECTORIES": str(place)})
        assert done.returncode == 0, done.stderr
        assert len(person.run_dir().attempts()) == 2
