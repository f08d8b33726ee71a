"""The spec, typed: what a run is, as frozen pydantic models whose descriptions are the reference of every key.

The models check each value by itself; check.py compares values with each other; the plan checks the machines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema, model_validator

from clusterddp.spec import fields
from clusterddp.spec.entry_section import PROGRAMS, Command, EntrySpec
from clusterddp.spec.fields import (
    MAX_HOSTS,
    Conflict,
    Count,
    Section,
    Word,
    key,
    keys_of,
    problem,
    read_line,
    read_variable,
    spellings,
)
from clusterddp.spec.hosts import Ssh, SshHost
from clusterddp.spec.layers import ALLOWED, RUNS_DIR, RUNS_DIR_DESCRIPTION
from clusterddp.spec.train import TrainSpec
from clusterddp.spec.tree import Scalar


def read_webhook(value: object) -> str:
    """Read `${NAME}`; the text is not shown, since it may be an address, which is a secret."""
    named = re.fullmatch(r"\$\{([^{}]*)\}", read_line(value))
    if not named:
        raise problem(
            "not the name of a variable: expected ${NAME}; an address is a secret, and the run's files keep the spec",
            "export SLACK_URL=https://... in your shell, and write webhook: ${SLACK_URL}",
        )
    return f"${{{read_variable(named[1])}}}"


def read_lines(value: object) -> object:
    """Read one text as a list of it."""
    return [value] if isinstance(value, Scalar | str) else value


class NotifySpec(Section):
    """Messages about the run."""

    on: Annotated[
        tuple[Annotated[Literal["start", "end", "fail", "requeue", "hang"], Word], ...],
        BeforeValidator(read_lines),
    ] = key(
        ("end",),
        "Events: start (the ranks of an attempt run), end (the run has ended, however), fail (it has ended by a "
        "failure), requeue (an attempt has ended and the next one follows), hang (no rank makes progress).",
        min_length=1,
    )
    command: Command | None = key(
        None,
        "A program that is started, as a list of words or as text that is split as a shell would. Its environment has "
        "CLUSTERDDP_RUN, CLUSTERDDP_EVENT, CLUSTERDDP_STATE, CLUSTERDDP_REASON and more, its standard input the "
        "message as JSON. Over SSH it runs where you submit.",
    )
    webhook: Annotated[str, BeforeValidator(read_webhook), WithJsonSchema({"type": "string"})] | None = key(
        None,
        "${NAME}: the variable NAME of your environment has an http or https address, which gets a POST of JSON that "
        "Slack and Mattermost accept. The variable is passed like those under secrets.",
    )

    def argv(self, working_dir: Path) -> tuple[str, ...]:
        """Return the words of the command; a relative path of its program is one from `working_dir`."""
        if self.command is None:
            return ()
        program, *words = shlex.split(self.command) if isinstance(self.command, str) else self.command
        return (str(working_dir / Path(program).expanduser()) if "/" in program else program, *words)


def notify_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find a notify section that sends nothing."""
    notify = job.notify
    if notify is not None and not (notify.command or notify.webhook):
        yield Conflict(("notify",), "names no command and no webhook, expected one of them or both")


DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Resources(Section):
    """How many machines, ranks, GPUs and cores the run takes."""

    aliases: ClassVar = {"nnodes": "nodes", "nproc_per_node": "procs_per_node", "ntasks_per_node": "procs_per_node"}

    nodes: fields.RankCount = key(
        1, "Machines, or slots for them; default: 1, for the ssh launcher the number of hosts. Alias: nnodes."
    )
    procs_per_node: fields.RankCount | None = key(
        None, "Ranks on each node; default: gpus_per_node, else 1. Aliases: nproc_per_node, ntasks_per_node."
    )
    gpus_per_node: fields.GpuCount | None = key(
        None, "GPUs on each node, one rank each; 0: none; default: one for each rank where there are any."
    )
    cpus_per_task: fields.CpuCount | None = key(
        None,
        "Cores for each rank; OMP_NUM_THREADS follows it. Default: the ranks of a node share its cores, on Slurm those "
        "of the job.",
    )
    memory_gb: fields.Gigabytes | None = key(None, "Memory on each node in gigabytes; default: no limit.")
    time: fields.TimeLimit | None = key(
        None,
        'Time limit of one attempt as Slurm writes it: "H:M:S", "D-H:M:S", "M:S", "D-H", "D-H:M", or minutes (a bare '
        "number, up to a day). Shortly before it ranks get a request to checkpoint and end. Default: none.",
    )

    @property
    def ranks_per_node(self) -> int:
        return self.procs_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


