"""The ssh section of the spec: hosts, the Python of each, what goes there and what comes home."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from clusterddp.spec import fields
from clusterddp.spec.fields import Word
from clusterddp.spec.hosts import refuse_too_many
from clusterddp.spec.section import Section
from clusterddp.spec.tree import Scalar


class SshPython(Section):
    """Which Python runs the ranks on a host."""

    python: fields.Line | None = Field(
        default=None, description="Python there, 3.10 or newer and with torch: a command or a path; default: python3."
    )
    venv: fields.Line | None = Field(default=None, description="Virtual environment there, from / or ~/.")
    conda: fields.Line | None = Field(default=None, description="Conda environment there, by its name or its path.")
    modules: tuple[fields.ModuleName, ...] = Field(
        default=(), description="Environment modules that are loaded there first, as for module load."
    )


class SshHost(SshPython):
    """A machine that is reached by SSH; what it does not say of its Python, the section says for all."""

    host: fields.Host = Field(description='Name or alias from ssh_config, or a set of them such as "gpu[02-04]".')
    gpus: fields.GpuCount | None = Field(
        default=None,
        validation_alias=AliasChoices("gpus", "slots"),
        description="GPUs to use on each of them, one rank each; default: gpus_per_node. Alias: slots.",
    )
    host_key: fields.HostKey | None = Field(
        default=None, description="Its host key, which must be this one: SHA256:... or a public key."
    )

    @model_serializer(mode="wrap")
    def _say_what_differs(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"host": self.host} | {key: value for key, value in to_dict(self).items() if value not in (None, (), [])}


class Ssh(SshPython):
    """Where the ssh launcher starts the nodes."""

    hosts: tuple[SshHost, ...] = Field(
        default=(),
        description="Hosts in the order of the nodes: names, sets, or {host, gpus, ...}; --hosts and --hostfile "
        "name them on the command line. At most 4,096 hosts.",
    )
    dir: fields.RemotePath = Field(
        default="~/.clusterddp", description="Directory of everything that clusterddp keeps on a host, from / or ~/."
    )
    send: dict[fields.Line, fields.RemotePath] = Field(
        default_factory=dict,
        description="Files and directories that are sent before the start, {LOCAL: ON_HOST}, ON_HOST from / or ~/. "
        "What is there already with the same content is not sent again.",
    )
    fetch: fields.Fetch = Field(
        default=("logs", "metrics", "checkpoints"),
        description="What is copied back into the run's directory when the run has ended: a list of logs, metrics and "
        "checkpoints (with the first host's output/), or all, or none.",
    )
    when_busy: Annotated[Literal["refuse", "wait"], Word] = Field(
        default="refuse", description="When other runs have the GPUs: refuse to start, or wait in line."
    )

    @field_validator("hosts", mode="before")
    @classmethod
    def _accept_names(cls, hosts: Any) -> Any:
        if not isinstance(hosts, list | tuple):
            return hosts
        refuse_too_many(hosts)
        return [{"host": host} if isinstance(host, Scalar | str) else host for host in hosts]
