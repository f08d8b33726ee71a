"""How Slurm holds jobs to what they were given, as sites have it: cgroup v1, a /tmp of the job's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.testbed.plan import RackPlan

UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpuset", "memory", "devices", "cpuacct")
NVIDIA_MAJOR = 195
"""Of the devices that pose as GPUs where they must be distinguished: no driver has it here, so they open with ENXIO."""


def find_obstacle_to_confinement() -> str:
    """Say why no job can be confined here; or nothing."""
    missing = [name for name in CONTROLLERS if not (CGROUPS / name / "cgroup.procs").exists()]
    return f"confinement needs the controllers {', '.join(missing)} of cgroup v1" if missing else ""


def cgroup_conf(plan: RackPlan) -> str:
    """Hold jobs to their memory, their GPUs and, where they are not made up, their cores."""
    cores = "yes" if plan.cores_per_host <= len(os.sched_getaffinity(0)) else "no"
    return f"ConstrainCores={cores}\nConstrainRAMSpace=yes\nConstrainDevices=yes\n"


def write_confinement(directory: Path, *, own_tmp: bool) -> str:
    """Return lines of slurm.conf: a step that holds what ssh brings; with `own_tmp`, a /tmp and /dev/shm per job."""
    if not own_tmp:
        return "PrologFlags=Contain"
    (directory / "own_tmp").mkdir()
    text = f"AutoBasePath=true\nBasePath={directory}/own_tmp\n"
    (directory / "etc/slurm/job_container.conf").write_text(text)
    return "PrologFlags=Contain\nJobContainerType=job_container/tmpfs"


def plan_namespaces(plan: RackPlan) -> tuple[str, ...]:
    """Plan the namespaces of a host; where jobs are confined, such as count as older than those of any job.

    A job's mount namespace is bound to a file, which the kernel (6.18) allows where its number is above the host's;
    each CPU counts in a range of its own.
    """
    cpus = sorted(os.sched_getaffinity(0))
    probe = "mount -t tmpfs none /mnt && touch /mnt/x && for cpu; do taskset -c $cpu unshare --mount=/mnt/x true; done"
    for cpu in cpus if plan.confine else []:
        others = [str(other) for other in cpus if other != cpu]
        argv = ["taskset", "-c", str(cpu), "unshare", "--mount", "sh", "-euc", probe, "sh", *others]
        if subprocess.run(argv, check=False, capture_output=True).returncode == 0:
            return ("taskset", "-c", str(cpu), *UNSHARE, "taskset", "-c", ",".join(map(str, cpus)))
    return UNSHARE