class Network(Section):
    """How the ranks find and reach each other."""

    interface: fields.Interface = key(
        "auto", "Network interface of the ranks' traffic; auto: the one that routes to node 0."
    )
    master_port: fields.Port = key("auto", "Port of the rendezvous on node 0, 1024 to 65535; auto: a free one.")
    start_timeout: fields.TimeLimit | None = key(
        None,
        'How long the nodes of a run may take to connect, written as time is: "0:30" is 30 seconds. Default: 1 minute '
        "and a second for each node; on Slurm, where container images are pulled, too, and with setup lines 10 minutes "
        "and a second for each node; with worker 2 minutes for ranks, 5 minutes for machines of ssh.hosts.",
    )
    host_silence: fields.TimeLimit | None = key(
        None,
        "How long another host may not answer (an unplugged cable, a switch that restarts), or storage be "
        'unavailable, before the run ends, written as time is. Default: "0:30", 30 seconds.',
    )
    heartbeat_timeout: fields.TimeLimit | None = key(
        None,
        "How long a process of clusterddp on a host that answers may send no heartbeat (it is stopped, or waits for a "
        'file server) before the run ends, written as time is; at least host_silence. Default: "1:00", 1 minute, or '
        "host_silence where that is longer.",
    )
    backend: fields.Backend = key(
        "auto", "What carries gradients; auto: nccl on GPUs, gloo on the CPU. gloo works on GPUs, too."
    )
    init: Annotated[Literal["auto", "env", "tcp", "file"], Word] = key(
        "auto",
        "How the ranks meet, for {init_method} and the built-in trainer: env (env://), tcp (tcp://ADDRESS:PORT), file "
        "(file://PATH, another for each attempt); auto: env for the trainer, tcp otherwise.",
    )


class Stop(Section):
    """The time that ranks have to write a checkpoint and end: before a time limit, when preempted, when stopped."""

    lead: fields.TimeLimit | None = key(
        None,
        'How long before the time limit the ranks are asked to stop: "0:30" is 30 seconds, a plain number is minutes; '
        "at most half of the limit. Default: a third of resources.time, at most 2 minutes; without one, 1 minute "
        "before the job ends.",
    )
    grace: fields.TimeLimit | None = key(
        None,
        "How long the ranks may take to end when they are asked to stop; then they are killed and the attempt has "
        'failed, or is cancelled if a user asked. "0:30" is 30 seconds, a plain number is minutes. Default: "2:00", 2 '
        "minutes.",
    )


class Elastic(Section):
    """With which nodes a run goes on after it has lost some."""

    min_nodes: fields.RankCount | None = key(
        None, "An attempt may begin with so many nodes; default: resources.nodes, so only a spare replaces a node."
    )
    spares: Annotated[int, BeforeValidator(fields.read_int)] = key(
        0,
        "Nodes more than resources.nodes that wait for a lost one to replace; over SSH the last of ssh.hosts, on Slurm "
        "nodes of the job.",
        ge=0,
        le=MAX_HOSTS,
    )


