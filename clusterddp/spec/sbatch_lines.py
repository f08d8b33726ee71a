"""The #SBATCH lines of a batch script, as sbatch reads them, and the sizes of the job that they ask for."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.network.hostlist import MAX_HOSTS, count
from clusterddp.spec.launch_options import SBATCH, Option, Word, take_options
from clusterddp.spec.slurm_options import GPU, GPU_MARK, GpuRequest, read_gpu_request

Lose = Callable[[str, str, int], None]
"""Is called with a part of the script that is not read, the reason, and its line."""

SIZES = frozenset(
    {
        "nodes", "ntasks", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu", "cpus_per_task", "cpus_per_gpu",
        "gpus", "gpus_per_node", "gpus_per_task", "gres",
    }
)  # fmt: skip
"""Options that decide the sizes, or follow from them."""
GPU_OPTIONS = ("gres", "gpus", "gpus_per_node", "gpus_per_task")
_NUMBERS = ("ntasks", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu", "cpus_per_task", "cpus_per_gpu")
_MARK = "#SBATCH"
OTHER_MARKS = ("#PBS", "#BSUB", "#$ ", "#COBALT", "#FLUX:")


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """An option of the job, and its line."""

    option: Option
    line: int
    of: str = "#SBATCH"
    """Where it is given: to the job, or to a launch program."""

    @property
    def text(self) -> str:
        return f"{self.of} {self.option.text}"


class GivenOptions(dict[str, Given]):
    """The options of a job by name, and their values as numbers."""

    def value(self, name: str) -> str:
        """Return the text of a value; empty where the option is not given, or has none."""
        given = self.get(name)
        return given.option.value.text if given and given.option.value else ""

    def lose(self, name: str, why: str, lose: Lose) -> None:
        """Say why an option is not read."""
        lose(self[name].text, why, self[name].line)

    def number(self, name: str) -> int | None:
        """Return a number from 1."""
        return int(self.value(name)) if re.fullmatch("0{0,9}[1-9][0-9]{0,5}", self.value(name)) else None

    def gpus(self, *names: str) -> GpuRequest | None:
        """Return what these options ask for; without names any of the job's."""
        return read_gpu_request({name: self.value(name) for name in names or self})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The size of the job, as far as its options have it."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None
    gpus_per_node: int | None

    def as_variables(self, given: GivenOptions) -> dict[str, str]:
        """Return the variables that Slurm sets for such options, where each has one value on all nodes."""
        facts = {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_NTASKS": self.nodes * self.tasks_per_node if "ntasks" in given else None,
            "SLURM_NTASKS_PER_NODE": given.number("ntasks_per_node"),
            "SLURM_CPUS_PER_TASK": given.number("cpus_per_task"),
            "SLURM_GPUS_ON_NODE": self.gpus_per_node,
        }
        return {name: str(number) for name, number in facts.items() if number is not None}


def read_sbatch_lines(text: str, source: str, lose: Lose) -> GivenOptions:
    """Read the options of a batch script: name -> the last one given, which is the valid one.

    sbatch ignores those after the first command. `source`: the name of the script in errors.
    Raises: UsageError: an option is unknown, and so is where it ends.
    """
    given = GivenOptions()
    in_force = True
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")  # noqa: PLW2901
        if not line.startswith(_MARK):
            if line.startswith(OTHER_MARKS):
                lose(line, "a line for another scheduler", number)
            in_force = in_force and (not line.strip() or line.lstrip().startswith("#"))
            continue
        if not in_force:
            lose(line, "sbatch ignores it: it is after the first command of the script", number)
            continue
        try:
            options, rest = take_options(list(_split_line(line.removeprefix(_MARK))), SBATCH)
        except UsageError as error:
            raise UsageError(f"{source}:{number}: {error.message}", hint=error.hint) from error
        for word in rest:
            lose(f"{_MARK} ... {word.text}", "not an option of sbatch", number)
        for option in options:
            earlier = given.get(option.name)
            if option.name == "mail_type" and earlier and earlier.option.value and option.value:
                both = Word(f"{earlier.option.value.text},{option.value.text}")  # Slurm adds them up
                option = dataclasses.replace(option, value=both)  # noqa: PLW2901
            elif earlier:
                lose(earlier.option.text, f"replaced in line {number}", earlier.line)
            given[option.name] = Given(option=option, line=number)
    return given


