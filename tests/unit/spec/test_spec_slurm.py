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
        (
            "slurm: {cpus_per_gpu: 8}\nresources: {cpus_per_task: 8}",
            "slurm.cpus_per_gpu",
            "sbatch takes one of them: both set the cores",
        ),
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


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("slurm: {gres: 'gpu:4'}", 8),
        ("slurm: {gres: 'gpu:a100:4'}", 8),
        ("slurm: {gres: 'nvme:1,gpu:a100:2,gpu:v100:2(S:0-1)'}", 8),
        ("slurm: {gres: gpu}", 2),
        ("slurm: {gres: nvme}", 2),
        ("slurm: {gpus_per_node: 'a100:4'}", 8),
        ("slurm: {gpus: 8}", 8),
        ("slurm: {gpus_per_task: 1}", 2),
        ("slurm: {gpus_per_task: 1}\nresources: {nodes: 2, gpus_per_node: 4}", 8),
        ("slurm: {tres_per_task: 'cpu=8,gres/gpu=1'}\nresources: {nodes: 2, procs_per_node: 3}", 6),
        ("slurm: {gpus_per_socket: 2}\nresources: {nodes: 2, gpus_per_node: 4}", 8),
        ("slurm: {gres: 'gpu:4'}\nlauncher: local", 2),
        ("slurm: {gres: 'gpu:4', gpus_per_node: false}", 8),
    ],
)
def test_the_ranks_follow_the_gpus_that_options_ask_for(text: str, ranks: int) -> None:
    text = text if "resources" in text else f"{text}\nresources: {{nodes: 2}}"
    job = load(text if "launcher" in text else f"launcher: slurm\n{text}")
    assert job.resources.world_size == ranks


UNKNOWN = "which does not say how many GPUs, and so ranks, a node has"


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("slurm: {gpus: 7}\nresources: {nodes: 2}", "slurm.gpus", f'found "7", {UNKNOWN}'),
        ("slurm: {gpus: 7}\nresources: {nodes: 2, gpus_per_node: 4}", "slurm.gpus", f'found "7", {UNKNOWN}'),
        ("slurm: {gpus_per_task: 4}", "slurm.gpus_per_task", f'found "4", {UNKNOWN}'),
        ("slurm: {tres_per_task: 'gres/gpu:2'}", "slurm.tres_per_task", f'found "gres/gpu:2", {UNKNOWN}'),
        ("slurm: {gpus_per_socket: 2}", "slurm.gpus_per_socket", f'found "2", {UNKNOWN}'),
        ("slurm: {gres: 'gpu:4'}\nresources: {gpus_per_node: 8}", "slurm.gres", "asks for 4 GPUs on each node, and "),
        ("slurm: {gpus: 4}\nresources: {gpus_per_node: 8}", "slurm.gpus", "asks for 4 GPUs on each node, and"),
        ("slurm: {gres: 'gpu:2'}\nresources: {procs_per_node: 4}", "resources.procs_per_node", "4 ranks on each node"),
    ],
)
def test_gpus_that_leave_open_how_many_ranks_there_are_are_refused(text: str, key: str, message: str) -> None:
    found = problem(f"launcher: slurm\n{text}")
    assert (found.key, found.message[: len(message)]) == (key, message)
    assert found.hint


def test_a_refusal_of_two_numbers_of_gpus_says_how_to_leave_out_either() -> None:
    found = problem("launcher: slurm\nslurm: {gres: 'gpu:4'}\nresources: {gpus_per_node: 8}")
    assert found.hint == "leave one of them out: ~resources.gpus_per_node, or slurm.gres=false"
