"""Check the machine of the submit, its cluster, and, in a short job (doctor/probe.py), nodes of the cluster.

The job is one task on each node for half a minute; it is found and cancelled by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from clusterddp.doctor.probe import PYTHON
from clusterddp.errors import ClusterddpError, PreflightError, SlurmError
from clusterddp.facts.checks import Check, Needs, Result, note, ok, red
from clusterddp.facts.judge import (
    CLOCK_RED_S,
    judge_clock,
    judge_here,
    judge_locked_memory,
    judge_machine,
    minor_version,
)
from clusterddp.facts.machine import Machine, read_machine
from clusterddp.facts.torch import Torch, import_torch
from clusterddp.network.interface import is_loopback
from clusterddp.places.slurm.cluster import Cluster, Partition, read_cluster
from clusterddp.places.slurm.commands import run_slurm
from clusterddp.places.slurm.explain import explain_waiting
from clusterddp.places.slurm.first_spec import choose_partition, consequences, time_text, why_not
from clusterddp.places.slurm.queue import Phase, Slurm, Wanted, scancel
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import plan_run
from clusterddp.planning.processes import process_environment
from clusterddp.planning.python import choose_python
from clusterddp.planning.slurm import option_argv
from clusterddp.run.job_tag import job_comment, job_name, job_tag
from clusterddp.system.units import format_bytes
from clusterddp.wire import build, read_object

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec


SCRIPT = """\
#!/bin/sh
# The same for every job: PYTHON DIRECTORY NONCE PYTHONPATH LD_LIBRARY_PATH are arguments, never text of this script.
if [ -w "$2" ]; then exec >>"$2/job.out" 2>&1; fi
if [ -n "$4" ]; then PYTHONPATH=$4; export PYTHONPATH; fi
if [ -n "$5" ]; then LD_LIBRARY_PATH=$5; export LD_LIBRARY_PATH; fi
cd / || exit
exec srun --export=ALL --kill-on-bad-exit=0 \\
    "$1" -m clusterddp.doctor.probe "$2" "$3" "$SLURMD_NODENAME" "$SLURM_JOB_ID"
