"""The variables that a script sets for its program: what the spec's env carries, and what it must not or need not."""

from __future__ import annotations

import re

from clusterddp.importing.findings import Findings
from clusterddp.importing.values import Text, as_written, is_fixed
from clusterddp.planning.environment import is_secret
from clusterddp.spec.scalars import RANK_VARIABLES

_OURS = {
    "OMP_NUM_THREADS": "resources.cpus_per_task sets it",
    "PYTHONUNBUFFERED": "it is always set",
}
_TRAVELS = re.compile(r"PATH|PYTHON[A-Z]*|LD_LIBRARY_PATH|CUDA_HOME|CONDA_[A-Z_]*|LIBRARY_PATH|CPATH|MODULEPATH")
_MASK = "..."


def set_variable(name: str, value: Text, findings: Findings, line: int | None) -> None:
    """Put a variable into the spec's env, or say why not; the value of a secret is repeated nowhere."""
    text = f"export {name}={as_written(value.text)}"
    if is_secret(name, value.text):
        text = f"export {name}={_MASK}"
        secrets = findings.values.setdefault("secrets", [])
        if name not in secrets and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            secrets.append(name)
        findings.lose(text, f"a secret: its value is not stored, export {name} where you submit", line, fate="before")
    elif name in RANK_VARIABLES or name.startswith("TORCHELASTIC_"):
        findings.lose(text, "clusterddp sets it for each rank", line, fate="ours")
    elif name in _OURS and (not is_fixed(value) or name != "OMP_NUM_THREADS"):
        findings.lose(text, _OURS[name], line, fate="ours")
    elif is_fixed(value):
        findings.values.setdefault("env", {})[name] = value.text
    elif _TRAVELS.fullmatch(name):
        findings.lose(text, "in the shell that submits: this variable goes along", line, fate="before")
    else:
        findings.lose(text, f"only the shell of the job knows {_unknown(value)}; env takes fixed values", line)


def _unknown(value: Text) -> str:
    return ", ".join(dict.fromkeys(value.unknown)) or "the rank"
