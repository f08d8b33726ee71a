"""A YAML file of another program: its values, what is taken of a section, and what is left."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.importing.findings import Fate, Findings
from clusterddp.planning.environment import is_secret
from clusterddp.spec import tree
from clusterddp.spec.section import MAX_RANKS

_WORDS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")


def read_values(node: tree.Node) -> Any:
    """Return the values of a tree with the types of YAML 1.1, as PyYAML reads them; a fraction stays text."""
    if isinstance(node, tree.Mapping):
        return {key: read_values(value) for key, value in node.entries.items()}
    if isinstance(node, tree.ListNode):
        return [read_values(item) for item in node.items]
    if node.null or node.quoted:
        return None if node.null else node.text
    if _INT.fullmatch(node.text):
        return int(node.text)
    return _WORDS.get(node.text.lower(), node.text)


class Section:
    """Keys and values that are taken one by one; `lose_rest` lists those that nobody has taken."""

    def __init__(self, values: object, findings: Findings, name: str = "") -> None:
        if not isinstance(values, Mapping):
            raise UsageError(f"{findings.source}: {name or 'it'} is no mapping of keys and values")
        self._values = dict(values)
        self._findings = findings
        self._prefix = f"{name}." if name else ""

    def take(self, key: str, default: Any = None) -> Any:
        """Take the value of a key."""
        return self._values.pop(key, default)

    def take_count(self, key: str) -> int | None:
        """Take a number from 1; None where there is none.

        Raises: UsageError: it is something else, or more than a run may have ranks.
        """
        value = self._values.pop(key, None)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_RANKS):
            return value
        expected = f"at most {MAX_RANKS:,}" if isinstance(value, int) and value > MAX_RANKS else "a number from 1"
        raise UsageError(f"{self._findings.source}: {self._prefix}{key} is {value!r}, expected {expected}")

    def take_list(self, key: str) -> list[Any]:
        """Take a list; empty where there is none. Raises: UsageError: it is something else."""
        value = self._values.pop(key, None)
        if value is None or isinstance(value, list):
            return value or []
        raise UsageError(f"{self._findings.source}: {self._prefix}{key} is {value!r}, expected a list")

    def lose(self, key: str, value: object, why: str, *, fate: Fate = "lost") -> None:
        """Say that a value is not carried, and why."""
        shown = "..." if is_secret(key, str(value)) else value
        self._findings.lose(f"{self._prefix}{key}: {shown}", why, fate=fate)

    def lose_rest(self, why: str) -> None:
        """List what is left."""
        for key, value in self._values.items():
            self.lose(str(key), value, why)
        self._values.clear()
