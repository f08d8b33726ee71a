"""The page of the keys of a spec, from the JSON Schema that `clusterddp schema` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from docs_pictures import command_output
from docs_text import filled, head, page

_NO_LIMIT = 2**31 - 1


def spec_page() -> str:
    schema = json.loads(command_output("schema"))
    lines = head(
        "Keys of a spec",
        "A spec is one YAML file. `clusterddp schema` prints the same as a JSON Schema, with which an editor completes "
        "and checks. An unknown key is an error. `KEY=VALUE` after the spec on the command line changes a value: "
        "`clusterddp submit job.yaml train.lr=0.2`.",
    )
    keys, sections = schema["properties"], schema["$defs"]
    lines += ["## Top level", ""]
    for name, key in keys.items():
        if _section(key, sections) is None and name != "slurm":
            lines += _key(name, key, required=name in schema.get("required", ()))
    for name, key in keys.items():
        section = _section(key, sections)
        if section is not None:
            lines += [f"## {name}", "", *filled(_both(key["description"], section["description"])), ""]
            lines += _keys(name, section)
    lines += ["## Items of ssh.hosts", "", *filled(sections["SshHost"]["description"]), ""]
    lines += _keys("ssh.hosts", sections["SshHost"])
    lines += [
        "## slurm",
        "",
        *filled(
            f"{keys['slurm']['description']} With `-` or `_`: `partition: gpu`, `mail-type: END`, `exclusive: true`. "
            "[Slurm](../slurm.md#options) lists what the other keys of a spec become."
        ),
    ]
    return page(lines)


def _section(key: Mapping[str, Any], sections: Mapping[str, Any]) -> Any:
    """Return the section that a key of the top level holds; None for a plain value."""
    for part in (key, *key.get("anyOf", ())):
        if "$ref" in part:
            return sections[part["$ref"].rpartition("/")[2]]
    return None


def _both(of_key: str, of_section: str) -> str:
    """Join what the key says and what its section says, unless one begins as the other."""
    return of_section if of_section.startswith(of_key.rstrip(".")) else f"{of_key} {of_section}"


def _keys(section: str, schema: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, key in schema["properties"].items():
        if not str(key.get("description", "")).startswith("Alias of"):
            lines += _key(f"{section}.{name}", key, required=name in schema.get("required", ()))
    return lines


def _key(name: str, key: Mapping[str, Any], *, required: bool) -> list[str]:
    what = _kind(key)
    if required:
        what += ", required"
    elif key.get("default") not in (None, [], {}):
        what += f", default `{json.dumps(key['default']).strip(chr(34))}`"
    return [f"### {name}", "", *filled(f"*{what}.* {key.get('description', '')}"), ""]


def _kind(key: Mapping[str, Any]) -> str:
    if key.get("examples"):
        return "time"
    if "anyOf" in key:
        return " or ".join(dict.fromkeys(_kind(part) for part in key["anyOf"] if part.get("type") != "null"))
    if "enum" in key or "const" in key:
        return " or ".join(f"`{word}`" for word in key.get("enum", [key.get("const")]))
    kind = key.get("type")
    if isinstance(kind, list):
        return " or ".join(kind)
    inner = key.get("items") or {}
    words = {
        "boolean": "true or false",
        "object": "mapping",
        "string": "text",
        "array": "list" + (f" of {_kind(inner)}" if inner and "$ref" not in str(inner) else ""),
        "integer": f"integer{_range(key)}",
        "number": f"number{_range(key)}",
    }
    return words.get(str(kind), "any value")


def _range(key: Mapping[str, Any]) -> str:
    low, above = key.get("minimum"), key.get("exclusiveMinimum")
    high, below = key.get("maximum"), key.get("exclusiveMaximum")
    start = f"from {low}" if low is not None else f"above {above}" if above is not None else ""
    end = f"below {below}" if below is not None else f"to {high:g}" if high is not None and high < _NO_LIMIT else ""
    return f" {start} {end}".rstrip() if start or end else ""
