"""The line that trains: its launch programs (srun, torchrun ...), and the nodes and ranks that they start."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from clusterddp.importing.files import Findings, set_variable
from clusterddp.spec.launch_options import (
    ACCELERATE,
    DEEPSPEED,
    MPIRUN,
    SRUN,
    TORCHRUN,
    Option,
    OptionTable,
    Word,
    take_options,
    words,
)
from clusterddp.spec.sbatch_lines import GPU_OPTIONS, SIZES, Given, GivenOptions, Sizes
from clusterddp.spec.slurm_options import KNOWN, OWNED, SRUN_OPTIONS

LaunchProgram = Literal["srun", "mpirun", "torchrun", "launch", "accelerate", "deepspeed"]
_BY_NAME: dict[str, tuple[LaunchProgram, OptionTable]] = {
    "srun": ("srun", SRUN),
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"), ("mpirun", MPIRUN)),
    "torchrun": ("torchrun", TORCHRUN),
    "deepspeed": ("deepspeed", DEEPSPEED),
}
_BY_MODULE: dict[str, tuple[LaunchProgram, OptionTable]] = {
    "torch.distributed.run": ("torchrun", TORCHRUN),
    "torch.distributed.launch": ("launch", TORCHRUN),
    "accelerate.commands.launch": ("accelerate", ACCELERATE),
    "deepspeed.launcher.runner": ("deepspeed", DEEPSPEED),
}
_STARTS_RANKS = frozenset({"torchrun", "launch", "accelerate", "deepspeed"})
"""The launch programs that start the ranks of a node themselves."""
_SETUP_MODULES = words(
    "pip venv virtualenv ensurepip conda spacy nltk.downloader wandb ipykernel huggingface_hub build"
)
"""Modules that install, log in or download: never the training."""
_OTHER_PYTHON = "ranks run the Python that clusterddp is installed in: submit with it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A launch program and its options."""

    program: LaunchProgram
    options: tuple[Option, ...]

    def value(self, name: str) -> Word | None:
        """Return the value of an option, the last one given."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def number(self, *names: str) -> int | None:
        """Return the first of these options that is a number from 1."""
        values = [self.value(name) for name in names]
        return next((number for value in values if value and (number := value.number)), None)


@dataclass(slots=True)
class Command:
    """The command of a line of a script."""

    levels: list[Level] = field(default_factory=list)
    """From the outermost inwards."""
    kind: Literal["script", "module", "command"] = "command"
    target: Word = field(default_factory=lambda: Word(""))
    """The script or module; of a command its first word."""
    args: list[Word] = field(default_factory=list)
    asides: list[tuple[str, str]] = field(default_factory=list)
    """Parts that are not imported: as written, and the reason."""


def read_command(given: Sequence[Word]) -> Command | None:
    """Parse a command line; None: nothing in it starts ranks or Python.

    Raises: UsageError: an option is unknown, and so is where it ends.
    """
    command, rest = Command(), list(given)
    while rest:
        _, slash, name = rest[0].text.rpartition("/")
        if slash and (_is_python(name) or name in {"torchrun", "deepspeed", "accelerate"}):
            command.asides.append((rest[0].text, _OTHER_PYTHON))
        if _is_python(name):
            interpreter, behind, module = _read_python(rest, command)
            if module and behind and behind[0].text in _BY_MODULE:
                program, table = _BY_MODULE[behind[0].text]
                rest = behind[1:]
            elif (module and behind and behind[0].text in _SETUP_MODULES) or not behind:
                return None
            else:
                command.kind = "command" if interpreter else "module" if module else "script"
                command.target, command.args = behind[0], behind[1:]
                return command
        elif name == "accelerate" and len(rest) > 1 and rest[1].text == "launch":
            program, table, rest = "accelerate", ACCELERATE, rest[2:]
        elif name in _BY_NAME:
            (program, table), rest = _BY_NAME[name], rest[1:]
        else:
            break
        options, rest = take_options(rest, table)
        command.levels.append(Level(program=program, options=tuple(options)))
        flags = {option.name for option in options}
        if program in _STARTS_RANKS and rest and "no_python" not in flags:
            command.kind = "module" if "module" in flags else "script"
            command.target, command.args = rest[0], rest[1:]
            return command
    if not command.levels or not rest:
        return None
    command.target, command.args = rest[0], rest[1:]
    return command


def names_program(word: Word) -> bool:
    """Return whether a word names Python or a program that starts ranks."""
    return _is_python(word.text.rpartition("/")[2]) or _names_launcher(word)


def starts_more(given: Sequence[Word]) -> str | None:
    """Return the part of a command that starts ranks itself, or is a text for a shell; None: it has none."""
    for index, word in enumerate(given):
        following = given[index + 1].text if index + 1 < len(given) else ""
        is_shell = word.text.rpartition("/")[2] in {"bash", "sh", "dash", "zsh"}
        if _names_launcher(word) or (is_shell and re.fullmatch("-[a-z]*c", following)):
            return f"{word.text} {following}".strip()
    return None


def _names_launcher(word: Word) -> bool:
    return word.text.rpartition("/")[2] in {*_BY_NAME, *_BY_MODULE, "accelerate", "horovodrun"}


def _is_python(name: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", name) is not None


def _read_python(given: Sequence[Word], command: Command) -> tuple[bool, list[Word], bool]:
    """Read `python [-u] FILE|-m MODULE ARG...`.

    Returns: whether Python itself is the command of the ranks (`-c`), the words behind its options, whether they
    begin with a module.
    """
    for index, word in enumerate(given[1:], 1):
        if word.text == "-m":
            return False, list(given[index + 1 :]), True
        if word.text == "-u":
            command.asides.append(("python -u", "the output of ranks is always unbuffered"))
        elif word.text in {"-c", "-W", "-X", "-"}:
            return True, list(given), False
        elif word.text.startswith("-"):
            command.asides.append((f"python {word.text}", "an option of Python; ranks are started without it"))
        else:
            return False, list(given[index:]), False
    return False, [], False


_RIVALS = (
    frozenset({"ntasks", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu"}),
    frozenset({"cpus_per_task", "cpus_per_gpu"}),
    frozenset(GPU_OPTIONS),
)
"""Groups of options that exclude each other: where the job has one of a group, srun's are ignored."""
_OF_THE_JOB = (KNOWN - OWNED.keys() - SRUN_OPTIONS) | SIZES | {"time"}
"""Options by which srun requests a job when it runs outside of one."""
_NODES = {"srun": "nodes", "torchrun": "nnodes", "launch": "nnodes", "accelerate": "num_machines",
          "deepspeed": "num_nodes"}  # fmt: skip
