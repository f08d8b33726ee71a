"""The spec's section notify: its values, and what they become in a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.errors import SpecError
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import NotifySpec
from clusterddp.spec.sweep import load_sweep
from clusterddp.view.background import HIDDEN, config_texts
from tests.support.launch_runs import plan_text

ENTRY = "name: a\nentry: {command: [true]}\n"


def notify(text: str, more: str = "") -> NotifySpec:
    spec = load_spec(f"{ENTRY}{more}notify: {text}\n", environ={}).job.notify
    assert spec is not None
    return spec


def refusal(text: str, more: str = "") -> str:
    with pytest.raises(SpecError) as refused:
        notify(text, more)
    return "\n".join(f"{problem.key}: {problem.message}" for problem in refused.value.problems)


def test_the_end_is_what_a_message_is_about_by_default():
    assert notify("{command: mail ada}").on == ("end",)


def test_one_event_needs_no_list():
    assert notify("{on: fail, command: mail ada}").on == ("fail",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{on: crash, command: a}", "notify.on"),
        ("{on: [], command: a}", "notify.on"),
        ("{on: end}", "names no command and no webhook"),
        ("{webhook: https://example.org/hunter2}", "expected ${NAME}"),
        ("{webhook: '${CLUSTERDDP_RUN}'}", "is set by clusterddp"),
    ],
)
def test_a_wrong_value_is_refused(text, said):
    assert said in refusal(text)


def test_an_address_that_is_refused_is_not_shown():
    with pytest.raises(SpecError) as refused:
        notify("{webhook: hooks.example.org/hunter2}")
    assert "hunter2" not in repr(refused.value.problems)


def test_a_sweep_has_one_section_for_all_its_runs():
    with pytest.raises(SpecError) as refused:
        load_sweep(f"{ENTRY}sweep: {{values: {{notify.command: [a, b]}}}}\n", sweep=[], environ={})
    assert "one for the whole sweep" in str(refused.value.problems)


def test_the_variable_of_an_address_is_a_secret_of_the_plan(tmp_path: Path):
    text = f"{ENTRY}notify: {{webhook: '${{HOOK}}'}}\n"
    with pytest.raises(SpecError, match="HOOK is not set"):
        plan_text(text, tmp_path)
    plan = plan_text(text, tmp_path, environ={"PATH": "/bin", "HOOK": "https://example.org/hunter2"})
    assert plan.secrets == ("HOOK",)
    assert "hunter2" not in repr(plan)


def test_a_relative_program_is_one_from_where_the_spec_was_submitted(tmp_path: Path):
    plan = plan_text(f"{ENTRY}notify: {{command: ./notify.sh all}}\n", tmp_path)
    assert plan.gang.notify is not None
    assert plan.gang.notify.command == (f"{tmp_path}/notify.sh", "all")
    assert plan_text(plan.spec_text, Path("/")).gang.notify == plan.gang.notify


def test_the_path_of_an_address_is_in_no_report():
    shown = config_texts({"notify": {"webhook": "https://example.org/hunter2"}})
    assert shown == {"notify.webhook": HIDDEN}
    assert config_texts({"notify": {"webhook": "${HOOK}"}}) == {"notify.webhook": "${HOOK}"}
