"""The result of reading a file: values for the spec, and a list of what it cannot express, with line and reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from clusterddp.importing.values import Text, as_written, is_fixed
from clusterddp.spec.scalars import RANK_VARIABLES
from clusterddp.spec.secret_values import is_secret

Fate = Literal["lost", "before", "ours"]
"""lost: the spec cannot express it; before: the user does it before a submit; ours: clusterddp does it itself."""

_SET_ANYWAY = {
    "OMP_NUM_THREADS": "resources.cpus_per_task sets it",
    "PYTHONUNBUFFERED": "it is always set",
}
_PASSED_ON = re.compile(r"PATH|PYTHON[A-Z]*|LD_LIBRARY_PATH|CUDA_HOME|CONDA_[A-Z_]*|LIBRARY_PATH|CPATH|MODULEPATH")
_SECRET_VALUE = re.compile(r"(?<![A-Za-z0-9_])([A-Za-z0-9_]+)=(\S+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A part of the file that is not in the spec."""

    fate: Fate
    text: str
    """As it is written, without the value of a secret."""
    why: str
    source: str
    line: int | None = None


@dataclass(slots=True)
class Findings:
    """The spec as far as it is read, and what is not imported of the file."""

    source: str
    """The name of the file in messages."""
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
        """List a part of the file that the spec cannot express."""
        self.left.append(Left(fate=fate, text=_SECRET_VALUE.sub(_masked, text), why=why, source=self.source, line=line))


def set_variable(name: str, value: Text, findings: Findings, line: int | None) -> None:
    """Put a variable into the spec's env, or list why not; the value of a secret is never written."""
    text = f"export {name}={as_written(value.text)}"
    if is_secret(name, value.text):
        text = f"export {name}=..."
        secrets = findings.values.setdefault("secrets", [])
        if name not in secrets and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            secrets.append(name)
        findings.lose(text, f"a secret: its value is not stored; export {name} where you submit", line, fate="before")
    elif name in RANK_VARIABLES or name.startswith("TORCHELASTIC_"):
        findings.lose(text, "clusterddp sets it for each rank", line, fate="ours")
    elif name in _SET_ANYWAY and (not is_fixed(value) or name != "OMP_NUM_THREADS"):
        findings.lose(text, _SET_ANYWAY[name], line, fate="ours")
    elif is_fixed(value):
        findings.values.setdefault("env", {})[name] = value.text
    elif _PASSED_ON.fullmatch(name):
        findings.lose(text, "in the shell that submits: this variable is passed on", line, fate="before")
    else:
        unknown = ", ".join(dict.fromkeys(value.unknown)) or "the rank"
        findings.lose(text, f"only the shell of the job knows {unknown}; env takes fixed values", line)


def _masked(match: re.Match[str]) -> str:
    return f"{match[1]}=..." if is_secret(match[1], match[2]) else match[0]
