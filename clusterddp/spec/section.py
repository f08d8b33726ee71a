"""The base of every section of the spec, and the helpers that look up its keys and spellings."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

MAX_RANKS = 65_536


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
def spellings(model: type[BaseModel]) -> dict[str, str]:
    """Map every spelling of a section's keys, aliases among them, to the key itself."""
    names = {name: name for name in model.model_fields}
    for name, field in model.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            names |= {str(alias): name for alias in field.validation_alias.choices}
    return names


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section or a list of sections; else None."""
    return next(_models(field.annotation), None)


@functools.cache
def _containers(model: type[BaseModel]) -> frozenset[str]:
    """Return the keys whose values are sections, lists or mappings."""
    fields = model.model_fields.items()
    return frozenset(
        name for name, field in fields if section_of(field) or get_origin(field.annotation) in (dict, tuple)
    )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
