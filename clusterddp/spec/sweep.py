"""A sweep: one spec in several variants, one for each combination of the values of its swept keys.

The spec is read once. Every variant is then typed and checked as a spec of its own, so an invalid value or combination
is found before a run is submitted.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping as Map
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.layers import COMMAND_LINE, Override, parse_argument
from clusterddp.spec.load import ResolvedSpec, Written, lay_over, program_problem, read_layers, resolve
from clusterddp.spec.program_arguments import value_at
from clusterddp.spec.tree import (
    ListNode,
    Mapping,
    Node,
    Place,
    Scalar,
    brief,
    in_order,
    problem_at,
    show,
    spec_error,
    without,
)
from clusterddp.spec.yamlfile import parse_value

MAX_VARIANTS = 10_000
ORIGIN = "sweep"
"""The origin of a swept value in the plan of a variant."""
_SECTION = "sweep"

_WHICH = "a sweep varies train.*, env.*, entry.* and network.*; its runs share everything else"
_SECTIONS = {"train": "lr", "env": "NAME", "entry": "args", "network": "backend"}
"""Sections whose keys may be swept on every launcher, each with an example: on Slurm a sweep is one job array."""
_OF_THE_SWEEP = "it is one for the whole sweep"
_REASONS = dict.fromkeys(
    ("resources", "device", "slurm", "ssh", "container", "entry.owns_ranks"),
    "it is a request for machines, which all runs of a sweep share",
) | {
    **dict.fromkeys(["launcher", "name", "after", "secrets", "notify", "snapshot", "stop", "sweep"], _OF_THE_SWEEP),
    "restarts": f"{_OF_THE_SWEEP}: Slurm restarts all tasks of a job array or none",
}
"""Why the other keys cannot be swept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One swept key and its values."""

    path: tuple[str, ...]
    nodes: tuple[Node, ...]
    place: Place

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One combination of the values."""

    values: dict[str, Any]
    """Dotted key -> its value in this variant."""
    resolved: ResolvedSpec
    submission: bytes | None = dataclasses.field(default=None, repr=False)
    """Of a function from Python: it with the arguments of this variant, pickled."""

    @property
    def label(self) -> str:
        return variant_label(self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    """A spec and its variants: a single one when no key is swept."""

    keys: tuple[str, ...]
    """The keys that are swept; none: the spec is no sweep."""
    variants: tuple[Variant, ...]
    """Ordered so that the last key changes fastest."""
    throttle: int | None


def variant_label(values: Map[str, Any]) -> str:
    """Write the values of one variant as a short text: `lr=0.1 seed=0`."""

    def short_name(key: str) -> str:
        """Return the last part of a dotted key; of a position in a list, with the name of the list."""
        rest, _, name = key.rpartition(".")
        return f"{rest.rpartition('.')[2]}.{name}" if name.isdecimal() and rest else name.lstrip("-")

    short = dict.fromkeys(map(short_name, values))
    names = short if len(short) == len(values) else values  # the dotted keys, where two sections have the name
    texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values.values())
    return " ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))