"""
_KEPT_OPTIONS = frozenset(
    {
        "partition", "account", "qos", "constraint", "cluster_constraint", "prefer", "reservation", "nodelist",
        "exclude", "clusters", "licenses", "wckey", "gres", "propagate",
    }
)  # fmt: skip
"""Options of the spec that decide where, whether, and within which limits a job may run."""
_MEMORY = "4G"
_RUN_S = 90.0
"""Slurm ends a job of one minute at most half a minute late."""
_POLL_S = 0.5
_LAG_S = 5.0
"""How long a file of a node may take to appear here (NFS)."""
_SAME_FIX = "one environment on storage that all nodes share, or the same one installed on each"
_RAISE_LOCKED = (
    "slurm.propagate=NONE: the node's own limit, not that of the shell which submits; where that is low, too, "
    "LimitMEMLOCK=infinity for slurmd"
)


class _Way(TypedDict, total=False):
    source: str
    interface: str | None
    clock_offset_s: float


class Way(_Way):
    """How a node has connected to the first one (doctor/probe.py)."""

    name: str
    addresses: tuple[str, ...]
    reached: str | None
    error: str


class Report(TypedDict):
    """What a node reports (doctor/probe.py)."""

    node_rank: int
    node: str
    machine: Machine
    way: Way | None
    done: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """What the doctor's job requests of Slurm, and how its tasks start."""

    num_nodes: int
    gpus_per_node: int = 0
    options: Mapping[str, str | bool] = field(default_factory=dict)
    """The spec's options of sbatch, by their long names with underscores."""
    python: str
    python_of_ranks: str = ""
    """Whose torch is checked; empty: `python`."""
    paths: tuple[str, ...] = ()
    """PYTHONPATH and LD_LIBRARY_PATH for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAnswer:
    """The result of the job; nodes without a report are in `nodes` and not in `reports`."""

    job_id: str | None
    num_nodes: int
    """How many nodes it asked for."""
    nodes: tuple[str, ...]
    """Those that Slurm named; of a short job it may have named none."""
    reports: dict[str, Report]
    """Node -> its report."""
    submitted: float
    collected: float
    output: tuple[str, ...]
    """What the job has printed."""


def run_job(
    request: JobRequest,
    *,
    runs_dir: Path,
    environ: Mapping[str, str],
    timeout_s: float,
    report: Callable[[str], None] = lambda text: None,
) -> JobAnswer:
    """Submit the job, wait for its reports, and see to it that nothing of it is left.

    Raises: SlurmError: Slurm refuses it, or does not start it within `timeout_s`. ClusterddpError: the runs directory
    cannot be written.
    """
    nonce = secrets.token_hex(16)
    tag = job_tag(nonce, 0)
    with _directory(runs_dir, nonce, request.python_of_ranks or request.python) as directory:
        job_id = None
        try:
            submitted = time.time()
            job_id = _submit(request, directory, nonce, tag, environ)
            report(f"job {job_id}: {request.num_nodes} nodes for a minute at most")
            wanted = Wanted(tag=tag, job_id=job_id, since=submitted, cluster=_cluster(request))
            nodes = _await_reports(request, directory, wanted, environ, timeout_s)
            reports = {report["node"]: report for report in _read_reports(directory)}
            return JobAnswer(
                job_id=job_id,
                num_nodes=request.num_nodes,
                nodes=nodes,
                reports=reports,
                submitted=submitted,
                collected=time.time(),
                output=_read_output(directory),
            )
        finally:
            _cancel(Wanted(tag=tag, job_id=job_id, cluster=_cluster(request)), environ)


def sbatch_argv(request: JobRequest, tag: str) -> list[str]:
    """Return sbatch's argv before the script."""
    ours: dict[str, str | bool] = {
        "parsable": True,
        "job_name": job_name("doctor", tag),
        "comment": job_comment("doctor", tag),
        "nodes": str(request.num_nodes),
        "ntasks_per_node": "1",
        "time": "1",
        "mem": _MEMORY,
        "export": "ALL",
        "chdir": "/",
        "output": os.devnull,
    }
    if request.gpus_per_node and "gres" not in request.options:
        ours["gpus_per_node"] = str(request.gpus_per_node)
    kept = {key: value for key, value in request.options.items() if key in _KEPT_OPTIONS}
    return ["sbatch", "--no-requeue", *option_argv(ours | kept)]


def judge_nodes(answer: JobAnswer, here: Machine, needs: Needs) -> list[Check]:
    """Judge every node of the job, also those that sent no report."""
    found: dict[str, dict[str, Result]] = {}
    nodes = dict.fromkeys((*answer.nodes, *answer.reports))
    if len(nodes) < answer.num_nodes:
        few = f"Slurm and the reports name {len(nodes)} of {answer.num_nodes} nodes: the others are not judged"
        found["nodes"] = {
            here.host: red(few, "clusterddp doctor SPEC --job once more; sinfo -R names nodes that are down")
        }
    for node in nodes:
        report = answer.reports.get(node)
        results = [_explain_silence(node, answer, here)] if report is None else _judge_node(report, answer, here, needs)
        for name, result in results:
            found.setdefault(name, {})[node] = result
    return [Check(name=name, results=results) for name, results in found.items()]


