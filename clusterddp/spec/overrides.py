"""Values that override the spec's file: `key=value` arguments, CLUSTERDDP__* variables, options.

Arguments follow Hydra's basic grammar: `train.lr=0.2` sets, `+env.NAME=1` sets as well (new or not), `~train.lr` resets
to the default. A value that begins with a quote, [ or { is YAML; any other, and one that begins with a placeholder such
as {output_dir}, is one scalar, byte for byte, as if it stood in the spec without quotes.

As a variable, `train.lr=0.2` is `CLUSTERDDP__TRAIN__LR=0.2`; what follows CLUSTERDDP__ENV__ keeps its case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Map
from dataclasses import dataclass

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.problems import spec_error
from clusterddp.spec.tree import Mapping, Node, Place, Scalar, show

ENV_PREFIX = "CLUSTERDDP__"
COMMAND_LINE = "command line"
MAX_ARGUMENT_SHOWN = 80

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+){0,19}")
"""The deepest key, as for the nesting of a spec (yamlfile.py)."""
_PLACEHOLDER = re.compile(r"\{[a-z][a-z0-9_]*\}|\{\{[a-z][a-z0-9_]*\}\}")
_OPTIONS = {("device", "cpu"): "--cpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One value for one key; without a node the key is reset to its default."""

    path: tuple[str, ...]
    node: Node | None
    place: Place

    def as_tree(self) -> Mapping:
        """Return a tree that holds only this value; for a reset, an empty scalar."""
        node = self.node or Scalar(text="", quoted=False, place=self.place)
        for part in reversed(self.path):
            node = Mapping(entries={part: node}, keys={part: self.place}, place=self.place)
        assert isinstance(node, Mapping)
        return node


def parse_argument(argument: str) -> Override:
    """Parse `key=value`, `+key=value` or `~key`. Raises: SpecError."""
    shown = argument if len(argument) <= MAX_ARGUMENT_SHOWN else argument[: MAX_ARGUMENT_SHOWN - 3] + "..."
    place = Place(source=f"{shown} ({COMMAND_LINE})", origin=COMMAND_LINE)
    key, equals, value = argument.partition("=")
    reset = key.startswith("~")
    key = key[1:] if reset or key.startswith("+") else key
    if reset and equals:
        raise spec_error(place, "a key is reset without a value", f"~{key}")
    if not _KEY.fullmatch(key) or not (reset or equals):
        raise spec_error(place, "expected key=value, for example train.lr=0.2, or ~key for the default")
    node = None if reset else _parse_text(value, key, place)
    return Override(path=tuple(key.split(".")), node=node, place=place)


def parse_environment(environ: Map[str, str]) -> tuple[list[Override], list[Problem]]:
    """Parse the CLUSTERDDP__* variables, in the order of their names."""
    overrides: list[Override] = []
    problems: list[Problem] = []
    for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX)):
        section, _, rest = variable.removeprefix(ENV_PREFIX).partition("__")
        section = section.lower()
        names = [rest] if section == "env" else rest.lower().split("__")
        path = (section, *(name for name in names if rest))
        place = Place(source=variable, origin=variable)
        try:
            if not _KEY.fullmatch(".".join(path)):
                raise spec_error(place, "names no key", "CLUSTERDDP__TRAIN__LR=0.2 stands for train.lr=0.2")
            node = _parse_text(environ[variable], ".".join(path), place)
            overrides.append(Override(path=path, node=node, place=place))
        except SpecError as error:
            problems += error.problems
    return overrides, problems


def from_options(options: Map[str, str]) -> list[Override]:
    """Make overrides of the command's own options, such as `{"launcher": "local"}` for --launcher local."""
    overrides = []
    for key, value in options.items():
        option = _OPTIONS.get((key, value), "--" + key.replace("_", "-"))
        place = Place(source=option, origin=option)
        node = Scalar(text=value, quoted=False, place=place)
        overrides.append(Override(path=tuple(key.split(".")), node=node, place=place))
    return overrides


def _parse_text(value: str, key: str, place: Place) -> Node:
    if value[:1] in ("[", "{", '"', "'") and not _PLACEHOLDER.match(value):
        from clusterddp.spec.yamlfile import parse_value  # commands that only look at runs do without YAML

        try:
            return parse_value(value, place) or Scalar(text="", quoted=False, place=place)
        except SpecError as error:
            message = f"cannot be read as YAML: {error.problems[0].message}"
            raise spec_error(place, message, error.problems[0].hint, key=key) from error
    if "," in value:
        raise spec_error(
            place,
            f"found several values, {show(value)}, expected one",
            "--sweep makes a run of each; a text with a comma stands in double quotes inside of the shell's: "
            f"{key}='{show(value)}'",
            key=key,
        )
    return Scalar(text=value, quoted=False, place=place)
