"""Runs a batch script in its job: with its own shell, in the environment of the job, and records how it ended.

The script is a child of this process, so its exit code and the signal that ended it are known; the job ends with the
same. Every start of the job is an attempt: Slurm and the user decide how often there is one. What starts ranks in the
script are steps (run/steps.py), by the commands in front of its PATH (step_command.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from clusterddp.errors import ClusterddpError, SlurmError
from clusterddp.node.processes import PASSED_ON, lead_group
from clusterddp.places.slurm.batch import JobStart, write_claim
from clusterddp.places.slurm.commands import JobNow, down_nodes, run_slurm, show_job
from clusterddp.places.slurm.step_command import install_commands
from clusterddp.ranks.environment import COOKIE, cookie
from clusterddp.run.attempts import (
    AttemptEnd,
    cancelled,
    close_attempt,
    failed,
    failed_by,
    find_end,
    make_attempt,
    read_end,
    spell_exit,
)
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import RankEnd, RunRecord, log_event, read_run
from clusterddp.run.seal import refuse_changed
from clusterddp.run.steps import read_batch_script, read_step, steps_of
from clusterddp.system.processes import end_by
from clusterddp.system.storage import retry_outage

_ANSWER_S = 5.0
"""How long the submit may take to write the job's id, once the job has started."""


def run_script(run: RunDir, start: JobStart, arguments: Sequence[str]) -> int:
    """Run the script of this start of the job; return its exit code.

    Raises: ClusterddpError, OSError: the run was changed, another job is its newest, or its storage is away.
    """
    plan, record = refuse_changed(run), read_run(run)
    record = _await_answer(run, record, start)
    if record.job_id is not None and not start.carries(record):
        raise ClusterddpError(f"{run.name}: job {start.job_id} is not its newest job, so this job starts nothing")
    script = Script(name=Path(plan["spec"]["entry"]["batch_script"]).name, signals_all=_signals_all_processes())
    attempt = _claim(run, record, start, script)
    facts = {"job_id": start.job_id, "restart_count": start.restart_count, "host": start.host}
    log_event(run, "job_started", attempt=attempt.number, **facts)
    environment = install_commands(run, attempt.number, os.environ, original=plan["spec"]["entry"]["batch_script"])
    environment |= {COOKIE: cookie(record.token, "b0"), "CLUSTERDDP_SCRIPT_PID": str(os.getpid())}
    code = script.run(shell_argv(read_batch_script(run), run.batch_script, arguments), environment, start)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm's commands must survive the one that the whole job gets
    end = script.end(run, attempt, start, code)
    if close_attempt(attempt, end, record.token).is_first:
        log_event(run, "attempt_ended", attempt=attempt.number, outcome=end.outcome, reason=end.reason)
    if code < 0:
        end_by(-code)
    return code


