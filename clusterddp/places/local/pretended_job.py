"""Runs a batch script without Slurm: the job that its #SBATCH lines ask for is pretended on this machine.

The script runs as in a job of Slurm's, by `python -m clusterddp.places.slurm.batch`, with the variables of such a job.
The commands in stand_ins.py stand in front of its PATH; the nodes of the job are 127.0.0.1, 127.0.0.2 and so on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import itertools
import os
import shlex
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from clusterddp.network.hostlist import compress, compress_counts
from clusterddp.places.local.stand_ins import COMMANDS, exported, fill_in
from clusterddp.planning.plan import Plan, read_plan
from clusterddp.ranks.environment import COOKIE, cookie, inherited_environment
from clusterddp.run.attempts import cancelled, end_run, failed, final_end, spell_exit
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.steps import read_batch_script
from clusterddp.run.sweep import sweep_of, task_of
from clusterddp.spec.batch_script import options_of
from clusterddp.spec.sbatch_lines import GivenOptions, Sizes, read_sizes
from clusterddp.system.files import is_file, open_log, write_json, write_text
from clusterddp.system.python import isolated_command

_BATCH = "clusterddp.places.slurm.batch"
_CANCEL_S = 3.0
"""How long the script has for its trap of SIGTERM when the run is cancelled."""
_OPTIONS_AS_VARIABLES = ("ntasks_per_node", "cpus_per_task", "gpus", "gpus_per_node", "gpus_per_task")
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG")
"""What a job has with --export=NONE, besides the variables of Slurm."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PretendedJob:
    """A job of Slurm's that is not there."""

    job_id: str
    script: Path
    """The script as submitted."""
    directory: str
    """Where it is submitted."""
    given: GivenOptions
    sizes: Sizes
    gpus: tuple[str, ...]
    """Of all nodes."""
    array: tuple[str, int, tuple[int, ...]] | None
    """The number of the array, of this task, and of all tasks."""

    @property
    def nodes(self) -> list[str]:
        return [f"127.0.0.{number}" for number in range(1, self.sizes.nodes + 1)]

    @property
    def name(self) -> str:
        return self.given.value("job_name") or self.script.name

    def variables(self) -> dict[str, str]:
        """Return the variables of Slurm's that the script has."""
        given, sizes, nodes = self.given, self.sizes, compress(self.nodes)
        asked = given.number("ntasks") or (sizes.nodes * sizes.tasks_per_node if given.number("ntasks_per_node") else 0)
        total = asked or sizes.nodes
        counts = [total // sizes.nodes + (node < total % sizes.nodes) for node in range(sizes.nodes)]
        cpus = [count * (sizes.cpus_per_task or 1) for count in counts]
        facts: dict[str, object] = {
            "SLURM_CLUSTER_NAME": "local",
            "SLURMD_NODENAME": self.nodes[0],
            **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), self.job_id),
            "SLURM_JOB_NAME": self.name,
            "SLURM_JOB_PARTITION": given.value("partition") or "local",
            "SLURM_JOB_ACCOUNT": given.value("account"),
            "SLURM_JOB_QOS": given.value("qos"),
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), nodes),
            **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), sizes.nodes),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), asked or ""),
            **{f"SLURM_{name.upper()}": given.value(name) for name in _OPTIONS_AS_VARIABLES},
            "SLURM_TASKS_PER_NODE": compress_counts(counts),
            "SLURM_CPUS_ON_NODE": cpus[0],
            "SLURM_JOB_CPUS_PER_NODE": compress_counts(cpus),
            "SLURM_GPUS_ON_NODE": sizes.gpus_per_node or "",
            "SLURM_JOB_USER": getpass.getuser(),
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_JOB_GID": str(os.getgid()),
            "SLURM_SUBMIT_DIR": self.directory,
            "SLURM_SUBMIT_HOST": socket.gethostname(),
            "SLURM_EXPORT_ENV": given.value("export"),
            **dict.fromkeys(("SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID"), "0"),
            "SLURM_PRIO_PROCESS": "0",
            "SLURM_JOB_START_TIME": int(time.time()),
            "ENVIRONMENT": "BATCH",
        }
        if self.array:
            number, task, tasks = self.array
            steps = {after - before for before, after in itertools.pairwise(tasks)}
            facts |= {
                "SLURM_ARRAY_JOB_ID": number,
                "SLURM_ARRAY_TASK_ID": str(task),
                "SLURM_ARRAY_TASK_COUNT": len(tasks),
                "SLURM_ARRAY_TASK_MIN": str(tasks[0]),
                "SLURM_ARRAY_TASK_MAX": tasks[-1],
                "SLURM_ARRAY_TASK_STEP": steps.pop() if len(steps) == 1 else 1,
            }
        return {name: str(value) for name, value in facts.items() if value != ""} | {
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus_of(0))
        }

    def gpus_of(self, node: int) -> list[str]:
        count = self.sizes.gpus_per_node or 0
        return list(self.gpus[node * count : (node + 1) * count])

    def fill_in(self, pattern: str) -> str:
        """Fill in the path of an output file, as sbatch does."""
        array_id, task_id, _ = self.array or (self.job_id, 2**32 - 2, ())
        values = {"j": self.job_id, "J": self.job_id, "A": array_id, "a": str(task_id), "s": "batch"}
        values |= {"x": self.name, "N": self.nodes[0], "n": "0", "t": "0"}
        return os.path.join(self.directory, fill_in(pattern, values))

    def facts(self, run: RunDir, output: str) -> dict[str, Any]:
        """Return what the stand-ins know of the job; `shown`: by `scontrol show job`."""
        sizes, now = self.sizes, time.strftime("%Y-%m-%dT%H:%M:%S")
        shown = {
            "JobId": self.job_id,
            "JobName": self.name,
            "UserId": f"{getpass.getuser()}({os.getuid()})",
            "JobState": "RUNNING",
            "Reason": "None",
            "Requeue": "1",
            "Restarts": "0",
            "BatchFlag": "1",
            "TimeLimit": self.given.value("time") or "UNLIMITED",
            "SubmitTime": now,
            "StartTime": now,
            "EndTime": "Unknown",
            "PreemptTime": "None",
            "SuspendTime": "None",
            "Partition": self.given.value("partition") or "local",
            "NodeList": compress(self.nodes),
            "BatchHost": self.nodes[0],
            "NumNodes": sizes.nodes,
            "NumCPUs": sizes.nodes * sizes.tasks_per_node * (sizes.cpus_per_task or 1),
            "NumTasks": sizes.nodes * sizes.tasks_per_node,
            "CPUs/Task": sizes.cpus_per_task or 1,
            "Command": str(self.script),
            "WorkDir": self.directory,
            "StdErr": output,
            "StdIn": "/dev/null",
            "StdOut": output,
        }
        gpus = [self.gpus_of(node) for node in range(sizes.nodes)]
        return {"job_id": self.job_id, "cancel_file": str(run.cancel_file), "gpus": gpus, "shown": shown}


