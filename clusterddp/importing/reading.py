"""Read files of other launchers and write one spec: recognise each file, read it, write the YAML with its comments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from clusterddp.errors import SpecError, UsageError
from clusterddp.importing.files import (
    ACCELERATE_MARKS,
    DEEPSPEED_MARK,
    GLUON_SECTION,
    Fate,
    Findings,
    Left,
    read_accelerate_config,
    read_env_file,
    read_gluon_config,
    read_hosts,
    read_values,
)
from clusterddp.importing.script import read_batch_script
from clusterddp.importing.step import read_step_of
from clusterddp.run.directory import RunDir
from clusterddp.spec.batch_script import spec_name
from clusterddp.spec.load import ResolvedSpec, load_spec
from clusterddp.spec.secret_values import hide_in_text
from clusterddp.spec.tree import decode, escape, read_bytes
from clusterddp.spec.yamlfile import parse, spec_yaml

Kind = Literal["slurm", "gluoncv", "accelerate", "hostfile", "env"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_SCRIPT = 250_000
"""Characters of a batch script; a file of another kind has at most 1 MB."""


HEADINGS: dict[Fate, str] = {
    "lost": "Not carried over, look at each",
    "before": "To do before you submit, in the shell that submits",
    "ours": "Left out because clusterddp does it",
}
_MAX_SHOWN = 160
_MAX_PROBLEMS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """The result of an import."""

    text: str
    """The spec, its comments included."""
    resolved: ResolvedSpec
    left: tuple[Left, ...]


def import_files(paths: Sequence[Path], *, kind: Kind | None = None) -> Imported:
    """Read files of other launchers and write a spec; nothing in them is executed.

    `kind`: their kind, where their content does not show it.
    Raises: UsageError, SpecError: a file is none of these, or cannot become a spec.
    """
    merged = Findings(source=", ".join(path.name for path in paths))
    for path in paths:
        findings = _read(path, kind)
        twice = [key for key in findings.values if key in merged.values and key not in {"name", "env", "secrets"}]
        if twice:
            raise UsageError(
                f"{path}: sets {', '.join(twice)}, and so does a file before it", hint="import each separately"
            )
        for key, value in findings.values.items():
            if key == "env":
                merged.values.setdefault("env", {}).update(value)
            elif key == "secrets":
                merged.values["secrets"] = list(dict.fromkeys([*merged.values.get("secrets", []), *value]))
            else:
                merged.values.setdefault(key, value)
        merged.left += findings.left
        merged.hint = merged.hint or findings.hint
    merged.values.setdefault("name", spec_name(paths[0].stem))
    merged.values.setdefault("launcher", "local")
    if "entry" not in merged.values:
        merged.set("entry.script", "train.py")
        merged.lose("entry.script", "no file names a program: write yours in place of train.py")
    return write_spec(merged)


def import_step(run: RunDir, step: str | None) -> Imported:
    """Write the spec of what a step of a batch script has run; `step`: its number, where several started ranks.

    Raises: UsageError: there is no such step, or it cannot be a spec.
    """
    findings = Findings(source=run.name)
    read_step_of(run, step, findings)
    return write_spec(findings)


def spell(left: Left) -> str:
    """Write one line for a part that is not imported, with the reason."""
    text = " ".join(left.text.split())
    text = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
    place = f"{left.source}:{left.line}: " if left.line is not None else ""
    return escape(f"{place}{text}  ({' '.join(left.why.split())})")


def _read(path: Path, kind: Kind | None) -> Findings:
    findings = Findings(source=str(path))
    text = decode(read_bytes(path, expected="a file of another launcher"), str(path))
    kind = kind or _kind_of(path, text)
    if kind == "slurm":
        if len(text) > MAX_SCRIPT:
            raise UsageError(f"{path}: is larger than {MAX_SCRIPT:,} characters, expected a batch script")
        findings.set("launcher", "slurm")
        findings.hint = f"clusterddp submit {shlex.quote(str(path))} runs it as it is"
        try:
            read_batch_script(text, findings)
        except UsageError as error:
            raise UsageError(error.message, hint=findings.hint) from error
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
    """Return the kind of a file by its marks; never guess.

    Raises: UsageError: it has none of them.
    """
    if re.search(r"^#SBATCH\b", text, re.MULTILINE):
        return "slurm"
    if path.name == ".deepspeed_env":
        return "env"
    if re.search(rf"^{GLUON_SECTION}\s*:", text, re.MULTILINE):
        return "gluoncv"
    if re.search(rf'^(?:{"|".join(ACCELERATE_MARKS)})\s*:|"{DEEPSPEED_MARK}"\s*:', text, re.MULTILINE):
        return "accelerate"
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if lines and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", line) for line in lines):
        return "env"
    if lines and any(re.search(r"\bslots\s*=|^[^\s:/]+:[0-9]+$", line) for line in lines):
        return "hostfile"
    raise UsageError(
        f"{path}: is of no known kind: no #SBATCH line, no {GLUON_SECTION}, no hosts with slots, no NAME=value lines",
        hint=f"--from names its kind: {', '.join(KINDS)}",
    )


def write_spec(findings: Findings) -> Imported:
    """Write the spec with what is not in it as comments.

    Raises: UsageError: it is not valid.
    """
    order = ["name", "launcher", "device", "resources", "slurm", "ssh", "network", "container", "python", "venv",
             "conda", "setup", "env", "secrets",
             "restarts", "entry", "train"]  # fmt: skip
    values = {key: findings.values[key] for key in order if key in findings.values}
    try:
        resolved = load_spec(spec_yaml(values), environ={}, whole=True)
    except SpecError as error:
        wrong = "; ".join(f"{problem.key}: {problem.message}" for problem in error.problems[:_MAX_PROBLEMS])
        raise UsageError(
            f"{findings.source}: {hide_in_text(wrong)}", hint=findings.hint or error.problems[0].hint
        ) from error
    left = sorted(findings.left, key=lambda each: (list(HEADINGS).index(each.fate), each.source, each.line or 0))
    comments = [f"# {findings.source}, as a spec of clusterddp: clusterddp import"]
    for fate, heading in HEADINGS.items():
        lines = [f"#   {spell(each)}" for each in left if each.fate == fate]
        comments += [f"# {heading}:", *lines] if lines else []
    text = "\n".join([*map(escape, comments), spec_yaml(values)])
    return Imported(text=text, resolved=resolved, left=tuple(left))
