"""The preflight: what the head makes of what its nodes have measured, round by round."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from clusterddp.node import preflight
from clusterddp.node.preflight import NodeHealth, Preflight, compare, compare_links, judge_gpus, measure_node
from tests.support.handmade_runs import make_gang

FAST = NodeHealth(core=1, mbyte_per_s=800.0, share=0.99, free=0.9)
HELD = NodeHealth(core=0, mbyte_per_s=160.0, share=0.2, free=0.9)
HOT = NodeHealth(core=3, mbyte_per_s=240.0, share=0.98, free=0.9)


def gang_of(count: int):
    gang = make_gang(nodes=count, per_node=1)
    nodes = tuple(dataclasses.replace(node, host=f"node{node.node_rank}") for node in gang.nodes)
    return dataclasses.replace(gang, nodes=nodes)


class Nodes:
    """The head's side, and the orders that it has sent."""

    def __init__(self, count: int) -> None:
        self.orders: list[tuple[int, dict]] = []
        self.head = Preflight(gang_of(count), lambda node_rank, order: self.orders.append((node_rank, order)))
        for node_rank in range(count):
            self.head.expect(node_rank, 0.0)

    def report(self, *found: NodeHealth) -> bool:
        for node_rank, health in enumerate(found):
            self.head.on_report(node_rank, {"kind": "preflight", "awaited": True, **dataclasses.asdict(health)})
        return self.head.is_over(1.0)

    def findings(self) -> list[tuple[int, bool]]:
        return [(each.node_rank, each.failed) for each in self.head.take()]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (HELD, "core 0 computes at 20% of the other nodes' speed: it has 20% of its time, another process or a limit"),
        (HOT, "core 3 computes at 30% of the other nodes' speed: heat, or a lower clock"),
        (dataclasses.replace(FAST, mbyte_per_s=410.0, share=0.5), "core 1 computes at 51%"),
        (dataclasses.replace(FAST, free=0.2), "20% of its memory is free, on the other nodes 90%"),
    ],
)
def test_what_is_slow_beside_the_others_is_said(node: NodeHealth, words: str) -> None:
    found = compare({0: FAST, 1: node, 2: FAST})
    assert list(found) == [1]
    assert found[1].startswith(words)


def test_nodes_that_are_alike_or_alone_are_not_slow() -> None:
    assert compare({0: HELD, 1: HELD}) == {}
    assert compare({0: HELD}) == {}
    assert compare({0: FAST, 1: dataclasses.replace(FAST, mbyte_per_s=520.0, share=0.65)}) == {}


def test_a_node_is_slow_that_is_so_in_three_rounds() -> None:
    nodes = Nodes(2)
    assert nodes.report(FAST, HELD) is False
    assert nodes.orders == [(0, {"kind": "preflight", "seconds": 0.3}), (1, {"kind": "preflight", "seconds": 0.3})]
    assert nodes.report(FAST, HELD) is False
    assert nodes.report(FAST, HELD) is True
    assert nodes.findings() == [(1, False)]
    assert nodes.head.is_over(99.0) is True
    assert nodes.findings() == []


@pytest.mark.parametrize("rounds", [[HELD, FAST], [HELD, HELD, FAST]])
def test_a_node_that_is_slow_for_a_moment_is_not_marked(rounds: list[NodeHealth]) -> None:
    nodes = Nodes(3)
    assert [nodes.report(FAST, FAST, found) for found in rounds] == [False] * (len(rounds) - 1) + [True]
    assert nodes.findings() == []


def test_another_node_that_is_slow_later_is_not_marked() -> None:
    nodes = Nodes(3)
    assert nodes.report(FAST, FAST, HELD) is False
    assert nodes.report(HELD, FAST, FAST) is True
    assert nodes.findings() == []


