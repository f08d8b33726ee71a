"""The JSON Schema: it describes every field, and agrees with the reader about what a spec is."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from clusterddp.errors import SpecError
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import json_schema


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _properties(schema: Any) -> list[tuple[str, Any]]:
    parts = [("", schema), *((name, part) for name, part in schema["$defs"].items())]
    return [(f"{name}.{key}", value) for name, part in parts for key, value in part["properties"].items()]


def test_the_schema_names_its_dialect() -> None:
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_every_property_has_a_description() -> None:
    assert [name for name, value in _properties(json_schema()) if len(value.get("description", "")) < 10] == []


def test_every_property_has_a_default_unless_it_is_required_or_a_section() -> None:
    schema = json_schema()
    required = {f".{key}" for key in schema["required"]}
    required |= {f"{name}.{key}" for name, part in schema["$defs"].items() for key in part.get("required", ())}
    without = {name for name, value in _properties(schema) if "default" not in value and "$ref" not in value}
    assert without == required


def test_a_section_has_the_defaults_of_its_keys_and_none_of_its_own() -> None:
    assert [name for name, value in _properties(json_schema()) if "default" in value and "$ref" in value] == []


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"resources": {"nnodes": 2, "nproc_per_node": 4, "time": "2:00:00"}},
        {"resources": {"nodes": 2, "ntasks_per_node": 4, "time": 30}},
        {"env": {"A": 1, "B": "x", "C": True}, "secrets": ["TOKEN"]},
        {"train": {"lr": 1, "max_steps": None, "augment": "none"}},
        {"entry": {"script": "a.py", "args": ["--lr", 0.1, True]}},
        {"slurm": {"partition": "gpu", "exclusive": True, "nice": 10}},
        {"ssh": {"hosts": ["a", "gpu[01-02]", {"host": "b", "gpus": 2}]}, "launcher": "ssh"},
        {"ssh": {"hosts": [{"host": "b", "slots": 2, "venv": "~/v", "modules": ["cuda/12"]}], "fetch": "all"}},
        {"ssh": {"dir": "/scratch/me", "send": {"data": "~/data"}, "fetch": ["logs"]}},
        {"network": {"master_port": 29500}},
        {"network": {"master_port": "auto", "interface": "eth0"}},
    ],
)
def test_what_reads_is_valid(validator: Any, extra: dict[str, Any]) -> None:
    validator.validate({"name": "x"} | extra)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"name": "a b"},
        {"name": "x", "epochs": 3},
        {"name": "x", "train": {"epochs": 0}},
        {"name": "x", "train": {"epochs": "3"}},
        {"name": "x", "train": {"model": "resnet19"}},
        {"name": "x", "train": {}, "entry": {"script": "a.py"}},
        {"name": "x", "entry": {}},
        {"name": "x", "entry": {"script": "a.py", "module": "a"}},
        {"name": "x", "resources": {"time": "2h"}},
        {"name": "x", "resources": {"time": 14400}},
        {"name": "x", "network": {"master_port": 80}},
        {"name": "x", "ssh": {"hosts": ["-x"]}},
        {"name": "x", "ssh": {"hosts": [{"gpus": 2}]}},
        {"name": "x", "ssh": {"hosts": [{"host": "a", "host_key": "SHA256:short"}]}},
        {"name": "x", "ssh": {"dir": "runs"}},
        {"name": "x", "ssh": {"send": {"data": "data"}}},
        {"name": "x", "ssh": {"fetch": ["weights"]}},
        {"name": "x", "python": "a\nb"},
        {"name": "x", "env": {"A": ["b"]}},
    ],
)
def test_what_does_not_read_is_not_valid(validator: Any, spec: dict[str, Any]) -> None:
    assert not validator.is_valid(spec)
    with pytest.raises(SpecError):
        load_spec(json.dumps(spec) + "\n", environ={})