@contextlib.contextmanager
def _directory(runs_dir: Path, nonce: str, python: str) -> Iterator[Path]:
    """Make a directory for the reports in the runs directory; remove it, and what was made for it, at the end.

    `python`: that of the ranks, for the probes.
    """
    made = [path for path in (runs_dir, *runs_dir.parents) if not path.exists()]
    directory = runs_dir / f".doctor-{nonce[:8]}"
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        (directory / "job.sh").write_text(SCRIPT)
        (directory / PYTHON).write_text(python, encoding="utf-8")
        yield directory
    except OSError as error:
        raise ClusterddpError(f"{error.filename or directory}: {error.strerror}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _submit(request: JobRequest, directory: Path, nonce: str, tag: str, environ: Mapping[str, str]) -> str:
    python_path, library_path = (*request.paths, "", "")[:2]
    script = [str(directory / "job.sh"), request.python, str(directory), nonce, python_path, library_path]
    argv = sbatch_argv(request, tag)
    try:
        answer = run_slurm([*argv, *script], environ=environ)
    except SlurmError as error:
        # A cluster that does not count memory refuses --mem.
        if error.transient or "memory" not in error.message.lower():
            raise
        answer = run_slurm([*(word for word in argv if word != f"--mem={_MEMORY}"), *script], environ=environ)
    job_id = answer.strip().rpartition("\n")[2].partition(";")[0]
    if not job_id.isdecimal():
        raise SlurmError(f"sbatch: no job id in its answer: {answer!r:.80}", transient=True)
    return job_id


def _await_reports(
    request: JobRequest, directory: Path, wanted: Wanted, environ: Mapping[str, str], timeout_s: float
) -> tuple[str, ...]:
    """Wait until each node has reported or the job has ended; return the names of its nodes."""
    slurm = Slurm(environ, max_age_s=_POLL_S)
    deadline = time.monotonic() + timeout_s
    started = ended = False
    nodes: tuple[str, ...] = ()
    why = "Slurm gives no reason"
    while True:
        try:
            job = slurm.find(wanted)
            why = explain_waiting(job) if job else why
            phase = job.phase if job else Phase.ENDED
            # While a job completes, Slurm names only the nodes that are not done with it.
            if job and job.nodes and not nodes and job.phase is not Phase.ENDING:
                nodes = tuple(run_slurm(["scontrol", "show", "hostnames", job.nodes], environ=environ).split())
        except SlurmError as error:  # asked again
            phase, why = Phase.RUNNING if started else Phase.WAITING, error.message
        if phase is not Phase.WAITING and not started:
            started, deadline = True, time.monotonic() + _RUN_S
        if phase is Phase.ENDED and not ended:
            ended, deadline = True, time.monotonic() + _LAG_S
        num_done = sum(report["done"] for report in _read_reports(directory))
        if num_done >= request.num_nodes or (started and time.monotonic() > deadline):
            return nodes
        if time.monotonic() > deadline:
            raise SlurmError(
                f"the doctor's job has not started within {timeout_s:g} s, and is cancelled: {why}",
                hint="--timeout S waits longer; slurm.partition=NAME may have free nodes (sinfo)",
                transient=False,
            )
        time.sleep(_POLL_S)


def _read_reports(directory: Path) -> list[Report]:
    """Read the reports that the nodes have written; an invalid one is left out."""
    with contextlib.suppress(OSError):
        os.listdir(directory)  # NFS: read the directory again
    reports = []
    for path in directory.glob("node-*.json"):
        with contextlib.suppress(OSError, ValueError):
            reports.append(build(Report, read_object(path.read_text(errors="replace")), "report"))
    return sorted(reports, key=lambda report: report["node_rank"])


def _read_output(directory: Path) -> tuple[str, ...]:
    try:
        lines = (directory / "job.out").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.strip())


def _cancel(wanted: Wanted, environ: Mapping[str, str]) -> None:
    """Cancel the job if it is still there; never a job of another name with the same number."""
    name, job_id = job_name("doctor", wanted.tag), wanted.job_id
    with contextlib.suppress(SlurmError):
        if job := Slurm(environ).find(wanted):
            name, job_id = job.name, job.job_id
    with contextlib.suppress(SlurmError):
        scancel(name, job_id, wanted.cluster, environ, "--quiet")


def _cluster(request: JobRequest) -> str | None:
    cluster = request.options.get("clusters")
    return cluster if isinstance(cluster, str) else None


