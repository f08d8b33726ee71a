"""The base of every section of the spec, and the helpers that look up its keys and spellings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ConfigDict, model_validator

from clusterddp.spec.train import TrainSpec

MAX_RANKS = 65_536
AnySection: TypeAlias = Any
"""A class: a pydantic model, or TrainSpec."""


class Section(BaseModel):
    """A part of the spec: frozen, and strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_containers(cls, data: Any) -> Any:
        """Give an empty section, list or mapping its default; an empty value is an error."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in _containers(cls)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Values that conflict. `keys`: their dotted keys; the problem points at the first one that is written."""

    keys: tuple[str, ...]
    message: str
    hint: str | None = None


@functools.cache
def keys_of(section: AnySection) -> dict[str, AnySection | None]:
    """Map each key of a section to the section that it holds, or holds a list of; None: it holds values."""
    if issubclass(section, BaseModel):
        return {name: next(_sections(field.annotation), None) for name, field in section.model_fields.items()}
    return {field.name: None for field in dataclasses.fields(section)}


@functools.cache
def spellings(section: AnySection) -> dict[str, str]:
    """Map every spelling of a section's keys, aliases among them, to the key itself."""
    names = {name: name for name in keys_of(section)}
    for name, field in section.model_fields.items() if issubclass(section, BaseModel) else ():
        if isinstance(field.validation_alias, AliasChoices):
            names |= {str(alias): name for alias in field.validation_alias.choices}
    return names


@functools.cache
def _containers(model: type[BaseModel]) -> frozenset[str]:
    """Return the keys whose values are sections, lists or mappings."""
    fields = model.model_fields
    return frozenset(
        name
        for name, section in keys_of(model).items()
        if section or get_origin(fields[name].annotation) in (dict, tuple)
    )


def _sections(annotation: Any) -> Iterator[AnySection]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or annotation is TrainSpec):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
