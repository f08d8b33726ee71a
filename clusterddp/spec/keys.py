"""The keys of a spec: maps each spelling to one key, and suggests a key for an unknown one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from clusterddp.errors import Problem
from clusterddp.spec.fields import AnySection, keys_of, spellings
from clusterddp.spec.model import JobSpec, json_schema
from clusterddp.spec.tree import ListNode, Mapping, Node, closest, did_you_mean, problem_at

MAX_SUGGESTIONS = 50
"""The most unknown keys that get a suggestion; a file with more is no spec, and the search takes time."""

# Keys of other tools, for which difflib finds nothing.
_SYNONYMS = {
    "learning_rate": "train.lr",
    "batch": "train.batch_size",
    "amp": "train.precision",
    "fp16": "train.precision",
    "bf16": "train.precision",
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

_REMOVED: dict[str, str] = {
    "start": "leave it out, and clusterddp starts the ranks; to have torchrun start them: "
    "entry: {command: [torchrun, train.py], owns_ranks: true}",
    "ssh.when_busy": "a run is refused with the name of the run that has its GPUs; submit it when they are free, "
    "or as a sweep, whose runs wait",
    "notify.shell": "a shell is a command like others: command: [sh, -c, 'TEXT']",
    "notify.mail": "on Slurm slurm: {mail_user: ADDRESS, mail_type: END}; elsewhere command: [mail, -s, TEXT, ADDRESS]",
    "keep": "clusterddp rm --older-than 30d removes runs that ended that long ago, also with --name",
    "train.comm_allow": "write the mode of exchange itself, such as train.comm: local:8",
    "entry.local_rank_arg": "write the option among the arguments: args: ['--local_rank={local_rank}']",
    "ssh.conda": "write conda: at the top level; a host of ssh.hosts may have one of its own",
    "ssh.venv": "write venv: at the top level; a host of ssh.hosts may have one of its own",
    "ssh.python": "write python: at the top level; a host of ssh.hosts may have one of its own",
    "container.python": "write python: at the top level; in a container it is looked for inside",
}
"""Dotted key that earlier versions had -> what to use instead, in one sentence for a hint."""

_HOSTFILES = ("hostfile", "hostfiles", "machinefile")


def with_one_spelling(
    tree: Mapping,
    problems: list[Problem],
    model: AnySection = JobSpec,
    path: tuple[str, ...] = (),
    *,
    stored: bool = False,
) -> Mapping:
    """Rename every key of a spec's tree to its one spelling; drop unknown keys and add them to `problems`.

    `model`, `path`: of the section, when the tree is one. Empty sections stay: `merge` handles them. `stored`: the spec
    is that of a run, which has every key of the version that made it; removed keys are dropped without a report.
    """
    found: list[Problem] = []
    known = _section(tree, model, path, found)
    problems += [each for each in found if not (stored and each.key in _REMOVED)]
    return known


def key_of_option(name: str) -> str | None:
    """Return the key that an option of another launcher sets, `gpus` -> `resources.gpus_per_node`; None: no key."""
    key = _key_of_name().get(name.lower().replace("-", "_"), "")
    key = f"slurm.{name.replace('-', '_')}" if key == "slurm" else key
    return key if key.partition(".")[0] in {"resources", "slurm", "network", "name", "env"} else None


def is_for_program(path: tuple[str, ...]) -> bool:
    """Return whether a key, in a spec that runs a program, is probably an argument of that: no key, or a trainer's."""
    name = path[0].lower().replace("-", "_")
    if len(path) > 1 or name in spellings(JobSpec):
        return name == "train" and len(path) > 1
    return _key_of_name().get(name, "train.").startswith("train.") and closest(name, spellings(JobSpec)) is None


def complete_override(typed: str) -> list[tuple[str, str]]:
    """Return how a `key=value` argument can go on, each with a description.

    A key ends with `=`, a section with a dot; a key that is reset, `~key`, ends with nothing. Values are those of keys
    with a fixed choice.
    """
    schema = json_schema()
    mark = typed[:1] if typed[:1] in {"+", "~"} else ""
    key, equals, value = typed.removeprefix(mark).partition("=")
    *sections, name = key.split(".")
    fields = schema["properties"]
    for section in sections:
        fields = _facts(fields.get(section, {}), schema).get("properties", {})
    if equals:
        values = _values(_facts(fields.get(name, {}), schema))
        return [(f"{mark}{key}={each}", "") for each in values if each.startswith(value)]
    found = []
    for each, field in fields.items():
        facts = _facts(field, schema)
        end = "." if facts.keys() & {"properties", "patternProperties"} else "" if mark == "~" else "="
        if each.startswith(name):
            words = " ".join(field.get("description", "").split())
            found.append((mark + ".".join([*sections, each]) + end, words.split(". ")[0]))
    return found


