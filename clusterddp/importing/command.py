"""The command that trains: the nested launch programs (srun, torchrun ...) with their options, and what a rank runs.

Source: sbatch(1) and srun(1) of Slurm 20.11 to 25.05, pyxis 0.20, torch/distributed/run.py of PyTorch 2.13,
accelerate 1.x, DeepSpeed 0.18, mpirun(1) of Open MPI 4 and 5, mpiexec of MPICH 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from clusterddp.importing.shell import Text, Variables, fixed_number, split_statements
from clusterddp.spec.slurm_options import FLAGS, KNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionTable:
    """The options of a command; names are written with `_`."""

    shorts: Mapping[str, str]
    """One letter -> the long name."""
    flags: frozenset[str]
    """Options without a value."""
    optional: frozenset[str] = frozenset()
    """Options whose value, if there is one, is written to them: `--exclusive=user`."""
    values: frozenset[str] = frozenset()
    """Options with a value; needed to recognise abbreviated names."""
    single_dash: bool = False
    """Long options may have one dash, as with mpirun."""
    counts: Mapping[str, int] | None = None
    """Options with several values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option as given."""

    name: str
    """Its long name with `_`, or the letter of an unknown short one."""
    value: Text | None
    text: str
    """As it is written."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SBATCH_SHORTS = {
    "A": "account", "a": "array", "b": "begin", "B": "extra_node_info", "C": "constraint", "c": "cpus_per_task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help",
    "I": "immediate", "i": "input", "J": "job_name", "k": "no_kill", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition",
    "Q": "quiet", "q": "qos", "s": "oversubscribe", "S": "core_spec", "t": "time", "u": "usage", "v": "verbose",
    "V": "version", "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_PYXIS_FLAGS = words(
    "container_mount_home no_container_mount_home container_remap_root no_container_remap_root container_entrypoint "
    "no_container_entrypoint container_writable container_readonly"
)
_PYXIS = words("container_image container_mounts container_workdir container_name container_save container_env")
_SLURM_OPTIONAL = words("exclusive no_kill nice propagate get_user_env immediate")

SBATCH = OptionTable(
    shorts=_SBATCH_SHORTS,
    flags=FLAGS | words("test_only parsable quiet verbose wait help usage version stepmgr") | _PYXIS_FLAGS,
    optional=_SLURM_OPTIONAL,
    values=KNOWN | _PYXIS,
)
SRUN = OptionTable(
    shorts=_SBATCH_SHORTS | {
        "E": "preserve_env", "K": "kill_on_bad_exit", "l": "label", "r": "relative", "T": "threads",
        "u": "unbuffered", "W": "wait", "X": "disable_status", "Z": "no_allocate", "R": "no_rotate",
    },
    flags=FLAGS | _PYXIS_FLAGS | words(
        "preserve_env label unbuffered disable_status no_allocate multi_prog quit_on_interrupt exact overlap "
        "interactive whole external debugger_test quiet verbose help usage version test_only"
    ),
    optional=_SLURM_OPTIONAL | words("kill_on_bad_exit pty bcast send_libs compress"),
    values=KNOWN | _PYXIS | words(
        "relative threads wait jobid het_group epilog prolog task_epilog task_prolog slurmd_debug msg_timeout "
        "cpus_per_task treewidth tmp cpu_bind mem_bind mpi"
    ),
)  # fmt: skip
TORCHRUN = OptionTable(
    shorts={"m": "module", "r": "redirects", "t": "tee", "h": "help"},
    flags=words("standalone module no_python run_path use_env help"),
    values=words(
        "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval "
        "start_method event_log_handler role log_dir redirects tee local_ranks_filter node_rank master_addr "
        "master_port local_addr logs_specs numa_binding signals_to_handle duplicate_stdout_filters "
        "duplicate_stderr_filters virtual_local_rank"
    ),
)
PYTHON = OptionTable(
    shorts={"W": "W", "X": "X", "m": "module", "c": "c"},
    flags=words("u O OO B E I s S v q b d i P x V h ? module c"),
    values=words("check_hash_based_pycs"),
)
"""`-m` and `-c` end the options: what follows is the program."""
ACCELERATE = OptionTable(
    shorts={"m": "module", "q": "quiet", "h": "help"},
    flags=words(
        "module no_python quiet debug cpu multi_gpu tpu use_xpu ipex use_deepspeed use_fsdp use_megatron_lm help "
        "same_network standalone enable_cpu_affinity use_parallelism_config use_cpu"
    ),
    values=words(
        "config_file num_processes num_machines machine_rank main_process_ip main_process_port mixed_precision "
        "dynamo_backend gpu_ids rdzv_backend rdzv_conf max_restarts monitor_interval num_cpu_threads_per_process "
        "main_training_function gradient_accumulation_steps role log_dir tee"
    ),
)
DEEPSPEED = OptionTable(
    shorts={"H": "hostfile", "i": "include", "e": "exclude", "h": "help"},
    flags=words(
        "module no_python no_local_rank no_ssh_check force_multi elastic_training no_ssh help bind_cores_to_rank"
    ),
    values=words(
        "hostfile include exclude num_nodes num_gpus min_elastic_nodes max_elastic_nodes node_rank master_port "
        "master_addr launcher launcher_args save_pid autotuning bind_core_list ssh_port venv_script"
    ),
)
MPIRUN = OptionTable(
    shorts={"n": "np", "c": "np", "N": "npernode", "H": "host", "x": "x", "q": "quiet", "v": "verbose", "V": "version"},
    flags=words(
        "oversubscribe nooversubscribe allow_run_as_root tag_output report_bindings bind_to_none bynode byslot "
        "display_map quiet verbose version use_hwthread_cpus prepend_rank l enable_recovery nolocal envall envnone"
    ),
    values=words(
        "np npernode ppn ntasks_per_node host hosts hostfile machinefile f map_by bind_to rank_by wdir wd prefix "
        "x genvlist launcher iface output_filename path report_uri timeout personality mpi rmk"
    ),
    single_dash=True,
    counts={"mca": 2, "gmca": 2, "omca": 2, "prtemca": 2, "pmixmca": 2, "genv": 2, "env": 2},
)
HOROVODRUN = OptionTable(
    shorts={"np": "num_proc", "H": "hosts", "hostfile": "hostfile", "p": "ssh_port", "v": "version"},
    flags=words("verbose gloo mpi js disable_cache check_build start_timeout_disabled tcp"),
    values=words(
        "num_proc hosts hostfile ssh_port network_interfaces start_timeout min_np max_np slots output_filename"
    ),
    single_dash=True,
)


