"""Which keys a spec has: one spelling for each, and what an unknown key was probably meant to be."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from clusterddp.errors import Problem
from clusterddp.spec.model import JobSpec
from clusterddp.spec.problems import closest, did_you_mean, problem_at
from clusterddp.spec.tree import ListNode, Mapping, Node, Place, Scalar

MAX_SUGGESTIONS = 50
"""Unknown keys for which a suggestion is sought; a file with more is no spec, and the search takes time."""

# Words of other tools, for which difflib finds nothing.
_SYNONYMS = {
    "learning_rate": "train.lr",
    "batch": "train.batch_size",
    "gpus": "resources.gpus_per_node",
    "mem": "resources.memory_gb",
    "memory": "resources.memory_gb",
    "cpus_per_rank": "resources.cpus_per_task",
    "nprocs": "resources.procs_per_node",
    "time_limit": "resources.time",
    "timeout": "resources.time",
    "hosts": "ssh.hosts",
    "remote_dir": "ssh.dir",
    "init_method": "network.init",
    "dist_url": "network.init",
    "callable": "entry.function",
    "cmd": "entry.command",
} | dict.fromkeys(
    ["partition", "account", "qos", "constraint", "gres", "mail_type", "mail_user", "exclusive", "nodelist", "exclude",
     "reservation"],
    "slurm",
)  # fmt: skip


_HOSTFILES = ("hostfile", "hostfiles", "machinefile")


def with_one_spelling(
    tree: Mapping, model: type[BaseModel] = JobSpec, path: tuple[str, ...] = ()
) -> tuple[Mapping, list[Problem]]:
    """Give every key of a spec's tree its one spelling, and report and drop the keys that a spec does not have.

    `model`, `path`: the tree is that of a section which lies there.

    Sections with nothing in them are left as they are: `merge` knows what they mean.
    """
    problems: list[Problem] = []
    return _section(tree, model, path, problems), problems


def without_nulls(tree: Mapping, model: type[BaseModel] = JobSpec) -> Mapping:
    """Drop sections and lists with nothing in them: they have their defaults then."""
    return _drop_nulls(tree, model)


def model_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model behind a field: of a section, or of the items of a list."""
    return next(_models(field.annotation), None)


@functools.cache
def spellings(model: type[BaseModel]) -> dict[str, str]:
    """Map every spelling of a section's keys, aliases among them, to the key itself."""
    names = {name: name for name in model.model_fields}
    for name, field in model.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            names |= {str(alias): name for alias in field.validation_alias.choices}
    return names


def _section(tree: Mapping, model: type[BaseModel], path: tuple[str, ...], problems: list[Problem]) -> Mapping:
    entries: dict[str, Node] = {}
    keys: dict[str, Place] = {}
    first: dict[str, str] = {}
    for written, node in tree.entries.items():
        place = tree.keys[written]
        name = spellings(model).get(written)
        dotted = ".".join((*path, written))
        if name is None:
            seek = len(problems) < MAX_SUGGESTIONS
            message, hint = _unknown_key(written, model, path) if seek else ("unknown key", None)
            problems.append(problem_at(place, message, hint, key=dotted))
        elif name in entries:
            problems.append(_second_spelling(place, dotted, first[name], keys[name]))
        else:
            entries[name] = _value(node, model.model_fields[name], (*path, name), problems)
            keys[name], first[name] = place, written
    return Mapping(entries=entries, keys=keys, place=tree.place)


def _value(node: Node, field: FieldInfo, path: tuple[str, ...], problems: list[Problem]) -> Node:
    model = model_of(field)
    if path == ("slurm",) and isinstance(node, Mapping):
        return _slurm_options(node, problems)
    if model is None:
        return node
    if isinstance(node, Mapping):
        return _section(node, model, path, problems)
    if isinstance(node, ListNode):
        items = tuple(
            _section(item, model, (*path, str(index)), problems) if isinstance(item, Mapping) else item
            for index, item in enumerate(node.items)
        )
        return ListNode(items=items, place=node.place)
    return node


def _slurm_options(tree: Mapping, problems: list[Problem]) -> Mapping:
    """Spell options with underscores, as in sbatch's own long names but for the hyphens."""
    entries: dict[str, Node] = {}
    keys: dict[str, Place] = {}
    first: dict[str, str] = {}
    for written, node in tree.entries.items():
        name = written.replace("-", "_")
        if name in entries:
            problems.append(_second_spelling(tree.keys[written], f"slurm.{written}", first[name], keys[name]))
        else:
            entries[name], keys[name], first[name] = node, tree.keys[written], written
    return Mapping(entries=entries, keys=keys, place=tree.place)


def _second_spelling(place: Place, dotted: str, first: str, first_place: Place) -> Problem:
    where = f"line {first_place.line}" if first_place.line is not None else first_place.source
    return problem_at(place, f"sets the same as {first} in {where}", key=dotted)


def _unknown_key(written: str, model: type[BaseModel], path: tuple[str, ...]) -> tuple[str, str | None]:
    """Say that a key is unknown and what was probably meant, as message and hint."""
    if written in _HOSTFILES:
        return "unknown key", "--hostfile FILE reads the hosts of a file"
    here = closest(written, spellings(model))
    elsewhere = _homes().get(written.lower().replace("-", "_"))
    if "." in written and written in _all_keys():
        section, _, rest = written.partition(".")
        return "unknown key", f"write it in its section, {section}: {{{rest}: ...}}"
    if elsewhere and (here is None or here not in elsewhere.split(".")):
        return _belongs(written, elsewhere, path), None
    return f"unknown key{did_you_mean(written, spellings(model))}", None


def _belongs(written: str, home: str, path: tuple[str, ...]) -> str:
    section, _, name = home.rpartition(".")
    if home == "slurm" or (name == written and section):
        return f"unknown key here. It belongs under {section or home}:"
    if name == written:
        return "unknown key here. It belongs at the top level"
    same_section = section == ".".join(path)
    return f'unknown key. Did you mean "{name if same_section else home}"?'


@functools.cache
def _homes() -> dict[str, str]:
    """Map the last part of every key, and words of other tools, to the dotted key they stand for."""
    homes = dict(_SYNONYMS)
    for dotted in _all_keys():
        homes.setdefault(dotted.rpartition(".")[2], dotted)
    for name, field in JobSpec.model_fields.items():
        model = model_of(field)
        for alias, target in (spellings(model) if model else {}).items():
            homes.setdefault(alias, f"{name}.{alias if alias != target else target}")
    return homes


@functools.cache
def _all_keys() -> tuple[str, ...]:
    """List every dotted key that a spec can have, but for those of free-form sections."""
    keys: list[str] = []
    for name, field in JobSpec.model_fields.items():
        model = model_of(field)
        keys += [name, *(f"{name}.{inner}" for inner in (model.model_fields if model else ()))]
    return tuple(keys)


def _drop_nulls(tree: Mapping, model: type[BaseModel]) -> Mapping:
    entries: dict[str, Node] = {}
    for name, node in tree.entries.items():
        field = model.model_fields[name]
        inner = model_of(field)
        if isinstance(node, Scalar) and node.null and (inner is not None or _is_container(field.annotation)):
            continue
        entries[name] = _drop_nulls(node, inner) if isinstance(node, Mapping) and inner is not None else node
    return Mapping(entries=entries, keys=tree.keys, place=tree.place)


def _is_container(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (dict, tuple)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