def name_job(run: RunDir, job_id: str) -> str:
    """Return the id by which the job knows itself: as Slurm has it, that of an array with its task."""
    return f"{_array_of(run.path.parent)}_{task_of(run.name)}" if sweep_of(run) else job_id


def _array_of(sweep: Path) -> int:
    return zlib.crc32(str(sweep).encode()) % 900_000 + 100_000


def pretend(run: RunDir, plan: Plan, job_id: str) -> PretendedJob:
    """Read the job that a batch script asks for."""
    given = options_of(read_batch_script(run), plan.spec["slurm"])
    sweep = sweep_of(run)
    return PretendedJob(
        job_id=job_id,
        script=Path(plan.spec["entry"]["batch_script"]),
        directory=str(plan.working_dir),
        given=given,
        sizes=read_sizes(given, lambda *_: None),
        gpus=tuple(gpu for node in plan.gang.nodes for gpu in node.gpus),
        array=(str(_array_of(sweep.path)), task_of(run.name), tuple(map(task_of, sweep.run_names())))
        if sweep
        else None,
    )


def carry_script(run: RunDir, attempt: int, job_id: str) -> None:
    """Run the script as a job until it ends, and record the end if the job could not."""
    plan = read_plan(run)
    job = pretend(run, plan, job_id)
    run.attempt(attempt).claim.unlink(missing_ok=True)  # the queue's; the job's own names its output
    token = plan.gang.token
    reason = "the task that carries the run failed"
    try:
        code = _wait_for(run, token, _start(run, job, plan.gang.entry.args, token))
        reason = f"the batch script's own process {spell_exit(code)}"
    except OSError as error:
        reason = f"the batch script could not be started: {error}"
        raise
    finally:
        _end_job(token)
        if final_end(run) is None:
            end = cancelled("cancelled") if is_file(run.cancel_file) else failed(reason, log="launcher/job.log")
            end_run(run, end, attempt=run.attempt(attempt), token=token)


