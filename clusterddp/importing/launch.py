"""The command that trains, `srun OPTIONS torchrun OPTIONS train.py ARG...`: its launchers, its ranks on a node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from clusterddp.importing.files import Findings
from clusterddp.spec.launch_options import SRUN, TORCHRUN, Option, Word, take_options, words
from clusterddp.spec.sbatch_lines import GPU_OPTIONS, SIZES, Given, GivenOptions, Sizes
from clusterddp.spec.slurm_options import KNOWN, OWNED, SRUN_OPTIONS

_LAUNCHERS = words("srun torchrun torch.distributed.run")
OTHER_LAUNCHERS = words(
    "mpirun mpiexec mpiexec.hydra orterun prterun accelerate accelerate.commands.launch deepspeed "
    "deepspeed.launcher.runner torch.distributed.launch horovodrun sbatch salloc"
)
_SETUP_MODULES = words(
    "pip venv virtualenv ensurepip conda spacy nltk.downloader wandb ipykernel huggingface_hub build"
)
"""Modules that install, log in or download: never the training."""
_OTHER_PYTHON = "ranks run the Python that clusterddp is installed in: submit with it"
_NO_EFFECT = words(
    "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr master_port node_rank local_addr standalone "
    "monitor_interval role log_dir redirects tee local_ranks_filter "
    "output error label unbuffered open_mode quiet verbose kill_on_bad_exit wait overlap exact jobid"
)
"""Options of torchrun and srun for the rendezvous, for logs, and for the end of all ranks after a failure."""
_OURS = "clusterddp has its own rendezvous and logs, and ends all ranks after a failure"
_OF_THE_JOB = (KNOWN - OWNED.keys() - SRUN_OPTIONS) | {"time"}
"""Options by which srun requests a job when it runs outside of one."""


@dataclass(slots=True)
class Launch:
    """A command that starts Python or ranks."""

    srun: list[Option] | None = None
    """Its options; None: the command has no srun."""
    torchrun: list[Option] | None = None
    kind: Literal["script", "module", "command"] = "command"
    """How the spec names the program."""
    program: list[Word] = field(default_factory=list)
    """The script or module, or the first word of a command; then its arguments."""
    asides: list[tuple[str, str]] = field(default_factory=list)
    """Parts that are not in the spec: as written, and the reason."""


def read_launch(given: Sequence[Word]) -> Launch | None:
    """Parse a command; None: it starts neither ranks nor Python.

    Raises: UsageError: an option is unknown, and so is where it ends.
    """
    launch, rest = Launch(), list(given)
    if _name(rest[0]) == "srun":
        launch.srun, rest = take_options(rest[1:], SRUN)
    if not rest:
        return None
    name = _name(rest[0])
    if _is_python(name) or name == "torchrun":
        if "/" in rest[0].text:
            launch.asides.append((rest[0].text, _OTHER_PYTHON))
        if name != "torchrun":
            launch.kind, launch.program = _skip_python(rest, launch.asides)
            target = launch.program[0].text if launch.program else ""
            if launch.kind != "module" or target != "torch.distributed.run":
                is_setup = launch.kind == "module" and target in _SETUP_MODULES and launch.srun is None
                return None if is_setup or not target else launch
            rest = launch.program
        launch.torchrun, launch.program = take_options(rest[1:], TORCHRUN)
        flags = {option.name for option in launch.torchrun}
        launch.kind = "command" if "no_python" in flags else "module" if "module" in flags else "script"
        return launch if launch.program else None
    launch.program = rest
    return None if launch.srun is None else launch


def find_launcher(given: Iterable[Word], *, or_python: bool = False) -> str | None:
    """Return the first word that names a launcher, a shell with `-c`, or Python; None: there is none."""
    is_shell = False
    for word in given:
        name = _name(word)
        if name in _LAUNCHERS | OTHER_LAUNCHERS or (is_shell and re.fullmatch("-[a-z]*c", name)):
            return word.text
        if or_python and _is_python(name):
            return word.text
        is_shell = name in {"bash", "sh", "dash", "zsh"}
    return None


def _name(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _is_python(name: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", name) is not None


def _skip_python(
    given: Sequence[Word], asides: list[tuple[str, str]]
) -> tuple[Literal["script", "module", "command"], list[Word]]:
    """Skip Python's options; with `-c` and options that the spec has not, Python itself is the program."""
    for index, word in enumerate(given[1:], 1):
        if word.text == "-m":
            return "module", list(given[index + 1 :])
        if not word.text.startswith("-"):
            return "script", list(given[index:])
        if word.text != "-u":
            return "command", list(given)
        asides.append(("python -u", "the output of ranks is always unbuffered"))
    return "script", []


