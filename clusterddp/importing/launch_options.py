"""The options of launch programs (srun, mpirun, torchrun ...), translated to the spec; the number of ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass

from clusterddp.importing.command import STARTS_RANKS, Command, Level
from clusterddp.importing.findings import Findings, set_variable
from clusterddp.importing.job import Sizes
from clusterddp.importing.launch_line import LaunchLine, ranks_of_mapping
from clusterddp.importing.options import Option, words
from clusterddp.importing.values import Text, as_written, is_fixed
from clusterddp.spec.slurm_options import SRUN_OPTIONS

_RENDEZVOUS = "the ranks find each other by clusterddp's own rendezvous"
_LOGS = "clusterddp logs RUN shows the output of each rank"
_GANG = "clusterddp starts the ranks of a gang together and ends them together"
_PLACE = "resources has the number of ranks and nodes"
_OURS: dict[str, str] = {
    **dict.fromkeys(
        words(
            "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr master_port node_rank machine_rank local_addr "
            "standalone main_process_ip main_process_port same_network network_interfaces"
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
            "nodes ntasks ntasks_per_node nnodes num_nodes num_machines np npernode ppn num_proc multi_gpu gpus "
            "cpus_per_task gres gpus_per_node gpus_per_task nodelist host hosts hostfile machinefile f oversubscribe "
            "bynode byslot map_by rank_by num_cpu_threads_per_process"
        ),
        _PLACE,
    ),
}
_HANDLED = words("module no_python use_env nproc_per_node num_processes num_gpus no_local_rank")
_ACCELERATE_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
}
"""Options that `accelerate launch` passes to its ranks as variables."""


_CONTAINER_KEYS = {
    "container_image": "image",
    "apptainer_image": "image",
    "container_mounts": "mounts",
    "apptainer_bind": "mounts",
    "apptainer_B": "mounts",
    "container_workdir": "workdir",
    "apptainer_pwd": "workdir",
}
"""Options of pyxis and of apptainer -> keys of the spec's container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """How many ranks the command starts on each node, and what is uncertain about it."""

    per_node: int
    doubts: tuple[str, ...] = ()


def count_ranks(command: Command, sizes: Sizes, launch: LaunchLine) -> Ranks:
    """Count the ranks that a command starts on each node."""
    inner = next((level for level in reversed(command.levels) if level.program in STARTS_RANKS), None)
    if inner is not None:
        return _count_started(inner, sizes, launch)
    outer = [level for level in command.levels if level.program in {"srun", "mpirun", "horovodrun"}]
    if not outer:
        few = sizes.tasks_per_node * sizes.nodes > 1 or (sizes.gpus_per_node or 1) > 1
        doubt = "the script starts one process, without srun or torchrun: one rank on each node; a program that "
        return Ranks(per_node=1, doubts=(f"{doubt}starts its own ranks needs entry.owns_ranks: true",) if few else ())
    if launch.hosts:
        return _count_on_hosts(launch)
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
        if local_rank and command.python and not any(option.name == local_rank for option in level.options):
            findings.set("entry.local_rank_arg", True)
        for option in level.options:
            if option.name not in settled or not is_fixed(option.value or Text("")):
                _translate(level, option, findings, line)


def _translate(level: Level, option: Option, findings: Findings, line: int) -> None:
    text = f"{level.program} {as_written(option.text)}"
    value = option.value or Text("")
    if option.name in _HANDLED or (is_fixed(value) and _translate_common(option.name, value.text, findings, line)):
        return
    if level.program == "srun" and option.name in SRUN_OPTIONS and is_fixed(value):
        findings.set(f"slurm.{option.name}", value.text or True)
    elif level.program == "accelerate" and option.name in _ACCELERATE_VARIABLES and is_fixed(value):
        findings.values.setdefault("env", {})[_ACCELERATE_VARIABLES[option.name]] = value.text
    elif level.program == "mpirun" and option.name in {"x", "genv", "env"} and "=" in value.text:
        name, _, content = value.text.partition("=")
        set_variable(name, Text(content, value.unknown), findings, line)
    elif level.program == "mpirun" and option.name in {"x", "genvlist"}:
        findings.lose(text, "variables of the shell that submits; known kinds are passed on", line, fate="before")
    elif option.name in _OURS:
        findings.lose(text, _OURS[option.name], line, fate="ours")
    else:
        findings.lose(text, f"a spec has no key for this option of {level.program}", line)


def _translate_common(name: str, value: str, findings: Findings, line: int) -> bool:
    """Translate an option that has one meaning for all launch programs; False: it is none of these."""
    if key := _CONTAINER_KEYS.get(name):
        container = findings.values.setdefault("container", {})
        if key == "mounts":
            container.setdefault("mounts", []).extend(mount for mount in value.split(",") if mount)
        else:
            runtime = {"runtime": "apptainer" if name.startswith("apptainer") else "pyxis"} if key == "image" else {}
            container |= {**runtime, key: value}
    elif name == "max_restarts" and re.fullmatch("[0-9]{1,6}", value):
        findings.set("restarts", int(value))
    elif name in {"cpu", "use_cpu"}:
        findings.set("device", "cpu")
    elif name == "apptainer_nv":
        findings.lose("apptainer --nv", "the container sees the GPUs of a run that has some", line, fate="ours")
    elif name == "export":
        _translate_export(value, findings, line)
    else:
        return False
    return True


def _translate_export(value: str, findings: Findings, line: int) -> None:
    for part in value.split(","):
        name, equals, content = part.partition("=")
        if equals:
            set_variable(name, Text(content), findings, line)
        elif part not in {"", "ALL"}:
            why = "variables of known kinds are passed on from the shell that submits; env sets others"
            findings.lose(f"--export={part}", why, line, fate="before")


def _count_started(level: Level, sizes: Sizes, launch: LaunchLine) -> Ranks:
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
    if level.program == "deepspeed" and any(slots for _, slots in launch.hosts):
        return _count_on_hosts(launch)
    if wanted is None and level.program != "deepspeed":
        return Ranks(per_node=1, doubts=doubts)
    if wanted is not None and wanted.text == "cpu":
        return Ranks(per_node=sizes.cpus_per_task or 1, doubts=doubts)
    known = sizes.gpus_per_node
    words_ = as_written(wanted.text) if wanted else "one for each GPU"
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


def _count_on_hosts(launch: LaunchLine) -> Ranks:
    """Count the ranks of a host; where hosts have different numbers, ssh.hosts has the number of each."""
    numbers = [slots or 1 for _, slots in launch.hosts]
    listed = ", ".join(f"{host} {slots or 1}" for host, slots in launch.hosts[:8])
    doubt = f"hosts have different numbers of ranks, which a spec has as their GPUs: {listed}"
    return Ranks(per_node=max(numbers), doubts=(doubt,) if len(set(numbers)) > 1 else ())


def _share(total: int, nodes: int) -> Ranks:
    """Distribute ranks over nodes; in a spec each node has the same number."""
    each = max(1, -(-total // nodes))
    doubt = f"{total} ranks do not divide by {nodes} nodes: the spec has {each} on each"
    return Ranks(per_node=each, doubts=() if each * nodes == total else (doubt,))
