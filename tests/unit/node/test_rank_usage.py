"""What ranks use and how fast they are: read from a process, judged by the head, kept in one file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from clusterddp.node.usage_watch import (
    NodeUsage,
    UsageWatch,
    pace_of_collectives,
    pace_of_own_steps,
    parse_apps,
    parse_gpus,
)
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.run.rank_usage import (
    RankUsage,
    Straggler,
    UsageReport,
    read_usage_report,
    warn_of,
    write_usage,
)
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

RANK = """
import sys, time
sys.path.insert(0, sys.argv[1])
from clusterddp.node.stack_hook import answer_stack_requests
answer_stack_requests()
from clusterddp.run.metrics import reached
reached.step, reached.own_step_s = 7, 0.25
ballast = bytearray(64 << 20)
print("up", flush=True)
while True:
    sum(range(10000))
"""


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", RANK, str(ROOT)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def look(node: NodeUsage, found: list[dict[str, object]], pid: int) -> dict[str, object]:
    found.clear()
    node.ask(1.5, 200, {3: pid})

    def answered() -> bool:
        node.tick({3: pid})
        return bool(found)

    wait_until(answered)
    return dict(found[0])


def test_a_node_reports_steps_cores_memory_and_the_gpu_of_its_rank(rank, tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\ncase $1 in --query-gpu=*) echo GPU-a, 3, 10; echo GPU-b, 80, 1024;; "
        f"*) echo GPU-b, {rank.pid};; esac"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found: list[dict[str, object]] = []
    node = NodeUsage(found.append, on_cpu=False)
    first = look(node, found, rank.pid)
    assert (first["kind"], first["asked"]) == ("usage", 1.5)
    assert first["received"] <= first["sent"] <= time.time()
    seen: dict[str, object] = {}

    def is_busy() -> bool:  # on a crowded machine it may get less for a while
        time.sleep(0.3)
        seen.update(look(node, found, rank.pid)["ranks"]["3"])
        return seen["cpu"] > 0.1

    wait_until(is_busy)
    assert (seen["step"], seen["own_step_s"], seen["entered"]) == (7, 0.25, [])
    assert 0.1 < seen["cpu"] < 1.3
    assert 64 << 20 < seen["memory"] < 256 << 20
    assert (seen["gpu"], seen["gpu_memory"]) == (0.8, 1 << 30)
    assert first["ranks"]["3"]["cpu"] is None


def test_a_rank_whose_python_is_stopped_is_reported_without_its_steps(rank, monkeypatch):
    monkeypatch.setattr("clusterddp.node.usage_watch._PATIENCE_S", 0.3)
    found: list[dict[str, object]] = []
    os.kill(rank.pid, 19)
    os.waitpid(rank.pid, os.WUNTRACED)
    seen = look(NodeUsage(found.append, on_cpu=True), found, rank.pid)["ranks"]["3"]
    assert "step" not in seen or seen["step"] is None
    assert seen["memory"] > 64 << 20


def test_a_look_that_is_given_up_leaves_nothing_open(rank, tmp_path, monkeypatch):
    slow = tmp_path / "nvidia-smi"
    slow.write_text("#!/bin/sh\nexec sleep 5\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = sorted(os.listdir("/proc/self/fd"))
    node = NodeUsage(lambda _: None, on_cpu=False)
    node.ask(1.5, 200, {3: rank.pid})
    assert node.asking
    assert len(os.listdir("/proc/self/fd")) == len(before) + 3
    node.close()
    assert not node.asking
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_what_nvidia_smi_prints_is_read_and_a_mig_device_does_not_say_how_busy_it_is():
    assert parse_gpus("GPU-a, 97, 81234\nGPU-b, [N/A], 5\nGPU-c, [Unknown Error], [N/A]\n\n") == {
        "GPU-a": (0.97, 81234 << 20),
        "GPU-b": (None, 5 << 20),
        "GPU-c": (None, None),
    }
    assert parse_apps("GPU-a, 12\nGPU-b, [N/A]\nNo running processes found\n") == [("GPU-a", 12)]


def entered(
    own_s: dict[int, float],
    kinds: tuple[int, ...] = (1, 1, 2),
    *,
    steps: int = 20,
    rare: int | None = 5,
    pauses: dict[tuple[int, int], float] | None = None,
    noise_s: float = 0.001,
) -> dict[int, dict[int, tuple[int, float]]]:
    """Let ranks train in step: each enters the collectives of a step after its own time, all go on after the last.

    `pauses`: seconds by step and rank.
    """
    chance = random.Random(1)
    found: dict[int, dict[int, tuple[int, float]]] = {rank: {} for rank in own_s}
    begins, number = 100.0, 0
    for step in range(steps):
        ready = {
            rank: begins + seconds + chance.uniform(0, noise_s) + (pauses or {}).get((step, rank), 0.0)
            for rank, seconds in own_s.items()
        }
        for place, kind in enumerate(kinds):
            for rank in own_s:
                found[rank][number] = (kind, ready[rank] + place * (0.002 + noise_s / 5))
            number += 1
        begins = max(ready.values()) + len(kinds) * (0.002 + noise_s / 5)
        if rare and step % rare == 0:
            for rank in own_s:
                found[rank][number] = (9, begins + 0.001)
            number += 1
    return found


@pytest.mark.parametrize("kinds", [(1,), (1, 1), (1, 2), (1, 1, 2), (1,) * 24 + (2,)], ids=len)
@pytest.mark.parametrize("rare", [None, 3])
def test_the_rank_for_which_the_others_wait_is_found_by_its_collectives(kinds, rare):
    pace = pace_of_collectives(entered({0: 0.05, 1: 0.05, 2: 0.09, 3: 0.05}, kinds, rare=rare), None)
    step_s = 0.09 + len(kinds) * 0.002
    assert pace.period_s == pytest.approx(step_s, rel=0.08)
    assert pace.late_s[2] == pytest.approx(0.04, abs=0.003)
    assert max(pace.late_s[rank] for rank in (0, 1, 3)) < 0.003
    assert pace.step_s[2] == pytest.approx(pace.period_s)
    assert pace.step_s[0] == pytest.approx(pace.period_s - 0.04, abs=0.003)


def test_one_long_pause_makes_no_straggler_and_no_long_step():
    pace = pace_of_collectives(entered({0: 0.05, 1: 0.05, 2: 0.05}, pauses={(10, 1): 30.0, (15, 2): 60.0}), None)
    assert pace.period_s == pytest.approx(0.056, rel=0.1)
    assert max(pace.late_s.values()) < 0.003


def test_where_ranks_share_cores_the_steps_are_known_all_the_same():
    pace = pace_of_collectives(entered(dict.fromkeys(range(4), 0.01), (1, 2, 3, 4, 5), steps=40, noise_s=0.02), None)
    assert pace.period_s == pytest.approx(0.06, rel=0.2)


@pytest.mark.parametrize("times", [[5.0] * 8, [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]], ids=["equal", "set back"])
def test_times_that_cannot_be_end_nothing(times):
    own = {number: (number % 2, at) for number, at in enumerate(times)}
    pace = pace_of_collectives({0: own, 1: own}, None)
    assert (pace.period_s, pace.late_s) == (None, {})


def test_kinds_whose_collectives_come_at_one_moment_say_nothing_of_a_step():
    own = {step * 4 + place: (place % 2, 100.0 + step) for step in range(10) for place in range(4)}
    assert pace_of_collectives({0: own, 1: own}, None).period_s == pytest.approx(1.0)


def test_too_little_says_nothing():
    alone = pace_of_collectives(entered({0: 0.05}), None)
    assert (alone.period_s, alone.late_s) == (None, {})
    few = pace_of_collectives(entered({0: 0.05, 1: 0.09}, (1, 2), steps=2), 0.1)
    assert (few.period_s, few.late_s) == (0.1, {})
    others = {0: {1: (1, 5.0)}, 1: {1: (2, 5.0)}}
    assert pace_of_collectives(others, None).late_s == {}


def test_what_a_program_measures_itself_is_taken():
    pace = pace_of_own_steps({0: 0.1, 1: 0.1, 2: 0.15}, 0.16)
    assert (pace.period_s, pace.step_s[2]) == (0.16, 0.15)
    assert pace.late_s[2] == pytest.approx(0.05)


class Watched:
    """A head's watch over two nodes of two ranks; the clock of node 1 is an hour ahead."""

    def __init__(self, tmp_path) -> None:
        self.run = RunDir(tmp_path)
        self.attempt = self.run.attempt(0)
        self.attempt.path.mkdir(parents=True)
        nodes = tuple(Node(node_rank=each, host=f"host{each}", ranks=(2 * each, 2 * each + 1)) for each in range(2))
        entry = Entry(kind="script", target="train.py", working_dir="/")
        gang = Gang(run="r", token="t", nodes=nodes, entry=entry, threads_per_rank=1, backend="gloo", master_addr="x")
        self.asked: list[tuple[int, float]] = []
        self.watch = UsageWatch(
            self.run, gang, self.attempt, lambda node, order: self.asked.append((node, order["asked"]))
        )
        self.now = 1000.0

    def look(self, own_s: dict[int, float], delay_s: float = 0.001, **facts) -> UsageReport | None:
        """Wait for the next questions and answer them; return what is in the file then."""
        before = len(self.asked)
        while len(self.asked) == before:
            self.now += 1.0
            self.watch.tick({0, 1}, 1000.0, self.now)
        asked = self.asked[-1][1]
        times = entered(own_s)
        for node, ahead_s in ((0, 0.0), (1, 3600.0)):
            received = asked + ahead_s + (delay_s if node else 0.0)
            began = 200.0 - asked - ahead_s + received
            ranks = {}
            for rank in (2 * node, 2 * node + 1):
                since = [[number, kind, round((at - began) * 1e6)] for number, (kind, at) in times[rank].items()]
                ranks[str(rank)] = {"cpu": 1.0, "memory": 1 << 20, "step": None, "entered": since, **facts}
            sent = time.time() + ahead_s - (delay_s if node else 0.0)
            answer = {"asked": asked, "received": received, "sent": sent, "ranks": ranks}
            self.watch.on_report(node, answer, self.now)
        self.watch.tick({0, 1}, 1000.0, self.now)
        return read_usage_report(self.attempt)

    def events(self) -> list[dict[str, object]]:
        lines = self.run.events.read_text().splitlines() if self.run.events.exists() else []
        return [json.loads(line) for line in lines]


