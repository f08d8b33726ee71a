"""Messages about a run: what they say, and which process may send each of them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Notify
from clusterddp.run.notices import (
    Message,
    SendOrder,
    Try,
    claim,
    message,
    message_of_end,
    message_of_sweep,
    next_try,
    settle,
)
from clusterddp.run.outcome import AttemptEnd, cancelled, failed
from clusterddp.run.sweep import SweepDir
from clusterddp.run.view import RunState, RunView
from clusterddp.system.files import read_jsonl, write_json

NOTIFY = Notify(on=("end",), webhook="https://example.org")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "calm-otter-1")
    run.path.mkdir()
    run.record.write_text("{}")
    return run


def order(run: RunDir, *, is_first: bool = True, age_s: float = 0.0) -> SendOrder:
    about = message("end", run, 0, RunState.COMPLETED, "", at=time.time() - age_s)
    return SendOrder(folder=run.notices, notify=NOTIFY, message=about, channels=("webhook",), is_first=is_first)


def test_a_message_is_claimed_once(run: RunDir):
    assert claim(order(run), "webhook") is not None
    assert claim(order(run), "webhook") is None


def test_each_channel_is_claimed_by_itself(run: RunDir):
    assert claim(order(run), "webhook") is not None
    assert claim(order(run), "mail") is not None


def test_the_next_attempt_has_a_message_of_its_own(run: RunDir):
    first = order(run)
    assert claim(first, "webhook") is not None
    again = dataclasses.replace(first, message=dataclasses.replace(first.message, attempt=1))
    assert claim(again, "webhook") is not None


def test_an_end_and_a_failure_are_one_event(run: RunDir):
    first = order(run)
    assert claim(first, "webhook") is not None
    failure = dataclasses.replace(first, message=dataclasses.replace(first.message, event="fail"))
    assert claim(failure, "webhook") is None


def test_the_head_has_ten_seconds_to_try_first(run: RunDir):
    assert next_try(order(run, is_first=False, age_s=1.0), "webhook") is None
    assert next_try(order(run, is_first=False, age_s=11.0), "webhook") is not None


def test_another_process_takes_over_when_the_head_cannot_send(run: RunDir):
    first = order(run)
    path = claim(first, "webhook")
    assert path is not None
    settle(first, "webhook", path, "example.org cannot be reached")
    assert claim(order(run, is_first=False), "webhook") is None, "the same host cannot, either"
    write_json(path, dataclasses.asdict(Try(time=time.time(), host="node07", pid=1, sent=False, error="no")))
    second = claim(order(run, is_first=False), "webhook")
    assert second is not None
    settle(first, "webhook", second, None)
    assert claim(order(run, is_first=False), "webhook") is None
    assert [row["event"] for row in read_jsonl(run.events)] == ["notify_failed", "notified"]


def test_a_later_failure_is_followed_by_a_pause_wherever_it_was(run: RunDir):
    run.notices.mkdir()
    for number in range(2):
        failed_try = Try(time=time.time(), host="node07", pid=1, sent=False, error="no")
        write_json(run.notices / f"end-0-webhook.{number}.json", dataclasses.asdict(failed_try))
    assert next_try(order(run), "webhook") is None


def test_no_try_is_left_after_five(run: RunDir):
    run.notices.mkdir()
    for number in range(5):
        failed_try = Try(time=0.0, host="a", pid=1, sent=False, error="no")
        write_json(run.notices / f"end-0-webhook.{number}.json", dataclasses.asdict(failed_try))
    assert next_try(order(run), "webhook") is None


def test_a_try_whose_process_was_killed_is_taken_over_after_a_minute(run: RunDir):
    run.notices.mkdir()
    path = run.notices / "end-0-webhook.0.json"
    write_json(path, dataclasses.asdict(Try(time=time.time() - 50, host="a", pid=1)))
    assert next_try(order(run), "webhook") is None
    write_json(path, dataclasses.asdict(Try(time=time.time() - 70, host="a", pid=1)))
    assert next_try(order(run), "webhook") is not None


def test_only_a_failure_is_sent_where_the_spec_says_fail(run: RunDir):
    notify = Notify(on=("fail",), webhook="https://example.org")
    assert message_of_end(notify, run, 0, AttemptEnd(outcome="COMPLETED", reason="")) is None
    assert message_of_end(notify, run, 0, cancelled("by ada")) is None
    about = message_of_end(notify, run, 0, failed("rank 3 exited with code 1", host="node01"))
    assert about is not None
    assert (about.event, about.state) == ("fail", "FAILED")
    assert about.text == "calm-otter-1 FAILED: rank 3 exited with code 1"


def test_an_attempt_that_is_followed_by_another_is_no_end(run: RunDir):
    end = failed("rank 3 left", host="node01", goes_on=True)
    assert message_of_end(NOTIFY, run, 0, end) is None
    about = message_of_end(dataclasses.replace(NOTIFY, on=("requeue",)), run, 1, end)
    assert about is not None
    assert about.text == "calm-otter-1 REQUEUED (attempt 1): rank 3 left"


def test_a_reason_is_one_line_and_no_mention_for_a_chat(run: RunDir):
    about = message("end", run, 0, RunState.FAILED, "rank 0:\n <!channel>\x1b[31m & more")
    assert about.reason == "rank 0: <!channel> [31m & more"
    assert about.to_json()["text"].endswith("rank 0: &lt;!channel&gt; [31m &amp; more")
    assert about.to_json()["schema"] == 1


def test_a_sweep_has_one_message_for_all_its_runs(tmp_path: Path):
    views = [RunView(state=state, attempt=1, end=None, reason="") for state in (RunState.COMPLETED, RunState.FAILED)]
    about = message_of_sweep(NOTIFY, SweepDir(tmp_path / "big-owl-2"), views)
    assert about is not None
    assert about.text == "big-owl-2 FAILED (attempt 2): 1 COMPLETED, 1 FAILED"


def test_an_order_survives_its_way_to_the_process_that_sends(run: RunDir):
    sent = order(run)
    assert SendOrder.from_json(sent.to_json()) == sent
    assert isinstance(sent.message, Message)