def _judge_node(report: Report, answer: JobAnswer, here: Machine, needs: Needs) -> Iterator[tuple[str, Result]]:
    machine = report["machine"]
    yield "Python", _judge_python(machine, here)
    for name, result in judge_machine(machine, needs):
        if name == "runs directory":
            yield name, dataclasses.replace(result, found=f"{result.found}, the same as here")
        elif name == "torch":
            yield name, _judge_torch(result, machine.torch, here.torch)
        elif name != "clock":
            yield name, result
    yield "locked memory", judge_locked_memory(machine, _RAISE_LOCKED, nccl=needs.num_gpus > 0)
    if report["way"] is not None:
        yield f"way to {report['way']['name']}", _judge_way(report["way"])
    yield "clock", _judge_clock(report, machine, answer)
    yield "size", ok(f"{machine.cores} cores for the task, {format_bytes(machine.memory_bytes)} memory")


def _judge_python(machine: Machine, here: Machine) -> Result:
    if machine.python == here.python:
        return ok(machine.python)
    if minor_version(machine.python) == minor_version(here.python):
        return note(f"{machine.python}, here {here.python}")
    return red(f"{machine.python} in {machine.executable}, here {here.python}", _SAME_FIX)


def _judge_torch(result: Result, there: Torch | None, here: Torch | None) -> Result:
    """Compare versions only where both sides have one."""
    if result.level == "red" or not (there and here and there.version and here.version):
        return result
    if there.version != here.version:
        return red(f"{there.version}, here {here.version}", _SAME_FIX)
    return result


def _judge_way(way: Way) -> Result:
    name, addresses = way["name"], way["addresses"]
    if way["reached"] is not None:
        by = f" by {way['interface']}" if way.get("interface") else ""
        return ok(f"{way['reached']}, from {way.get('source', '?')}{by}")
    if addresses and all(map(is_loopback, addresses)):
        return red(
            f"{name} is {', '.join(addresses)} here, which is this host itself",
            f"the real address of {name} in /etc/hosts or DNS",
        )
    if not addresses:
        return red(way["error"], f"the address of {name} in /etc/hosts or DNS")
    return red(f"not reached: {way['error']}", "the nodes' firewall has to let jobs connect to each other")


def _judge_clock(report: Report, machine: Machine, answer: JobAnswer) -> Result:
    """Compare clocks: with the first node's by its answer, with this machine's by the times of submit and report."""
    way = report["way"]
    if way is not None and "clock_offset_s" in way:
        against_first = judge_clock(way["clock_offset_s"], f"that of {way['name']}")
        if against_first.level != "ok":
            return against_first
    behind = answer.submitted - machine.time
    ahead = machine.time - answer.collected
    offset = behind if behind > 0 else -ahead if ahead > 0 else 0.0
    if abs(offset) >= CLOCK_RED_S:
        return judge_clock(offset, "the clock here")
    return ok("agrees with the clock here")


def _explain_silence(node: str, answer: JobAnswer, here: Machine) -> tuple[str, Result]:
    """Explain why a node has written no report, by the output of its task or of srun if it has the reason."""
    lines = [line for line in answer.output if f"{node}:" in line or "execve" in line]
    lines.sort(key=lambda line: "execve" not in line)  # the cause, before "task 1: Exited with exit code 2"
    if lines and not lines[0].startswith(f"{node}: "):
        return "report", red(f"no report: {lines[0]}", f"srun -w {node} {here.executable} -V")
    why = lines[0].partition(": ")[2] if lines else "it may not see the runs directory"
    fix = f"srun -w {node} ls -d {here.directory.path}; --runs DIR names storage that all nodes share"
    return "runs directory", red(f"no report: {why}", fix)


_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_NUM_NODES = 2