def read_srun(options: Sequence[Option], job: GivenOptions, line: int, findings: Findings) -> GivenOptions:
    """Return the job's options with those of srun; what contradicts the job, or has no key in a spec, is refused."""
    given = GivenOptions(job)
    for option in options:
        name, text, value = option.name, f"srun {option.text}", option.value.text if option.value else ""
        if name in _NO_EFFECT or (name == "export" and value == "ALL"):
            findings.lose(text, _OURS, line, fate="ours")
            continue
        if option.value and option.value.computed:
            findings.refuse(text, "a shell computes the value", line)
        if name in SIZES or (not job and name in _OF_THE_JOB):
            rival = next((other for other in GPU_OPTIONS if name in GPU_OPTIONS and other in job), name)
            if rival in job and (rival != name or job.value(name) != value):
                findings.refuse(text, f"the job has {job[rival].option.text}", line)
            given[name] = Given(option=option, line=line, of="srun")
        elif name in SRUN_OPTIONS:
            findings.set(f"slurm.{name}", value or True)
        else:
            findings.refuse(text, "a spec has no key for this option of srun", line)
    return given


def read_torchrun(options: Sequence[Option], sizes: Sizes, line: int, findings: Findings) -> int:
    """Return the ranks that torchrun starts on each node; what a spec has no key for is refused."""
    nodes, ranks = Word("1"), Word("1")
    for option in options:
        text, value = f"torchrun {option.text}", option.value or Word("")
        if option.name in _NO_EFFECT:
            findings.lose(text, _OURS, line, fate="ours")
        elif value.computed:
            findings.refuse(text, "a shell computes the value", line)
        elif option.name == "nnodes":
            nodes = value
        elif option.name == "nproc_per_node":
            ranks = value
        elif option.name == "max_restarts" and re.fullmatch("[0-9]{1,6}", value.text):
            findings.set("restarts", int(value.text))
        elif option.name not in {"module", "no_python"}:
            findings.refuse(text, "a spec has no key for this option of torchrun", line)
    if nodes.number != sizes.nodes:
        findings.refuse(f"torchrun --nnodes {nodes.text}", f"the job has {sizes.nodes} nodes", line)
    each = sizes.gpus_per_node if ranks.text in {"gpu", "auto"} else ranks.number
    if each is None:
        findings.refuse(f"torchrun --nproc-per-node {ranks.text}", "the script does not have the number", line)
    return each


def count_ranks(launch: Launch, sizes: Sizes, text: str, line: int, findings: Findings) -> int:
    """Return how many ranks a command starts on each node."""
    if launch.srun is None and sizes.nodes > 1:
        findings.refuse(text, f"without srun it runs on the first of {sizes.nodes} nodes only", line)
    if launch.torchrun is not None:
        if launch.srun is not None and sizes.tasks_per_node > 1:
            findings.refuse(text, f"srun starts it {sizes.tasks_per_node} times on each node", line)
        return read_torchrun(launch.torchrun, sizes, line, findings)
    if launch.srun is not None:
        return sizes.tasks_per_node
    if (sizes.gpus_per_node or 1) > 1:
        why = "one process, without srun or torchrun: a program that starts its own ranks needs entry.owns_ranks: true"
        findings.lose(text, why, line)
    return 1