def take_options(given: Sequence[Text], table: OptionTable) -> tuple[list[Option], list[Text]]:
    """Take the options from the head of a command's arguments; return them and the rest."""
    options: list[Option] = []
    rest = deque(given)
    while rest and rest[0].text.startswith("-") and rest[0].text != "-":
        word = rest.popleft()
        if word.text == "--":
            break
        options += _long(word, rest, table) if _is_long(word, table) else _short(word, rest, table)
        if table is PYTHON and options[-1].name in {"module", "c"}:
            break
    return options, list(rest)


def _is_long(word: Text, table: OptionTable) -> bool:
    if word.text.startswith("--"):
        return True
    name = word.text[1:].partition("=")[0].replace("-", "_")
    known = table.flags | table.values | set(table.counts or {}) | set(table.shorts)
    return table.single_dash and len(name) > 1 and name in known


def _long(word: Text, rest: deque[Text], table: OptionTable) -> list[Option]:
    written, equals, value = word.text.lstrip("-").partition("=")
    name = _whole_name(written.replace("-", "_"), table)
    if equals:
        return [Option(name=name, value=Text(value, word.unknown), text=word.text)]
    count = (table.counts or {}).get(name, 1)
    if name in table.flags | table.optional or not _value_follows(name, rest, table):
        return [Option(name=name, value=None, text=word.text)]
    taken = [rest.popleft() for _ in range(min(count, len(rest)))]
    joined = Text("=".join(text.text for text in taken), tuple(u for text in taken for u in text.unknown))
    return [Option(name=name, value=joined, text=" ".join([word.text, *(text.text for text in taken)]))]


