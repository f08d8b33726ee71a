"""Loads a spec: merges the file and everything that overrides it into one JobSpec, with the origin of every value.

Precedence: options and arguments of the command line > the spec > --profile > the project file > the default profile >
the site file > defaults. What the command names overrides what is found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping as Map
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.check import More, check, conflicts_here
from clusterddp.spec.entry_section import EntrySpec
from clusterddp.spec.keys import is_for_program, with_one_spelling
from clusterddp.spec.layers import (
    Override,
    SharedFiles,
    from_options,
    parse_argument,
    read_profile,
    read_shared_files,
    refusals,
)
from clusterddp.spec.model import JobSpec
from clusterddp.spec.program_arguments import names_argument, set_argument, words_problem
from clusterddp.spec.train import TrainSpec
from clusterddp.spec.tree import (
    Mapping,
    Node,
    Place,
    brief,
    decode,
    in_order,
    is_null,
    merge,
    problem_at,
    read_bytes,
    read_stdin,
    spec_error,
    without,
)
from clusterddp.spec.yamlfile import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSpec:
    """A spec with all overrides applied."""

    job: JobSpec
    origins: dict[str, str]
    """Dotted key -> the origin of its value, for each value that is no default."""
    path: Path | None
    text: str
    """The spec as written, without overrides."""
    shared: SharedFiles
    """The site file and the project file that were read."""
    tree: Mapping = field(repr=False, compare=False)
    """The values as they are written, for the place of a problem that the plan finds."""

    def changes(self) -> tuple[dict[str, Any], ...]:
        """List the values that are no defaults, in the order of the model.

        Each has its key, value, default, origin, and the site file or project file that it is from.
        """
        defaults, found = default_values(), []
        for key, value in _changed_values(self.job).items():
            origin = self.origins.get(key, "")
            file = next((file.name for file in self.shared if origin.startswith(f"{file.name}:")), None)
            found.append({"key": key, "value": value, "default": defaults.get(key), "origin": origin, "file": file})
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The spec with all overrides merged into it, before it is typed."""

    tree: Mapping
    problems: tuple[Problem, ...]
    """Problems found so far: unknown keys, arguments that cannot be read."""
    path: Path | None
    name: str
    """The spec's name in messages."""
    text: str
    arguments: tuple[tuple[str, ...], ...]
    """The keys that arguments of the command line set or reset."""
    shared: SharedFiles
    more: More
    """Finds further conflicts, of a spec that is submitted now."""


def load_spec(
    source: Path | str,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    environ: Map[str, str],
    flags: Map[str, str] | None = None,
    hosts: Override | None = None,
    whole: bool = False,
    working_dir: Path | None = None,
) -> ResolvedSpec:
    """Read a spec and everything that overrides it.

    `source` is a path, `-` for the standard input, or, when it has a line break, the YAML itself. `flags` are the
    command's own options, `{"launcher": "local"}`; `hosts`: those of --hosts or --hostfile. `whole`: the spec has all
    of its values, as a run's own has; no profile, project file or site file is read. `working_dir`: it is submitted
    from there now, so a script or a secret that it names and that is not here is a problem of it.

    Raises: SpecError: with every problem that was found.
    """
    written = read_layers(
        *(source, overrides), profile=profile, environ=environ, flags=flags, hosts=hosts, whole=whole,
        working_dir=working_dir,
    )  # fmt: skip
    resolved, found = resolve(written, written.tree)
    if written.problems or resolved is None:
        raise SpecError(in_order([*written.problems, *found], written.name))
    return resolved


def read_layers(
    source: Path | str,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    environ: Map[str, str],
    flags: Map[str, str] | None = None,
    hosts: Override | None = None,
    whole: bool = False,
    working_dir: Path | None = None,
) -> Written:
    """Read a spec and merge everything that overrides it into it; see `load_spec`.

    Raises: SpecError: the file, or the profile, cannot be read at all.
    """
    path, name = None, "<text>"
    if source == "-":
        name, data = "<stdin>", read_stdin()
    elif isinstance(source, str) and ("\n" in source or "\r" in source):
        data = source.encode("utf-8", "surrogatepass")
    else:
        path, name = Path(source), str(Path(source))
        if path.suffix == ".py":
            hint = f"clusterddp init --script {name} writes a spec that runs it"
            raise spec_error(Place(source=name), "is a Python script, expected a spec", hint)
        data = read_bytes(path)
    text = decode(data, name)
    spec = parse(text, name)
    problems: list[Problem] = []
    below, shared = Mapping(place=spec.place if whole else Place(source="")), SharedFiles()
    if not whole:  # a spec without a file is as one in the working directory
        shared = read_shared_files(environ, path.absolute().parent if path else Path.cwd(), spec=path)
        files = (shared.site, shared.project)
        site, project = (with_one_spelling(file.tree, problems) if file else None for file in files)
        for shared_tree in filter(None, (site, project)):
            problems += refusals(shared_tree, is_project=shared_tree is project)
        chosen = read_profile(environ, profile)
        of_profile = with_one_spelling(chosen, problems) if chosen is not None else None
        # A profile that the command names overrides the project file; the default profile does not.
        layers = [site, of_profile, project] if profile is None else [site, project, of_profile]
        below = functools.reduce(merge, [layer for layer in layers if layer is not None], below)
    known = with_one_spelling(spec, problems, stored=whole)
    problems += hosts.problems if hosts else ()
    arguments = _arguments(overrides, problems)
    laid_over = [*arguments, *from_options(flags or {}), *([hosts] if hosts else [])]
    of_entry = [one for one in laid_over if one.path[0] == "entry"]
    has_entry = (of_entry[-1].node or of_entry[-1].path[1:]) if of_entry else "entry" in known.entries
    runs_program = "train" not in known.entries and bool(has_entry)
    if runs_program:
        below = without(below, ("train",))  # for the specs without an entry
    tree = merge(below, known)
    for override in laid_over:
        meant = program_problem(override, tree) if runs_program and override in arguments else None
        if meant is not None:
            problems.append(meant)
        else:
            tree = lay_over(tree, override, problems)
    tree = dataclasses.replace(tree, place=spec.place)
    return Written(
        tree=tree,
        problems=tuple(problems),
        path=path,
        name=name,
        text=text,
        arguments=tuple(override.path for override in arguments),
        shared=shared,
        more=functools.partial(conflicts_here, working_dir=working_dir, environ=environ)
        if working_dir
        else lambda job: (),
    )


