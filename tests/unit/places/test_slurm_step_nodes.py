"""The nodes of a job that an attempt of an elastic run gets, and what its plan asks Slurm for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterddp.cli.text.plan import plan_lines
from clusterddp.places.slurm.step_nodes import StepNodes
from clusterddp.planning.plan import Plan
from clusterddp.run.node_marks import Mark, remember
from tests.support.launch_runs import plan_text

SPEC = (
    "name: job\nlauncher: slurm\nrestarts: 3\nresources: {nodes: 2, procs_per_node: 4}\n"
    "elastic: {min_nodes: 1, spares: 1}\n"
)
SRUN = ("env", "--unset=A", "srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "python", "RUN_DIR")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def planned(tmp_path: Path) -> Plan:
    (tmp_path / "place").mkdir()
    return plan_text(SPEC, tmp_path / "place", environ={})


def nodes_of(plan: Plan, *hosts: str) -> StepNodes:
    return StepNodes.of_gang(plan.to_json()["gang"], hosts, "")


def test_the_job_has_the_spare_and_a_step_does_not(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan.slurm is not None
    assert {"--nodes=3", "--ntasks=12", "--ntasks-per-node=4"} <= set(plan.slurm.sbatch)
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4"} <= set(plan.slurm.srun)
    assert plan.gang.world_size == 8
    shown = " ".join(" ".join(plan_lines(plan, verbose=True)).split())
    assert "2 nodes x 4 = 8 ranks" in shown
    assert "and 1 spare" in shown
    assert "elastic: the job asks for 3 nodes; when one is lost" in shown


def test_a_step_names_its_nodes_and_has_ranks_for_them(tmp_path: Path) -> None:
    nodes = nodes_of(planned(tmp_path), "a", "b", "c")
    assert nodes.step(SRUN) == (*SRUN[:3], "--nodelist=a,b", *SRUN[3:])
    fewer = nodes.without({"b", "c"}, "").step(SRUN)
    assert fewer[3:8] == ("--nodelist=a", "--overlap", "--mem=0", "--nodes=1", "--ntasks=4")


@pytest.mark.parametrize(("usable", "number"), [(0, 1), (2, 2), (9, 3)])
def test_a_job_that_is_queued_again_asks_for_as_many_nodes_as_there_are(
    tmp_path: Path, usable: int, number: int
) -> None:
    asked = nodes_of(planned(tmp_path), "a", "b", "c").request(usable, cpus_per_task=2)
    assert asked == {"NumNodes": str(number), "NumTasks": str(number * 4), "NumCPUs": str(number * 8)}


def test_a_marked_node_is_taken_last_unless_it_is_the_batch_host(tmp_path: Path) -> None:
    now = time.time()
    remember(Mark(node=node, launcher="slurm", why="slow", run="r", since=now, until=now + 3600) for node in ("a", "b"))
    assert nodes_of(planned(tmp_path), "a", "b", "c").taken == ("a", "c")


def test_a_change_of_nodes_is_explained(tmp_path: Path) -> None:
    nodes = nodes_of(planned(tmp_path), "a", "b", "c")
    assert nodes.explain((), {}) == nodes.explain(("a", "b"), {}) == ""
    left = nodes.without({"b"}, "")
    assert left.explain(nodes.taken, {"b": "no power"}) == "node 1 on b was lost (no power); c, a spare, took its place"
    alone = left.without({"c"}, "")
    said = "node 1 on c was lost (no power); the run goes on with 1 of 2 nodes"
    assert alone.explain(left.taken, {"c": "no power"}) == said
    assert alone.explain((), {}) == "the run goes on with 1 of 2 nodes"
