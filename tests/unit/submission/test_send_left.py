"""What a later command sends of a run: only its user's own messages, once, and for a day."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.places.staging import make_run
from clusterddp.places.state import read_state
from clusterddp.run.attempts import failed, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import log_event, read_events
from clusterddp.run.seal import sealed
from clusterddp.submission.notices import send_left
from clusterddp.system.files import read_json, read_jsonl, write_json
from clusterddp.view.events import warn_of_unsent
from tests.support.launch_runs import plan_text
from tests.support.webhook import PATH, Webhook

SPEC = "name: a\nentry: {{command: [true]}}\nnotify: {{{keys}}}\n"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as webhook:
        yield webhook


def ended_run(place: Path, keys: str, *, ago_s: float = 60.0, environ: dict[str, str] | None = None) -> RunDir:
    """Make a run that has failed some time ago, and whose head has sent nothing."""
    environ = dict(os.environ) | (environ or {})
    run = RunDir(make_run(plan_text(SPEC.format(keys=keys), place, environ=environ), environ).run_dir)
    end = dataclasses.replace(failed("rank 1 exited with code 3"), ended=time.time() - ago_s)
    log_event(run, "attempt_ended", attempt=0)
    write_end(run.attempt(0), end)
    return run


def send(run: RunDir, **environ: str) -> None:
    send_left(run, read_state(run), dict(os.environ) | environ, patience_s=30.0)


def test_a_command_sends_what_the_head_could_not(tmp_path: Path, webhook: Webhook):
    run = ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url})
    send(run, HOOK=webhook.url)
    send(run, HOOK=webhook.url)
    assert [message["text"] for message in webhook.received] == [f"{run.name} FAILED: rank 1 exited with code 3"]
    assert webhook.paths == [PATH]
    assert [row["event"] for row in read_jsonl(run.events)] == ["attempt_ended", "notified"]
    assert not any("hunter2" in path.read_text() for path in run.path.rglob("*.*") if path.is_file())


def test_a_command_that_lacks_the_address_leaves_it_to_another(tmp_path: Path, webhook: Webhook):
    run = ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url})
    send_left(run, read_state(run), os.environ)
    assert not run.notices.exists()
    send(run, HOOK=webhook.url)
    assert len(webhook.received) == 1


def test_a_warning_goes_when_a_later_try_succeeds(tmp_path: Path, webhook: Webhook):
    run = ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url})
    log_event(run, "notify_failed", attempt=0, what="end", by="webhook", error="127.0.0.1 cannot be reached")
    assert warn_of_unsent(read_events(run)) == "notify.webhook was not sent (end): 127.0.0.1 cannot be reached"
    send(run, HOOK=webhook.url)
    assert warn_of_unsent(read_events(run)) == ""


def test_a_redirect_is_not_followed(tmp_path: Path):
    with Webhook() as elsewhere, Webhook(302, elsewhere.url) as webhook:
        run = ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url})
        send(run, HOOK=webhook.url)
        assert (len(webhook.received), len(elsewhere.received)) == (2, 0)
    assert "HTTP 302, a redirect" in warn_of_unsent(read_events(run))
    assert "hunter2" not in run.events.read_text()


def test_a_plan_that_another_user_has_changed_sends_nothing(tmp_path: Path, webhook: Webhook):
    run = ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url})
    plan = read_json(run.plan)
    assert plan
    plan["gang"]["notify"]["command"] = ["touch", str(tmp_path / "pwned")]
    write_json(run.plan, plan)
    send(run, HOOK=webhook.url)
    assert webhook.received == []
    assert not (tmp_path / "pwned").exists()
    assert not run.notices.exists()


def test_a_plan_of_another_users_key_sends_nothing(tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch):
    run = ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    send(run, HOOK=webhook.url)
    assert webhook.received == []


def test_the_seal_of_one_run_is_none_for_another(tmp_path: Path, webhook: Webhook):
    first, second = (ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url}) for _ in range(2))
    plan, other = read_json(second.plan), read_json(first.plan)
    assert plan
    assert other
    write_json(second.plan, plan | {"seal": other["seal"]})
    send(second, HOOK=webhook.url)
    assert webhook.received == []


def test_nothing_is_sent_a_day_after_the_end(tmp_path: Path, webhook: Webhook):
    send(ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url}, ago_s=25 * 3600.0), HOOK=webhook.url)
    assert webhook.received == []


def test_a_command_gets_the_message_in_its_environment_and_on_standard_input(tmp_path: Path):
    script = 'cat > message; echo "$CLUSTERDDP_RUN $CLUSTERDDP_EVENT $CLUSTERDDP_STATE $CLUSTERDDP_REASON" > said'
    run = ended_run(tmp_path, f"on: [end, fail], command: [sh, -c, '{script}']")
    send(run)
    assert (run.path / "said").read_text() == f"{run.name} fail FAILED rank 1 exited with code 3\n"
    message = read_json(run.path / "message")
    assert message
    assert message["run"] == run.name


def test_a_command_that_fails_is_a_warning_with_its_last_words(tmp_path: Path):
    run = ended_run(tmp_path, "command: [sh, -c, 'echo no pager here >&2; exit 4']")
    send(run)
    said = warn_of_unsent(read_events(run))
    assert said == "notify.command was not sent (end): sh ended with exit code 4: no pager here"


def test_a_message_that_the_head_may_be_sending_is_left_to_it(tmp_path: Path, webhook: Webhook):
    run = ended_run(tmp_path, "webhook: '${HOOK}'", ago_s=5.0, environ={"HOOK": webhook.url})
    send_left(run, read_state(run), dict(os.environ) | {"HOOK": webhook.url})
    assert webhook.received == []
    assert not run.notices.exists()


def test_a_plan_of_an_earlier_version_still_has_the_address(tmp_path: Path, webhook: Webhook):
    run = ended_run(tmp_path, "webhook: '${HOOK}'", environ={"HOOK": webhook.url})
    plan = read_json(run.plan)
    assert plan
    plan["gang"]["notify"]["webhook"] = webhook.url
    write_json(run.plan, sealed(plan))
    send(run)
    assert len(webhook.received) == 1
