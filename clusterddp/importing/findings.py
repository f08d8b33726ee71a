"""What was found in a file: the values of the spec that it becomes, and everything else, each with its line and why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from clusterddp.planning.environment import is_secret

Fate = Literal["lost", "before", "ours"]
"""lost: the spec does not carry it; before: it has to be done before a submit; ours: clusterddp does it by itself."""

_SECRET_VALUE = re.compile(r"(?<![A-Za-z0-9_])([A-Za-z0-9_]+)=(\S+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """Something that stands in the file and not in the spec."""

    fate: Fate
    text: str
    """As it is written; the value of a secret is not."""
    why: str
    source: str
    line: int | None = None


@dataclass(slots=True)
class Findings:
    """The spec that is being put together, and what is left of the file."""

    source: str
    """What messages name the file."""
    values: dict[str, Any] = field(default_factory=dict)
    """As in a spec: sections are mappings."""
    left: list[Left] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        """Set the value of a dotted key; the first part of it is the section."""
        section, dot, name = key.partition(".")
        if dot:
            self.values.setdefault(section, {})[name] = value
        else:
            self.values[section] = value

    def lose(self, text: str, why: str, line: int | None = None, *, fate: Fate = "lost") -> None:
        """Say what of the file the spec does not carry."""
        self.left.append(Left(fate=fate, text=_SECRET_VALUE.sub(_masked, text), why=why, source=self.source, line=line))


def _masked(match: re.Match[str]) -> str:
    return f"{match[1]}=..." if is_secret(match[1], match[2]) else match[0]
