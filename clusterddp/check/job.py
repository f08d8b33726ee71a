"""The doctor's job: one task on each node for half a minute; it is found and cancelled by its name."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from clusterddp.check.probe import MARK, join_lines
from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.facts.machine import Machine
from clusterddp.slurm.commands import run_slurm
from clusterddp.slurm.explain import explain_waiting
from clusterddp.slurm.identity import job_name, job_tag
from clusterddp.slurm.jobs import Phase
from clusterddp.slurm.queue import Slurm, Wanted
from clusterddp.wire import build, read_object

SCRIPT = """\
#!/bin/sh
# The same for every job: PYTHON DIRECTORY NONCE PYTHONPATH LD_LIBRARY_PATH are arguments, never text of this script.
if [ -w "$2" ]; then exec >>"$2/job.out" 2>&1; fi
if [ -n "$4" ]; then PYTHONPATH=$4; export PYTHONPATH; fi
if [ -n "$5" ]; then LD_LIBRARY_PATH=$5; export LD_LIBRARY_PATH; fi
exec srun --export=ALL --kill-on-bad-exit=0 \\
    "$1" -m clusterddp.check.probe "$2" "$3" "$SLURMD_NODENAME" "$SLURM_JOB_ID"
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


class _Way(TypedDict, total=False):
    source: str
    interface: str | None
    clock_offset_s: float
    first: dict[str, Any] | None
    """The first node's own report."""


class Way(_Way):
    """How a node has connected to the first one (check/probe.py)."""

    name: str
    addresses: tuple[str, ...]
    reached: str | None
    error: str


class Report(TypedDict):
    """What a node reports (check/probe.py)."""

    node_rank: int
    node: str
    nonce: str
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
    paths: tuple[str, ...] = ()
    """PYTHONPATH and LD_LIBRARY_PATH for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAnswer:
    """The result of the job; nodes without a report are in `nodes` and not in `reports`."""

    job_id: str | None
    nodes: tuple[str, ...]
    reports: dict[str, Report]
    """Node -> its last report."""
    submitted: float
    collected: float
    output: tuple[str, ...]
    """What the job has printed besides the reports."""


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
    name = job_name("doctor", tag)
    with _directory(runs_dir, nonce) as directory:
        job_id = None
        try:
            submitted = time.time()
            job_id = _submit(request, directory, nonce, name, environ)
            report(f"job {job_id}: {request.num_nodes} nodes for a minute at most")
            wanted = Wanted(tag=tag, job_id=job_id, since=submitted, cluster=_cluster(request))
            nodes = _await_reports(request, directory, wanted, environ, timeout_s)
            reports, output = _collect(directory)
            return JobAnswer(
                job_id=job_id,
                nodes=nodes or tuple(reports),
                reports=reports,
                submitted=submitted,
                collected=time.time(),
                output=output,
            )
        finally:
            _cancel(request, name, job_id, environ)


def sbatch_argv(request: JobRequest, name: str) -> list[str]:
    """Return sbatch's argv before the script."""
    ours: dict[str, str | bool] = {
        "parsable": True,
        "job_name": name,
        "nodes": str(request.num_nodes),
        "ntasks_per_node": "1",
        "time": "1",
        "mem": _MEMORY,
        "export": "NONE",
        "chdir": "/",
        "output": os.devnull,
    }
    if request.gpus_per_node and "gres" not in request.options:
        ours["gpus_per_node"] = str(request.gpus_per_node)
    kept = {key: value for key, value in request.options.items() if key in _KEPT_OPTIONS and value is not False}
    argv = ["sbatch", "--no-requeue"]
    for key, value in (ours | kept).items():
        if value is not False:
            argv.append(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return argv


@contextlib.contextmanager
def _directory(runs_dir: Path, nonce: str) -> Iterator[Path]:
    """Make a directory for the reports in the runs directory; remove it, and what was made for it, at the end."""
    made = [path for path in (runs_dir, *runs_dir.parents) if not path.exists()]
    directory = runs_dir / f".doctor-{nonce[:8]}"
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        (directory / "nonce").write_text(nonce)
        (directory / "job.sh").write_text(SCRIPT)
        yield directory
    except OSError as error:
        raise ClusterddpError(f"{error.filename or directory}: {error.strerror}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _submit(request: JobRequest, directory: Path, nonce: str, name: str, environ: Mapping[str, str]) -> str:
    python_path, library_path = (*request.paths, "", "")[:2]
    script = [str(directory / "job.sh"), request.python, str(directory), nonce, python_path, library_path]
    argv = sbatch_argv(request, name)
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
            if job and job.nodes and not nodes:
                nodes = tuple(run_slurm(["scontrol", "show", "hostnames", job.nodes], environ=environ).split())
        except SlurmError as error:  # asked again
            phase, why = Phase.RUNNING if started else Phase.WAITING, error.message
        if phase is not Phase.WAITING and not started:
            started, deadline = True, time.monotonic() + _RUN_S
        if phase is Phase.ENDED and not ended:
            ended, deadline = True, time.monotonic() + _LAG_S
        if _all_done(request, directory) or (started and time.monotonic() > deadline):
            return nodes
        if time.monotonic() > deadline:
            raise SlurmError(
                f"the doctor's job has not started within {timeout_s:g} s, and is cancelled: {why}",
                hint="--timeout S waits longer; slurm.partition=NAME may have free nodes (sinfo)",
                transient=False,
            )
        time.sleep(_POLL_S)


def _all_done(request: JobRequest, directory: Path) -> bool:
    return len([report for report in _read_reports(directory) if report["done"]]) >= request.num_nodes


def _read_reports(directory: Path) -> Iterator[Report]:
    for path in directory.glob("node-*.json"):
        with contextlib.suppress(OSError):
            yield from _parse_reports([path.read_text(errors="replace")])


def _parse_reports(texts: Iterable[str]) -> Iterator[Report]:
    """Read reports, and the first node's report within each; an invalid one is dropped."""
    for text in texts:
        with contextlib.suppress(ValueError):
            report = build(Report, read_object(text), "report")
            first = report["way"].get("first") if report["way"] else None
            if first is not None:
                with contextlib.suppress(ValueError):
                    yield build(Report, first | {"way": None}, "report")
            yield report


def _collect(directory: Path) -> tuple[dict[str, Report], tuple[str, ...]]:
    """Collect the newest report of each node: from its file, the job's output, or another node's report."""
    with contextlib.suppress(OSError):
        os.listdir(directory)  # NFS: read the directory again
    try:
        lines = (directory / "job.out").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    reports: dict[str, Report] = {}
    for report in (*_parse_reports(join_lines(lines)), *_read_reports(directory)):
        known = reports.get(report["node"])
        if known is None or report["done"] or not known["done"]:
            reports[report["node"]] = report
    output = tuple(line for line in lines if line.strip() and not line.startswith(MARK))
    return dict(sorted(reports.items(), key=lambda item: item[1]["node_rank"])), output


def _cancel(request: JobRequest, name: str, job_id: str | None, environ: Mapping[str, str]) -> None:
    """Cancel the job if it is still there; never a job of another name with the same number."""
    with contextlib.suppress(SlurmError):
        which = [f"--clusters={cluster}"] if (cluster := _cluster(request)) else []
        which += [job_id] if job_id else []
        run_slurm(["scancel", "--quiet", f"--user={_user()}", f"--name={name}", *which], environ=environ)


def _cluster(request: JobRequest) -> str | None:
    cluster = request.options.get("clusters")
    return cluster if isinstance(cluster, str) else None


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