def check_cluster(
    resolved: ResolvedSpec | None,
    runs_dir: Path,
    environ: Mapping[str, str],
    *,
    with_job: bool,
    timeout_s: float,
    report: Callable[[str], None],
) -> list[Check]:
    """Check this machine and its cluster, for a spec if there is one; `with_job`: also nodes, within `timeout_s`."""
    job = resolved.job if resolved else None
    python = _python_of_ranks(job, runs_dir, environ)
    here = dataclasses.replace(read_machine(runs_dir, environ), torch=import_torch(python))
    on_slurm, on_cpu = job is not None and job.launcher == "slurm", job is not None and job.device == "cpu"
    needs = Needs()
    if job is not None:
        num_gpus = 0 if on_cpu else job.resources.gpus_per_node or 0
        needs = Needs(trainer=job.entry is None, use_gpus=not on_cpu, num_gpus=num_gpus)
    found = list(judge_here(here))
    found += judge_machine(here, Needs() if on_slurm else needs)  # of a Slurm run only the submit happens here
    found += _judge_slurm(environ, job if on_slurm else None)
    if resolved is not None:
        found += check_plan(resolved, runs_dir, environ)
    checks = [Check(name=name, results={here.host: result}) for name, result in found]
    if with_job:
        request = _job_request(job, environ, python)
        try:
            answer = run_job(request, runs_dir=runs_dir.absolute(), environ=environ, timeout_s=timeout_s, report=report)
        except PreflightError as error:
            refused = red(error.message, error.hint or "the output of sbatch has the reason")
            return [*checks, Check(name="job", results={here.host: refused})]
        checks += judge_nodes(answer, here, needs)
    return checks


def check_plan(resolved: ResolvedSpec, runs_dir: Path, environ: Mapping[str, str]) -> Iterator[tuple[str, Result]]:
    """Plan the submit of the spec, and ask Slurm whether it would accept this plan."""
    try:
        plan = plan_run(resolved, Request(runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ))
    except ClusterddpError as error:
        yield "plan", red(error.message, error.hint or "clusterddp submit -n shows the plan")
        return
    yield "plan", ok(f"{len(plan.gang.members)} x {len(plan.gang.nodes[0].ranks)} ranks, {plan.gang.backend}")
    if plan.slurm is None:
        return
    from clusterddp.places.slurm.explain import advise_refusal
    from clusterddp.places.slurm.launcher import SlurmLauncher, ask_scheduler

    try:
        SlurmLauncher(environ).check(plan)
    except PreflightError as error:
        yield "data", red(error.message, error.hint or "train.data_dir names where they are")
    verdict = ask_scheduler(plan.slurm, environ)
    if verdict.accepted is None:
        yield "sbatch --test-only", note(f"not asked: {verdict.words}")
    elif verdict.accepted:
        when = f"accepted; it would start at {verdict.start} on {verdict.nodes}" if verdict.start else "accepted"
        yield "sbatch --test-only", ok(when)
    else:
        fix = advise_refusal(verdict.words) or "the spec's slurm and resources; sinfo, sacctmgr show assoc"
        yield "sbatch --test-only", red(verdict.words, fix)


def _python_of_ranks(job: JobSpec | None, runs_dir: Path, environ: Mapping[str, str]) -> str:
    """Return the Python of the spec's ranks; ours, where the plan says why there is none."""
    request = Request(runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ)
    with contextlib.suppress(ClusterddpError):
        return (job and choose_python(job, request).executable) or sys.executable
    return sys.executable


def _job_request(job: JobSpec | None, environ: Mapping[str, str], python: str) -> JobRequest:
    environment = process_environment(environ)
    return JobRequest(
        num_nodes=job.resources.nodes if job else _NUM_NODES,
        gpus_per_node=(job.resources.gpus_per_node or 0) if job else 0,
        options=dict(job.slurm) if job else {},
        python=sys.executable,
        python_of_ranks=python,
        paths=(environment.get("PYTHONPATH", ""), environment.get("LD_LIBRARY_PATH", "")),
    )


def _judge_slurm(environ: Mapping[str, str], job: JobSpec | None) -> Iterator[tuple[str, Result]]:
    """Query Slurm, if it is here, and judge its answers; `job` is a spec for Slurm, if there is one."""
    missing = [name for name in _COMMANDS if shutil.which(name, path=environ.get("PATH")) is None]
    if len(missing) == len(_COMMANDS):
        found = "none of its commands is here"
        yield "Slurm", note(found) if job is None else red(found, "submit from a login node of the cluster")
        return
    if missing:
        yield "Slurm's commands", red(f"{', '.join(missing)} missing", "install Slurm's client package; see PATH")
        return
    try:
        cluster = read_cluster(environ)
    except SlurmError as error:
        level = note if job is None and not error.transient else red
        yield "Slurm", level(error.message, "scontrol ping: is slurmctld up, and reached from here?")
        return
    yield "Slurm", ok(f"{cluster.version} answers, cluster {cluster.name}")
    if cluster.has_accounting:
        broken = next((answer for answer in cluster.unanswered if answer.startswith("sacct")), None)
        yield "accounting", note(broken, "sacctmgr ping; states still come from squeue") if broken else ok("answers")
    name = None if job is None else _option(job, "partition")
    partition = cluster.partition(name) if name else choose_partition(cluster)
    for sentence in consequences(cluster, partition):
        yield "cluster", note(sentence)
    if job is not None:
        yield "partition", _judge_partition(cluster, job, name)
        yield "account", _judge_account(cluster, _option(job, "account"), partition)