def shell_argv(text: bytes, script: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command that the kernel makes of a script: the program and the argument of its first line."""
    found = re.match(rb"#![ \t]*(\S+)[ \t]*(.*?)[ \t\r]*$", text.partition(b"\n")[0])
    words = [os.fsdecode(word) for word in found.groups() if word] if found else ["/bin/sh"]
    return [*words, str(script), *arguments]


@dataclasses.dataclass(kw_only=True, slots=True)
class Script:
    """The script of one start of the job."""

    name: str
    signals_all: bool
    """True: Slurm sends its signals to the children of this process, too."""
    received: set[int] = dataclasses.field(default_factory=set)
    _process: subprocess.Popen[bytes] | None = None

    def run(self, argv: Sequence[str], environment: dict[str, str], start: JobStart) -> int:
        """Run it until it ends, and pass signals on; return its exit code, negative for a signal.

        A SIGTERM that came before this process could handle it is lost; Slurm knows that it ends the job.
        """
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        self._process = subprocess.Popen(
            argv,
            env=environment,
            close_fds=False,
            preexec_fn=lead_group,  # noqa: PLW1509  this process has one thread; `kill 0` in the script spares it
        )
        job = ask_for(start) if signal.SIGTERM not in self.received else None
        if job is not None and job.ends:
            self.received.add(signal.SIGTERM)
        for number in self.received:
            self._process.send_signal(number)
        return self._process.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)
        if self._process is not None and not self.signals_all:
            self._process.send_signal(number)

    def end(self, run: RunDir, attempt: AttemptDir, start: JobStart, code: int) -> AttemptEnd:
        """Explain how it ended."""
        cause = first_failure(run, attempt.number)
        if signal.SIGTERM in self.received and (end := _ended_by_slurm(start, cause)) is not None:
            return end
        if code == 0:
            warning = f"it went on after {cause.error}" if cause else ""
            return AttemptEnd(outcome="COMPLETED", reason=f"{self.name} exited with code 0", warning=warning)
        if cause is not None:
            return failed_by(cause)
        return failed(f"{self.name} {spell_exit(code)}", host=start.host)


def first_failure(run: RunDir, attempt: int) -> RankEnd | None:
    """Return the failure of a rank that ended the script, with its step and line in the text.

    It is the first one since the script has started its last step: after an earlier one the script went on.
    """
    failures, last_start = [], 0.0
    steps = {str(step.step): step.attempt(attempt) for step in steps_of(run, attempt)}
    for name, directory in steps.items():
        end, record = read_end(directory), read_step(directory)
        last_start = max(last_start, record.started if record else 0.0)
        if end is not None and record is not None and end.outcome == "FAILED" and end.root_cause is not None:
            outer = read_step(steps[record.inside]) if record.inside in steps else None
            line = record.line or (outer.line if outer else None)
            where = f"step {name} ({record.command[0]}{f', line {line}' if line else ''})"
            error = f"{where}: {end.root_cause.error or end.reason}"
            failures.append((end.ended, dataclasses.replace(end.root_cause, error=error)))
    last = [failure for failure in failures if failure[0] >= last_start] or failures[-1:]
    return min(last, key=lambda failure: failure[0])[1] if last else None


def _await_answer(run: RunDir, record: RunRecord, start: JobStart) -> RunRecord:
    """Wait for the id that sbatch has answered, by which the job knows that it is the newest of the run."""
    deadline = time.monotonic() + _ANSWER_S
    while record.job_id is None and time.monotonic() < deadline:
        time.sleep(0.02)
        record = read_run(run)
    return record


def _claim(run: RunDir, record: RunRecord, start: JobStart, script: Script) -> AttemptDir:
    """Claim the attempt of this start: the one that the job was submitted for, else the next one."""
    facts = {
        "stdout": str(Path("/proc/self/fd/1").readlink()),
        "stderr": str(Path("/proc/self/fd/2").readlink()),
        "signals": "all" if script.signals_all else "tasks",
    }
    while True:
        attempts = retry_outage(run.attempts)
        last = attempts[-1] if attempts else make_attempt(run, record.job_attempt)
        if last.number >= record.job_attempt and read_end(last) is None and write_claim(last, start, **facts):
            return last
        if find_end(last, record.token) is None:
            close_attempt(last, failed("Slurm has started the job again", goes_on=True), record.token)
        with contextlib.suppress(FileExistsError):
            make_attempt(run, last.number + 1)


def _signals_all_processes() -> bool:
    """Say whether Slurm sends signals to all processes of a task, and not to the task alone."""
    try:
        text = run_slurm(["scontrol", "show", "config"], environ=os.environ)
    except SlurmError:
        return False
    return re.search(r"^ProctrackType\s*=\s*proctrack/linuxproc", text, re.M) is not None


def ask_for(start: JobStart) -> JobNow | None:
    """Ask Slurm for the job; None: it does not answer."""
    try:
        return show_job(start.job_id, os.environ)
    except SlurmError:
        return None


def _ended_by_slurm(start: JobStart, cause: RankEnd | None) -> AttemptEnd | None:
    """Ask why Slurm has sent SIGTERM; None: it does not end the job, or cannot be asked.

    `cause`: the failure of a rank, which tells more where its node is the one that Slurm has lost.
    """
    job = ask_for(start)
    if job is not None and (job.restarts > start.restart_count or job.preempted):
        return failed("the job was " + ("preempted" if job.preempted else "requeued"), host=start.host, goes_on=True)
    if job is None or not job.ends:
        return None
    if job.reason == "TimeLimit":
        return failed("the time limit of the job is reached", host=start.host)
    if job.reason in {"None", ""}:
        return cancelled("the job was cancelled")
    down = down_nodes(os.environ)
    if cause is not None and cause.host in down:
        return failed_by(cause)
    what = f"Slurm ended the job ({job.reason})"
    return failed(f"{', '.join(down)} is down: {what}" if down else what, host=down[0] if down else start.host)