def load_sweep(
    source: Path | str,
    arguments: Sequence[str] = (),
    *,
    sweep: bool,
    profile: str | None = None,
    environ: Map[str, str],
    flags: Map[str, str] | None = None,
    hosts: Override | None = None,
    working_dir: Path | None = None,
) -> SweepSpec:
    """Read a spec whose `sweep` section, or arguments such as `train.lr=0.1,0.2`, name several values for some keys.

    With `sweep` False an argument has one value. An argument for a key that the section sweeps takes the place of the
    section's values. See `load_spec` for the rest.

    Raises: SpecError: with every problem of every variant; a problem that not all have names the variants.
    """
    problems: list[Problem] = []
    axes, ordinary = _split(arguments, problems) if sweep else ({}, list(arguments))
    written = read_layers(
        source, ordinary, profile=profile, environ=environ, flags=flags, hosts=hosts, working_dir=working_dir
    )
    base = without(written.tree, (_SECTION,))
    axes = _of_section(written.tree, problems) | axes
    for path in written.arguments:
        axes.pop(path, None)
    if axes:
        problems += _axis_problems(base, axes)
    elif not problems and not written.problems and (sweep or _SECTION in written.tree.keys):
        # An option or an empty section asks for a sweep.
        whole_spec = dataclasses.replace(written.tree.place, line=None, column=None, source_line=None)
        hint = "train.lr=0.1,0.2 --sweep, or sweep: {values: {train.lr: [0.1, 0.2]}}; ~sweep drops the section"
        message = "nothing is swept: no key has several values"
        problems.append(problem_at(written.tree.keys.get(_SECTION, whole_spec), message, hint, key=_SECTION))
    # The section is checked with the base; each variant without it, for it has its own values.
    whole, found = resolve(written, written.tree)
    variants: tuple[Variant, ...] = ()
    if not problems:
        variants, more = _resolve_all(written, base, tuple(axes.values()))
        found += [problem for problem in more if problem not in found]
    if problems or written.problems or whole is None or found:
        raise SpecError(in_order([*problems, *written.problems, *found], written.name))
    throttle = whole.job.sweep.throttle if whole.job.sweep else None
    return SweepSpec(keys=tuple(axis.key for axis in axes.values()), variants=variants, throttle=throttle)


def _split(arguments: Sequence[str], problems: list[Problem]) -> tuple[dict[tuple[str, ...], Axis], list[str]]:
    """Separate arguments with several values from those with one."""
    axes: dict[tuple[str, ...], Axis] = {}
    ordinary: list[str] = []
    for argument in arguments:
        try:
            axis = _parse_axis(argument)
        except SpecError as error:
            problems += error.problems
            continue
        if axis is None:
            ordinary.append(argument)
        elif axis.path in axes:
            problems.append(problem_at(axis.place, "is swept twice", key=axis.key))
        else:
            axes[axis.path] = axis
    return axes, ordinary


def _parse_axis(argument: str) -> Axis | None:
    """Read `key=a,b` as the list [a, b]; None when there are not several values."""
    key, _, value = argument.partition("=")
    if "," not in value:
        return None
    place = Place(source=f"{show(argument)[1:-1]} ({COMMAND_LINE})", origin=ORIGIN)
    try:
        listed = parse_value(f"[{value}]", place)
    except SpecError as error:
        if value[0] in "[{\"'":
            return None  # one list, mapping or quoted text: its own reader reports what is wrong
        message = f"cannot be read as the list [{show(value)[1:-1]}]: {error.problems[0].message}"
        raise spec_error(place, message, error.problems[0].hint, key=key) from error
    nodes = listed.items if isinstance(listed, ListNode) else ()
    if len(nodes) == 1 and isinstance(nodes[0], Scalar) and not nodes[0].quoted:
        raise spec_error(place, f"found {show(value)}, expected a value after the comma", key=key)
    if len(nodes) < 2:
        return None
    path = parse_argument(f"{key}=1").path
    return Axis(path=path, nodes=nodes, place=place)


def _of_section(tree: Mapping, problems: list[Problem]) -> dict[tuple[str, ...], Axis]:
    """Read the axes of the section `sweep`; the model reports an invalid form when the spec is typed."""
    section = tree.entries.get(_SECTION)
    values = section.entries.get("values") if isinstance(section, Mapping) else None
    axes: dict[tuple[str, ...], Axis] = {}
    if not isinstance(values, Mapping):
        return axes
    for key, node in values.entries.items():
        place = values.keys[key]
        try:
            path = parse_argument(f"{key}=1").path
        except SpecError:
            problems.append(problem_at(place, "expected a dotted key such as train.lr", _WHICH, key=key))
            continue
        nodes = tuple(
            dataclasses.replace(item, place=dataclasses.replace(item.place, origin=ORIGIN))
            for item in (node.items if isinstance(node, ListNode) else (node,))
        )
        axes[path] = Axis(path=path, nodes=nodes, place=place)
    return axes


