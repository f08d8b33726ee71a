"""The JSON Schema of a spec, for editors: completion, descriptions and checks while typing."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from clusterddp.spec.entry_rules import PROGRAMS
from clusterddp.spec.entry_section import EntrySpec
from clusterddp.spec.keys import model_of, spellings
from clusterddp.spec.model import JobSpec
from clusterddp.spec.ssh_section import SshHost

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema of a spec as draft 2020-12; descriptions and ranges come from the model."""
    schema = JobSpec.model_json_schema(mode="validation")
    definitions: dict[str, Any] = schema["$defs"]
    for field in JobSpec.model_fields.values():
        model = model_of(field)
        if model is not None:
            _add_aliases(definitions[model.__name__], model)
    definitions[EntrySpec.__name__]["oneOf"] = [{"required": [kind]} for kind in PROGRAMS]
    hosts = definitions["Ssh"]["properties"]["hosts"]
    _add_aliases(definitions[SshHost.__name__], SshHost)
    name = definitions[SshHost.__name__]["properties"]["host"]
    hosts["items"] = {"anyOf": [{"type": "string", "pattern": name["pattern"]}, hosts["items"]]}
    schema["not"] = {"required": ["train", "entry"]}
    _drop_titles(schema)
    return {"$schema": DIALECT, "title": "clusterddp spec"} | schema


def _add_aliases(definition: dict[str, Any], model: type[BaseModel]) -> None:
    properties = definition["properties"]
    for spelling, name in spellings(model).items():
        if spelling != name:
            properties[spelling] = properties[name] | {"description": f"Alias of {name}."}


def _drop_titles(schema: dict[str, Any]) -> None:
    """Drop the titles that pydantic derives from names: editors would show them above the descriptions."""
    for part in [schema, *schema["$defs"].values()]:
        part.pop("title", None)
        for value in part["properties"].values():
            value.pop("title", None)
