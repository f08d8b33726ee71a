"""The status of a run, or of a sweep, read from its files into one value; `to_json` is its form for scripts.

It has the newest checkpoint and, of a run that failed, what kind of failure its root cause is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.host_run import read_reports, read_unreached, start_of
from clusterddp.places.state import announce, read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_held
from clusterddp.run.node_marks import learn
from clusterddp.run.rank_usage import read_usage_report
from clusterddp.run.record import RankEnd, RunRecord, Start, read_events, read_gang, read_run, read_start
from clusterddp.run.seal import Mark, mark_of
from clusterddp.run.state import RunState, RunView
from clusterddp.run.steps import is_batch_script, job_output, shown_step
from clusterddp.run.sweep import QueueRecord, SweepDir, read_queue, read_sweep
from clusterddp.system.files import is_file, read_json
from clusterddp.view.effective import Effective, read_effective
from clusterddp.view.events import (
    HangEvent,
    NodeTransport,
    Stopping,
    count_lost_rows,
    find_change_of_nodes,
    find_hang,
    find_start_phases,
    find_stopping,
    find_transports,
    warn_of_nodes,
    warn_of_sockets,
    warn_of_unsent,
    warn_of_unwatched,
    warn_of_wait,
)
from clusterddp.view.progress import TAIL_BYTES, Progress, read_progress
from clusterddp.view.ranks import RankStatus, rank_statuses
from clusterddp.view.steps import StepStatus, gang_of, read_steps, step_view
from clusterddp.view.timeline import Timeline, Times, read_timeline
from clusterddp.wire import build

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Job

_NAME = re.compile(r"step-(?P<step>\d+)-a(?P<attempt>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A run at one moment, as `list` shows it: read without the records of ranks."""

    run: str
    name: str
    """Of its spec; several runs may have it."""
    state: RunState
    reason: str
    """Why it is in this state; may be empty."""
    launcher: str
    """`local`, `ssh`, `slurm`, `worker`; `none` for ranks that another launcher started."""
    job_id: str | None
    """Slurm's job id, the pid of the local task, or what started the ranks."""
    attempt: int | None
    """The newest attempt; None before the first one starts."""
    progress: Progress | None
    """How far the run is; None for a program that reports nothing."""
    created: float
    """Seconds since the epoch."""
    ended: float | None
    times: Times
    variant: str = ""
    """In a sweep: the values by which this run differs from the others."""
    hold: str | None = None
    """The hold that it is in, or was; its own name: it is a hold."""
    mark: Mark = ""
    """Why it is not your own, so that commands only read it: `unsealed`, `another user's`; empty: it is."""
    bytes: int | None = None
    """What it takes on disk here, without a snapshot of code that other runs use, too; null without `--wide`."""

    def to_json(self) -> dict[str, Any]:
        shown = {field.name: getattr(self, field.name) for field in dataclasses.fields(RunSummary)}
        return shown | {
            "state": self.state.value,
            "times": self.times.to_json(),
            "progress": self.progress.to_json() if self.progress else None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus(RunSummary):
    """A run at one moment, by its files, as `status` shows it."""

    world_size: int
    """Ranks in all."""
    ranks: tuple[RankStatus, ...]
    """The ranks of the newest attempt; of a batch script those of `shown_step`."""
    root_cause: RankEnd | None
    """The first failure of a run that FAILED."""
    checkpoint: Checkpoint | None
    """The newest one of a run that has ended."""
    job: Job | None = None
    """On Slurm: the job as Slurm reports it; None where the files suffice."""
    unreachable: tuple[str, ...] = ()
    """On SSH hosts: a sentence for each of them that did not answer last."""
    job_log: str | None = None
    """On Slurm: the log of the batch script, relative to the run's directory, when no rank was started."""
    start_phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the newest attempt's start that is over and was recorded."""
    warning: str = ""
    """What a user should look at besides the state."""
    transports: tuple[NodeTransport, ...] = ()
    """By node, of those whose NCCL has said so in the newest attempt."""
    stopping: Stopping | None = None
    """Of a run that goes on, though its ranks were asked to checkpoint and end."""
    nodes_changed: str = ""
    """Why the newest attempt has other nodes than the one before; empty: it has the same."""
    hang: HangEvent | None = None
    """While it runs: since when no rank makes progress."""
    last_output: float | None = None
    """While it runs: when a rank last wrote to its log, over SSH by the clock of its host; seconds since the epoch."""
    report: str | None = None
    """The path of its report, once it is written: at the end of each attempt."""
    lost_rows: int = 0
    """Rows of `metrics.jsonl` that its storage did not take, as far as it could be written again since."""
    diagnosis: Diagnosis | None = None
    """The kind of the root cause, by its words."""
    steps: tuple[StepStatus, ...] | None = None
    """Of a batch script: the commands that have started ranks in the newest attempt."""
    held: tuple[str, ...] = ()
    """Of a hold: the runs in it, on Slurm the one that runs and those that wait."""
    shown_step: str | None = None
    """Of a batch script: the newest step that runs, else the first that failed, else the newest."""
    effective: Effective | None = None
    """How much of the time since the first step went into steps that count; null before the first."""

    @property
    def finished(self) -> bool:
        return self.state.finished

    def without_times(self) -> dict[str, Any]:
        """Return its JSON without what changes every second."""
        age = {"reason": ""} if self.state is RunState.UNKNOWN else {}  # the reason has it
        return self.to_json() | {"times": None, "last_output": None, "effective": None} | age

    def to_json(self) -> dict[str, Any]:
        cause = self.root_cause
        job = {"job": _job_json(self.job)} if self.launcher == "slurm" else {}
        summary = RunSummary.to_json(self)
        return {
            "schema": 1,
            **{name: summary[name] for name in summary if name not in ("variant", "progress", "bytes")},
            "world_size": self.world_size,
            "progress": summary["progress"],
            "steps": None if self.steps is None else [step.to_json() for step in self.steps],
            "shown_step": self.shown_step,
            "held": list(self.held),
            "ranks": [rank.to_json() for rank in self.ranks],
            "root_cause": cause
            and {name: getattr(cause, name) for name in ("rank", "host", "exit_code", "error", "log")},
            "diagnosis": self.diagnosis and dataclasses.asdict(self.diagnosis),
            "start_phases": self.start_phases,
            "nccl": [dataclasses.asdict(transport) for transport in self.transports],
            "warning": self.warning,
            "checkpoint": self.checkpoint and dataclasses.asdict(self.checkpoint),
            "stopping": self.stopping and dataclasses.asdict(self.stopping),
            "lost_rows": self.lost_rows,
            "nodes_changed": self.nodes_changed,
            "hang": self.hang and dataclasses.asdict(self.hang),
            "last_output": self.last_output,
            "report": self.report,
            "effective": self.effective and dataclasses.asdict(self.effective),
            **job,
        }


def read_status(run: RunDir, view: RunView | None = None) -> RunStatus:
    """Read the status of a run."""
    record = read_run(run)
    view = view or read_state(run, record=record)
    steps = read_steps(run, view, record.token) if is_batch_script(run) else None
    shown = run if steps is None else shown_step(run, view.attempt)
    attempt = None if view.attempt is None else shown.attempt(view.attempt)
    gang, end = (None if steps == () or record.is_hold else gang_of(shown, attempt)), view.end
    start: Start = (attempt and read_start(attempt)) or {}
    of_ranks = step_view(shown, view, record.token)
    unreached = read_unreached(run) if record.launcher == "ssh" else {}
    events, is_running = read_events(run), view.state is RunState.RUNNING and of_ranks.end is None
    all_events = events
    if shown.step is not None:
        events = [row for row in events if row.get("step") == shown.step]
    if not mark_of(run):
        learn(run, all_events)
    usage = read_usage_report(attempt) if is_running and attempt else None
    transports = find_transports(events, view.attempt)
    warnings = (
        end.warning if end else "",
        warn_of_nodes(all_events, view.attempt),
        warn_of_sockets(transports),
        warn_of_unsent(all_events),
        warn_of_unwatched(all_events, view.attempt),
        usage.warning if usage else "",
        "" if view.finished else warn_of_wait(events),
    )
    ranks = rank_statuses(gang, attempt, start, of_ranks, unreached=unreached, report=usage) if gang else ()
    outputs = [rank.last_output for rank in ranks]
    if record.launcher == "ssh":  # not all logs are here
        outputs = [report.last_output for report in read_reports(run).values() if report.start == start_of(record)]
    now = time.time()
    timeline = read_timeline(run, record, is_finished=view.finished, now=now)
    return RunStatus(
        **_summary(shown, record, view, timeline, tail_bytes=TAIL_BYTES),
        reason=view.reason,
        world_size=gang.num_ranks if gang else 0,
        ranks=ranks,
        steps=steps,
        held=tuple(each.name for each in list_held(run)) if record.is_hold and not view.finished else (),
        shown_step=shown.step,
        root_cause=end.root_cause if end else None,
        diagnosis=diagnose(end.root_cause, run) if end and end.root_cause else None,
        checkpoint=newest_checkpoint(run),
        job=view.job,
        unreachable=() if view.finished else tuple(unreached.values()),
        job_log=None if start else find_job_log(run),
        start_phases=find_start_phases(events, record, view.attempt, start)
        if view.attempt is not None and steps is None
        else {},
        transports=transports,
        warning="; ".join(filter(None, warnings)),
        stopping=find_stopping(events, attempt, gang.stop_grace_s)
        if is_running and attempt and gang and not gang.entry.unchanged
        else None,
        lost_rows=count_lost_rows(all_events),
        nodes_changed=find_change_of_nodes(events, view.attempt),
        report=str(run.report.absolute()) if run.report.exists() else None,
        hang=find_hang(events, view.attempt) if is_running else None,
        last_output=max((at for at in outputs if at is not None), default=None) if is_running else None,
        effective=read_effective(run, timeline, all_events, is_finished=view.finished, now=now),
    )


def read_summary(run: RunDir, *, record: RunRecord, view: RunView) -> RunSummary:
    """Read the summary of a run whose record and state are known already."""
    reason = view.end.root_cause.error if view.end and view.end.root_cause else view.reason
    timeline = read_timeline(run, record, is_finished=view.finished, now=time.time())
    return RunSummary(**_summary(run, record, view, timeline, tail_bytes=4096), reason=reason)


def _summary(shown: RunDir, record: RunRecord, view: RunView, timeline: Timeline, *, tail_bytes: int) -> dict[str, Any]:
    """Read the fields of `RunSummary`, without the reason; `shown`: the run, or the step whose progress is meant."""
    run = RunDir(shown.path)
    progress = read_progress(shown, tail_bytes=tail_bytes)
    return {
        "run": run.name,
        "name": record.name,
        "variant": record.variant,
        "hold": record.hold,
        "mark": mark_of(run),
        "state": view.state,
        "launcher": record.launcher,
        "job_id": view.job.job_id if view.job else record.job_id,
        "attempt": view.attempt,
        "progress": dataclasses.replace(progress, eta_s=None) if progress and view.finished else progress,
        "created": record.created_ns / 1e9,
        "ended": view.end.ended if view.end else None,
        "times": timeline.times,
    }


def find_job_log(run: RunDir) -> str | None:
    """Find the log of the job of a run on Slurm, relative to the run's directory; of a batch script its own output."""
    if is_batch_script(run):
        attempts = run.attempts()
        return next(map(str, job_output(attempts[-1])), None) if attempts else None
    log = run.launcher_dir / "job.log"
    return str(log.relative_to(run.path)) if log.exists() else None


def _job_json(job: Job | None) -> dict[str, Any] | None:
    if job is None:
        return None
    names = ("job_id", "state", "reason", "partition", "num_nodes", "nodes", "submitted")
    waits = job.phase.value == "waiting"
    moments = {"started": None if waits else job.started, "expected_start": job.started if waits else None}
    return {name: getattr(job, name) for name in names} | moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that is complete."""

    path: str
    """Of its data; on a host from the run's directory there."""
    step: int
    """Optimizer steps done."""
    host: str | None = None
    """On which host of the run it is; None: here."""
    created: float | None = None
    """Seconds since the epoch; None: only the host knows."""


def newest_checkpoint(run: RunDir) -> Checkpoint | None:
    """Find the newest checkpoint, by its name: the one with data here, else the one that a host has."""
    here = [name for path in run.checkpoints.glob("*.json") if is_file(path.with_suffix(".pt")) and (name := path.stem)]
    if newest := _newest(here):
        manifest = run.checkpoints / f"{newest[0]}.json"
        created = None
        with contextlib.suppress(ClusterddpError, OSError, ValueError):
            created = build({"created": float | None}, read_json(manifest))["created"]
        return Checkpoint(path=str(manifest.with_suffix(".pt")), step=newest[1], created=created)
    there = {host: report.checkpoints for host, report in read_reports(run).items()}
    newest = _newest(name for names in there.values() for name in names)
    if newest is None:
        return None
    host = next(host for host, names in there.items() if newest[0] in names)
    return Checkpoint(path=f"checkpoints/{newest[0]}.pt", step=newest[1], host=host)


def _newest(names: Iterable[str]) -> tuple[str, int] | None:
    """Return the newest of some checkpoints, by attempt, then by step, with its step."""
    found = [(int(match["attempt"]), int(match["step"]), name) for name in names if (match := _NAME.fullmatch(name))]
    _, step, newest = max(found, default=(0, 0, ""))
    return (newest, step) if newest else None


def has_checkpoint(run: RunDir) -> bool:
    """Return whether there is a checkpoint: here, or on the SSH hosts of the run."""
    here = next(run.checkpoints.glob("*.json"), None) is not None
    return here or any(report.checkpoints for report in read_reports(run).values())


def may_have_saved(run: RunDir) -> bool:
    """Return whether the run may go on from where it was; False for a program that left no file and never asked."""
    entry = read_gang(run).entry
    if entry.always_stops or has_checkpoint(run) or any(is_file(attempt.asked) for attempt in run.attempts()):
        return True
    output = Path(entry.output_dir or run.output)
    with contextlib.suppress(OSError):
        return next(output.iterdir(), None) is not None
    return bool(entry.output_dir)  # it may be on another machine


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The kind of a failure."""

    category: str
    """One of the words that docs/cli.md lists; setup: before any rank ran; code: the program."""
    text: str
    """The category for people."""
    hint: str
    """What helps against it; may be empty."""

    @property
    def may_pass(self) -> bool:
        """True when the same run may come further without a change to its program, its spec or its machines."""
        return self.category in ("storage", "time_limit", "hang", "node_lost", "network", "port", "killed", "setup")


_NEEDS_LESS = "fewer loaders need less"
_SETUP = Diagnosis("setup", "before any rank ran", "clusterddp doctor SPEC checks the machines")
_CODE = Diagnosis("code", "the program", "")
_OF_PROGRAMS = (
    ("exited with code 0 while others", "inputs may be uneven: model.join() of DDP, drop_last=True of the loader"),
    ("Duplicate GPU|invalid device ordinal", "each rank has one GPU: cuda:LOCAL_RANK"),
    ("device-side assert|illegal memory access", "env: {CUDA_LAUNCH_BLOCKING: 1} in the spec shows the line"),
    (r"op\.preamble\.length", "in a collective all ranks have tensors of the same sizes, in the same order"),
    ("worker .*(exited unexpectedly|signal: (Seg|Abort))", "num_workers=0 shows the exception of the loader's worker"),
    (r"exited with code 127\b", "a command was not found there: setup, venv, conda or env: {PATH: ...} in the spec"),
    (r"exited with code 126\b", "a file there is not a program, or not executable: chmod +x"),
    ("ModuleNotFoundError", "venv, conda, python or setup of the spec choose the Python of the ranks"),
)
_KINDS: dict[str, Diagnosis] = {
    r"^\S+: setup( line \d+ \(|: )": Diagnosis("setup", "the setup lines of the spec", ""),
    r"^hang:|Watchdog caught|collective operation timeout|[Tt]imed out waiting|wait timeout after": Diagnosis(
        "hang", "a hang", "attempts/N/stacks has where each rank waited"
    ),
    **{pattern: dataclasses.replace(_CODE, hint=hint) for pattern, hint in _OF_PROGRAMS},
    r"(CUDA|HIP)( error:)? out of memory|OutOfMemoryError|ALLOC_FAILED|Cuda failure.*out of memory": Diagnosis(
        "gpu_memory", "out of GPU memory", "a smaller batch per rank needs less"
    ),
    r"Too many open files|received 0 items of ancdata": Diagnosis(
        "open_files", "too many open files", f"raise ulimit -n on that host; {_NEEDS_LESS}"
    ),
    r"can't start new thread|pthread_create failed|Thread creation failed|BlockingIOError: \[Errno 11\]": Diagnosis(
        "processes", "too many processes and threads", f"raise ulimit -u on that host; {_NEEDS_LESS}"
    ),
    r"shared memory(\(shm\)|.*No space left)|unable to mmap \d+ bytes from|signal: Bus error|by SIGBUS\b": Diagnosis(
        "shared_memory", "out of shared memory", f"a larger /dev/shm (--shm-size, --ipc=host); {_NEEDS_LESS}"
    ),
    r"lack of memory|OUT_OF_MEMORY|MemoryError|[Cc]annot allocate memory|can't allocate memory|[Oo]ut of memory"
    r"|OOM Killed|signal: Killed|Unable to allocate .* for an array": Diagnosis(
        "memory", "out of memory", f"resources.memory_gb asks Slurm for more; {_NEEDS_LESS}"
    ),
    r"No space left on device|[Dd]isk quota|Read-only file system|Stale file handle|Input/output error"
    r"|inline_container.*unexpected pos|file write failed": Diagnosis(
        "storage", "storage", "make room, or mend the file system, then go on"
    ),
    r"AF_UNIX path too long": Diagnosis(
        "socket_path", "the path of a socket is too long", "a short one: env: {TMPDIR: /tmp} in the spec"
    ),
    r"[Aa]ddress already in use|EADDRINUSE": Diagnosis(
        "port", "a port is in use", "two ranks or programs have it; owns_ranks: true if the program starts ranks"
    ),
    r"time limit|TIME LIMIT|\bTIMEOUT\b|before Slurm takes the job away|before the job is taken away"
    r"|Slurm ended the job before|did not stop within": Diagnosis(
        "time_limit", "time limit", "more resources.time, or restarts, which go on at a checkpoint"
    ),
    r"\bis lost\b|NODE.FAIL|BOOT_FAIL|is cut off|; (its |all )?ranks? .*ended with it": Diagnosis(
        "node_lost", "node lost", "restarts: 1 in the spec starts again after a loss"
    ),
    r"URLError|HTTPError|HTTPS?ConnectionPool|LocalEntryNotFound|[Cc]ouldn.t connect to|Error downloading": Diagnosis(
        "download", "a download", "many nodes reach no internet: download it first, where that is reached"
    ),
    r"ECC error|busy or unavailable|no kernel image|NVIDIA driver|CUDA driver version|No CUDA GPUs|no CUDA-capable"
    r"|unhandled cuda error|GPU is lost|fallen off the bus": Diagnosis(
        "gpu", "a GPU or its driver", "clusterddp doctor SPEC checks the GPUs of each node"
    ),
    r"gloo/|\bGloo |\bnccl|\bNCCL|DistNetworkError|DistStoreError|Connection:? (closed|reset|refused|aborted|timed)"
    r"|Connection(Reset|Refused|Aborted)?Error|BrokenPipeError|Broken pipe"
    r"|No route to host|Network is unreachable|Name or service not known|Temporary failure in name resolution"
    r"|socket has timed out|remote process exit|have not joined|did not join|did not reach": Diagnosis(
        "network", "network", "clusterddp doctor SPEC checks the network between the hosts"
    ),
    r"FileNotFoundError|NotADirectoryError|UnidentifiedImageError|BadZipFile|DataLoader timed out"
    r"|cannot read folder|data_dir|\bdata set\b": Diagnosis(
        "data", "data", "every node needs the files under the same path"
    ),
    r"PREEMPT(ION|ED)\b": Diagnosis("killed", "preempted", "restarts: 1 in the spec starts again after it"),
    r"was killed by SIG(KILL|TERM|HUP|INT|XCPU)\b": Diagnosis(
        "killed", "killed from outside", "another process, or the kernel for lack of memory, ended it"
    ),
}
"""A pattern of words, and what they mean; the first one that is found counts."""
_NAMES = re.compile(r"^(the program of )?ranks? [\d, -]+ on \S+?(:| )|(?<!\w)'[^' ]*'|\"[^\" ]*\"")
"""Names of hosts, files and values, whose words mean nothing."""


def diagnose(cause: RankEnd, run: RunDir | None = None) -> Diagnosis:
    """Find the kind of a failure: by its own words, the first cause first, then by the end of its traceback.

    `run`: whose plan may explain why a file is missing.
    """
    last_line = (cause.traceback or "").rstrip().rpartition("\n")[2]
    for text in (*cause.error.split("; then "), last_line):
        words = _NAMES.sub("", text)
        for pattern, diagnosis in _KINDS.items():
            if re.search(pattern, words):
                absent = _find_not_uploaded(run, text) if run and diagnosis.category == "data" else None
                hint = f"git ignores {absent}, so submit did not upload it: ssh.send or entry.data_dir"
                return dataclasses.replace(diagnosis, hint=hint) if absent else diagnosis
    return _SETUP if cause.rank is None else _CODE


def _find_not_uploaded(run: RunDir, error: str) -> str | None:
    """Return what git ignores that has the missing file, or is in the missing directory, of a run over SSH."""
    missing = re.search(r"FileNotFoundError.*'([^']+)'", error)
    # Another user's plan may be anything.
    with contextlib.suppress(ClusterddpError, OSError, TypeError, AttributeError, KeyError):
        plan = read_json(run.plan) or {}
        if missing and plan["ssh"]:
            path = f"/{os.path.normpath(missing[1]).strip('/')}/"
            names = ((name, f"/{name.strip('/')}/") for name in plan["snapshot"]["ignored"])
            return next((str(name) for name, there in names if there in path or path in there), None)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepStatus:
    """A sweep at one moment, by its files and Slurm's answer."""

    sweep: str
    launcher: str
    job_id: str | None
    keys: tuple[str, ...]
    throttle: int | None
    created: float
    """Seconds since the epoch."""
    runs: tuple[RunSummary, ...]
    queue: QueueRecord | None = None
    """The queue that starts the runs; None: Slurm does."""

    @property
    def states(self) -> dict[str, int]:
        """Count the runs in each state, in the order of a run's life; a state that none has is left out."""
        counts = Counter(run.state for run in self.runs)
        return {state.value: counts[state] for state in RunState if counts[state]}

    @property
    def finished(self) -> bool:
        return all(run.state.finished for run in self.runs)

    def without_times(self) -> dict[str, Any]:
        """Return its JSON without what changes every second."""
        return self.to_json() | {"runs": [run.to_json() | {"times": None} for run in self.runs]}

    def to_json(self) -> dict[str, Any]:
        queue = self.queue
        return {
            "sweep": self.sweep,
            "launcher": self.launcher,
            "job_id": self.job_id,
            "keys": list(self.keys),
            "throttle": self.throttle,
            "queue": queue
            and {
                "state": queue.state,
                "pid": queue.process.pid,
                "host": queue.process.host,
                "waits_for": queue.waits_for or None,
                "ended": queue.ended,
                "why": queue.why or None,
            },
            "states": self.states,
            "runs": [run.to_json() for run in self.runs],
        }


def read_sweep_status(sweep: SweepDir) -> SweepStatus:
    """Read the status of a sweep; Slurm is asked once for all its runs."""
    record = read_sweep(sweep)
    runs = [(run, read_run(run)) for run in sweep.runs()]
    announce(runs)
    return SweepStatus(
        sweep=sweep.name,
        launcher=record.launcher,
        job_id=record.job_id,
        keys=record.keys,
        throttle=record.throttle,
        created=record.created_ns / 1e9,
        queue=None if record.launcher == "slurm" else read_queue(sweep),
        runs=tuple(read_summary(run, record=known, view=read_state(run, record=known)) for run, known in runs),
    )