def read_sizes(given: GivenOptions, lose: Lose) -> Sizes:
    """Compute the size of the job."""
    _refuse_odd_numbers(given, lose)
    tasks = given.number("ntasks_per_node") or given.number("tasks_per_node")
    total = given.number("ntasks")
    nodes = _nodes(given, lose)
    if nodes is None:
        nodes = math.ceil(total / tasks) if total and tasks else 1
        if total and total > 1 and not tasks:
            given.lose("ntasks", "without --nodes Slurm chooses how many: one is taken", lose)
    gpus = _gpus_per_node(given, nodes, tasks)
    per_gpu = given.number("ntasks_per_gpu")
    if tasks is None:
        tasks = math.ceil(total / nodes) if total else per_gpu * gpus if per_gpu and gpus else 1
    if per_gpu and per_gpu * (gpus or 0) != tasks:
        given.lose("ntasks_per_gpu", f"there are {tasks} tasks on each node", lose)
    if total and total != nodes * tasks:
        given.lose("ntasks", f"every node has the same number of ranks: {nodes} x {tasks}", lose)
    gpus = _gpus_per_node(given, nodes, tasks)
    return Sizes(nodes=nodes, tasks_per_node=tasks, cpus_per_task=_cores(given, gpus, tasks, lose), gpus_per_node=gpus)


def _cores(given: GivenOptions, gpus: int | None, tasks: int, lose: Lose) -> int | None:
    cores, per_gpu = given.number("cpus_per_task"), given.number("cpus_per_gpu")
    if per_gpu and (cores is not None or not gpus):
        why = "--cpus-per-task sets it, too" if cores is not None else "the script does not have the number of GPUs"
        given.lose("cpus_per_gpu", why, lose)
    return max(1, per_gpu * gpus // tasks) if cores is None and per_gpu and gpus else cores


def _refuse_odd_numbers(given: GivenOptions, lose: Lose) -> None:
    """List sizes that are not a number from 1."""
    for name in _NUMBERS:
        if name in given and not re.fullmatch("0{0,9}[1-9][0-9]{0,5}", given.value(name)):
            given.lose(name, "expected a number from 1", lose)
    for name in GPU_OPTIONS:
        parts = given.value(name).split(",")
        odd = any(GPU_MARK.match(part) and not GPU.fullmatch(part) for part in parts)
        request = given.gpus(name)
        if name in given and (odd if name == "gres" and parts != [""] else not request or request.count is None):
            given.lose(name, "expected a number of GPUs", lose)


def _nodes(given: GivenOptions, lose: Lose) -> int | None:
    value = given.value("nodes")
    if not value:
        try:  # a job without --nodes gets all of the named hosts
            return count(given.value("nodelist"), limit=MAX_HOSTS) or None
        except ClusterddpError:  # the path of a file with the hosts
            return None
    number = re.fullmatch("0*([1-9][0-9]{0,5})(-.*)?", value)
    if number is None or number[2]:
        why = "a spec has one number of nodes" + (": the smallest is taken" if number else ", from 1: 1 is taken")
        given.lose("nodes", why, lose)
    return int(number[1]) if number else 1


def _gpus_per_node(given: GivenOptions, nodes: int, tasks: int | None) -> int | None:
    request = given.gpus()
    asked = request.on_node(nodes=nodes, tasks=tasks) if request else None
    return None if asked is None else math.ceil(asked)


def _split_line(text: str) -> Iterator[Word]:
    """Split at blanks as sbatch does: quotes keep words together, an unquoted # begins a comment."""
    word: str | None = None
    for match in re.finditer(r"\\(.)|\"([^\"]*)(?:\"|$)|'([^']*)(?:'|$)|(#)|(\s+)|(.)", text, re.DOTALL):
        if match[4]:
            break
        if match[5]:
            if word is not None:
                yield Word(word)
            word = None
            continue
        word = (word or "") + (match[1] or match[2] or match[3] or match[6] or "")
    if word is not None:
        yield Word(word)
