"""The types of the spec's fields: sections, the readers of single values, their ranges and their JSON Schema.

A reader takes a value as written, and returns a typed value or raises an error. Scalars of a file are text with a flag
whether they were quoted (`tree.Scalar`); values from Python or JSON are typed already. Only the model types a scalar,
not YAML, so `4:00:00` is a time and `no` is not a boolean.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from clusterddp.errors import ClusterddpError
from clusterddp.network.hostlist import expand
from clusterddp.ranks.environment import PLACE_VARIABLES
from clusterddp.spec.train import NAMES, TrainSpec
from clusterddp.spec.tree import Scalar, describe, did_you_mean
from clusterddp.system.units import UNIT_S

MAX_RANKS = 65_536
AnySection: TypeAlias = Any
"""A class: a pydantic model, or TrainSpec."""


class Section(BaseModel):
    """A part of the spec: frozen, and strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    aliases: ClassVar[dict[str, str]] = {}
    """Other spellings of keys -> the keys."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_containers(cls, data: Any) -> Any:
        """Give an empty section, list or mapping its default; an empty value is an error."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in _containers(cls)}


def key(default: Any, description: str, **limits: Any) -> Any:
    """Return a field of a section, with the text that explains it in `clusterddp schema`.

    `default`: `...` for none; a section's class for one with that section's own defaults.
    """
    if isinstance(default, type):
        return Field(default_factory=default, description=description, **limits)
    return Field(default, description=description, **limits)


@dataclass(frozen=True, slots=True)
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
    return {name: name for name in keys_of(section)} | getattr(section, "aliases", {})


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


TIME = r"^([0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2})$"
MAX_DAYS = 3650
DAY_S = 86_400

_TIME_HINT = 'write "H:M:S", "D-H:M:S", "M:S", "D-H", "D-H:M" or minutes'


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of time as Slurm writes it: the text as given, and what it means in seconds."""

    text: str
    seconds: int

    def __str__(self) -> str:
        return self.text


def read_duration(value: object) -> Duration:
    """Read a time limit in one of Slurm's six forms; a bare number is minutes.

    Source: sbatch(1), option --time.
    """
    if isinstance(value, Duration):
        return value
    if isinstance(value, bool) or not isinstance(value, Scalar | str | int):
        refuse(value, "a time", _TIME_HINT)
    text = str(value) if isinstance(value, int) else read_text(value)
    if text.lower() in {"infinite", "unlimited"}:
        refuse(value, "a time", "leave time out for no limit of your own")
    if not re.fullmatch(TIME, text) or len(text) > 20:
        refuse(value, "a time", _hint_at(text))
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if any(part > 59 for part in parts[1:]) or (days and parts[0] > 23):
        refuse(value, "minutes and seconds up to 59, and hours up to 23 behind days", _TIME_HINT)
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = [0, *parts, 0][:3] if len(parts) == 1 else [0, *parts][-3:]
    total_s = int(days or 0) * DAY_S + hours * 3600 + minutes * 60 + seconds
    if text.isdecimal() and total_s > DAY_S:  # unlikely to mean minutes
        hint = f'if you mean that, write "{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}"'
        if minutes % 60 == 0:
            hint = f'{minutes} seconds are "{minutes // 3600}:{minutes % 3600 // 60:02}:00"; {hint}'
        raise problem(f"{text} means {text} minutes ({minutes / 1440:.3g} days), as in Slurm", hint)
    if not 0 < total_s <= MAX_DAYS * DAY_S:
        hint_if_none = None if total_s else "leave time out for no limit of your own"
        refuse(value, f"a time above 0 and up to {MAX_DAYS} days", hint_if_none)
    return Duration(text, total_s)


def _hint_at(text: str) -> str:
    """Spell a time with a unit, such as 20s or 2h, in Slurm's notation; of another text, name the forms."""
    found = re.fullmatch(r"([0-9]{1,9}) ?(s|m|min|h|d)", text, re.IGNORECASE)
    if found is None:
        return _TIME_HINT
    days, clock = divmod(int(found[1]) * UNIT_S[found[2][0].lower()], DAY_S)
    written = f"{clock // 3600}:{clock // 60 % 60:02}:{clock % 60:02}"
    return f'{text} is "{days}-{written}"' if days else f'{text} is "{written}"'


HOST_SET = r"^[A-Za-z0-9_:\[][A-Za-z0-9_.:@,\[\]-]*$"
"""The pattern of a host in the JSON Schema; `read_host` is stricter."""
MAX_HOSTS = 4_096
"""The most hosts, with sets expanded, that a spec, a hostfile or a command line may name."""
_HOST_WORDS = 'a host or a set of hosts, such as gpu01 or "gpu[02-04]"'
_HOST_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f.]*")

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"

MAX_INT = 2**63 - 1

Fetched: TypeAlias = Literal["logs", "metrics", "checkpoints"]
FETCHABLE: tuple[Fetched, ...] = get_args(Fetched)

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = frozenset({"nan", "inf", "infinity"})
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "y", "1", "t"), "true") | dict.fromkeys(
    ("false", "no", "off", "n", "0", "f"), "false"
)
"""Other words for a boolean -> the one that a spec has."""