def _axis_problems(base: Mapping, axes: dict[tuple[str, ...], Axis]) -> list[Problem]:
    """Find problems of the axes, before variants are made of them."""
    problems: list[Problem] = []
    for axis in axes.values():
        reason = _why_not_swept(axis.path)
        if reason:
            problems.append(problem_at(axis.place, reason, _WHICH, key=axis.key))
            continue
        seen: set[tuple[str, bool]] = set()
        for node in axis.nodes:  # two equal values would make two equal runs
            if isinstance(node, Scalar) and (node.text, node.quoted) in seen:
                problems.append(problem_at(node.place, f"{show(node.text)} is swept twice", key=axis.key))
            elif isinstance(node, Scalar):
                seen.add((node.text, node.quoted))
        whole = next((other for other in axes.values() if other.path == axis.path[: len(other.path)]), axis)
        if whole is not axis:
            problems.append(problem_at(axis.place, f"is part of {whole.key}, which is swept, too", key=axis.key))
            continue
        override = Override(path=axis.path, node=axis.nodes[0] if axis.nodes else None, place=axis.place)
        meant = program_problem(override, base) if "entry" in base.entries and "train" not in base.entries else None
        if meant is not None:
            problems.append(meant)
        else:
            lay_over(base, override, problems)
    count = math.prod(len(axis.nodes) for axis in axes.values())
    if count > MAX_VARIANTS:
        message = f"{' x '.join(str(len(axis.nodes)) for axis in axes.values())} = {count} runs"
        place = next(iter(axes.values())).place
        problems.append(problem_at(place, f"{message}, expected at most {MAX_VARIANTS}", key=_SECTION))
    return problems


def _why_not_swept(path: tuple[str, ...]) -> str | None:
    """Return why a key cannot be swept; None when it can be, or is unknown."""
    reason = _REASONS.get(path[0]) or _REASONS.get(".".join(path[:2]))
    if reason:
        return f"cannot be swept: {reason}"
    if path[0] in _SECTIONS and len(path) == 1:
        return f"cannot be swept: it is a section; name a key of it, such as {path[0]}.{_SECTIONS[path[0]]}"
    return None


def _resolve_all(written: Written, base: Mapping, axes: tuple[Axis, ...]) -> tuple[tuple[Variant, ...], list[Problem]]:
    """Type and check every variant."""
    variants: list[Variant] = []
    chosen_of: dict[Problem, list[tuple[Node, ...]]] = {}
    for nodes in itertools.product(*(axis.nodes for axis in axes)):
        tree = base
        for axis, node in zip(axes, nodes, strict=True):
            tree = lay_over(tree, Override(path=axis.path, node=node, place=node.place), [])
        resolved, problems = resolve(written, dataclasses.replace(tree, place=base.place))
        if resolved is not None:
            dumped = resolved.job.model_dump(mode="json")
            values = {axis.key: value_at(dumped, axis.path, node) for axis, node in zip(axes, nodes, strict=True)}
            variants.append(Variant(values=values, resolved=resolved))
        for problem in problems:
            chosen_of.setdefault(problem, []).append(nodes)
    return tuple(variants), [_named(problem, axes, chosen) for problem, chosen in chosen_of.items()]


def _named(problem: Problem, axes: tuple[Axis, ...], chosen: list[tuple[Node, ...]]) -> Problem:
    """Add to a problem the values that its variants have in common.

    A problem of all variants is the spec's own; a value that the message is about is in it already.
    """
    common = {
        axis.key: brief(nodes[0])
        for axis, nodes in zip(axes, zip(*chosen, strict=True), strict=True)
        if len(set(map(id, nodes))) == 1
    }
    if len(chosen) == math.prod(len(axis.nodes) for axis in axes) or list(common) in ([], [problem.key]):
        return problem
    return dataclasses.replace(problem, message=f"{problem.message} (with {variant_label(common)})")
