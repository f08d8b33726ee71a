"""A run goes on with other numbers of ranks: what is kept, what changes, and what is said of it before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from clusterddp.errors import SpecError, UsageError
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, plan_changed, plan_run
from clusterddp.run.directory import RunDir
from clusterddp.spec.load import load_spec
from clusterddp.spec.train import TrainSpec

FOUR = "name: a\ndevice: cpu\nresources: {nodes: 4}\ntrain: {batch_size: 8, lr: 0.2, lr_batch: 32}\n"
HOSTS = "launcher: ssh\nssh: {hosts: [one, two, three]}\n"


def plan_of(tmp_path: Path, text: str) -> Plan:
    plan = plan_run(load_spec(text, environ={}), Request(runs_dir=tmp_path / "runs", working_dir=tmp_path, environ={}))
    return keep(plan)


def keep(plan: Plan) -> Plan:
    """Write the spec of a run, as a submit and a resume do."""
    run = RunDir(plan.run_dir)
    run.path.mkdir(parents=True, exist_ok=True)
    run.spec.write_text(plan.spec_text)
    return Plan.from_json(json.loads(json.dumps(plan.to_json())))


def resumed(plan: Plan, *overrides: str) -> Plan:
    return keep(plan_changed(plan, RunDir(plan.run_dir).spec, overrides, {}))


def test_ranks_that_divide_the_global_batch_keep_it(tmp_path: Path) -> None:
    first = plan_of(tmp_path, FOUR)
    assert first.global_batch == 32
    two = resumed(first, "resources.nodes=2")
    assert (two.gang.num_ranks, two.global_batch) == (2, 32)
    said = "2 ranks x batch_size 8 x accumulate 2: a step still has 32 images, so steps, learning rate and samples stay"
    assert two.notes[0] == said


def test_others_come_near_to_it_and_the_first_plan_stays_what_counts(tmp_path: Path) -> None:
    three = resumed(plan_of(tmp_path, FOUR), "resources.nodes=3")
    assert three.notes[0] == (
        "3 ranks x batch_size 8 x accumulate 1: a step has 24 images instead of 32, so 1.33 times as many steps are "
        "left, and the peak learning rate goes from 0.2 to 0.15"
    )
    one = resumed(three, "resources.nodes=1")
    assert one.notes[0].startswith("1 rank x batch_size 8 x accumulate 4: a step still has 32 images")


def test_a_rate_that_does_not_grow_with_the_batch_stays(tmp_path: Path) -> None:
    three = resumed(plan_of(tmp_path, FOUR.replace("lr:", "lr_scaling: none, lr:")), "resources.nodes=3")
    assert three.notes[0].endswith("1.33 times as many steps are left, and the peak learning rate stays 0.2")


def test_local_steps_have_a_rate_by_the_number_of_ranks(tmp_path: Path) -> None:
    two = resumed(plan_of(tmp_path, FOUR.replace("lr:", "comm: local:8, lr:")), "resources.nodes=2")
    assert two.notes[0].endswith("; with comm local:8 the learning rate depends on the number of ranks, too")


@pytest.mark.parametrize("word", ["train.batch_size=16", "train.accumulate=2"])
def test_another_batch_size_asks_for_another_global_batch(tmp_path: Path, word: str) -> None:
    other = resumed(plan_of(tmp_path, FOUR), word, "resources.nodes=3")
    assert other.global_batch == 48
    assert "a step has 48 images instead of 32, so 0.67 times as many steps" in other.notes[0]
    assert resumed(other, "resources.nodes=1").global_batch == 48


def test_values_that_leave_the_size_alone_say_nothing_of_it(tmp_path: Path) -> None:
    first = plan_of(tmp_path, FOUR)
    assert resumed(first, "train.epochs=40").notes == first.notes


def test_a_plan_of_an_earlier_version_counts_its_own_ranks(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, FOUR)
    older = Plan.from_json({key: value for key, value in plan.to_json().items() if key != "global_batch"})
    assert older.global_batch is None
    assert resumed(older, "resources.nodes=2").global_batch == 32


def test_a_script_decides_itself(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    plan = plan_of(tmp_path, "name: a\ndevice: cpu\nsnapshot: false\nresources: {nodes: 4}\nentry: {script: a.py}\n")
    said = "WORLD_SIZE is 3 instead of 4: the program decides what its batch and learning rate become"
    assert resumed(plan, "resources.nodes=3").notes[0] == said


def test_over_ssh_each_named_host_is_a_node(tmp_path: Path) -> None:
    first = plan_of(tmp_path, FOUR.replace("resources: {nodes: 4}\n", HOSTS))
    two = resumed(first, "ssh.hosts=[one, three]")
    assert [node.host for node in two.gang.nodes] == ["one", "three"]
    assert "a step has 16 images instead of 24" in two.notes[0]
    assert len(resumed(two, "ssh.hosts=[one, two, three]").gang.nodes) == 3


def test_over_ssh_the_first_hosts_are_taken_and_the_others_named(tmp_path: Path) -> None:
    two = resumed(plan_of(tmp_path, FOUR.replace("resources: {nodes: 4}\n", HOSTS)), "resources.nodes=2")
    assert [node.host for node in two.gang.nodes] == ["one", "two"]
    assert "resources.nodes is 2: three is not used; ~resources.nodes takes all" in two.notes


def test_what_a_checkpoint_depends_on_stays(tmp_path: Path) -> None:
    first = plan_of(tmp_path, FOUR)
    with pytest.raises(UsageError, match=r"resume goes on with the same train.seed, 0, not 1"):
        resumed(first, "train.seed=1", "resources.nodes=2")
    with pytest.raises(SpecError, match=r"resources.nodes"):
        resumed(first, "resources.nodes=two")


def test_the_nearest_global_batch_is_taken() -> None:
    random = Random(0)
    for _ in range(1000):
        ranks, batch_size, wanted = (random.randint(1, most) for most in (12, 40, 3000))
        spec = TrainSpec(batch_size=batch_size).fitted(ranks, wanted)
        found, at_once = spec.global_batch(ranks), ranks * batch_size
        assert found == wanted or wanted % at_once
        assert abs(found - wanted) <= at_once / 2 or found == at_once > wanted
