"""Options of sbatch and of the launch programs (srun, torchrun ...): which there are, and how they are written.

Source: sbatch(1) and srun(1) of Slurm 20.11 to 25.05, pyxis 0.20, torch/distributed/run.py of PyTorch 2.13,
mpirun(1) of Open MPI 4 and 5, mpiexec of MPICH 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clusterddp.errors import UsageError
from clusterddp.spec.slurm_options import FLAGS, KNOWN


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command."""

    text: str
    """Without quotes; as it is written where a shell computes a part of it."""
    computed: bool = False
    """A shell computes a part of it: `$NAME`, `$(...)`, `*.tar`, `~`."""

    @property
    def number(self) -> int | None:
        """A count from 1 to 99,999."""
        known = not self.computed and self.text.isascii() and self.text.isdigit() and len(self.text) < 6
        return int(self.text) or None if known else None


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
    """Options with a value."""
    single_dash: bool = False
    """Long options may have one dash, as with mpirun."""
    counts: Mapping[str, int] | None = None
    """Options with several values."""

    @property
    def names(self) -> frozenset[str]:
        """Return the long names of all options."""
        return self.flags | self.optional | self.values | frozenset(self.counts or {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option as given."""

    name: str
    """Its long name with `_`, or the letter of an unknown short one."""
    value: Word | None
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
        "preserve_env label unbuffered disable_status no_allocate multi_prog quit_on_interrupt exact "
        "interactive whole external debugger_test quiet verbose help usage version test_only no_rotate async bell "
        "no_bell no_shell parsable stepmgr wait_for_children consolidate_segments spread_segments"
    ),
    optional=_SLURM_OPTIONAL | words(
        "kill_on_bad_exit pty bcast send_libs compress overlap external_launcher kill_command oom_kill_step requeue "
        "resv_ports x11"
    ),
    values=KNOWN | _PYXIS | words(
        "relative threads wait jobid het_group epilog prolog task_epilog task_prolog slurmd_debug msg_timeout "
        "cpus_per_task treewidth tmp cpu_bind mem_bind mpi accel_bind argv autocomplete bcast_exclude cluster context "
        "environment ignore_signals mem_update ntasks_per_tres pack_group resources runtime"
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


def take_options(given: Sequence[Word], table: OptionTable) -> tuple[list[Option], list[Word]]:
    """Take the options from the head of a command's arguments; return them and the rest.

    Raises: UsageError: whether the word after an option is its value is unknown.
    """
    options: list[Option] = []
    rest = deque(given)
    while rest and rest[0].text.startswith("-") and rest[0].text != "-":
        word = rest.popleft()
        if word.text == "--":
            break
        options += _long(word, rest, table) if _is_long(word, table) else _short(word, rest, table)
    return options, list(rest)


def _is_long(word: Word, table: OptionTable) -> bool:
    if word.text.startswith("--"):
        return True
    name = word.text[1:].partition("=")[0].replace("-", "_")
    return table.single_dash and len(name) > 1 and name in table.names


def _long(word: Word, rest: deque[Word], table: OptionTable) -> list[Option]:
    written, equals, value = word.text.lstrip("-").partition("=")
    name = _whole_name(written.replace("-", "_"), table)
    if equals:
        return [Option(name=name, value=Word(value, word.computed), text=word.text)]
    count = (table.counts or {}).get(name, 1)
    if name in table.flags | table.optional or not _value_follows(word.text, name, rest, table):
        return [Option(name=name, value=None, text=word.text)]
    taken = [rest.popleft() for _ in range(min(count, len(rest)))]
    joined = Word("=".join(each.text for each in taken), any(each.computed for each in taken))
    return [Option(name=name, value=joined, text=" ".join([word.text, *(each.text for each in taken)]))]


def _short(word: Word, rest: deque[Word], table: OptionTable) -> list[Option]:
    """Read `-n4`, `-n 4`, and flags in one word, `-lu`."""
    options = []
    letters = word.text[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = table.shorts.get(letter, letter)
        if name in table.flags:
            options.append(Option(name=name, value=None, text=f"-{letter}"))
            continue
        given = Word(letters.removeprefix("="), word.computed) if letters else None
        if not letters and name not in table.optional and _value_follows(f"-{letter}", name, rest, table):
            given = rest.popleft()
        text = f"-{letter}{letters}" if letters else f"-{letter} {given.text}" if given else f"-{letter}"
        options.append(Option(name=name, value=given, text=text))
        break
    return options


def _whole_name(name: str, table: OptionTable) -> str:
    """Complete an abbreviated name, if only one option begins with it."""
    longer = [each for each in table.names if each.startswith(name)]
    return longer[0] if len(longer) == 1 and name not in table.names else name


def _value_follows(text: str, name: str, rest: deque[Word], table: OptionTable) -> bool:
    """Return whether the next word is the value of this option.

    Raises: UsageError: the option is unknown, and a word follows that may be its value.
    """
    known = name in table.values or name in (table.counts or {}) or name in table.shorts.values()
    if rest and not known and not rest[0].text.startswith("-"):
        raise UsageError(
            f"{text} {rest[0].text}: an unknown option, and the next word may be its value",
            hint=f"write {text}=VALUE, or move the option to the end of the options",
        )
    return bool(rest) and known