def test_a_preflight_that_hangs_holds_a_start_for_three_seconds() -> None:
    nodes = Nodes(2)
    nodes.head.on_report(0, {"kind": "preflight", "awaited": True, **dataclasses.asdict(FAST)})
    assert nodes.head.is_over(2.9) is False
    assert nodes.head.is_over(3.0) is True
    assert nodes.findings() == [(1, False)]


def test_a_child_that_failed_holds_no_start() -> None:
    nodes = Nodes(2)
    assert nodes.report(FAST) is False
    nodes.head.on_report(1, {"kind": "preflight", "awaited": True})
    assert nodes.head.is_over(0.1) is True


def test_what_all_nodes_lack_is_no_node_s_fault_and_what_fails_counts_all_the_same() -> None:
    full = dataclasses.replace(FAST, slow=("TMPDIR /tmp cannot be written: No space left on device",))
    nodes = Nodes(2)
    nodes.report(full, full)
    assert nodes.findings() == []
    nodes.report(full, FAST)
    assert nodes.findings() == [(0, False)]
    nodes.report(FAST, dataclasses.replace(FAST, failed=("the disk is gone",)))
    assert nodes.findings() == [(1, True)]


def test_a_slow_link_is_measured_again_alone_before_it_counts() -> None:
    nodes = Nodes(4)
    for node_rank, speed in ((1, 110.0), (2, 8.0), (3, 110.0)):
        nodes.head.on_report(node_rank, {"kind": "preflight", "link": speed})
    assert nodes.orders == [(2, {"kind": "preflight", "link": True})]
    assert nodes.findings() == []
    nodes.head.on_report(2, {"kind": "preflight", "link": 9.0})
    assert nodes.findings() == [(2, False)]


def test_fast_links_are_not_compared() -> None:
    assert compare_links({1: 900.0, 2: 70.0}) == {}
    assert compare_links({1: 8.0}) == {}
    assert compare_links({1: 110.0, 2: 20.0}) == {2: "its link to node 0 carries 20 MB/s, the others 110"}


def test_this_machine_is_measured(tmp_path: Path) -> None:
    found = measure_node({"here": tmp_path}, cores=1, seconds=0.02)
    assert found.core in os.sched_getaffinity(0)
    assert found.mbyte_per_s > 0
    assert 0 < found.free <= 1
    assert (found.failed, found.slow) == ((), ())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "failed", "slow"),
    [(errno.EROFS, 1, 0), (errno.EIO, 1, 0), (errno.ENOSPC, 0, 1), (errno.ENOENT, 0, 0)],
)
def test_a_sick_disk_fails_and_a_full_one_is_slow(
    number: int, failed: int, slow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(preflight.os, "fsync", refuse)
    found = measure_node({"TMPDIR": tmp_path}, cores=1, seconds=0.01)
    assert (len(found.failed), len(found.slow)) == (failed, slow)
    assert all(str(tmp_path) in text and os.strerror(number) in text for text in found.failed + found.slow)


def test_a_gpu_that_is_lost_fails_a_start() -> None:
    text = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover\n"
    assert judge_gpus(text, "", up_s=10.0).failed == (text.strip(),)
    assert judge_gpus("No devices were found\n", "", up_s=10.0).failed == ("No devices were found",)


def test_sick_gpus_are_named_by_nvidia_smi_and_by_the_kernel() -> None:
    log = (
        "4,811,90000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.\n"
        "4,812,91000000,-;NVRM: Xid (PCI:0000:5e:00): 31, pid=1234, Ch 00000008\n"  # the program's own fault
    )
    found = judge_gpus("0, 0, Not Active\n1, 2, Not Active\n2, [N/A], Active\n", log, up_s=100.0)
    assert found.failed == ()
    assert found.slow == (
        "GPU 1 has 2 uncorrectable memory errors",
        "GPU 2 is slowed down by its hardware: heat or power",
        "Xid 79 of GPU 0000:3b:00: fallen off the bus",
    )
    assert judge_gpus("", log, up_s=90_000.0).slow == ()  # of yesterday
