"""The slurm section: which options a spec may set, and which values they take."""

from __future__ import annotations

import pytest

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import JobSpec
from clusterddp.spec.slurm_options import OWNED


def load(text: str) -> JobSpec:
    return load_spec(f"name: x\n{text}\n", environ={}).job


def problem(text: str) -> Problem:
    with pytest.raises(SpecError) as refusal:
        load(text)
    [found] = refusal.value.problems
    return found


@pytest.mark.parametrize("name", sorted(OWNED))
def test_an_option_that_clusterddp_sets_is_refused_at_its_place_with_what_to_write_instead(name: str) -> None:
    found = problem(f"slurm:\n  partition: gpu\n  {name.replace('_', '-')}: 1")
    assert (found.key, found.line, found.message) == (f"slurm.{name}", 4, "clusterddp sets this option itself")
    assert found.hint == OWNED[name]


@pytest.mark.parametrize("value", ["true", "false", "null"])
def test_an_option_of_ours_cannot_be_switched_off_either(value: str) -> None:
    assert problem(f"slurm: {{output: {value}}}").message == "clusterddp sets this option itself"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("partition: true", "found true, expected a value"),
        ("hold: yes", 'found "yes", expected true or false'),
        ("distribution: cyclic", 'found "cyclic", expected block, block:block, block:cyclic or block:fcyclic'),
        ("distribution: 'plane=4'", 'found "plane=4", expected block, block:block, block:cyclic or block:fcyclic'),
        ("p: gpu", "found a short option, expected a long one"),
        ("part: gpu", "found the beginning of partition, expected the whole name"),
        ("outp: x", "found the beginning of output, expected the whole name"),
        ("partiton: gpu", 'unknown option of sbatch. Did you mean "partition"?'),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused(option: str, message: str) -> None:
    assert problem(f"slurm: {{{option}}}").message == message


@pytest.mark.parametrize(
    "option",
    [
        "distribution: 'block:cyclic:fcyclic,Pack'",
        "exclusive: true",
        "exclusive: user",
        "requeue: expedite",
        "exclusive: true, oversubscribe: false",
        "gres: 'gpu:a100:4,nvme:1'",
        "nice: true",
        "dependency: singleton",
        "kill_on_invalid_dep: true",
        "a_plugin_of_the_site: anything goes",
    ],
)
def test_an_option_with_a_value_that_it_takes_is_kept(option: str) -> None:
    assert load(f"slurm: {{{option}}}").slurm


def test_nothing_behind_an_option_removes_the_default() -> None:
    assert load("slurm: {gpus_per_node: null}").slurm == {"gpus_per_node": False}


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("resources: {memory_gb: 4}\nslurm: {mem: 8G}", "slurm.mem", "resources.memory_gb asks for memory too"),
        ("device: cpu\nslurm: {gpus: 8}", "slurm.gpus", "asks for GPUs, and device is cpu"),
        ("slurm: {exclusive: true, oversubscribe: true}", "slurm.oversubscribe", "contradicts exclusive"),
        ("slurm: {mem: 8G, mem-per-cpu: 2G}", "slurm.mem_per_cpu", "contradicts mem, expected one of them"),
        ("slurm: {requeue: true, no_requeue: true}", "slurm.no_requeue", "contradicts requeue, expected one of them"),
        ("after: [7]\nslurm: {dependency: singleton}", "slurm.dependency", "after sets it, expected one of them"),
    ],
)
def test_two_places_that_say_different_things_are_refused(text: str, key: str, message: str) -> None:
    found = problem(text)
    assert (found.key, found.message[: len(message)]) == (key, message)


def test_an_option_for_gpus_on_the_cpu_gets_a_hint_how_to_leave_it_out() -> None:
    assert problem("device: cpu\nslurm: {gpus_per_task: 1}").hint == "slurm.gpus_per_task=false leaves it out"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("container: {image: a, mounts: ['a,b']}", "container.mounts.0"),
        ("container: {image: a, mounts: ['a:b:c:d']}", "container.mounts.0"),
        ("container: {runtime: docker, image: a}", "container.runtime"),
        ("container: {runtime: pyxis}", "container.image"),
        ("after: ['aftersome:x']", "after.0"),
        ("after: ['a b']", "after.0"),
    ],
)
def test_containers_and_dependencies_are_checked_at_their_place(text: str, key: str) -> None:
    assert problem(text).key == key
