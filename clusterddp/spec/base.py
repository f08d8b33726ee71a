"""What a spec is laid over: the values of the site file, the project file and a profile, merged."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Mapping as Map
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.errors import Problem
from clusterddp.spec.keys import with_one_spelling
from clusterddp.spec.profiles import read_profile
from clusterddp.spec.shared import SharedFiles, read_shared_files, refusals
from clusterddp.spec.tree import Mapping, Node, Place, merge


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The values below those of a spec."""

    tree: Mapping
    problems: tuple[Problem, ...] = ()
    """Unknown keys, and keys that a shared file may not set."""
    shared: SharedFiles = field(default_factory=SharedFiles)
    """The files that were read."""


def read_base(environ: Map[str, str], profile: str | None, spec: Path | None) -> Base:
    """Read what the spec at `spec` is laid over; None: a spec without a file, in the working directory.

    A profile that the command names overrides the project file; the default profile does not.
    Raises: SpecError: a file cannot be used at all.
    """
    problems: list[Problem] = []
    shared = read_shared_files(environ, spec.absolute().parent if spec else Path.cwd(), spec=spec)
    site, project = (_known(file.tree, problems) if file else None for file in (shared.site, shared.project))
    for tree in filter(None, (site, project)):
        problems += refusals(tree)
    chosen = read_profile(environ, profile)
    of_profile = _known(chosen, problems) if chosen is not None else None
    layers = [site, of_profile, project] if profile is None else [site, project, of_profile]
    tree = functools.reduce(merge, [layer for layer in layers if layer is not None], Mapping(place=Place(source="")))
    return Base(tree=tree, problems=tuple(problems), shared=shared)


def read_shared_values(environ: Map[str, str], spec: Path) -> dict[str, Node]:
    """Read what the site file and the project file give a spec at `spec`, by dotted key; lists are values.

    Raises: SpecError: a file cannot be used at all.
    """
    tree = Mapping(place=Place(source=""))
    for file in read_shared_files(environ, spec.absolute().parent, spec=spec):
        tree = merge(tree, with_one_spelling(file.tree)[0])
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping, prefix: str) -> Iterator[tuple[str, Node]]:
    for key, node in tree.entries.items():
        if isinstance(node, Mapping):
            yield from _leaves(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", node


def _known(tree: Mapping, problems: list[Problem]) -> Mapping:
    known, found = with_one_spelling(tree)
    problems += found
    return known