def _start(
    run: RunDir, job: PretendedJob, args: Sequence[str | int | float | bool], token: str
) -> subprocess.Popen[bytes]:
    job_file = run.launcher_dir / "pretended_job.json"
    with contextlib.ExitStack() as files:
        output = files.enter_context(_open_output(run, job, "output"))
        error = files.enter_context(_open_output(run, job, "error")) if job.given.value("error") else output
        write_json(job_file, job.facts(run, os.path.realpath(f"/proc/self/fd/{output.fileno()}")))
        commands = install_stand_ins(run, job_file)
        environment = exported(job.given.value("export"), inherited_environment(), _KEPT)
        environment["PATH"] = os.pathsep.join((str(commands), environment.get("PATH", os.defpath)))
        return subprocess.Popen(
            isolated_command(_BATCH, str(run.path), *map(str, args)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            cwd=os.path.join(job.directory, job.given.value("chdir") or job.given.value("workdir")),
            env=environment | job.variables() | {COOKIE: cookie(token, "b0")},
            umask=0o022,
        )


def _open_output(run: RunDir, job: PretendedJob, option: str) -> IO[bytes]:
    """Open the file that the script names for its output, since it may read it; else one of the run's directory."""
    if pattern := job.given.value(option):
        try:
            return open(job.fill_in(pattern), "ab" if job.given.value("open_mode") == "append" else "wb")
        except OSError as error:
            log = open_log(run.launcher_dir / "job.log")
            log.write(f"clusterddp: --{option}={pattern}: {error.strerror}; with Slurm this output is lost\n".encode())
            log.flush()
            return log
    return open_log(run.launcher_dir / "job.log")


def install_stand_ins(run: RunDir, job_file: Path) -> Path:
    """Write the commands that stand in for Slurm's; return their directory."""
    directory = run.launcher_dir / "stand_ins"
    directory.mkdir(mode=0o700, exist_ok=True)
    for name in COMMANDS:
        words = isolated_command("clusterddp.places.local.stand_ins", str(job_file), name)
        write_text(directory / name, f'#!/bin/bash -p\nexec {shlex.join(words)} "$@"\n')
        (directory / name).chmod(0o700)
    return directory


def _wait_for(run: RunDir, token: str, process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the job; a cancel ends it as Slurm's does, by SIGTERM first."""
    while process.poll() is None:
        time.sleep(0.1)
        if is_file(run.cancel_file):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CANCEL_S)
            _end_job(token)
            return process.wait(_CANCEL_S)
    return process.returncode


def _end_job(token: str) -> None:
    """Kill all that the job has left; not submitit's controller, with which the kernel would kill this process."""
    end_processes(f"{token}.", timeout_s=3.0, but=[os.getppid()])
