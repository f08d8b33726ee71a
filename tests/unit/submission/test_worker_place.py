"""Which of several hosts this one is, by all of its addresses and names."""

from __future__ import annotations

import pytest

from clusterddp.errors import PreflightError
from clusterddp.places.worker.place import find_own_index

NAMES = ("gpu02.lab", "gpu02")
ADDRESSES = {"10.0.0.12": "eth0", "192.168.7.2": "ib0", "172.17.0.1": "docker0"}


def find(*hosts: str | tuple[str, str]) -> int:
    pairs = [(host, "") if isinstance(host, str) else host for host in hosts]
    return find_own_index([(host, found.split()) for host, found in pairs], NAMES, ADDRESSES)


@pytest.mark.parametrize(
    "hosts",
    [
        [("10.0.0.11", "10.0.0.11"), ("10.0.0.12", "10.0.0.12")],
        [("a", "192.168.7.1"), ("b", "192.168.7.2")],
        [("a", "10.0.0.11"), ("ana@b", "10.9.9.9 10.0.0.12")],
        ["gpu01", "gpu02"],
        ["gpu01", "GPU02.lab"],
        ["gpu01", "ana@gpu02.lab."],
        [("gpu01", "10.0.0.11"), ("gpu02", "127.0.1.1")],
    ],
)
def test_any_own_address_or_name_identifies_the_machine(hosts: list[str | tuple[str, str]]) -> None:
    assert find(*hosts) == 1


def test_a_machine_that_is_none_of_the_hosts_is_refused_with_all_addresses() -> None:
    with pytest.raises(PreflightError) as caught:
        find(("10.0.0.11", "10.0.0.11"), "gpu07")
    assert caught.value.message == (
        "this machine, gpu02.lab (10.0.0.12 on eth0, 192.168.7.2 on ib0, 172.17.0.1 on docker0), is none of the hosts "
        "of the spec: 10.0.0.11, gpu07 (a name that is not known here)"
    )


def test_a_machine_that_is_two_of_the_hosts_is_refused_with_the_reason() -> None:
    with pytest.raises(PreflightError) as caught:
        find(("a", "10.0.0.12"), ("b", "192.168.7.2"))
    assert "is 2 of the hosts of the spec: node 0 (a): 10.0.0.12 is on its eth0; node 1 (b): 192.168.7.2" in str(
        caught.value
    )


def test_a_name_that_means_another_machine_here_is_not_this_one_though_it_begins_alike() -> None:
    with pytest.raises(PreflightError):
        find(("gpu02.other", "10.0.0.99"))
