"""Every error that clusterddp raises on purpose, and the exit code that the command ends with.

ClusterddpError            1  our own error, or the machine's (disk full, directory not writable)
|-- UsageError             2  the command line is invalid
|-- SpecError              2  the spec, an override or a profile is wrong; carries every problem found
|-- PreflightError         3  the machines are not ready: too few GPUs, a host that does not answer
|   |-- SlurmError         3  a command of Slurm failed, or could not reach the controller (`transient`)
|   |-- NetworkError       3  no network connects all hosts
|   `-- SshError           3  a host cannot be reached, has another host key, or refuses the login (`phase`)
|-- RunNotFoundError       4  no run of that name
|-- RunFailedError         5  the run that was waited for failed
|   `-- RankError          5  the function of a rank raised an exception (`rank`, `host`, `traceback`)
`-- RunCancelledError      6  the run that was waited for was cancelled
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_MAX_OF_HOST = 2000
"""Characters of an error that a host sends, which may be any text."""


class ClusterddpError(Exception):
    """An error whose message is for the user: where, what was found, what was expected; `hint` says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without a call of `__init__`, whose arguments are not `args`: a process pool hands errors on."""
        return _unpickled, (type(self), self.args), self.__dict__

    def __str__(self) -> str:
        """Return message and hint: a traceback, and a log, show no other text."""
        return f"{self.message}; hint: {self.hint}" if self.hint else self.message


def _unpickled(kind: type[ClusterddpError], args: tuple[Any, ...]) -> ClusterddpError:
    return kind.__new__(kind, *args)


class UsageError(ClusterddpError):
    """The command line is invalid."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem in a spec.

    `line` and `column` count from 1; they are None for a value that is not from a file. `source` is then its origin,
    such as `train.lr=x (command line)`.
    """

    source: str
    message: str
    key: str = ""
    line: int | None = None
    column: int | None = None
    source_line: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"
        hint = f"\n    hint: {self.hint}" if self.hint else ""
        return f"{place}  {f'{self.key}: ' if self.key else ''}{self.message}{hint}"


NOT_SUBMITTED = "nothing was submitted"


class SpecError(ClusterddpError):
    """The spec is wrong; `problems` has every problem, in the order of the file."""

    exit_code = 2

    def __init__(self, problems: tuple[Problem, ...], result: str = NOT_SUBMITTED) -> None:
        sources = ", ".join(dict.fromkeys(problem.source for problem in problems))
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{sources} has {count}{result and ', '}{result}")
        self.problems = problems
        self.result = result

    def __str__(self) -> str:
        """Return every problem with its hint, a line each."""
        return "\n".join([self.message, *(f"  {problem}" for problem in self.problems)])


class PreflightError(ClusterddpError):
    """The machines are not ready for the spec."""

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
    """The hosts found no network that connects all of them."""


SshPhase = Literal["resolve", "connect", "host key", "authentication", "start", "ask"]


class SshError(PreflightError):
    """A connection to `host` failed in `phase`; `ask`: a request over the open connection failed.

    `dropped`: the host closed the connection, so a retry may succeed.
    """

    def __init__(
        self, host: str, phase: SshPhase, found: str, *, hint: str | None = None, dropped: bool = False
    ) -> None:
        found, hint = found[:_MAX_OF_HOST], hint and hint[:_MAX_OF_HOST]
        super().__init__(f"{host}: {phase}: {found}", hint=hint)
        self.host = host
        self.phase = phase
        self.found = found
        self.dropped = dropped


class NonsenseError(SshError):
    """The answer of a host's agent is invalid."""

    def __init__(self, host: str, what: str) -> None:
        super().__init__(host, "ask", f"the answer of its agent is invalid: {what}", dropped=True)


class RunNotFoundError(ClusterddpError):
    """No run of that name in the runs directory."""

    exit_code = 4


class RunFailedError(ClusterddpError):
    """The run that was waited for failed."""

    exit_code = 5


class RankError(RunFailedError):
    """The function that a rank called raised an exception; `traceback` is the rank's own, as text."""

    def __init__(self, run: str, rank: int, host: str, traceback: str) -> None:
        last_line = traceback.rstrip().rpartition("\n")[2]
        super().__init__(f"{run}: rank {rank} on {host}: {last_line}\n\n{traceback.rstrip()}")
        self.rank = rank
        self.host = host
        self.traceback = traceback


class RunCancelledError(ClusterddpError):
    """The run that was waited for was cancelled."""

    exit_code = 6
