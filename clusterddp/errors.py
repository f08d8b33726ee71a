"""Every error that clusterddp raises on purpose, and the exit code that the command ends with.

ClusterddpError            1  our own error, or the machine's (disk full, directory not writable)
|-- UsageError             2  the command line asks for something that makes no sense
|-- SpecError              2  the spec, an override or a profile is wrong; carries every problem found
|-- PreflightError         3  the machines are not ready: too few GPUs, a host that does not answer
|   |-- SlurmError         3  a command of Slurm failed, or could not ask the controller (`transient`)
|   |-- NetworkError       3  the hosts do not reach each other as a gang must
|   `-- SshError           3  a host cannot be reached, is not who it should be, or does not let us in (`phase`)
|-- RunNotFoundError       4  no run of that name
|-- RunFailedError         5  the run that was waited for failed
`-- RunCancelledError      6  the run that was waited for was cancelled
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class ClusterddpError(Exception):
    """An error whose message is for the user: where, what was found, what was expected; `hint` says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ClusterddpError):
    """The command line asks for something that makes no sense."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong in a spec.

    `line` and `column` count from 1 and are None for a value that did not come from a file; `source` is then the
    origin, for example `train.lr=x (command line)`.
    """

    source: str
    message: str
    key: str = ""
    line: int | None = None
    column: int | None = None
    source_line: str | None = None
    hint: str | None = None


class SpecError(ClusterddpError):
    """The spec is wrong; `problems` holds every problem that was found, in the order of the file."""

    exit_code = 2

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        sources = ", ".join(dict.fromkeys(problem.source for problem in problems))
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{sources} has {count}, nothing was submitted")
        self.problems = problems


class PreflightError(ClusterddpError):
    """The machines are not ready for what the spec asks."""

    exit_code = 3


SlurmReason = Literal["no command", "cannot run", "no cluster", "accounting disabled", "unknown job"]


class SlurmError(PreflightError):
    """A command of Slurm failed.

    `transient`: Slurm did not answer, so it is unknown whether it did what was asked. `reason`: the cause, where a
    caller acts on it.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, transient: bool, reason: SlurmReason | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.transient = transient
        self.reason = reason


class NetworkError(PreflightError):
    """No network carries the gang, as far as its hosts could find out."""


SshPhase = Literal["resolve", "connect", "host key", "authentication", "start", "ask"]


class SshError(PreflightError):
    """A connection to `host` failed in `phase`, `ask`: what was asked of it when it was there.

    `dropped`: the host hung up, so another try may go through.
    """

    def __init__(
        self, host: str, phase: SshPhase, found: str, *, hint: str | None = None, dropped: bool = False
    ) -> None:
        super().__init__(f"{host}: {phase}: {found}", hint=hint)
        self.host = host
        self.phase = phase
        self.found = found
        self.dropped = dropped


class NonsenseError(SshError):
    """What a host's agent has answered cannot be."""

    def __init__(self, host: str, what: str) -> None:
        super().__init__(host, "ask", f"its agent's answer makes no sense: {what}", dropped=True)


class RunNotFoundError(ClusterddpError):
    """No run of that name in the runs directory."""

    exit_code = 4


class RunFailedError(ClusterddpError):
    """The run that was waited for failed."""

    exit_code = 5


class RunCancelledError(ClusterddpError):
    """The run that was waited for was cancelled."""

    exit_code = 6