_PER_NODE = ("npernode", "ppn", "ntasks_per_node")
_TOTALS = ("np",)
_HOSTS = words("host hosts include hostfile machinefile f")


@dataclass(slots=True)
class LaunchLine:
    """The size by the options of the launch programs, and by the job's options where they have none."""

    given: GivenOptions
    """The job's options, with those that the line adds or replaces."""
    settled: set[str] = field(default_factory=set)
    """Names of options that `given` or the number of ranks contains."""


def read_launch_line(
    command: Command,
    job: GivenOptions,
    findings: Findings,
    line: int,
    *,
    refuse: Callable[[int, str, str], NoReturn],
) -> LaunchLine:
    """Read the nodes and tasks of a command line; options of the job that contradict it are listed."""
    for level in command.levels:
        for option in level.options:
            text = f"{level.program} {option.text}"
            if option.name in _HOSTS and level.program != "srun":
                if not job:
                    refuse(line, text, "hosts, which clusterddp submit --hosts LIST or --hostfile FILE takes,")
                findings.lose(text, "in a job Slurm chooses the hosts; slurm.nodelist names them", line)
            if level.program == "accelerate" and option.name in _OTHER_STRATEGIES:
                refuse(line, text, "the ranks would train plain DDP without it: entry.command with owns_ranks runs it")
            if option.value and option.value.computed and _OURS.get(option.name) not in {_RENDEZVOUS, _LOGS, _GANG}:
                refuse(line, text, "a shell computes the value")
    reader = _Reader(job, findings, line)
    for level in command.levels:
        reader.read(level)
    return reader.found