def refuse(found: object, expected: str, hint: str | None = None) -> NoReturn:
    """Raise an error with the value that was found and the one that was expected."""
    raise problem(f"found {describe(found)}, expected {expected}", hint)


def problem(message: str, hint: str | None = None) -> PydanticCustomError:
    """Make an error with clusterddp's message and hint, which check.py reads from its context."""
    return PydanticCustomError("clusterddp", "{message}", {"message": message, "hint": hint})


def without_mpi(value: object) -> object:
    """Refuse a backend of torch.distributed that clusterddp does not support."""
    if str(value.text if isinstance(value, Scalar) else value).strip().lower() == "mpi":
        raise problem(
            "mpi is not in PyTorch's wheels: it exists only in a torch built from source against an MPI",
            "auto chooses nccl on GPUs and gloo on the CPU; mpirun can still start the ranks: clusterddp worker",
        )
    return value


def read_int(value: object) -> int:
    """Read a whole number in decimal digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = _number_text(value, "a whole number", _INT, _int_hint)
    if len(text) > 20 or abs(int(text)) > MAX_INT:
        refuse(value, "a whole number below 2^63")
    return int(text)


def read_float(value: object) -> float:
    """Read a finite number."""
    if isinstance(value, Scalar) and not value.quoted and value.text.lower().lstrip("+-.") in _NOT_FINITE:
        refuse(value, "a finite number")
    written: object = value
    if isinstance(value, bool) or not isinstance(value, int | float):
        value = _number_text(value, "a number", _FLOAT, _float_hint)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else refuse(written, "a finite number")


def read_bool(value: object) -> bool:
    """Read `true` or `false`; the other words of YAML 1.1 are refused, because only some readers take them."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Scalar) and not value.quoted and value.text.lower() in {"true", "false"}:
        return value.text.lower() == "true"
    meant = _BOOLEANS.get(value.text.lower() if isinstance(value, Scalar) else str(value))
    quotes = ", without quotes" if isinstance(value, Scalar) and value.quoted else ""
    refuse(value, "true or false", f"write {meant}{quotes}" if meant else None)


def read_text(value: object) -> str:
    """Read text byte for byte; a plain `123` is the text 123."""
    if not isinstance(value, Scalar | str):
        refuse(value, "text", "write the value after the colon" if value is None else None)
    text = value.text if isinstance(value, Scalar) else value
    if "\0" in text:
        refuse(value, "text without NUL characters", "no argument, path or variable of a process can hold one")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        refuse(value, "text that UTF-8 can encode", "write the character itself instead of a pair of escapes")
    return text


def read_word(value: object) -> str | None:
    """Read one of a few words; an empty value passes, and the model's error then lists the choices."""
    return None if value is None else read_text(value)


def read_image_set(value: object) -> str:
    """Read the name of a set of images that the trainer knows."""
    name = read_text(value)
    if name not in NAMES:
        hint = "clusterddp help train.dataset lists them; another set is for your own script, or for dataset: folder"
        refuse(value, f"a set that the trainer knows{did_you_mean(name, NAMES)}", hint)
    return name


def read_filled_text(value: object) -> str:
    """Read text that is not empty."""
    return read_text(value) or refuse(value, "text that is not empty")


def read_line(value: object) -> str:
    """Read text that is sent as a line and as a command's argument: no control characters, no leading `-`."""
    text = _without_controls(read_filled_text(value), value)
    return refuse(value, "text that does not begin with -") if text.startswith("-") else text


def read_remote_path(value: object) -> str:
    """Read a path on hosts: absolute or from `~`, which the host expands."""
    text = read_line(value)
    if text.startswith(("/", "~/")) and text.strip("/") not in ("", "~") and ".." not in text.split("/"):
        return text.rstrip("/")
    relative = re.fullmatch(r"[A-Za-z0-9_][^:]*", text) and ".." not in text.split("/")
    hint = f"write ~/{text} or its full path" if relative else None
    refuse(value, "a path on the hosts, from / or ~/ and without ..", hint)


def read_loose_text(value: object) -> str:
    """Read text or a number from Python or JSON: for variables and arguments of a process."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return read_text(value)


def read_option(value: object) -> str | bool:
    """Read a Slurm option: true or false for a switch, an empty value for false, otherwise its text."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, Scalar) and not value.quoted and value.text in {"true", "True", "TRUE"}:
        return True
    if isinstance(value, Scalar) and not value.quoted and value.text in {"false", "False", "FALSE"}:
        return False
    return _without_controls(read_loose_text(value), value)


def read_port(value: object) -> int | Literal["auto"]:
    """Read a port number, or `auto`."""
    if isinstance(value, Scalar | str) and read_text(value) == "auto":
        return "auto"
    expected = "auto or a port from 1024 to 65535"
    try:
        port = read_int(value)
    except PydanticCustomError as error:
        refuse(value, expected, (error.context or {}).get("hint"))
    return port if 1024 <= port <= 65535 else refuse(value, expected)


