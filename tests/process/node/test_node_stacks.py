"""Where the ranks of a real gang are: asked by a file, found out when it hangs, named when it is ended."""

from __future__ import annotations

import json
import os
import signal

from clusterddp.node.rank_probe import find_memory, takes_signal
from clusterddp.run.rank_usage import UsageReport, read_usage_report
from clusterddp.run.stacks import Folded, RankStack, StackReport, fold, read_report, request_stacks
from tests.support.gang_runs import GangRun, running
from tests.support.waiting import wait_until

GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(8)
def step():
    dist.all_reduce(ones)
for _ in range(3):
    step()
"""
ONE_SLEEPS = """
up()
if rank == 1:
    time.sleep(600)
step()
"""
HOLDS_THE_GIL = """
up()
if rank == 3:
    sum(iter(int, 1))
forever()
"""


def stacks_of(gang: GangRun) -> StackReport:
    """Ask for stacks as the command does, and wait for the report."""
    wanted = request_stacks(gang.attempt())
    return wait_until(lambda: read_report(gang.attempt(), wanted), what=gang.logs)


def folded(gang: GangRun) -> Folded:
    return fold(stacks_of(gang))


def usage_of(gang: GangRun) -> UsageReport | None:
    return read_usage_report(gang.attempt())


def events_of(gang: GangRun, kind: str) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in gang.run.events.read_text().splitlines()] if gang.run.events.exists() else []
    return [row for row in rows if row["event"] == kind]


def test_a_rank_that_sleeps_while_the_others_reduce_is_named_and_ends_the_run(tmp_path):
    with running(tmp_path, GROUP + ONE_SLEEPS, hang="fail", hang_after_s=25.0) as gang:
        gang.await_up()
        found = wait_until(lambda: (now := folded(gang)).verdict == "hang" and now, what=gang.logs)
        first, second = found.groups
        assert first.text.startswith("rank 1 on host0 is in <module> (program.py:")
        assert first.text.endswith("time.sleep(600)), and has not entered all_reduce #4")
        assert second.ranks == (0, 2, 3)
        assert second.text.startswith("3 ranks wait in all_reduce #4 (called from program.py:")
        assert not gang.attempt().stacks_request.exists()

        stopped = gang.ranks()[2].pid
        os.kill(stopped, signal.SIGSTOP)
        assert folded(gang).groups[0].text == "rank 2 on host1 is stopped by a signal"
        os.kill(stopped, signal.SIGCONT)

        assert gang.await_end(60) == [1, 1]
        cause = gang.end().root_cause
        assert cause.rank == 1
        assert cause.host == "host0"
        assert cause.error.startswith("hang: no progress for ")
        assert "rank 1 on host0 is in <module> (program.py:" in cause.error
        assert [event["ranks"] for event in events_of(gang, "hang")] == [[1]]
        assert read_report(gang.attempt(), "hang-0") is not None


def test_a_rank_for_which_the_others_wait_is_named_though_its_script_reports_nothing(tmp_path):
    slow = "up()\nwhile True:\n    time.sleep(0.15 if rank == 3 else 0.05)\n    step()\n"
    with running(tmp_path, GROUP + slow) as gang:
        gang.await_up()
        seen = wait_until(lambda: (now := usage_of(gang)) and now.stragglers and now, what=gang.logs)
        (straggler,) = seen.stragglers
        assert (straggler.rank, straggler.host) == (3, "host1")
        assert 0.05 < straggler.late_s < straggler.period_s
        first, last = seen.ranks[0], seen.ranks[3]
        assert first.step_s < 0.7 * last.step_s
        assert last.memory > 64 << 20
        assert [event["rank"] for event in events_of(gang, "straggler")] == [3]


def test_a_rank_whose_c_code_holds_the_gil_has_a_stack_and_does_not_answer(tmp_path):
    with running(tmp_path, HOLDS_THE_GIL) as gang:
        gang.await_up()
        ranks = wait_until(lambda: (ranks := stacks_of(gang).ranks)[3].answers is False and ranks, what=gang.logs)
        assert [each.answers for each in ranks] == [True, True, True, False]
        assert ranks[3].frames[0].source == "sum(iter(int, 1))"


def test_a_rank_that_gave_the_signal_back_is_not_signalled(tmp_path):
    with running(tmp_path, "signal.signal(signal.SIGRTMIN + 7, signal.SIG_DFL)\nup()\nsum(iter(int, 1))") as gang:
        gang.await_up()

        def silent() -> tuple[RankStack, ...]:
            found = stacks_of(gang).ranks
            return () if any(each.answers for each in found) else found

        ranks = wait_until(silent)
        assert {each.missing for each in ranks} == {"it does not answer, and takes no signal"}
        assert all(find_memory(each.pid) and not takes_signal(each.pid) for each in ranks)


def test_ranks_that_wait_in_init_process_group_are_reported_with_the_usual_reasons_and_started_again(tmp_path):
    program = 'import torch.distributed as dist\nup()\ndist.init_process_group("gloo", rank=rank, world_size=3)\n'
    with running(tmp_path, program, nodes=1, hang="restart", hang_after_s=12.0, restarts=1) as gang:
        gang.await_up(1)
        error = gang.end().root_cause.error
        assert gang.end().will_restart
        assert ": 2 ranks wait in init_process_group (called from program.py:" in error
        assert "its world_size is not 2, the number of ranks of the run" in error
        gang.run.cancel_file.touch()
        gang.await_end()
