"""Pages and pictures that are made of the code are what today's code makes, and `clusterddp help` prints them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.cli.help_ import TOPICS
from clusterddp.cli.main import _COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]
OWN_VARIABLE = re.compile(r"\bCLUSTERDDP_[A-Z]+(?:_[A-Z]+)*\b")
NO_VARIABLES = {"CLUSTERDDP_COMPLETE"}
"""The name that click gives to its own variable begins with an underscore."""


def test_generated_pages_and_pictures_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/write_docs", "--check"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), (
        f"run .venv/bin/python tools/write_docs\n{done.stdout}{done.stderr}"
    )


def test_every_variable_of_ours_is_on_the_page_of_variables() -> None:
    used = {
        name
        for path in (ROOT / "clusterddp").rglob("*.py")
        for name in OWN_VARIABLE.findall(path.read_text())
        if name not in NO_VARIABLES
    }
    documented = set(OWN_VARIABLE.findall((ROOT / "docs/reference/environment.md").read_text()))
    assert used - documented == set()


def test_the_picture_of_the_plan_has_its_ranks_and_changed_values() -> None:
    text = re.sub(r"<[^>]+>", "", (ROOT / "docs/pictures/plan.svg").read_text()).replace("&#160;", " ")
    assert "2 nodes x 8 = 16 ranks" in text
    assert "train.checkpoint_every=10" in text


@pytest.mark.parametrize("topic", TOPICS)
def test_help_prints_a_topic(topic: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help", topic]) == 0
    assert capfd.readouterr().out == (ROOT / f"docs/reference/{topic}.md").read_text()


def test_every_page_of_the_reference_is_a_topic() -> None:
    assert {path.stem for path in (ROOT / "docs/reference").glob("*.md")} == set(TOPICS)


def test_help_lists_its_topics(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    out = capfd.readouterr().out
    assert [topic for topic in TOPICS if f"  {topic} " not in out] == []


@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_help_prints_the_options_of_a_command(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    if command in TOPICS:
        pytest.skip("a topic of that name is printed")
    assert main(["help", command]) == 0
    asked = capfd.readouterr().out
    assert main([command, "-h"]) == 0
    assert asked == capfd.readouterr().out


def test_help_of_an_unknown_topic_names_the_topics(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "frobnicate"]) == 2
    assert "spec, commands, errors" in capfd.readouterr().err


def test_help_loads_no_pydantic() -> None:
    code = "import sys; from clusterddp.cli.main import main; main(['help', 'spec']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"pydantic", "yaml", "rich", "torch"} & set(re.findall(r"'(\w+)'", done.stdout.splitlines()[-1]))
