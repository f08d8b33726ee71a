"""Messages about a run: what they say, and of which ends there is one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from clusterddp.run.attempts import AttemptEnd, cancelled, failed
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Notify
from clusterddp.run.notices import HelperOrder, claim, message, message_of_end, view_of_sweep
from clusterddp.run.state import RunState, RunView, final_view
from clusterddp.wire import build

NOTIFY = Notify(on=("end",), webhook="${HOOK}")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "calm-otter-1")
    run.path.mkdir()
    return run


def test_a_message_is_claimed_once(run: RunDir):
    assert claim(run, "end-0-webhook")
    assert not claim(run, "end-0-webhook")
    assert claim(run, "end-0-mail")


def test_only_a_failure_is_sent_where_the_spec_says_fail(run: RunDir):
    notify = Notify(on=("fail",), webhook="https://example.org")
    assert message_of_end(notify, run, final_view(run.attempt(0), AttemptEnd(outcome="COMPLETED", reason=""))) is None
    assert message_of_end(notify, run, final_view(run.attempt(0), cancelled("by ada"))) is None
    end = failed("rank 3 exited with code 1", host="node01")
    about = message_of_end(notify, run, final_view(run.attempt(0), end))
    assert about is not None
    assert (about.event, about.state) == ("fail", "FAILED")
    assert about.text == "calm-otter-1 FAILED: rank 3 exited with code 1"


def test_an_attempt_that_is_followed_by_another_is_no_end(run: RunDir):
    view = RunView(state=RunState.REQUEUED, attempt=1, end=None, reason="rank 3 left")
    assert message_of_end(NOTIFY, run, view) is None
    about = message_of_end(dataclasses.replace(NOTIFY, on=("requeue",)), run, view)
    assert about is not None
    assert about.text == "calm-otter-1 REQUEUED (attempt 1): rank 3 left"


def test_a_reason_is_one_line_and_no_mention_for_a_chat(run: RunDir):
    about = message("end", run, 0, RunState.FAILED, "rank 0:\n <!channel>\x1b[31m & more")
    assert about.reason == "rank 0: <!channel> [31m & more"
    assert about.to_json()["text"].endswith("rank 0: &lt;!channel&gt; [31m &amp; more")
    assert about.to_json()["schema"] == 1


def test_a_sweep_has_one_message_for_all_its_runs(tmp_path: Path):
    views = [RunView(state=state, attempt=1, end=None, reason="") for state in (RunState.COMPLETED, RunState.FAILED)]
    about = message_of_end(NOTIFY, RunDir(tmp_path / "big-owl-2"), view_of_sweep(views))
    assert about is not None
    assert about.text == "big-owl-2 FAILED (attempt 2): 1 COMPLETED, 1 FAILED"


def test_an_order_survives_its_way_to_the_process_that_sends(run: RunDir):
    about = message("end", run, 0, RunState.COMPLETED, "")
    sent = HelperOrder(notify=NOTIFY, message=about, channel="webhook")
    assert build(HelperOrder, json.loads(json.dumps(dataclasses.asdict(sent)))) == sent