def _short(word: Text, rest: deque[Text], table: OptionTable) -> list[Option]:
    """Read `-n4`, `-n 4`, and flags in one word, `-lu`."""
    options = []
    letters = word.text[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = table.shorts.get(letter, letter)
        if name in table.flags:
            options.append(Option(name=name, value=None, text=f"-{letter}"))
            continue
        if name in table.optional or letters:
            value = Text(letters.removeprefix("="), word.unknown) if letters else None
            options.append(Option(name=name, value=value, text=f"-{letter}{letters}"))
        elif rest and (letter in table.shorts or _value_follows(name, rest, table)):
            value = rest.popleft()
            options.append(Option(name=name, value=value, text=f"-{letter} {value.text}"))
        else:
            options.append(Option(name=name, value=None, text=f"-{letter}"))
        break
    return options


def _whole_name(name: str, table: OptionTable) -> str:
    """Complete an abbreviated name, if only one option begins with it."""
    known = table.flags | table.optional | table.values | set(table.counts or {})
    if name in known:
        return name
    name = table.shorts.get(name, name) if len(name) > 1 else name
    longer = [each for each in known if each.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _value_follows(name: str, rest: deque[Text], table: OptionTable) -> bool:
    """Return whether the next word is the value of this option; for an unknown option it is a guess."""
    if not rest:
        return False
    if name in table.values or name in (table.counts or {}):
        return True
    following = rest[0].text
    program = following.rpartition("/")[2]
    return not following.startswith("-") and not program.endswith((".py", ".sh")) and not is_program(program)


def is_program(name: str) -> bool:
    """Return whether a word is the name of a launch program, or Python."""
    base = name.rstrip("0123456789.")
    return base in {"python", "torchrun", "accelerate", "deepspeed", "bash", "sh", "mpirun", "mpiexec", "srun", "env",
                    "apptainer", "singularity", "horovodrun", "numactl", "nsys", "time"}  # fmt: skip


LaunchProgram = Literal["srun", "mpirun", "horovodrun", "torchrun", "launch", "accelerate", "deepspeed"]
_BY_NAME: dict[str, tuple[LaunchProgram, OptionTable]] = {
    "srun": ("srun", SRUN),
    "mpirun": ("mpirun", MPIRUN),
    "mpiexec": ("mpirun", MPIRUN),
    "mpiexec.hydra": ("mpirun", MPIRUN),
    "orterun": ("mpirun", MPIRUN),
    "prterun": ("mpirun", MPIRUN),
    "horovodrun": ("horovodrun", HOROVODRUN),
    "torchrun": ("torchrun", TORCHRUN),
    "deepspeed": ("deepspeed", DEEPSPEED),
}
_BY_MODULE: dict[str, tuple[LaunchProgram, OptionTable]] = {
    "torch.distributed.run": ("torchrun", TORCHRUN),
    "torch.distributed.launch": ("launch", TORCHRUN),
    "accelerate.commands.launch": ("accelerate", ACCELERATE),
    "deepspeed.launcher.runner": ("deepspeed", DEEPSPEED),
}
_PREFIXES = frozenset({"exec", "nohup", "time", "command", "stdbuf", "setsid", "ionice", "nice", "numactl", "taskset"})
"""Commands that run the one after them; their own options are dropped."""
_SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
STARTS_RANKS: frozenset[LaunchProgram] = frozenset({"torchrun", "launch", "accelerate", "deepspeed"})
"""The launch programs that start the ranks of a node themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A launch program and its options."""

    program: LaunchProgram
    options: tuple[Option, ...]

    def value(self, name: str) -> Text | None:
        """Return the value of an option, the last one given."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def number(self, *names: str) -> int | None:
        """Return the first of these options that is a fixed number from 1."""
        values = [self.value(name) for name in names]
        return next((number for value in values if value and (number := fixed_number(value))), None)


@dataclass(slots=True)
class Command:
    """The command of a line of a script."""

    levels: list[Level] = field(default_factory=list)
    """From the outermost inwards."""
    kind: Literal["script", "module", "command"] = "command"
    target: Text = field(default_factory=lambda: Text(""))
    """The script or module; of a command its first word."""
    args: list[Text] = field(default_factory=list)
    env: dict[str, Text] = field(default_factory=dict)
    """Variables that the command line itself sets."""
    asides: list[tuple[str, str]] = field(default_factory=list)
    """Parts that are not imported: as written, and the reason."""

    @property
    def python(self) -> bool:
        return self.kind != "command"

    @property
    def programs(self) -> tuple[LaunchProgram, ...]:
        return tuple(level.program for level in self.levels)


def read_command(words: Sequence[Text], variables: Variables, depth: int = 0) -> Command:
    """Parse a command line, as far as its programs are known here."""
    command = Command()
    rest = list(words)
    while rest and (step := _step_of(rest[0], depth)) is not None:
        rest = step(command, rest, variables)
        if command.target.text:
            return command
    if rest:
        command.target, command.args = rest[0], rest[1:]
        if rest[0].text.endswith(".py"):
            command.kind = "script"
    return command


_Step = Callable[[Command, list[Text], Variables], list[Text]]


def _step_of(word: Text, depth: int) -> _Step | None:
    """Return the function that parses the first program of a command line; None: it is the program of the ranks."""
    name = word.text.rpartition("/")[2]
    steps: dict[str, _Step] = {"env": _take_env, "accelerate": _take_accelerate}
    steps |= dict.fromkeys(_BY_NAME, _take_launch_program) | dict.fromkeys(_PREFIXES, _take_prefix)
    step = steps.get(name)
    if step is None and name.rstrip("0123456789.") == "python":
        return _take_python
    if step is None and name in {"apptainer", "singularity"}:
        return _take_apptainer
    if step is None and name in _SHELLS and depth < 3:
        return lambda command, rest, variables: _take_shell(command, rest, variables, depth)
    return step


def _take_launch_program(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    return _take_level(command, _BY_NAME[rest[0].text.rpartition("/")[2]], rest[1:])


def _take_level(command: Command, known: tuple[LaunchProgram, OptionTable], given: list[Text]) -> list[Text]:
    program, table = known
    options, rest = take_options(given, table)
    command.levels.append(Level(program=program, options=tuple(options)))
    if program not in STARTS_RANKS:
        return rest
    flags = {option.name for option in options}
    if not rest or "no_python" in flags:
        return rest
    command.kind = "module" if "module" in flags else "script"
    command.target, command.args = rest[0], rest[1:]
    return []


def _take_accelerate(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    if len(rest) > 1 and rest[1].text == "launch":
        return _take_level(command, ("accelerate", ACCELERATE), rest[2:])
    command.target, command.args = rest[0], rest[1:]
    return []


def _take_python(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    interpreter, given = rest[0], rest[1:]
    options, behind = take_options(given, PYTHON)
    for option in options:
        if option.name == "u":
            command.asides.append(("python -u", "the output of ranks is always unbuffered"))
        elif option.name not in {"module", "c"}:
            command.asides.append((f"python {option.text}", "an option of Python; ranks are started without it"))
    ends = options[-1].name if options else ""
    if "/" in interpreter.text:
        command.asides.append(
            (interpreter.text, "ranks run the Python that clusterddp is installed in: submit with it")
        )
    if ends == "c" or not behind:
        command.target, command.args = interpreter, given
        return []
    if ends == "module" and behind[0].text in _BY_MODULE:
        return _take_level(command, _BY_MODULE[behind[0].text], behind[1:])
    command.kind = "module" if ends == "module" else "script"
    command.target, command.args = behind[0], behind[1:]
    return []


def _take_env(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    """Parse `env A=b`; its options are dropped."""
    rest = rest[1:]
    while rest and (rest[0].text.startswith("-") or "=" in rest[0].text):
        word = rest.pop(0)
        name, equals, value = word.text.partition("=")
        if equals and name.isidentifier():
            command.env[name] = Text(value, word.unknown)
        else:
            command.asides.append((f"env {word.text}", "an option of env"))
    return rest


def _take_prefix(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    words, rest = [rest[0].text], rest[1:]
    while rest and rest[0].text.startswith("-"):
        words.append(rest.pop(0).text)
    if words != ["exec"]:
        command.asides.append((" ".join(words), "the program runs without it"))
    return rest


def _take_apptainer(command: Command, rest: list[Text], variables: Variables) -> list[Text]:
    """Parse `apptainer exec [options] IMAGE`; its image becomes the container of the spec."""
    program, rest = rest[0].text, rest[1:]
    if not rest or rest[0].text not in {"exec", "run"}:
        command.target, command.args = Text(program), rest
        return []
    rest = rest[1:]
    given: list[Option] = []
    while rest and rest[0].text.startswith("-"):
        name, equals, value = rest.pop(0).text.partition("=")
        word = name.lstrip("-").replace("-", "_")
        takes = word in {"bind", "B", "pwd", "env", "home", "H", "overlay", "workdir", "W", "mount"}
        text = Text(value) if equals else rest.pop(0) if takes and rest else None
        given.append(Option(name=f"apptainer_{word}", value=text, text=f"{name} {text.text if text else ''}".strip()))
    if rest:
        given.append(Option(name="apptainer_image", value=rest[0], text=rest[0].text))
    command.levels.append(Level(program="srun", options=tuple(given)))
    return rest[1:]


def _take_shell(command: Command, rest: list[Text], variables: Variables, depth: int) -> list[Text]:
    """Parse `bash -c "..."`; a script file of the shell is a command like any other."""
    flags = "".join(word.text for word in rest[1:-1])
    if len(rest) < 3 or not rest[1].text.startswith("-") or not flags.endswith("c"):
        command.target, command.args = rest[0], rest[1:]
        return []
    statements = [each for each in split_statements(rest[-1].text) if each.words]
    last = statements[-1] if statements else None
    if last is None:
        command.target, command.args = rest[0], rest[1:]
        return []
    for statement in statements[:-1]:
        command.asides.append((statement.text, "runs before the program, in the same shell"))
    words = [text for word in last.words for text in variables.resolve(word)]
    while words and "=" in words[0].text and words[0].text.partition("=")[0].isidentifier():
        word = words.pop(0)
        name, _, value = word.text.partition("=")
        command.env[name] = Text(value, word.unknown)
    inner = read_command(words, variables, depth + 1)
    command.levels += inner.levels
    command.kind, command.target, command.args = inner.kind, inner.target, inner.args
    command.env |= inner.env
    command.asides += inner.asides
    for redirection in last.redirections:
        command.asides.append((redirection, "clusterddp logs RUN shows the output of ranks"))
    return []
