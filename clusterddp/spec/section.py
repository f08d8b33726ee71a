"""What every section of the spec is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the spec: frozen, and strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
