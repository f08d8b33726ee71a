"""Writes a spec as YAML that reads back to the same JobSpec."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from clusterddp.spec.model import JobSpec
from clusterddp.spec.tree import NULL_WORDS

# Text that every YAML reader reads as text, so it needs no quotes.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_LONG_KEY = 120
"""YAML readers search at most 128 characters for the colon of a key."""
_NEXT_LINE = "\n  "
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n"})
# Characters that JSON does not escape, and that YAML or the strict reader refuses.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def resolved_yaml(job: JobSpec) -> str:
    """Write every value of `job`, defaults too."""
    return spec_yaml(job.model_dump(mode="json"))


def spec_yaml(values: Mapping[str, Any]) -> str:
    """Write values as a spec, sections as mappings; leave out those that are None."""
    lines: list[str] = []
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, dict) and value:
            lines.append(f"{key}:")
            lines += [f"  {_pair(name, inner, after_key=_NEXT_LINE)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {flow_yaml(value)}")
    return "\n".join(lines) + "\n"


def flow_yaml(value: Any) -> str:
    """Write data in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(_pair(key, inner) for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow_yaml, value)) + "]"
    return _scalar(value)


def _pair(key: str, value: Any, after_key: str = " ") -> str:
    """Write a key and its value; a long key needs `? ` before it and, outside of braces, a line of its own."""
    text = _scalar(key)
    return f"{text}: {flow_yaml(value)}" if len(text) < _LONG_KEY else f"? {text}{after_key}: {flow_yaml(value)}"


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED and value not in NULL_WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
