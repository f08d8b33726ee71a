"""sbatch's options in a spec: which ones clusterddp sets itself, and which values they take; unknown ones pass through.

Source: sbatch(1) of Slurm 20.11 to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterddp.spec.tree import closest, describe

OWNED: dict[str, str] = {
    "job_name": "name: sets it; clusterddp adds a tag that identifies the job",
    "output": "clusterddp logs RUN shows it; it is in the run's directory",
    "error": "clusterddp logs RUN shows it; it is in the run's directory",
    "input": "a rank has no standard input; entry.args passes it arguments",
    "open_mode": "logs of all attempts are kept",
    "array": "train.lr=0.1,0.2 --sweep makes an array of runs",
    "nodes": "resources.nodes sets it",
    "ntasks": "resources.nodes and resources.procs_per_node decide it",
    "ntasks_per_node": "resources.procs_per_node sets it",
    "tasks_per_node": "resources.procs_per_node sets it",
    "ntasks_per_gpu": "resources.procs_per_node and resources.gpus_per_node decide it",
    "cpus_per_task": "resources.cpus_per_task sets it",
    "time": "resources.time sets it",
    "signal": "supervisors ask the ranks in time to checkpoint",
    "export": "env: sets variables for the ranks, secrets: passes them on by name",
    "export_file": "env: sets variables for the ranks, secrets: passes them on by name",
    "get_user_env": "env: sets variables for the ranks",
    "chdir": "the job starts in the run's directory, the ranks where you submit",
    "workdir": "the job starts in the run's directory, the ranks where you submit",
    "wrap": "entry.script or entry.module names what the ranks run",
    "wait": "submit --wait waits for the end of the run",
    "clusters": "a run is followed on one cluster; SLURM_CONF in your environment names another one",
    "test_only": "submit -n asks the scheduler too",
    "parsable": "submit -o json prints the job's number",
    "quiet": "submit -o json prints only the job's number",
    "verbose": "submit -n shows the command that you can run by hand with --verbose",
    "uid": "the job runs as the user who submits it",
    "gid": "newgrp or sg changes the group that you submit with",
    "help": "clusterddp submit -h",
    "usage": "clusterddp submit -h",
    "version": "sbatch --version",
}
"""Options that clusterddp sets itself or that would break it -> what to write instead."""

FLAGS = frozenset(
    {
        "contiguous", "hold", "ignore_pbs", "no_requeue", "overcommit", "oversubscribe", "reboot",
        "share", "spread_job", "use_min_nodes",
    }
)  # fmt: skip
"""Options without a value."""
_FLAG_OR_VALUE = frozenset({"exclusive", "kill_on_invalid_dep", "nice", "no_kill", "propagate", "requeue"})
SRUN_OPTIONS = frozenset({"cpu_bind", "mpi"})
"""Options that only srun has; they are passed to srun."""
BIND_OPTIONS = frozenset({"gpu_bind", "tres_bind"})
GPU_OPTIONS = frozenset({"gpus", "gpus_per_node", "gpus_per_socket", "gpus_per_task"})
MEMORY_OPTIONS = frozenset({"mem", "mem_per_cpu", "mem_per_gpu"})
REQUEUE_OPTIONS = frozenset({"requeue", "no_requeue"})

_MAIL_TYPES = frozenset(
    {
        "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
        "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS",
    }
)  # fmt: skip
_HOSTS = r"[A-Za-z0-9_.-]+(\[[0-9,-]+\][A-Za-z0-9_.-]*)*"
_RESOURCE = r"[^\s:,=]+(=[^\s:,]+)?(:[^\s:,]+)*"
_SIZE = (r"[0-9]+[KMGT]?B?", "a size such as 64G; without a unit it is in megabytes")
_COUNT = (r"[0-9]+", "a whole number")
_GPUS = (r"([A-Za-z0-9_.-]+:)?[0-9]+(,[A-Za-z0-9_.-]+:[0-9]+)*", "a number of GPUs, or type:number such as a100:4")
_NAMES = (r"[^\s,]+(,[^\s,]+)*", "a name, or several with commas between them")
_PATTERNS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("partition", "reservation", "licenses"), _NAMES),
    **dict.fromkeys(("account", "qos", "wckey"), (r"\S+", "a name without spaces")),
    **dict.fromkeys(("mem", "mem_per_cpu", "mem_per_gpu", "tmp"), _SIZE),
    **dict.fromkeys(GPU_OPTIONS, _GPUS),
    **dict.fromkeys(
        ("cpus_per_gpu", "mincpus", "cores_per_socket", "sockets_per_node", "threads_per_core", "core_spec",
         "thread_spec", "ntasks_per_core", "ntasks_per_socket", "delay_boot"),
        _COUNT,
    ),
    "priority": (r"[0-9]+|TOP", "a whole number, or TOP"),
    "nice": (r"[-+]?[0-9]+", "a whole number"),
    **dict.fromkeys(("nodelist", "exclude"), (rf"{_HOSTS}(,{_HOSTS})*|[^/\n]*/.*", "hosts such as node[01-04],gpu7")),
    "exclusive": (r"user|mcs|topo", "true, user, mcs or topo"),
    "no_kill": (r"off", "true or off"),
    "requeue": (r"expedite", "true or expedite, which Slurm has since 25.11"),
    "kill_on_invalid_dep": (r"yes|no", 'true or false, which Slurm calls "yes" and "no"'),
    "gres": (rf"{_RESOURCE}(,{_RESOURCE})*", "resources such as gpu:a100:4,nvme"),
    "distribution": (
        r"(?i:block(:(block|cyclic|fcyclic|\*)){0,2}(,(no)?pack)?)",
        "block, block:block, block:cyclic or block:fcyclic",
    ),
    "mail_user": (r"\S[^\s@]*@\S+|[\w.-]+", "an address, or a user of the cluster"),
    "dependency": (r"singleton|[a-z]+(:[0-9]+(_[0-9]+)?(\+[0-9]+)?)+([,?]\S+)?", "such as afterok:1234"),
}  # fmt: skip
KNOWN = frozenset(
    {
        *OWNED, *FLAGS, *_FLAG_OR_VALUE, *SRUN_OPTIONS, *_PATTERNS, *MEMORY_OPTIONS, "acctg_freq", "batch", "bb", "bbf",
        "begin", "cluster_constraint", "comment", "constraint", "container", "container_id", "cpu_freq", "deadline",
        "extra", "extra_node_info", "gpu_bind", "gpu_freq", "gres_flags", "hint", "mail_type", "mcs_label", "mem_bind",
        "network", "nodefile", "power", "prefer", "profile", "resv_ports", "segment", "signal", "stepmgr", "switches",
        "time_min", "tres_bind", "tres_per_task", "wait_all_nodes",
    }
)  # fmt: skip


def option_problem(name: str, value: str | bool) -> tuple[str, str | None] | None:
    """Return message and hint for an invalid option; None for a valid one and for an unknown one."""
    if name in OWNED:
        return "clusterddp sets this option itself", OWNED[name]
    if len(name) == 1:
        return "found a short option, expected a long one", "sbatch --help names both, such as -p and --partition"
    if name not in KNOWN:
        return _unknown_problem(name)
    if isinstance(value, str):
        return _value_problem(name, value)
    needs_value = value and name not in FLAGS and name not in _FLAG_OR_VALUE
    return ("found true, expected a value", None) if needs_value else None


def asks_for_gpus(options: Mapping[str, str | bool]) -> bool:
    """Return whether these options ask for GPUs in any of Slurm's ways."""
    counts = (str(value) for name, value in options.items() if name in GPU_OPTIONS and value)
    if any(not re.fullmatch(r"(.*:)?0+", count) for count in counts):
        return True
    return any(
        re.match(r"(gres[:/])?gpu\b", resource)
        for name in ("gres", "tres_per_task")
        for resource in str(options.get(name) or "").split(",")
    )


