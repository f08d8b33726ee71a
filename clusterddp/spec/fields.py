"""The types of the spec's fields: a reader, a range, and its JSON Schema."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from clusterddp.spec.hosts import HOST_SET, read_host
from clusterddp.spec.image_sets import NAMES
from clusterddp.spec.scalars import (
    FETCHABLE,
    TIME,
    VARIABLE,
    Duration,
    Fetched,
    read_bool,
    read_duration,
    read_fetch,
    read_filled_text,
    read_float,
    read_image_set,
    read_int,
    read_line,
    read_loose_text,
    read_option,
    read_port,
    read_remote_path,
    read_sweep_values,
    read_text,
    read_variable,
    read_word,
    refuse,
    without_mpi,
)
from clusterddp.spec.section import MAX_RANKS


@dataclass(frozen=True, slots=True)
class Matching:
    """Text that has to match the whole `pattern`, in the reader and the JSON Schema; `expected` is for messages."""

    pattern: str
    expected: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {"pattern": self.pattern}

    def _read(self, value: object) -> str:
        text = read_text(value)
        found = re.fullmatch(self.pattern.removeprefix("^").removesuffix("$"), text)
        return text if found else refuse(value, self.expected)


_LOOSE: dict[str, Any] = {"type": ["string", "number", "boolean"]}

Count = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(read_int)]
RankCount = Annotated[int, Field(ge=1, le=MAX_RANKS), BeforeValidator(read_int)]
GpuCount = Annotated[int, Field(ge=0, le=128), BeforeValidator(read_int)]
CpuCount = Annotated[int, Field(ge=1, le=4_096), BeforeValidator(read_int)]
Restarts = Annotated[int, Field(ge=0, le=100), BeforeValidator(read_int)]
Pixels = Annotated[int, Field(ge=0, le=1023), BeforeValidator(read_int)]
Side = Annotated[int, Field(ge=8, le=1024), BeforeValidator(read_int)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), BeforeValidator(read_int)]
Gigabytes = Annotated[float, Field(gt=0, le=1_000_000), BeforeValidator(read_float)]
Positive = Annotated[float, Field(gt=0, le=1e6), BeforeValidator(read_float)]
NotNegative = Annotated[float, Field(ge=0, le=1e6), BeforeValidator(read_float)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(read_float)]
BelowOne = Annotated[float, Field(ge=0, lt=1), BeforeValidator(read_float)]
Switch = Annotated[bool, BeforeValidator(read_bool)]
Text = Annotated[str, Field(min_length=1), BeforeValidator(read_filled_text)]
LooseText = Annotated[str, BeforeValidator(read_loose_text), WithJsonSchema(_LOOSE)]
Word = BeforeValidator(read_word)
"""For choices: `Annotated[Literal["a", "b"], Word]`."""

Name = Annotated[
    str,
    Matching(
        r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", "1 to 64 letters, digits, dots, - and _, beginning with a letter or digit"
    ),
]
Module = Annotated[
    str,
    Matching(r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$", "a module's dotted name, such as package.train"),
]
Host = Annotated[str, Field(pattern=HOST_SET), BeforeValidator(read_host)]
HostKey = Annotated[
    str,
    Matching(
        r"^(SHA256:[A-Za-z0-9+/]{43}=?|[a-z0-9@.-]+ [A-Za-z0-9+/]+=*)$",
        "SHA256: and 43 characters, as ssh-keygen -l shows it, or a public key",
    ),
]
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f-][^\x00-\x1f\x7f]*$"), BeforeValidator(read_line)]
ModuleName = Annotated[str, Matching(r"^[A-Za-z0-9_][A-Za-z0-9_.+/:=@-]*$", "the name of a module, such as cuda/12.4")]
RemotePath = Annotated[str, Field(pattern=r"^(/|~/)[^\x00-\x1f\x7f]+$"), BeforeValidator(read_remote_path)]
Interface = Annotated[
    str, Matching(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,14}$", "auto or the name of an interface, such as eth0")
]
Mount = Annotated[
    str,
    Matching(
        r"^[^:,\x00-\x1f\x7f]+(:[^:,\x00-\x1f\x7f]+){0,2}$",
        "PATH or HOST_PATH:PATH[:FLAGS], without commas or control characters",
    ),
]
After = Annotated[
    str,
    Matching(
        r"^((afterok|afterany|afternotok):)?[A-Za-z0-9@/._-]+$",
        "a run or a job id, with afterok:, afterany: or afternotok: before it",
    ),
]
Comm = Annotated[
    str,
    Matching(
        r"^(exact|bf16|local:[1-9][0-9]{0,4})$",
        "exact, bf16 or local:H (such as local:8)",
    ),
]
SlurmKey = Annotated[str, Matching(r"^[a-z][a-z0-9_-]*$", "a long option of sbatch, such as partition or mail_type")]
ImageSetName = Annotated[str, BeforeValidator(read_image_set), WithJsonSchema({"enum": list(NAMES)})]
Variable = Annotated[str, Field(pattern=VARIABLE), BeforeValidator(read_variable)]
Option = Annotated[str | bool, PlainValidator(read_option), WithJsonSchema(_LOOSE)]
SweepValues = Annotated[
    tuple[Any, ...],
    BeforeValidator(read_sweep_values),
    WithJsonSchema({"type": "array", "minItems": 1}),
]
Backend = Annotated[
    Literal["auto", "gloo", "nccl"],
    Word,
    BeforeValidator(without_mpi),
]
Port = Annotated[
    int | Literal["auto"],
    PlainValidator(read_port),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1024, "maximum": 65535}]}),
]
Fetch = Annotated[
    tuple[Annotated[Fetched, Word], ...],
    BeforeValidator(read_fetch),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["all", "none"]},
                {"type": "array", "items": {"enum": list(FETCHABLE)}, "uniqueItems": True},
            ]
        }
    ),
]
Age = Annotated[str, Matching(r"^[1-9][0-9]{0,4}[hdw]$", "a length of time such as 12h, 30d or 4w")]
TimeLimit = Annotated[
    Duration,
    PlainValidator(read_duration),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string", "pattern": TIME}, {"type": "integer", "minimum": 1, "maximum": 1440}],
            "examples": ["2:00:00", "1-12:00:00", 30],
        }
    ),
]