def _judge_partition(cluster: Cluster, job: JobSpec, names: str | None) -> Result:
    if names is None:
        default = next((partition for partition in cluster.partitions if partition.is_default), None)
        if default is None:
            return red("the spec names none, and the cluster has no default", "slurm.partition=NAME")
        return _judge_one_partition(cluster, job, default)
    unknown = [name for name in names.split(",") if cluster.partition(name) is None]
    if unknown and cluster.partitions:
        known = ", ".join(partition.name for partition in cluster.partitions)
        return red(f"the cluster has no partition {', '.join(unknown)}", f"slurm.partition=NAME, one of {known}")
    found = [partition for name in names.split(",") if (partition := cluster.partition(name))]
    results = [_judge_one_partition(cluster, job, partition) for partition in found]
    # Slurm takes the partition that can start the job first.
    return next((result for result in results if result.level == "ok"), results[0] if results else note("not known"))


def _judge_one_partition(cluster: Cluster, job: JobSpec, partition: Partition) -> Result:
    asked = job.resources
    fix = "sinfo -s; slurm.partition=NAME"
    if not cluster.may_use(partition):
        return red(f"{partition.name} takes none of your jobs: {why_not(cluster, partition)}", fix)
    if asked.time and partition.max_time_s and asked.time.seconds > partition.max_time_s:
        limit = time_text(partition.max_time_s)
        return red(f"{partition.name} allows {limit}, the spec asks for {asked.time}", f'resources.time="{limit}"')
    if partition.node_groups:
        usable = [group for group in partition.node_groups if group.num_gpus >= (asked.gpus_per_node or 0)]
        num_nodes = sum(group.num_nodes for group in usable)
        if num_nodes < asked.nodes:
            what = f" with {asked.gpus_per_node} GPUs" if asked.gpus_per_node else ""
            return red(f"{partition.name} has {num_nodes} nodes{what}, the spec asks for {asked.nodes}", fix)
        up = sum(group.num_nodes for group in usable if group.usable)
        if up < asked.nodes:
            return note(f"{partition.name} has {up} such nodes up now, the spec asks for {asked.nodes}", "sinfo -R")
        return ok(f"{partition.name}, {num_nodes} nodes can take the spec")
    return ok(partition.name)


def _judge_account(cluster: Cluster, account: str | None, partition: Partition | None) -> Result:
    if account is None:
        needed = cluster.needs_account and cluster.default_account is None and len(cluster.accounts) != 1
        if needed:
            return red("jobs need an account, and the spec names none", _account_fix(cluster))
        return ok("none named")
    if not cluster.has_accounting:
        return note(f"{account}: without accounting Slurm accepts any", None)
    if account not in cluster.accounts and (cluster.needs_account or cluster.accounts):
        return red(f"{account} is not an account of {cluster.user.name}", _account_fix(cluster))
    if partition is not None and not partition.takes_account(account):
        return red(f"partition {partition.name} takes no jobs of {account}", _account_fix(cluster))
    return ok(account)


def _account_fix(cluster: Cluster) -> str:
    names = ", ".join(cluster.accounts)
    return f"slurm.account=NAME, one of {names}" if names else "ask the cluster's administrators for an account"


def _option(job: JobSpec, name: str) -> str | None:
    value = job.slurm.get(name)
    return value if isinstance(value, str) else None
