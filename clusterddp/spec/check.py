"""Checks a tree and makes a JobSpec: the model types values, the rules compare them, each error gets its place."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from clusterddp.errors import Problem
from clusterddp.spec.hosts import with_node_for_each_host
from clusterddp.spec.keys import with_one_spelling
from clusterddp.spec.model import JobSpec
from clusterddp.spec.problems import did_you_mean, problem_at
from clusterddp.spec.rules import conflicts
from clusterddp.spec.section import Conflict
from clusterddp.spec.tree import ListNode, Mapping, Node, Place, Scalar, describe, to_data

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_Model = TypeVar("_Model", bound=BaseModel)
_KINDS = {"model_type": "a mapping", "dict_type": "a mapping", "tuple_type": "a list", "list_type": "a list"}


def check(tree: Mapping) -> tuple[JobSpec | None, list[Problem]]:
    """Type a tree whose keys are known; return a job, or problems."""
    data = to_data(tree)
    job, details = _typed(JobSpec, data)
    problems = [_field_problem(tree, detail) for detail in details]
    wrong = [_named_part(detail["loc"]) for detail in details]
    if job is None:
        # Valid values may still conflict: the rules check a spec without the invalid ones.
        for path in wrong:
            _remove(data, path)
        job, _ = _typed(JobSpec, {"name": "unnamed"} | data)
    job = job and with_node_for_each_host(job)
    for conflict in conflicts(job) if job else ():
        if not any(_touches(key, ".".join(path)) for key in conflict.keys for path in wrong):
            problems.append(_conflict_problem(tree, conflict))
    return (None, problems) if problems else (job, [])


def check_section(tree: Mapping, model: type[_Model], key: str) -> tuple[_Model | None, list[Problem]]:
    """Type a mapping that is not part of a spec; `key`: its dotted key, for messages."""
    known, problems = with_one_spelling(tree, model, tuple(key.split(".")))
    typed, details = _typed(model, to_data(known))
    found = [_field_problem(known, detail) for detail in details]
    problems += [dataclasses.replace(each, key=f"{key}.{each.key}") for each in found]
    return (None, problems) if problems else (typed, [])


def _typed(model: type[_Model], data: dict[str, Any]) -> tuple[_Model | None, list[ErrorDetails]]:
    """Type the data with pydantic; return a model, or errors."""
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _touches(key: str, other: str) -> bool:
    """Return whether one key contains the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _named_part(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the location up to the first list index."""
    named: list[str] = []
    for part in loc:
        if not isinstance(part, str) or part == "[key]":
            break
        named.append(part)
    return tuple(named)


def _remove(data: dict[str, Any], path: tuple[str, ...]) -> None:
    for part in path[:-1]:
        child = data.get(part)
        if not isinstance(child, dict):
            return
        data = child
    data.pop(path[-1], None)


def _conflict_problem(tree: Mapping, conflict: Conflict) -> Problem:
    key = next((key for key in conflict.keys if _has(tree, key)), conflict.keys[0])
    return problem_at(_locate(tree, tuple(key.split(".")))[1], conflict.message, conflict.hint, key=conflict.keys[0])


def _has(tree: Mapping, key: str) -> bool:
    path = tuple(key.split("."))
    return _locate(tree, path)[2] == len(path)


def _field_problem(tree: Mapping, detail: ErrorDetails) -> Problem:
    is_key = detail["loc"][-1] == "[key]"
    loc = detail["loc"][:-1] if is_key else detail["loc"]
    node, place, _ = _locate(tree, loc, of_key=is_key)
    message, hint = _words(detail, node)
    return problem_at(place, message, hint, key=".".join(map(str, loc)))


def _words(detail: ErrorDetails, node: Node | None) -> tuple[str, str | None]:
    """Return clusterddp's message and hint for an error of pydantic."""
    kind, context = detail["type"], detail.get("ctx", {})
    found = describe(node if isinstance(node, Scalar) else detail["input"])
    if kind == "clusterddp":
        return context["message"], context["hint"]
    if kind == "missing":
        return f"missing, expected {'`name: my-run`' if detail['loc'] == ('name',) else 'a value'}", None
    if kind in _BOUNDS:
        name, bound = _BOUNDS[kind]
        return f"found {found}, expected {bound} {float(context[name]):.12g}", None
    if kind == "literal_error":
        return _choice_words(found, node, re.findall("'([^']*)'", context["expected"]))
    if kind in _KINDS:
        text = node.text if isinstance(node, Scalar) else ""
        simple = _KINDS[kind] == "a list" and re.fullmatch(r"[\w./=-]{1,40}( [\w./=-]{1,40}){0,9}", text)
        hint = f"write [{', '.join(text.split())}]" if simple else None
        return f"found {found}, expected {_KINDS[kind]}", hint
    return f"found {found}, expected something else ({kind})", None


def _choice_words(found: str, node: Node | None, choices: list[str]) -> tuple[str, str | None]:
    listed = ", ".join(choices[:-1]) + f" or {choices[-1]}"
    written = node.text if isinstance(node, Scalar) else ""
    hint = None
    if "none" in choices and (node is None or written.lower() in {"no", "off", "false", "null", "~", ""}):
        hint = "write none"
    return f"found {found}, expected {listed}{did_you_mean(written, choices) if not hint else ''}", hint


def _locate(tree: Mapping, loc: tuple[int | str, ...], *, of_key: bool = False) -> tuple[Node | None, Place, int]:
    """Find the node at `loc`, or the nearest one around it; returns it, its place, and how many parts were found.

    A mapping or list in block style begins in the line below its key: then the key is the place.
    """
    node: Node = tree
    place = Place(source=tree.place.source, origin=tree.place.origin)
    for depth, part in enumerate(loc):
        if isinstance(node, Mapping) and isinstance(part, str) and part in node.entries:
            key_place, node = node.keys[part], node.entries[part]
            place = node.place if isinstance(node, Scalar) and not of_key else key_place
        elif isinstance(node, ListNode) and isinstance(part, int | str) and str(part).isdecimal():
            node = node.items[int(part)]
            place = node.place
        else:
            return (node if isinstance(node, Scalar) else None), place, depth
    return node, place, len(loc)
