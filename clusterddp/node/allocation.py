"""Asks Slurm's controller about our job without blocking: each question is a child process, read after its end."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.errors import SlurmError
from clusterddp.node.clock import Clock
from clusterddp.slurm.commands import slurm_environment
from clusterddp.slurm.control import END_TIME, KILL_WAIT_S, JobNow, read_job, read_kill_wait_s, read_time_left_s

PATIENCE_S = 4.0
"""How long the controller may take to answer: its answer mostly decides whether ranks that end are restarted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The controller's answer about the job."""

    job: JobNow | None
    """None: it does not answer, or does not know the job."""
    asked: float
    time_left_s: float | None = None
    """At the time of the question; None: no limit is known."""
    error: str = ""


class Allocation:
    """One job at the controller."""

    def __init__(self, job_id: str, environ: Mapping[str, str], clock: Clock) -> None:
        self.kill_wait_s = KILL_WAIT_S
        self._job_id = job_id
        self._environ = slurm_environment(environ)
        end = environ.get(END_TIME, "")
        self._end_time = float(end) if end.isdecimal() and len(end) <= 12 else None
        self._clock = clock
        self._question: _Command | None = None
        self._config: _Command | None = None
        self._answer: Answer | None = None

    @property
    def asking(self) -> bool:
        return self._question is not None

    def ask(self) -> None:
        """Ask for the job, unless a question is under way."""
        if self._question is not None:
            return
        now = self._clock.now
        try:
            self._question = _Command(["scontrol", "show", "job", "-o", self._job_id], self._environ, now)
        except OSError as error:  # in a container there is no scontrol
            left_s = None if self._end_time is None else self._end_time - time.time()
            self._answer = Answer(job=None, asked=now, time_left_s=left_s, error=str(error))

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Read the answers of the questions among the children that have ended."""
        if self._config is not None and self._config.pid in exits:
            self.kill_wait_s = read_kill_wait_s(self._config.read()[0])
            self._config = None
        question = self._question
        if question is not None and question.pid in exits:
            self._question = None
            out, err = question.read()
            self._answer = _parse_answer(out, err, question.begun)

    def take(self) -> Answer | None:
        """Return the answer to the last question, once."""
        if self._question is not None and self._clock.now - self._question.begun > PATIENCE_S:
            self._question.give_up()
            self._answer = Answer(job=None, asked=self._question.begun, error=f"no answer within {PATIENCE_S:g} s")
            self._question = None
        answer, self._answer = self._answer, None
        return answer

    def ask_config(self) -> None:
        """Ask how Slurm is configured; its defaults count until the answer."""
        try:
            self._config = _Command(["scontrol", "show", "config"], self._environ, self._clock.now)
        except OSError:
            self._config = None


class _Command:
    """One of Slurm's commands under way; the supervisor's loop reaps all children, and reports its end."""

    def __init__(self, argv: list[str], environ: Mapping[str, str], now: float) -> None:
        program = shutil.which(argv[0], path=environ.get("PATH"))
        if program is None:
            raise FileNotFoundError(f"{argv[0]} is not on this host")
        self.begun = now
        self._process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def read(self) -> tuple[str, str]:
        """Return the standard output and error of a command that has ended."""
        self._process.returncode = 0  # the supervisor's loop has reaped it
        streams = (self._process.stdout, self._process.stderr)
        out, err = (stream.read().decode(errors="replace") if stream else "" for stream in streams)
        self._close()
        return out, err

    def give_up(self) -> None:
        """Kill it and ignore its answer."""
        self._process.kill()
        self._process.returncode = 0
        self._close()

    def _close(self) -> None:
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()


def _parse_answer(out: str, err: str, asked: float) -> Answer:
    try:
        return Answer(job=read_job(out), asked=asked, time_left_s=read_time_left_s(out))
    except SlurmError as error:
        return Answer(job=None, asked=asked, error=" ".join(err.split()) or error.message)
