"""From a spec and everything that may change it to one JobSpec, with the origin of every value.

Precedence: options and arguments of the command line > CLUSTERDDP__* > the spec > the profile > defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping as Map
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.check import check
from clusterddp.spec.keys import with_one_spelling
from clusterddp.spec.model import EntrySpec, JobSpec, TrainSpec
from clusterddp.spec.overrides import Override, from_options, parse_argument, parse_environment
from clusterddp.spec.problems import format_spec_error, in_order
from clusterddp.spec.profiles import read_profile
from clusterddp.spec.schema import json_schema
from clusterddp.spec.textfile import decode, read_bytes, read_stdin
from clusterddp.spec.tree import Mapping, merge, without
from clusterddp.spec.write import resolved_yaml
from clusterddp.spec.yamlfile import parse

__all__ = ["Change", "ResolvedSpec", "format_spec_error", "json_schema", "load_spec", "resolved_yaml"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A value that is no default."""

    key: str
    value: Any
    default: Any
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSpec:
    """A spec as it will be run."""

    job: JobSpec
    origins: dict[str, str]
    """Dotted key -> where the value came from, for each value that is no default."""
    path: Path | None
    text: str
    """The spec as it was written, before anything changed it."""

    def changes(self) -> tuple[Change, ...]:
        """List the values that are no defaults, in the order of the model."""
        defaults = _defaults()
        return tuple(
            Change(key=key, value=value, default=defaults.get(key), origin=self.origins.get(key, ""))
            for key, value in _flatten(self.job.model_dump(mode="json")).items()
            if value != defaults.get(key)
        )


def load_spec(
    source: Path | str,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    environ: Map[str, str],
    flags: Map[str, str] | None = None,
) -> ResolvedSpec:
    """Read a spec and everything that changes it.

    `source` is a path, `-` for the standard input, or, when it has a line break, the YAML itself. `flags` are the
    command's own options, `{"launcher": "local"}`.

    Raises: SpecError: with every problem that was found.
    """
    path, name, text = _read(source)
    spec = parse(text, name)
    problems: list[Problem] = []
    base = read_profile(environ, profile)
    tree = _known(base, problems) if base is not None else Mapping(place=spec.place)
    tree = merge(tree, _known(spec, problems))
    from_environment, found = parse_environment(environ)
    problems += found
    for override in [*from_environment, *_arguments(overrides, problems), *from_options(flags or {})]:
        tree = _apply(tree, override, problems)
    tree = dataclasses.replace(tree, place=spec.place)
    job, found = check(tree)
    problems += found
    if problems or job is None:
        raise SpecError(in_order(problems, name))
    return ResolvedSpec(job=job, origins=_origins(tree, job), path=path, text=text)


def _read(source: Path | str) -> tuple[Path | None, str, str]:
    """Return the spec's path, the name that messages use, and its text."""
    if source == "-":
        return None, "<stdin>", decode(read_stdin(), "<stdin>")
    if isinstance(source, str) and ("\n" in source or "\r" in source):
        return None, "<text>", decode(source.encode("utf-8", "surrogatepass"), "<text>")
    path = Path(source)
    return path, str(path), decode(read_bytes(path), str(path))


def _known(tree: Mapping, problems: list[Problem]) -> Mapping:
    known, found = with_one_spelling(tree)
    problems += found
    return known


def _arguments(arguments: Sequence[str], problems: list[Problem]) -> list[Override]:
    overrides = []
    for argument in arguments:
        try:
            overrides.append(parse_argument(argument))
        except SpecError as error:
            problems += error.problems
    return overrides


def _apply(tree: Mapping, override: Override, problems: list[Problem]) -> Mapping:
    known = _known(override.as_tree(), problems)
    if override.node is not None:
        return merge(tree, known)
    path: list[str] = []
    level: Any = known
    while isinstance(level, Mapping) and level.entries:
        name, level = next(iter(level.entries.items()))
        path.append(name)
    return without(tree, tuple(path)) if len(path) == len(override.path) else tree


def _origins(tree: Mapping, job: JobSpec) -> dict[str, str]:
    defaults = _defaults()
    changed = [key for key, value in _flatten(job.model_dump(mode="json")).items() if value != defaults.get(key)]
    origins: dict[str, str] = {}
    for key in changed:
        node: Any = tree
        for part in key.split("."):
            node = node.entries.get(part) if isinstance(node, Mapping) else None
        if node is not None:
            origins[key] = node.place.words
    return origins


def _defaults() -> dict[str, Any]:
    job = JobSpec(name="unnamed").model_dump(mode="json")
    sections = {"train": TrainSpec().model_dump(mode="json"), "entry": EntrySpec().model_dump(mode="json")}
    return _flatten(job | sections) | {"name": None}


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted keys and values; lists are values, and so are sections that are None."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
