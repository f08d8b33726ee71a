"""The types of the spec's fields: a reader, a range, and what the JSON Schema says of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

from clusterddp.spec.duration import TIME, Duration, read_duration
from clusterddp.spec.hosts import HOST_SET, read_host
from clusterddp.spec.image_sets import NAMES
from clusterddp.spec.scalars import (
    FETCHABLE,
    VARIABLE,
    matching,
    read_bool,
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
    read_variable,
    read_word,
    without_mpi,
)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
LINE = r"^[^\x00-\x1f\x7f-][^\x00-\x1f\x7f]*$"
REMOTE_PATH = r"^(/|~/)[^\x00-\x1f\x7f]+$"
HOST_KEY = r"^(SHA256:[A-Za-z0-9+/]{43}=?|[a-z0-9@.-]+ [A-Za-z0-9+/]+=*)$"
MODULE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+/:=@-]*$"
MODULE = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
INTERFACE = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,14}$"

MOUNT = r"^[^:,\x00-\x1f\x7f]+(:[^:,\x00-\x1f\x7f]+){0,2}$"
COMM = r"^(exact|bf16|powersgd:[1-9][0-9]{0,2}|local:[1-9][0-9]{0,4}|auto)$"
AFTER = r"^((afterok|afterany|afternotok):)?[A-Za-z0-9@/._-]+$"

_LOOSE: dict[str, Any] = {"type": ["string", "number", "boolean"]}

Count = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(read_int)]
RankCount = Annotated[int, Field(ge=1, le=65_536), BeforeValidator(read_int)]
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
    Field(pattern=NAME),
    BeforeValidator(matching(NAME, "1 to 64 letters, digits, dots, - and _, beginning with a letter or digit")),
]
Module = Annotated[
    str, Field(pattern=MODULE), BeforeValidator(matching(MODULE, "a module's dotted name, such as package.train"))
]
Host = Annotated[str, Field(pattern=HOST_SET), BeforeValidator(read_host)]
HostKey = Annotated[
    str,
    Field(pattern=HOST_KEY),
    BeforeValidator(matching(HOST_KEY, "SHA256: and 43 characters, as ssh-keygen -l shows it, or a public key")),
]
Line = Annotated[str, Field(min_length=1, pattern=LINE), BeforeValidator(read_line)]
ModuleName = Annotated[
    str, Field(pattern=MODULE_NAME), BeforeValidator(matching(MODULE_NAME, "the name of a module, such as cuda/12.4"))
]
RemotePath = Annotated[str, Field(pattern=REMOTE_PATH), BeforeValidator(read_remote_path)]
Interface = Annotated[
    str,
    Field(pattern=INTERFACE),
    BeforeValidator(matching(INTERFACE, "auto or the name of an interface, such as eth0")),
]
Mount = Annotated[
    str,
    Field(pattern=MOUNT),
    BeforeValidator(matching(MOUNT, "PATH or HOST_PATH:PATH[:FLAGS], without commas or control characters")),
]
After = Annotated[
    str,
    Field(pattern=AFTER),
    BeforeValidator(matching(AFTER, "a run or a job id, with afterok:, afterany: or afternotok: before it")),
]
Comm = Annotated[
    str,
    Field(pattern=COMM),
    BeforeValidator(matching(COMM, "exact, bf16, powersgd:R (such as powersgd:4), local:H (such as local:8) or auto")),
]
ImageSetName = Annotated[str, BeforeValidator(read_image_set), WithJsonSchema({"enum": list(NAMES)})]
SlurmKey = Annotated[
    str,
    BeforeValidator(matching(r"^[a-z][a-z0-9_-]*$", "a long option of sbatch, such as partition or mail_type")),
]
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
    tuple[Annotated[Literal["logs", "metrics", "checkpoints"], Word], ...],
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
