"""The specs that are shipped: every one reads, and is valid by the JSON Schema."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from clusterddp.spec.load import load_spec
from clusterddp.spec.model import json_schema
from tests.support.paths import ROOT

JOBS = sorted((ROOT / "jobs").rglob("*.yaml"))
TEMPLATES = sorted((ROOT / "templates").glob("init_*.yaml"))


class CoreLoader(yaml.SafeLoader):
    """Types scalars by YAML 1.2's core schema, as editors do."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (the name is PyYAML's)


for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}.items():
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)


@pytest.mark.parametrize("path", JOBS + TEMPLATES, ids=lambda path: path.name)
def test_a_shipped_spec_reads(path: Path) -> None:
    assert load_spec(path, environ={}).job.name in (path.stem, "my-run")


@pytest.mark.parametrize("path", JOBS + TEMPLATES, ids=lambda path: path.name)
def test_a_shipped_spec_is_valid_by_the_schema(path: Path) -> None:
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=CoreLoader)
    jsonschema.Draft202012Validator(json_schema()).validate(document)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_first_spec_is_valid_with_every_suggestion_taken(path: Path) -> None:
    """Each commented line `# key: value` is one that works when its mark is removed."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)# ([a-z_]+: *[^ ].*)$", text, re.MULTILINE):
        if match.group(2).startswith(("entry:", "hosts:")):  # instead of what stands above them
            continue
        load_spec(text.replace(match.group(), match.group(1) + match.group(2)), environ={})


def test_there_is_a_first_spec_for_each_launcher() -> None:
    launchers = {path.name: load_spec(path, environ={}).job.launcher for path in TEMPLATES}
    assert launchers == {"init_local.yaml": "local", "init_slurm.yaml": "slurm", "init_ssh.yaml": "ssh"}


def test_there_is_an_example_for_each_launcher() -> None:
    assert {load_spec(path, environ={}).job.launcher for path in JOBS} == {"local", "ssh", "slurm"}


def test_resnet18_2x8_has_sixteen_ranks_on_two_nodes() -> None:
    job = load_spec(ROOT / "jobs" / "resnet18_2x8.yaml", environ={}).job
    assert (job.launcher, job.resources.nodes, job.resources.ranks_per_node) == ("slurm", 2, 8)
    assert (job.restarts, job.slurm) == (0, {"partition": "gpu"})


def test_scripts_named_by_a_spec_are_shipped() -> None:
    entries = [job.entry for job in (load_spec(path, environ={}).job for path in JOBS) if job.entry is not None]
    scripts = [entry.script or str(entry.function).partition(":")[0] for entry in entries]
    assert scripts.count("jobs/scripts/fit_line.py") == len(list((ROOT / "jobs").glob("*.yaml"))) - 1
    assert all(os.access(ROOT / script, os.R_OK) for script in scripts)