def _facts(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field's value, without the null of a field that may be left out."""
    choices = [each for each in field.get("anyOf", ()) if each.get("type") != "null"]
    found = choices[0] if len(choices) == 1 else field
    if "$ref" in found:
        return dict(schema["$defs"][found["$ref"].rpartition("/")[2]])
    return found


def _values(facts: dict[str, Any]) -> list[str]:
    """Return the values of a field that has a fixed choice."""
    if facts.get("type") == "boolean":
        return ["true", "false"]
    choices = [facts, *facts.get("anyOf", ()), facts.get("items", {})]
    return [str(value) for choice in choices for value in (*choice.get("enum", ()), *[choice.get("const")]) if value]


def _section(tree: Mapping, model: AnySection, path: tuple[str, ...], problems: list[Problem]) -> Mapping:
    names = spellings(model)
    tree = _renamed(tree, lambda written: names.get(written, written), path, problems)
    entries: dict[str, Node] = {}
    for name, node in tree.entries.items():
        inner = (*path, name)
        if name in keys_of(model):
            entries[name] = _value(node, keys_of(model)[name], inner, problems)
            continue
        seek = len(problems) < MAX_SUGGESTIONS
        message, hint = _unknown_key(name, model, path) if seek else ("unknown key", None)
        problems.append(problem_at(tree.keys[name], message, hint, key=".".join(inner)))
    return Mapping(entries=entries, keys={name: tree.keys[name] for name in entries}, place=tree.place)


def _value(node: Node, model: AnySection | None, path: tuple[str, ...], problems: list[Problem]) -> Node:
    if path == ("slurm",) and isinstance(node, Mapping):
        # sbatch's long names, with underscores for hyphens.
        return _renamed(node, lambda written: written.replace("-", "_"), path, problems)
    if model is not None and isinstance(node, Mapping):
        return _section(node, model, path, problems)
    if model is not None and isinstance(node, ListNode):
        items = (_value(item, model, (*path, str(index)), problems) for index, item in enumerate(node.items))
        return ListNode(items=tuple(items), place=node.place)
    return node


def _renamed(tree: Mapping, spell: Callable[[str], str], path: tuple[str, ...], problems: list[Problem]) -> Mapping:
    """Rename each key to its one spelling; report and drop a key that another spelling has set."""
    written_as: dict[str, str] = {}
    for written, place in tree.keys.items():
        first = written_as.setdefault(spell(written), written)
        if first is not written:
            first_place = tree.keys[first]
            where = f"line {first_place.line}" if first_place.line is not None else first_place.source
            message = f"sets the same as {first} in {where}"
            problems.append(problem_at(place, message, key=".".join((*path, written))))
    return Mapping(
        entries={name: tree.entries[written] for name, written in written_as.items()},
        keys={name: tree.keys[written] for name, written in written_as.items()},
        place=tree.place,
    )


def _unknown_key(written: str, model: AnySection, path: tuple[str, ...]) -> tuple[str, str | None]:
    """Return message and hint for an unknown key, with the key that the user probably means."""
    removed = _REMOVED.get(".".join((*path, written)))
    if removed:
        return "this key was removed", removed
    if written in _HOSTFILES:
        return "unknown key", "--hostfile FILE reads the hosts of a file"
    here = closest(written, spellings(model))
    elsewhere = _key_of_name().get(written.lower().replace("-", "_"))
    if "." in written and written in _all_keys():
        section, _, rest = written.partition(".")
        return "unknown key", f"write it in its section, {section}: {{{rest}: ...}}"
    if elsewhere and (here is None or here not in elsewhere.split(".")):
        return _suggest(written, elsewhere, path), None
    return f"unknown key{did_you_mean(written, spellings(model))}", None


def _suggest(written: str, key: str, path: tuple[str, ...]) -> str:
    section, _, name = key.rpartition(".")
    if key == "slurm" or (name == written and section):
        return f"unknown key here. It belongs under {section or key}:"
    if name == written:
        return "unknown key here. It belongs at the top level"
    same_section = section == ".".join(path)
    return f'unknown key. Did you mean "{name if same_section else key}"?'


@functools.cache
def _key_of_name() -> dict[str, str]:
    """Map the last part of every key, and keys of other tools, to a dotted key."""
    found = dict(_SYNONYMS)
    for dotted in _all_keys():
        found.setdefault(dotted.rpartition(".")[2], dotted)
    for name, model in keys_of(JobSpec).items():
        for spelling in spellings(model) if model else ():
            found.setdefault(spelling, f"{name}.{spelling}")
    return found


@functools.cache
def _all_keys() -> tuple[str, ...]:
    """List every dotted key of a spec, without those of free-form sections."""
    keys: list[str] = []
    for name, model in keys_of(JobSpec).items():
        keys += [name, *(f"{name}.{inner}" for inner in (keys_of(model) if model else ()))]
    return tuple(keys)