def read_variable(value: object) -> str:
    """Read the name of an environment variable that the user may set."""
    # The text is not shown: it may be a secret's value that was written in place of its name.
    name = read_text(value)
    if not re.fullmatch(VARIABLE, name):
        hint = "write only the name, never its value" if "=" in name else None
        raise problem("not the name of a variable: expected letters, digits and _, beginning with no digit", hint)
    if name in PLACE_VARIABLES or name.startswith(("TORCHELASTIC_", "CLUSTERDDP_")):
        hint = {
            "MASTER_PORT": "network.master_port sets it",
            "MASTER_ADDR": "it is the address of node 0 on network.interface",
            "WORLD_SIZE": "resources.nodes and resources.procs_per_node decide it",
        }.get(name)
        raise problem(f"{name} is set by clusterddp for each rank; your value would break the run", hint)
    return name


def read_fetch(value: object) -> object:
    """Read the kinds of results to copy back from hosts; `all` and `none` stand for lists; duplicates are dropped."""
    if isinstance(value, Scalar | str):
        text = read_text(value)
        if text in ("all", "none"):
            return FETCHABLE if text == "all" else ()
        refuse(value, "all, none, or a list", f"write [{text}]" if text in FETCHABLE else None)
    if not isinstance(value, list | tuple):
        return value
    named: dict[str, object] = {}
    for item in value:
        named.setdefault(item.text if isinstance(item, Scalar) else str(item), item)
    return list(named.values())


def read_sweep_values(value: object) -> tuple[object, ...]:
    """Read the values of a key in a sweep; each is typed when its variant is."""
    if not isinstance(value, list | tuple) or not value:
        refuse(value, "a list of values" if not isinstance(value, list | tuple) else "a list that is not empty")
    return tuple(plain(item) for item in value)


def read_host(value: object) -> str:
    """Read a host or a set of hosts; refuse a name that `ssh` would read as an option or an address."""
    text = read_text(value)
    if not re.fullmatch(HOST_SET, text):
        slots = re.fullmatch(r"(\S+)\s+(?:slots|gpus)\s*=\s*([0-9]+)", text.strip())
        refuse(value, _HOST_WORDS, f"write {{host: {slots[1]}, gpus: {slots[2]}}}" if slots else None)
    try:
        names = expand(text, limit=MAX_HOSTS)
    except ClusterddpError as error:
        raise problem(error.message) from error
    for name in names:
        if _HOST_NAME.fullmatch(name) or _ADDRESS.fullmatch(name):
            continue
        if numbered := re.fullmatch("([^:]+):[0-9]+", name):
            hint = f"{{host: {numbered[1]}, gpus: N}} sets the number of GPUs; a port belongs in ssh_config"
            raise problem(f'found "{name}", expected a host without a number behind it', hint)
        refuse(value, f"{_HOST_WORDS}; {name!r} is not a host")
    return text


def _without_controls(text: str, value: object) -> str:
    if any(char < " " or char == "\x7f" for char in text):
        refuse(value, "text without line breaks or other control characters")
    return text


def plain(value: object) -> object:
    """Return a value as YAML 1.2 types it, to show it and to write it again."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if not isinstance(value, Scalar) or value.quoted:
        return value.text if isinstance(value, Scalar) else value
    if _INT.fullmatch(value.text) and len(value.text) <= 20:
        return int(value.text)
    if _FLOAT.fullmatch(value.text) and math.isfinite(float(value.text)):
        return float(value.text)
    return {"true": True, "false": False}.get(value.text, value.text)


def _number_text(value: object, expected: str, pattern: re.Pattern[str], hint: Callable[[str], str | None]) -> str:
    """Return the text of a number that is written without quotes."""
    if not isinstance(value, Scalar):
        refuse(value, expected)
    text, matches = value.text, pattern.fullmatch(value.text)
    if value.quoted:
        refuse(value, expected, f"write {text}, without quotes" if matches and len(text) <= 20 else None)
    return text if matches else refuse(value, expected, hint(text) if len(text) <= 20 else None)


def _int_hint(text: str) -> str | None:
    if re.fullmatch(r"[-+]?0[0-9]+", text):
        return f"write {int(text)}; some YAML readers take a leading 0 for octal"
    if re.fullmatch(r"[0-9][0-9_]*", text):
        return f"write {text.replace('_', '')}"
    if re.fullmatch(r"0[xX][0-9a-fA-F]+|0o[0-7]+", text):
        return f"write {int(text, 0)}"
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)) and float(text).is_integer() and abs(float(text)) < 1e15:
        return f"write {int(float(text))}"
    return None


def _float_hint(text: str) -> str | None:
    if re.fullmatch(r"[-+]?0[0-9]+(\.[0-9]*)?", text):
        return f"write {text.lstrip('+0') or '0'}"
    if re.fullmatch(r"[-+]?[0-9]+,[0-9]+", text):
        return f"write {text.replace(',', '.')}"
    if re.fullmatch(r"[0-9][0-9_]*(\.[0-9]*)?", text):
        return f"write {text.replace('_', '')}"
    return None


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