def ranks_of_mapping(value: Word) -> int | None:
    """Return N of `--map-by ppr:N:node`."""
    match = re.fullmatch("ppr:([1-9][0-9]{0,4}):node", value.text.lower())
    return int(match[1]) if match else None


class _Reader:
    """Reads the launch programs of one line, from the outermost inwards; the innermost decides."""

    def __init__(self, job: GivenOptions, findings: Findings, line: int) -> None:
        self.found = LaunchLine(given=GivenOptions(job))
        self._job = job
        self._findings = findings
        self._line = line

    def read(self, level: Level) -> None:
        """Read the options of one program."""
        fixed = {option.name: option for option in level.options}
        if level.program == "srun":
            self._read_srun(fixed)
        elif level.program == "mpirun":
            self._read_mpirun(level, fixed)
        else:
            self._read_agent(level, fixed)

    def _read_srun(self, fixed: Mapping[str, Option]) -> None:
        for name, option in fixed.items():
            rivals = next((group for group in _RIVALS if name in group), frozenset({name}))
            if name == "nodes":
                self._set_nodes("srun", option, option.value.text if option.value else "")
            elif (name in SIZES and not rivals & self._job.keys()) or (not self._job and name in _OF_THE_JOB):
                self.found.given[name] = Given(option=option, line=self._line, of="srun")
                self.found.settled.add(name)

    def _read_mpirun(self, level: Level, fixed: Mapping[str, Option]) -> None:
        found = self.found
        total = next((number for name in _TOTALS if (number := _number(fixed.get(name)))), None)
        per_node = next((number for name in _PER_NODE if (number := _number(fixed.get(name)))), None)
        mapped = fixed["map_by"].value if "map_by" in fixed else None
        if per_node is None and mapped and (per_node := ranks_of_mapping(mapped)):
            found.settled.add("map_by")
        found.settled |= fixed.keys() & {*_TOTALS, *_PER_NODE}
        if total and per_node and "nodes" not in found.given:
            option = next(fixed[name] for name in _TOTALS if name in fixed)
            self._set_nodes(level.program, option, str(-(-total // per_node)))

    def _read_agent(self, level: Level, fixed: Mapping[str, Option]) -> None:
        """Read torchrun's, accelerate's and DeepSpeed's options."""
        found, option = self.found, fixed.get(_NODES[level.program])
        if option and option.value:
            self._set_nodes(level.program, option, option.value.text)
        threads = fixed.get("num_cpu_threads_per_process")
        if threads and _number(threads) and not {"cpus_per_task", "cpus_per_gpu"} & found.given.keys():
            cores = Option(name="cpus_per_task", value=threads.value, text=threads.text)
            found.given["cpus_per_task"] = Given(option=cores, line=self._line, of=level.program)
            found.settled.add(threads.name)

    def _set_nodes(self, program: str, option: Option, value: str) -> None:
        """Set the number of nodes; of a range, `2-4` or `2:4`, the smallest."""
        match = re.fullmatch("0*([1-9][0-9]{0,5})([-:].*)?", value)
        if match is None:
            return
        number, found = int(match[1]), self.found
        if match[2]:
            why = f"a spec has one number of nodes: {number}"
            self._findings.lose(f"{program} {option.text}", why, self._line)
        before = found.given.get("nodes")
        if before is not None and before.option.value and before.option.value.number != number:
            why = f"{program} {option.text} (line {self._line}) starts ranks on {number}: the spec has {number}"
            self._findings.lose(before.text, why, before.line)
        nodes = Option(name="nodes", value=Word(str(number)), text=option.text)
        found.given["nodes"] = Given(option=nodes, line=self._line, of=program)
        found.settled.add(option.name)


def _number(option: Option | None) -> int | None:
    return option.value.number if option and option.value else None


_RENDEZVOUS = "the ranks find each other by clusterddp's own rendezvous"
_LOGS = "clusterddp logs RUN shows the output of each rank"
_GANG = "clusterddp starts the ranks of a gang together and ends them together"
_PLACE = "resources has the number of ranks and nodes"
_OURS: dict[str, str] = {
    **dict.fromkeys(
        words(
            "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr master_port node_rank machine_rank local_addr "
            "standalone main_process_ip main_process_port same_network"
        ),
        _RENDEZVOUS,
    ),
    **dict.fromkeys(
        words(
            "log_dir redirects tee local_ranks_filter output error label unbuffered tag_output prepend_rank "
            "output_filename open_mode quiet verbose"
        ),
        _LOGS,
    ),
    **dict.fromkeys(
        words(
            "kill_on_bad_exit wait allow_run_as_root no_ssh_check launcher overlap exact whole jobid monitor_interval"
        ),
        _GANG,
    ),
    **dict.fromkeys(
        words(
            "nodes ntasks ntasks_per_node nnodes num_nodes num_machines np npernode ppn multi_gpu gpus "
            "cpus_per_task gres gpus_per_node gpus_per_task nodelist oversubscribe "
            "bynode byslot map_by rank_by num_cpu_threads_per_process"
        ),
        _PLACE,
    ),
}
_OTHER_STRATEGIES = words("config_file use_deepspeed use_fsdp use_megatron_lm use_parallelism_config tpu")
_HANDLED = words("module no_python use_env nproc_per_node num_processes num_gpus no_local_rank")
_ACCELERATE_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
}
"""Options that `accelerate launch` passes to its ranks as variables."""


_CONTAINER_KEYS = {"container_image": "image", "container_mounts": "mounts", "container_workdir": "workdir"}
"""Options of pyxis -> keys of the spec's container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """How many ranks the command starts on each node, and what is uncertain about it."""

    per_node: int
    doubts: tuple[str, ...] = ()


def count_ranks(command: Command, sizes: Sizes) -> Ranks:
    """Count the ranks that a command starts on each node."""
    inner = next((level for level in reversed(command.levels) if level.program in _STARTS_RANKS), None)
    if inner is not None:
        return _count_started(inner, sizes)
    outer = [level for level in command.levels if level.program in {"srun", "mpirun"}]
    if not outer:
        few = sizes.tasks_per_node * sizes.nodes > 1 or (sizes.gpus_per_node or 1) > 1
        doubt = "the script starts one process, without srun or torchrun: one rank on each node; a program that "
        return Ranks(per_node=1, doubts=(f"{doubt}starts its own ranks needs entry.owns_ranks: true",) if few else ())
    ranks = Ranks(per_node=sizes.tasks_per_node)
    for level in outer:
        ranks = _count_tasks(level, sizes, ranks)
    if ranks.per_node != sizes.tasks_per_node and sizes.tasks_per_node > 1:
        doubt = f"the job has {sizes.tasks_per_node} tasks on each node, this line starts {ranks.per_node}"
        ranks = dataclasses.replace(ranks, doubts=(*ranks.doubts, doubt))
    return ranks


def translate_levels(command: Command, findings: Findings, line: int, *, settled: Collection[str]) -> None:
    """Translate the options of the launch programs to the spec, and list those that cannot be.

    `settled`: names of options that the sizes contain already.
    """
    for level in command.levels:
        local_rank = {"launch": "use_env", "deepspeed": "no_local_rank"}.get(level.program)
        if local_rank and command.kind != "command" and all(option.name != local_rank for option in level.options):
            findings.set("entry.local_rank_arg", True)
        if level.program == "mpirun":
            why = "ranks start without MPI: a program that calls it (Horovod, mpi4py) needs slurm.mpi: pmix"
            findings.lose("mpirun", why, line)
        for option in level.options:
            if option.name not in {*settled, *_HANDLED, *_HOSTS}:
                _translate(level, option, findings, line)
    container = findings.values.get("container")
    if container and "image" not in container:
        findings.lose(f"container {container}", "the script has no image on this line", line)
        del findings.values["container"]


def _translate(level: Level, option: Option, findings: Findings, line: int) -> None:
    text = f"{level.program} {option.text}"
    value = option.value.text if option.value else ""
    if key := _CONTAINER_KEYS.get(option.name):
        container = findings.values.setdefault("container", {})
        if key == "mounts":
            container.setdefault("mounts", []).extend(mount for mount in value.split(",") if mount)
        else:
            container |= {"runtime": "pyxis", key: value} if key == "image" else {key: value}
    elif option.name == "max_restarts" and re.fullmatch("[0-9]{1,6}", value):
        findings.set("restarts", int(value))
    elif option.name in {"cpu", "use_cpu"}:
        findings.set("device", "cpu")
    elif level.program == "srun" and option.name in SRUN_OPTIONS:
        findings.set(f"slurm.{option.name}", value or True)
    elif level.program == "accelerate" and option.name in _ACCELERATE_VARIABLES:
        findings.values.setdefault("env", {})[_ACCELERATE_VARIABLES[option.name]] = value
    elif level.program == "mpirun" and option.name in {"x", "genv", "env"} and "=" in value:
        name, _, content = value.partition("=")
        set_variable(name, Word(content), findings, line)
    elif option.name == "export" or (level.program == "mpirun" and option.name in {"x", "genvlist"}):
        why = "variables of known kinds are passed on from the shell that submits; env sets others"
        findings.lose(text, why, line, fate="before")
    elif option.name in _OURS:
        findings.lose(text, _OURS[option.name], line, fate="ours")
    else:
        findings.lose(text, f"a spec has no key for this option of {level.program}", line)


def _count_started(level: Level, sizes: Sizes) -> Ranks:
    if level.program == "accelerate":
        total = level.number("num_processes")
        return _share(total, sizes.nodes) if total else Ranks(per_node=sizes.gpus_per_node or 1)
    counts = "num_gpus" if level.program == "deepspeed" else "nproc_per_node"
    wanted = level.value(counts)
    doubts: tuple[str, ...] = ()
    if (
        level.program != "deepspeed"
        and sizes.nodes > 1
        and not any(option.name == "nnodes" for option in level.options)
    ):
        doubts = (f"{level.program} without --nnodes starts a world on each node; the spec has one on {sizes.nodes}",)
    if number := level.number(counts):
        return Ranks(per_node=number, doubts=doubts)
    if wanted is None and level.program != "deepspeed":
        return Ranks(per_node=1, doubts=doubts)
    if wanted is not None and wanted.text == "cpu":
        return Ranks(per_node=sizes.cpus_per_task or 1, doubts=doubts)
    known = sizes.gpus_per_node
    words_ = wanted.text if wanted else "one for each GPU"
    doubt = "" if known else f"{words_}: the script does not have the number of ranks on a node; the spec has 1"
    if known and wanted is not None and wanted.text not in {"gpu", "auto"}:
        doubt = f"{words_}: taken as one rank for each of {known} GPUs"
    return Ranks(per_node=known or 1, doubts=(*doubts, doubt) if doubt else doubts)


def _count_tasks(level: Level, sizes: Sizes, so_far: Ranks) -> Ranks:
    if number := level.number("ntasks_per_node", "npernode", "ppn"):
        return Ranks(per_node=number)
    if (mapped := level.value("map_by")) and (number := ranks_of_mapping(mapped)):
        return Ranks(per_node=number)
    if number := level.number("ntasks", "np", "num_proc"):
        return _share(number, sizes.nodes)
    return so_far


def _share(total: int, nodes: int) -> Ranks:
    """Distribute ranks over nodes; in a spec each node has the same number."""
    each = max(1, -(-total // nodes))
    doubt = f"{total} ranks do not divide by {nodes} nodes: the spec has {each} on each"
    return Ranks(per_node=each, doubts=() if each * nodes == total else (doubt,))
