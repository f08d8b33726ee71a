"""sbatch's options in a spec: which ones clusterddp sets itself; unknown ones and values pass through.

Source: sbatch(1) of Slurm 20.11 to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

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

_NO_SCRIPT = frozenset(
    {"wrap", "wait", "clusters", "test_only", "parsable", "quiet", "verbose", "uid", "gid", "help", "usage", "version"}
)
"""Those of them that the command line of a batch script may not have either."""
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
_OF_A_TASK = ("gpus_per_task", "tres_per_task")
GPU_MARK = re.compile(r"(gres[:/])?gpu\b")
GPU = re.compile(r"(?:gres[:/])?gpu(?:[:=][A-Za-z_][^:=(]*)?(?:[:=]([0-9]{1,6}))?(?:\(.*\))?")
"""A resource of gres or tres_per_task that is GPUs, and their number."""
MEMORY_OPTIONS = frozenset({"mem", "mem_per_cpu", "mem_per_gpu"})
REQUEUE_OPTIONS = frozenset({"requeue", "no_requeue"})

_DISTRIBUTION = re.compile(r"block(:(block|cyclic|fcyclic|\*)){0,2}(,(no)?pack)?", re.IGNORECASE)
KNOWN = frozenset(
    {
        *OWNED, *FLAGS, *_FLAG_OR_VALUE, *SRUN_OPTIONS, *GPU_OPTIONS, *MEMORY_OPTIONS, "account", "acctg_freq", "batch",
        "bb", "bbf", "begin", "cluster_constraint", "comment", "constraint", "container", "container_id", "core_spec",
        "cores_per_socket", "cpu_freq", "cpus_per_gpu", "deadline", "delay_boot", "dependency", "distribution",
        "exclude", "extra", "extra_node_info", "gpu_bind", "gpu_freq", "gres", "gres_flags", "hint", "licenses",
        "mail_type", "mail_user", "mcs_label", "mem_bind", "mincpus", "network", "nodefile", "nodelist",
        "ntasks_per_core", "ntasks_per_socket", "partition", "power", "prefer", "priority", "profile", "qos",
        "reservation", "resv_ports", "segment", "signal", "sockets_per_node", "stepmgr", "switches", "thread_spec",
        "threads_per_core", "time_min", "tmp", "tres_bind", "tres_per_task", "wait_all_nodes", "wckey",
    }
)  # fmt: skip


def option_problem(name: str, value: str | bool, *, of_script: bool = False) -> tuple[str, str | None] | None:
    """Return message and hint for an invalid option; None for a valid one and for an unknown one.

    sbatch itself checks values. `of_script`: it overrides one of a batch script, which sets more of them.
    """
    if of_script and name in SRUN_OPTIONS:
        return "an option of srun, and the batch script calls srun", None
    if of_script and name in OWNED.keys() - _NO_SCRIPT:
        return None
    if name in OWNED:
        return "clusterddp sets this option itself", OWNED[name]
    if len(name) == 1:
        return "found a short option, expected a long one", "sbatch --help names both, such as -p and --partition"
    if name not in KNOWN:
        return _unknown_problem(name)
    expected = None
    if isinstance(value, str):
        if name in FLAGS:
            expected = "true or false"
        elif name == "distribution" and not _DISTRIBUTION.fullmatch(value):  # sbatch takes others, a run does not
            expected = "block, block:block, block:cyclic or block:fcyclic"
    elif value and name not in FLAGS and name not in _FLAG_OR_VALUE:
        expected = "a value"
    return (f"found {describe(value)}, expected {expected}", None) if expected else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRequest:
    """The option by which a job asks for GPUs."""

    option: str
    count: int | None
    """On each node, for each task or socket, or in all, as the option says; None: its text is no number."""

    def on_node(self, *, nodes: int, tasks: int | None) -> Fraction | None:
        """Return how many GPUs a node has; of a total the average; None: not known. `tasks`: on each node."""
        if self.count is None or self.option == "gpus_per_socket":  # Slurm 22.05 gives more than so many on a socket
            return None
        if self.option in _OF_A_TASK:
            return None if tasks is None else Fraction(self.count * tasks)
        return Fraction(self.count, nodes if self.option == "gpus" else 1)


def read_gpu_request(options: Mapping[str, str | bool]) -> GpuRequest | None:
    """Read the option that asks for GPUs, in any of Slurm's ways; None: there is none."""
    found = []
    for name in ("gpus_per_node", "gres", "gpus", *_OF_A_TASK, "gpus_per_socket"):
        value = options.get(name) or ""
        parts = [] if value is True else value.split(",")
        if name in {"gres", "tres_per_task"}:
            matches = [GPU.fullmatch(part) for part in parts if GPU_MARK.match(part)]
            counts = [str(match[1] or 1) if match else "" for match in matches]
        else:
            counts = [part.rpartition(":")[2] for part in parts if value]
        known = all(re.fullmatch("[0-9]{1,6}", count) for count in counts)
        if counts:
            found.append(GpuRequest(option=name, count=sum(map(int, counts)) if known else None))
    return next((request for request in found if request.count != 0), found[0] if found else None)


def asks_for_gpus(options: Mapping[str, str | bool]) -> bool:
    """Return whether these options ask for GPUs in any of Slurm's ways."""
    request = read_gpu_request(options)
    return request is not None and request.count != 0


def _unknown_problem(name: str) -> tuple[str, str | None] | None:
    # sbatch accepts any unambiguous prefix of an option: `outp` would be `output`.
    longer = sorted(known for known in KNOWN if known.startswith(name))
    if longer:
        return f"found the beginning of {longer[0]}, expected the whole name", None
    match = closest(name, KNOWN, cutoff=0.85)
    return (f'unknown option of sbatch. Did you mean "{match}"?', None) if match else None