def elastic_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find an elastic section that cannot have an effect, or contradicts another one."""
    elastic, nodes = job.elastic, job.resources.nodes
    if elastic is None:
        return
    if elastic.min_nodes is not None and elastic.min_nodes > nodes:
        yield Conflict(
            ("elastic.min_nodes", "resources.nodes"), f"found {elastic.min_nodes}, expected at most the {nodes} nodes"
        )
    if not job.restarts:
        yield Conflict(("elastic", "restarts"), "a lost node uses up a restart, and restarts is 0", "restarts: 20")
    if elastic.spares and job.slurm.get("gpus"):
        yield Conflict(
            ("elastic.spares", "slurm.gpus"),
            "it counts the GPUs of all nodes, and does not say how many are a spare's",
            "resources.gpus_per_node",
        )
    if job.entry is not None and (job.entry.owns_ranks or job.entry.batch_script):
        yield Conflict(("elastic", "entry"), "is for ranks that clusterddp starts, and this program starts its own")


class Container(Section):
    """The container that every rank runs in, on Slurm."""

    runtime: Annotated[Literal["pyxis", "apptainer"], Word] = key(
        "pyxis", "pyxis (srun --container-image, with enroot) or apptainer (apptainer exec)."
    )
    image: fields.Text = key(..., "Image as the runtime names it: a .sqsh or .sif file, or a registry's name.")
    mounts: tuple[fields.Mount, ...] = key(
        (),
        "Directories seen inside: PATH or HOST_PATH:PATH[:FLAGS]. The run's directory, the data and clusterddp itself "
        "are always mounted.",
    )
    workdir: fields.Text | None = key(None, "Directory in which the container starts; default: the image's own.")


class Sweep(Section):
    """The values of swept keys: each combination is a run; on Slurm all runs are one job array."""

    aliases: ClassVar = {"max_parallel": "throttle"}

    values: dict[str, fields.SweepValues] = key(
        {}, "Dotted keys and the list of values of each, {train.lr: [0.1, 0.2]}; of train, env, entry or network."
    )
    throttle: Count | None = key(
        None,
        "Runs of the sweep at a time; default: Slurm decides; elsewhere as many as there are GPUs for, on the CPU "
        "one. Alias: max_parallel.",
    )


class JobSpec(Section):
    """What to run and where: one spec for every launcher."""

    name: fields.Name = key(
        ..., "Name of the job: 1 to 64 letters, digits, dots, - and _, beginning with a letter or digit."
    )
    launcher: Annotated[Literal["local", "ssh", "slurm"], Word] = key(
        "local", "What starts the ranks: this machine, machines over SSH, or Slurm. --launcher overrides it."
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], Word] = key(
        "auto", "Where ranks compute; auto: on GPUs where there are any. --cpu overrides it."
    )
    resources: Resources = key(Resources, "Machines, ranks, GPUs, cores, time.")
    network: Network = key(Network, "Interface, port and backend.")
    stop: Stop = key(Stop, "The time that ranks have to write a checkpoint and end.")
    python: fields.Line | None = key(
        None,
        "The Python that runs the ranks, 3.10 or newer and with torch: a path or a command; over SSH and in a "
        "container it is looked for there. Default: that of the environment that is activated where you submit, else "
        "clusterddp's own; over SSH and in a container python3. The built-in trainer takes clusterddp's own.",
    )
    venv: fields.Line | None = key(
        None, "A virtual environment whose Python runs the ranks: its directory; over SSH from / or ~/."
    )
    conda: fields.Line | None = key(
        None, "A conda or micromamba environment whose Python runs the ranks: its name or its directory."
    )
    setup: Annotated[tuple[fields.Text, ...], BeforeValidator(read_lines)] = key(
        (),
        "Lines that bash runs once on each node before its ranks start: a list, or one text; module, conda and "
        "micromamba work as in your shell. The ranks get the environment after them, and the Python that they put "
        "first on PATH. A line that fails ends the run.",
    )
    env: dict[fields.Variable, fields.LooseText] = key(
        {}, "Variables for every rank; they override what clusterddp would set."
    )
    secrets: tuple[fields.Variable, ...] = key(
        (), "Names of variables that are passed to the ranks from where you submit; values are never stored."
    )
    restarts: fields.Restarts = key(
        0, "How many times all ranks are restarted from the last checkpoint after a failure."
    )
    elastic: Elastic | None = key(None, "Spares in the place of lost nodes, or fewer nodes; needs restarts.")
    hang: Annotated[Literal["report", "restart", "fail"], Word] = key(
        "report",
        "What follows when no rank makes progress: report (status shows which ranks wait for which), restart (end the "
        "attempt; restarts says how often the next one starts), fail (end the run). Stacks are saved first.",
    )
    hang_after: fields.TimeLimit | None = key(
        None,
        "How long a run may show no progress (no output, no bytes read or written, no further collective), written as "
        'time is: "2:00" is 2 minutes. Default: 1 minute, 20 median steps, or 3 times the usual time between rows in '
        "metrics.jsonl, whichever is longest.",
    )
    notify: NotifySpec | None = key(
        None, "Messages about the run's start, end, restarts and hangs: a command, a webhook."
    )
    snapshot: fields.Switch = key(True, "Run a copy of the code, which later edits do not change.")
    train: TrainSpec | None = key(None, "The built-in trainer; also what runs when there is no entry.")
    entry: EntrySpec | None = key(None, "Your program that every rank runs")
    slurm: dict[fields.SlurmKey, fields.Option] = key(
        {},
        "Options of sbatch by their long names, for the slurm launcher; true: without a value, false: a default of "
        "clusterddp's is left out.",
    )
    container: Container | None = key(None, "A container for the ranks, for the slurm launcher.")
    after: tuple[fields.After, ...] = key(
        (),
        "Runs or job ids that have to end first, for the slurm launcher: RUN (it must complete), or afterok:RUN, "
        "afterany:RUN, afternotok:RUN.",
    )
    ssh: Ssh = key(Ssh, "Hosts, for the ssh launcher.")
    sweep: Sweep | None = key(None, "Values that are tried in all combinations, each in a run of its own.")

    @property
    def all_secrets(self) -> tuple[str, ...]:
        """The variables that are passed from the submitting shell, by name: `secrets`, and that of notify.webhook."""
        webhook = self.notify.webhook if self.notify else None
        return tuple(dict.fromkeys([*self.secrets, *([webhook[2:-1]] if webhook else [])]))

    @property
    def num_spares(self) -> int:
        """How many nodes wait to replace a lost one."""
        return self.elastic.spares if self.elastic else 0

    @property
    def cpu_reason(self) -> str | None:
        """The setting that keeps the run off GPUs, as text; None: none does."""
        if self.device == "cpu":
            return "device is cpu"
        return "resources.gpus_per_node is 0" if self.resources.gpus_per_node == 0 else None

    @model_validator(mode="before")
    @classmethod
    def _train_by_default(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("train") is None and data.get("entry") is None:
            return data | {"train": {}}
        return data


JobSpec.model_rebuild(_types_namespace=vars(fields))  # TrainSpec's annotations are names of spec/fields.py


def json_schema(*, shared: bool = False) -> dict[str, Any]:
    """Return the JSON Schema of a spec, for editors, as draft 2020-12: every key with its description and range.

    `shared`: of a project file or site file.
    """
    schema = JobSpec.model_json_schema(mode="validation")
    definitions: dict[str, Any] = schema["$defs"]
    for model in filter(None, [SshHost, *keys_of(JobSpec).values()]):
        properties = definitions[model.__name__]["properties"]
        for spelling, name in spellings(model).items():
            if spelling != name:
                properties[spelling] = properties[name] | {"description": f"Alias of {name}."}
    definitions[EntrySpec.__name__]["oneOf"] = [{"required": [kind]} for kind in PROGRAMS]
    hosts = definitions[Ssh.__name__]["properties"]["hosts"]
    name = definitions[SshHost.__name__]["properties"]["host"]
    hosts["items"] = {"anyOf": [{"type": "string", "pattern": name["pattern"]}, hosts["items"]]}
    schema["not"] = {"required": ["train", "entry"]}
    _drop_titles(schema)
    if shared:
        allowed = {key: value for key, value in schema["properties"].items() if key in ALLOWED}
        schema["properties"] = allowed | {RUNS_DIR: {"type": "string", "description": RUNS_DIR_DESCRIPTION}}
        del schema["required"], schema["not"]
    title = "clusterddp project file or site file" if shared else "clusterddp spec"
    return {"$schema": DIALECT, "title": title} | schema


def _drop_titles(schema: dict[str, Any]) -> None:
    """Drop the titles that pydantic makes from names: editors would show them above the descriptions."""
    for part in [schema, *schema["$defs"].values()]:
        part.pop("title", None)
        for value in part["properties"].values():
            value.pop("title", None)
