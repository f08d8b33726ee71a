"""A section of a YAML file of somebody else's: what is taken of it, and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.launch.environment import is_secret
from clusterddp.launch.importing.findings import Fate, Findings


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

        Raises: UsageError: it is something else.
        """
        value = self._values.pop(key, None)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise UsageError(f"{self._findings.source}: {self._prefix}{key} is {value!r}, expected a number from 1")

    def lose(self, key: str, value: object, why: str, *, fate: Fate = "lost") -> None:
        """Say that a value is not carried, and why."""
        shown = "..." if is_secret(key, str(value)) else value
        self._findings.lose(f"{self._prefix}{key}: {shown}", why, fate=fate)

    def lose_rest(self, why: str) -> None:
        """List what is left."""
        for key, value in self._values.items():
            self.lose(str(key), value, why)
        self._values.clear()