EVEN, SLOW = dict.fromkeys(range(4), 0.05), {0: 0.05, 1: 0.05, 2: 0.05, 3: 0.09}


def test_a_straggler_on_a_node_with_another_clock_is_named_after_two_looks_and_until_it_is_none(tmp_path):
    watched = Watched(tmp_path)
    assert watched.look(SLOW).stragglers == ()
    (straggler,) = watched.look(SLOW).stragglers
    assert (straggler.rank, straggler.host) == (3, "host1")
    assert straggler.late_s == pytest.approx(0.04, abs=0.004)
    assert watched.look(EVEN).stragglers == ()
    assert [(event["event"], event["rank"]) for event in watched.events()] == [("straggler", 3), ("straggler_over", 3)]
    assert "rank 3 on host1 is a straggler: the others wait " in watched.events()[0]["text"]


def test_where_the_clocks_are_not_known_well_enough_no_rank_is_named(tmp_path):
    watched = Watched(tmp_path)
    for _ in range(3):
        assert watched.look(SLOW, delay_s=0.05).stragglers == ()


def test_looks_get_rarer_and_the_file_keeps_the_past(tmp_path):
    watched = Watched(tmp_path)
    moments = []
    for _ in range(40):
        report = watched.look(EVEN)
        moments.append(watched.now - 1000)
    assert moments[0] == 5
    assert moments[1] - moments[0] == 10
    assert moments[-1] - moments[-2] == 30
    assert report.ranks[0].cpu == 1.0


@pytest.mark.parametrize("nonsense", [{"entered": [[1, 2]]}, {"cpu": "1"}, {"entered": 3}])
def test_an_answer_that_is_none_leaves_its_ranks_out(tmp_path, nonsense):
    watched = Watched(tmp_path)
    assert watched.look(EVEN, **nonsense) is None


def test_the_file_is_read_back_and_a_damaged_one_counts_as_none(tmp_path):
    attempt = RunDir(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    assert read_usage_report(attempt) is None
    report = UsageReport(time=1.0, ranks=(RankUsage(rank=0, cpu=1.5),))
    write_usage(attempt, report)
    assert read_usage_report(attempt) == report
    for text in ("", "[]", '{"time": "x"}'):
        attempt.usage.write_text(text)
        assert read_usage_report(attempt) is None


def test_stragglers_are_named_in_one_line():
    two = [Straggler(rank=rank, host="gpu02", late_s=0.0412, period_s=0.13) for rank in (4, 5)]
    assert warn_of(two[:1]) == ("rank 4 on gpu02 is a straggler: the others wait 41.2 ms of each step of 130 ms (32%)")
    assert warn_of(two).startswith("ranks 4-5 on gpu02 are stragglers: ")
    assert warn_of([]) == ""
