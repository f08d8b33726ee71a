"""The spec that an import writes: YAML that reads, and comments that say what it does not carry."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import SpecError
from clusterddp.importing.findings import Fate, Findings, Left
from clusterddp.spec.load import ResolvedSpec, load_spec
from clusterddp.spec.tree import escape
from clusterddp.spec.write import spec_yaml

HEADINGS: dict[Fate, str] = {
    "lost": "Not carried over, look at each",
    "before": "To do before you submit, in the shell that submits",
    "ours": "Left out because clusterddp does it",
}
_MAX_SHOWN = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What an import gives."""

    text: str
    """The spec, its comments included."""
    resolved: ResolvedSpec
    left: tuple[Left, ...]


def write_spec(findings: Findings) -> Imported:
    """Write the spec; what a spec does not take is said with the reason.

    Raises: SpecError: what remains is no spec.
    """
    values, left = copy.deepcopy(findings.values), list(findings.left)
    order = ["name", "launcher", "device", "resources", "slurm", "ssh", "network", "container", "env", "secrets",
             "restarts", "entry", "train"]  # fmt: skip
    values = {key: values[key] for key in order if key in values}
    resolved = _settle(values, left, findings.source)
    left.sort(key=lambda each: (list(HEADINGS).index(each.fate), each.source, each.line or 0))
    comments = [f"# {findings.source}, as a spec of clusterddp: clusterddp import"]
    for fate, heading in HEADINGS.items():
        lines = [f"#   {spell(each)}" for each in left if each.fate == fate]
        comments += [f"# {heading}:", *lines] if lines else []
    text = "\n".join([*map(escape, comments), spec_yaml(values)])
    return Imported(text=text, resolved=resolved, left=tuple(left))


def spell(left: Left) -> str:
    """Say in one line what is left of the file, and why."""
    text = " ".join(left.text.split())
    text = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
    place = f"{left.source}:{left.line}: " if left.line is not None else ""
    return escape(f"{place}{text}  ({' '.join(left.why.split())})")


def _settle(values: dict[str, Any], left: list[Left], source: str) -> ResolvedSpec:
    """Read the spec as a submit would; what it refuses is taken out and listed, until it reads."""
    while True:
        try:
            return load_spec(spec_yaml(values), environ={})
        except SpecError as error:
            refused = {problem.key: problem for problem in error.problems}
            taken = [(key, _take(values, key.split("."))) for key in sorted(refused, key=_place_in_list, reverse=True)]
            if not any(found for _, found in taken):
                raise
            for key, found in taken:
                if found:
                    problem = refused[key]
                    why = problem.message + (f"; {problem.hint}" if problem.hint else "")
                    left.append(Left(fate="lost", text=f"{key}: {found[0]}", why=why, source=source))


def _place_in_list(key: str) -> tuple[int, ...]:
    """Order keys so that, taken from the last, no entry of a list moves before it is taken."""
    return tuple(int(part) for part in key.split(".") if part.isascii() and part.isdigit())


def _take(values: Any, path: list[str]) -> tuple[Any] | None:
    """Take the value at a path out; None when nothing is there, or the spec could not do without it."""
    if path in (["name"], ["entry"], ["entry", "script"], ["entry", "module"], ["entry", "command"], ["ssh", "hosts"]):
        return None
    for part in path[:-1]:
        values = values.get(part) if isinstance(values, dict) else None
    if isinstance(values, dict) and path[-1] in values:
        return (values.pop(path[-1]),)
    if isinstance(values, list) and path[-1].isdigit() and int(path[-1]) < len(values):
        return (values.pop(int(path[-1])),)
    return None
