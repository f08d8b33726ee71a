"""The spec's `entry` section: a program of the user's, and how it wants to be started."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from clusterddp.spec import fields
from clusterddp.spec.entry_scalars import Value, read_argument, read_command, read_data, read_function
from clusterddp.spec.fields import Word
from clusterddp.spec.section import Section

FUNCTION = r"^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*|[^:\x00]+\.py):[A-Za-z_][A-Za-z0-9_.]*$"

Function = Annotated[
    str, Field(pattern=FUNCTION), BeforeValidator(read_function(FUNCTION)), WithJsonSchema({"type": "string"})
]
Command = Annotated[
    str | tuple[str, ...],
    PlainValidator(read_command),
    PlainSerializer(lambda command: command if isinstance(command, str) else list(command)),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": ["string", "number", "boolean"]}},
            ]
        }
    ),
]
Argument = Annotated[Any, BeforeValidator(read_argument), WithJsonSchema({})]
Data = Annotated[dict[str, Any], BeforeValidator(read_data), WithJsonSchema({"type": "object"})]


class EntrySpec(Section):
    """A program of yours that every rank runs: a script, a module, a function or a command."""

    script: fields.Text | None = Field(default=None, description="Path of a Python script, from where you submit.")
    module: fields.Module | None = Field(default=None, description="Dotted name of a module, as for python -m.")
    function: Function | None = Field(
        default=None,
        description="A Python function that is called with args and kwargs: package.module:function, or "
        "path/file.py:function.",
    )
    command: Command | None = Field(
        default=None,
        description="A command of any kind: a list of words, or text that is split into words as a shell would; no "
        "shell reads it unless shell is true.",
    )
    shell: fields.Switch = Field(
        default=False,
        description="Hand command to /bin/sh as it is: it has variables ($RANK, $MASTER_ADDR, "
        "$CLUSTERDDP_INIT_METHOD, ...) in place of placeholders, and args as $1, $2, ...",
    )
    args: tuple[Argument, ...] = Field(
        default=(),
        description="Arguments of the program, each passed on unchanged but for placeholders such as {rank} or "
        "{init_method}; for a function: values of any kind.",
    )
    kwargs: Data = Field(default_factory=dict, description="Arguments of a function by their names.")
    owns_ranks: fields.Switch = Field(
        default=False,
        description="The program starts its ranks itself (torch.multiprocessing.spawn, torchrun): it is started once "
        "on each node and told which node that is, and how many ranks to start there.",
    )
    world_size: Annotated[Literal["auto", "processes", "machines"], Word] = Field(
        default="auto",
        description="What {world_size} and {rank} count; with owns_ranks the variables WORLD_SIZE and RANK, too. auto: "
        "processes; machines with owns_ranks.",
    )
    local_rank_arg: fields.Switch = Field(
        default=False,
        description="Put --local_rank=N before the arguments, as torch.distributed.launch does.",
    )
    fork: fields.Switch = Field(
        default=True,
        description="A node's ranks are forked from one process that has imported torch and numpy for all of them, "
        "where a supervisor starts several ranks of a Python program; false: each rank is a Python of its own.",
    )
    stop_signal: Annotated[Literal["none", "TERM", "INT", "HUP", "USR1", "USR2"], Word] = Field(
        default="none",
        description="Signal by which a command is told to stop, for one that does not look at $CLUSTERDDP_STOP_FILE; "
        "ending by it is no failure then.",
    )
    data_dir: fields.Text | None = Field(
        default=None, description="Directory of the data on every node, for {data_dir}; over SSH a path on the hosts."
    )
    output_dir: fields.Text | None = Field(
        default=None,
        description="Directory for results, for {output_dir}; it is made. Default: output/ in the run's directory.",
    )

    @property
    def counts(self) -> Literal["processes", "machines"]:
        """What {rank} and {world_size} count."""
        if self.world_size == "auto":
            return "machines" if self.owns_ranks else "processes"
        return self.world_size

    @model_validator(mode="before")
    @classmethod
    def _type_what_a_function_takes(cls, data: Any) -> Any:
        """A program's arguments are words; a function's are values, typed as YAML has them."""
        args = data.get("args") if isinstance(data, dict) else None
        if isinstance(args, list | tuple) and data.get("function") is not None:
            return data | {"args": [Value(item) for item in args]}
        return data
