"""The options of the launchers of the command that trains, as keys of a spec, and its ranks on a node."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterddp.importing.files import Findings
from clusterddp.spec.launch_options import Option, Word, words
from clusterddp.spec.launchers import Launch
from clusterddp.spec.sbatch_lines import GPU_OPTIONS, SIZES, Given, GivenOptions, Sizes
from clusterddp.spec.slurm_options import KNOWN, OWNED, SRUN_OPTIONS

_NO_EFFECT = words(
    "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr master_port node_rank local_addr standalone "
    "monitor_interval role log_dir redirects tee local_ranks_filter "
    "output error label unbuffered open_mode quiet verbose kill_on_bad_exit wait overlap exact jobid"
)
"""Options of torchrun and srun for the rendezvous, for logs, and for the end of all ranks after a failure."""
_OURS = "clusterddp has its own rendezvous and logs, and ends all ranks after a failure"
_OF_THE_JOB = (KNOWN - OWNED.keys() - SRUN_OPTIONS) | {"time"}
"""Options by which srun requests a job when it runs outside of one."""


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
