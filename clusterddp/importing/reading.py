"""Which file it is, and the reading of it: from files of other launchers to one spec."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from clusterddp.errors import UsageError
from clusterddp.importing.accelerate import MARKS, read_accelerate_config
from clusterddp.importing.batch import read_batch_script, spec_name
from clusterddp.importing.findings import Findings
from clusterddp.importing.gluon import SECTION, read_gluon_config
from clusterddp.importing.hosts import read_env_file, read_hosts
from clusterddp.importing.sections import read_values
from clusterddp.importing.writing import Imported, write_spec
from clusterddp.spec.textfile import decode, read_bytes
from clusterddp.spec.yamlfile import parse

Kind = Literal["slurm", "gluoncv", "accelerate", "hostfile", "env"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_SCRIPT = 250_000
"""Characters of a batch script; a file of another kind has at most 1 MB."""


def import_files(paths: Sequence[Path], *, kind: Kind | None = None, line: int | None = None) -> Imported:
    """Read files of other launchers and write the spec that they come to; nothing in them is executed.

    `kind`: what they are, where it cannot be told. `line`: where the command of a batch script stands.
    Raises: UsageError, SpecError: a file is none of these, or cannot become a spec.
    """
    merged = Findings(source=", ".join(path.name for path in paths))
    for path in paths:
        findings = _read(path, kind, line)
        twice = [key for key in findings.values if key in merged.values and key not in {"name", "env", "secrets"}]
        if twice:
            raise UsageError(f"{path}: sets {', '.join(twice)}, and so does a file before it", hint="import each alone")
        for key, value in findings.values.items():
            _merge(merged.values, key, value)
        merged.left += findings.left
    merged.values.setdefault("name", spec_name(paths[0].stem))
    merged.values.setdefault("launcher", "local")
    if "entry" not in merged.values:
        merged.set("entry.script", "train.py")
        merged.lose("entry.script", "no file names a program: write yours in place of train.py")
    return write_spec(merged)


def _read(path: Path, kind: Kind | None, line: int | None) -> Findings:
    findings = Findings(source=str(path))
    text = decode(read_bytes(path, expected="a file of another launcher"), str(path))
    kind = kind or _kind_of(path, text)
    if kind == "slurm":
        if len(text) > MAX_SCRIPT:
            raise UsageError(f"{path}: is larger than {MAX_SCRIPT:,} characters, expected a batch script")
        findings.set("launcher", "slurm")
        read_batch_script(text, findings, line=line, place=path.parent)
    elif kind == "hostfile":
        read_hosts(path, findings)
    elif kind == "env":
        read_env_file(text, findings)
    else:
        data = read_values(parse(text, str(path)))
        findings.set("name", spec_name(path.stem))
        (read_gluon_config if kind == "gluoncv" else read_accelerate_config)(data, findings)
    return findings


def _kind_of(path: Path, text: str) -> Kind:
    """Tell a file by its marks, never by a guess."""
    if re.search(r"^#SBATCH\b", text, re.MULTILINE):
        return "slurm"
    if path.name == ".deepspeed_env":
        return "env"
    if re.search(rf"^{SECTION}\s*:", text, re.MULTILINE):
        return "gluoncv"
    if any(re.search(rf"^{mark}\s*:", text, re.MULTILINE) for mark in MARKS):
        return "accelerate"
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if lines and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", line) for line in lines):
        return "env"
    if lines and any(re.search(r"\bslots\s*=|^[^\s:/]+:[0-9]+$", line) for line in lines):
        return "hostfile"
    raise UsageError(
        f"{path}: cannot be told what this is: no #SBATCH line, no {SECTION}, no hosts with slots, no NAME=value lines",
        hint=f"--from says it: {', '.join(KINDS)}",
    )


def _merge(values: dict[str, Any], key: str, value: Any) -> None:
    if key == "env":
        values.setdefault("env", {}).update(value)
    elif key == "secrets":
        values["secrets"] = list(dict.fromkeys([*values.get("secrets", []), *value]))
    else:
        values.setdefault(key, value)