def resolve(written: Written, tree: Mapping) -> tuple[ResolvedSpec | None, list[Problem]]:
    """Type a tree that was made from `written`; return a resolved spec, or problems."""
    job, problems = check(tree, written.more)
    if job is None:
        return None, problems
    origins = _origins(tree, job)
    resolved = ResolvedSpec(
        job=job, origins=origins, path=written.path, text=written.text, shared=written.shared, tree=tree
    )
    return resolved, []


def lay_over(tree: Mapping, override: Override, problems: list[Problem]) -> Mapping:
    """Return the tree with one value set or reset; a problem with it is added to `problems`."""
    if names_argument(override.path):
        return set_argument(tree, override, problems)
    known = with_one_spelling(override.as_tree(), problems)
    if override.node is not None:
        return merge(tree, known)
    path: list[str] = []
    level: Any = known
    while isinstance(level, Mapping) and level.entries:
        name, level = next(iter(level.entries.items()))
        path.append(name)
    return without(tree, tuple(path)) if len(path) == len(override.path) else tree


def read_shared_values(environ: Map[str, str], spec: Path) -> dict[str, Node]:
    """Read what the site file and the project file give a spec at `spec`, by dotted key; lists are values."""
    tree = Mapping(place=Place(source=""))
    for file in read_shared_files(environ, spec.absolute().parent, spec=spec):
        tree = merge(tree, with_one_spelling(file.tree, []))
    found: dict[str, Node] = {}

    def collect(tree: Mapping, prefix: str) -> None:
        for key, node in tree.entries.items():
            if isinstance(node, Mapping):
                collect(node, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = node

    collect(tree, "")
    return found


@functools.cache
def default_values() -> dict[str, Any]:
    """Return the default of every value, by dotted key."""
    job = JobSpec(name="unnamed").model_dump(mode="json")
    sections = {"train": TrainSpec().to_json(), "entry": EntrySpec().model_dump(mode="json")}
    return flatten(job | sections) | {"name": None}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted keys and values; lists are values, and so are sections that are None."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _arguments(arguments: Sequence[str], problems: list[Problem]) -> list[Override]:
    """Parse KEY=VALUE arguments; from one that begins with - on they are words of the user's program."""
    own = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if words := arguments[len(own) :]:
        problems.append(words_problem(words))
    overrides = []
    for argument in own:
        try:
            overrides.append(parse_argument(argument))
        except SpecError as error:
            problems += error.problems
    return overrides


def program_problem(override: Override, tree: Mapping) -> Problem | None:
    """Make the problem of an argument that is one of the user's program; None: it is none."""
    entry = tree.entries.get("entry")
    of_entry = entry.entries if isinstance(entry, Mapping) else {}
    if override.node is None or "batch_script" in of_entry or not is_for_program(override.path):
        return None
    name, value, is_call = override.path[-1], brief(override.node), not is_null(of_entry.get("function"))
    what, where, sets = ("function", "kwargs", name) if is_call else ("program", "args", f"--{name}")
    message = "is for the built-in trainer, and" if override.path[0] == "train" else "unknown key;"
    message += f" this spec runs your own {what}"
    hint = f"entry.{where}.{name}={value} sets {sets} of your {what}"
    return problem_at(override.place, message, hint, key=".".join(override.path))


def _changed_values(job: JobSpec) -> dict[str, Any]:
    """Return the values that are no defaults, by dotted key."""
    defaults = default_values()
    values = flatten(job.model_dump(mode="json"))
    return {key: value for key, value in values.items() if value != defaults.get(key)}


_DERIVED = {"resources.nodes": "the number of hosts", "resources.gpus_per_node": "the GPUs that slurm asks for"}
"""Keys that may follow from others -> the origin of such a value."""


def _origins(tree: Mapping, job: JobSpec) -> dict[str, str]:
    origins: dict[str, str] = {}
    for key in _changed_values(job):
        node: Any = tree
        for part in key.split("."):
            node = node.entries.get(part) if isinstance(node, Mapping) else None
        if node is not None:
            origins[key] = node.place.text
        elif key in _DERIVED:
            origins[key] = _DERIVED[key]
    return origins
