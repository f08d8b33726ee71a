"""The elastic section: which sizes fit, and how many hosts a run over SSH then has."""

from __future__ import annotations

import pytest

from clusterddp.errors import SpecError
from clusterddp.spec.hosts import share_out, unused_hosts
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import JobSpec

HOSTS = "name: x\nlauncher: ssh\nrestarts: 3\nssh: {hosts: [a, b, c, d]}\n"


def load(text: str) -> JobSpec:
    return load_spec(text, environ={}).job


def message_of(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(text)
    (problem,) = caught.value.problems
    return problem.message


def test_spares_are_hosts_beyond_the_nodes() -> None:
    job = load(HOSTS + "resources: {nodes: 2}\nelastic: {spares: 1}\n")
    assert [share.host.host for share in share_out(job)] == ["a", "b", "c"]
    assert unused_hosts(job) == ("d",)


def test_without_a_number_of_nodes_all_hosts_but_the_spares_are_nodes() -> None:
    assert load(HOSTS + "elastic: {spares: 1}\n").resources.nodes == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HOSTS + "elastic: {min_nodes: 5}\n", "found 5, expected at most the 4 nodes"),
        (HOSTS + "resources: {nodes: 3}\nelastic: {spares: 2}\n", "4 hosts for 3 nodes and 2 spares"),
        (
            HOSTS.replace("restarts: 3", "restarts: 0") + "elastic: {min_nodes: 2}\n",
            "a lost node uses up a restart, and restarts is 0",
        ),
        (
            "name: x\nlauncher: slurm\nrestarts: 3\nresources: {nodes: 2}\nslurm: {gpus: 4}\nelastic: {spares: 1}\n",
            "it counts the GPUs of all nodes, and does not say how many are a spare's",
        ),
        (
            HOSTS + "elastic: {spares: 1}\nentry: {command: torchrun train.py, owns_ranks: true}\n",
            "is for ranks that clusterddp starts, and this program starts its own",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    assert message_of(text) == message