def _unknown_problem(name: str) -> tuple[str, str | None] | None:
    # sbatch accepts any unambiguous prefix of an option: `outp` would be `output`.
    longer = sorted(known for known in KNOWN if known.startswith(name))
    if longer:
        return f"found the beginning of {longer[0]}, expected the whole name", None
    match = closest(name, KNOWN, cutoff=0.85)
    return (f'unknown option of sbatch. Did you mean "{match}"?', None) if match else None


def _value_problem(name: str, value: str) -> tuple[str, str | None] | None:
    if name == "time_min":
        return _time_problem(value)
    if name == "mail_type":
        return _mail_type_problem(value)
    if name in FLAGS:
        return f"found {describe(value)}, expected true or false", None
    if name in _PATTERNS and not re.fullmatch(_PATTERNS[name][0], value):
        return f"found {describe(value)}, expected {_PATTERNS[name][1]}", None
    return None


def _time_problem(value: str) -> tuple[str, str | None] | None:
    from pydantic_core import PydanticCustomError  # a plan of a job on Slurm is read without pydantic

    from clusterddp.spec.fields import read_duration

    try:
        read_duration(value)
    except PydanticCustomError as error:
        context = error.context or {}
        return str(context["message"]), context["hint"]
    return None


def _mail_type_problem(value: str) -> tuple[str, str | None] | None:
    unknown = [word for word in value.split(",") if word.upper() not in _MAIL_TYPES]
    if not unknown:
        return None
    match = closest(unknown[0], [word.lower() for word in _MAIL_TYPES])
    message = f"found {describe(unknown[0])}, expected {', '.join(sorted(_MAIL_TYPES))}"
    return message, f"write {match.upper()}" if match else None
