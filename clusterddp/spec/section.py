"""What every section of the spec is: keys that pydantic types, and rules between them that find conflicts."""

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
        """A section, list or mapping with nothing behind its key has its default; an empty value is an error."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in _containers(cls)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Values that do not go together. `keys` are the dotted keys concerned; the first one given is pointed at."""

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
    """Return the model behind a field: of a section, or of the items of a list."""
    return next(_models(field.annotation), None)


@functools.cache
def _containers(model: type[BaseModel]) -> frozenset[str]:
    """Name the keys whose values are sections, lists or mappings."""
    fields = model.model_fields.items()
    return frozenset(
        name for name, field in fields if section_of(field) or get_origin(field.annotation) in (dict, tuple)
    )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
