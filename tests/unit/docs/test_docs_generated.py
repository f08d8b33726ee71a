"""Pages and pictures that are made of the code are what today's code makes, and `clusterddp help` prints them."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import jsonschema
import pytest
import yaml

from clusterddp.cli.help_ import TOPICS
from clusterddp.cli.main import _COMMANDS, WITHOUT_JSON, cli, main
from clusterddp.spec.model import json_schema
from tests.support.worker_ranks import demand

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


def test_each_key_of_the_page_of_keys_has_a_line_that_the_schema_takes() -> None:
    page = (ROOT / "docs/reference/spec.md").read_text()
    found = re.findall(r"^### (\S+)\n\n`(\w+): ([^`]*)`", page, re.MULTILINE)
    assert [name for name, _, _ in found] == re.findall(r"^### (\S+)$", page, re.MULTILINE)
    schema, wrong = json_schema(), []
    for name, key, text in found:
        place = schema
        for part in name.split(".")[:-1]:
            (reference,) = re.findall(r"#/\$defs/(\w+)", str(place["properties"][part]))
            place = schema["$defs"][reference]
        rule = place["properties"][key] | {"$defs": schema["$defs"]}
        if not jsonschema.Draft202012Validator(rule).is_valid(yaml.safe_load(text)):
            wrong.append(f"{name}: {text}")
    assert wrong == []


def commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """List the commands that do something, such as `hosts check`."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", each) for below, each in commands(command))
        elif command:
            yield name, command


def test_every_command_prints_json_or_the_page_says_why_not(docs_records: ModuleType) -> None:
    choices = {
        name: [getattr(param.type, "choices", ()) for param in command.params if param.name == "output"]
        for name, command in commands(cli)
    }
    able = {name for name, found in choices.items() if found and "json" in found[0]}
    assert set(choices) - able == set(WITHOUT_JSON)
    assert {
        name: call for name in able if not (call := [form for form in docs_records.FORMS if is_of(form, name)])
    } == {}


def is_of(call: str, command: str) -> bool:
    return f"{call} ".startswith(f"{command} ")


def test_jq_reads_each_example(docs_records: ModuleType) -> None:
    jq = demand("jq")
    wrong_filter = 3
    for line in docs_records.jq_examples():
        words = [jq, "-n", *shlex.split(line.partition("| jq ")[2])]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode != wrong_filter, line + done.stderr


@pytest.fixture
def docs_records(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("docs_records")


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
