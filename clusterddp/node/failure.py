"""How a rank ended, and how likely its failure is the cause of other ranks' failures.

When one rank of a gang dies the others fail soon after, because they lose the connection to it, and the failure that is
seen first is not always the first one. So each failure has a weight: 0 cannot follow from another rank's failure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from clusterddp.facts.memory import explain_oom_kill
from clusterddp.network.rendezvous.connection import Message
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.attempts import RootCause, loss_of_nodes, one_line, read_error_file, signal_name, spell_end
from clusterddp.run.directory import AttemptDir
from clusterddp.run.gang import Gang, Node
from clusterddp.system.files import read_tail

CERTAIN = 0
"""A signal from outside, a lost node: it does not follow from another rank's end."""
OWN = 1
"""An exception or exit code of the rank's own."""
CONNECTION = 2
"""A connection that broke, perhaps not one to another rank."""
CASCADE = 3
"""A collective that failed because another rank had ended, or did not take part."""

_CONNECTION = re.compile(r"Connection (?:closed|reset|refused|aborted)|Broken pipe|ConnectionError|EOFError", re.I)
# The errors of torch 2.13's gloo, TCPStore and NCCL on the ranks that are left (gloo's and the store's measured here,
# with 4 ranks in an all_reduce loop; NCCL's from nccl.h and ProcessGroupNCCL.cpp).
_CASCADE = re.compile(
    r"gloo[/\\]transport|ncclRemoteError|DistNetworkError|DistStoreError|Connection closed by (?:remote )?peer"
    r"|remote process exit|Watchdog caught collective|NCCL watchdog|(?:recvValue|sendBytes|recvVector) failed"
    r"|failed to recv, got 0 bytes|wait timeout after|Timed out (?:after|waiting)|monitoredBarrier",
    re.I,
)
_LINES = 20
_HEAD = "Traceback (most recent call last):"
_TORCHRUNS = "ChildFailedError"
"""torchrun's own exception, which reports that a rank had one; the rank's is printed before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    exit_code: int
    """As a shell has it: 128 + signal for a rank that a signal ended."""
    signal: str | None = None
    error: str | None = None
    """One line: the exception, or another known cause; None: only the exit code is known."""
    traceback: str | None = None
    """The exception's; where there is none, the last lines of standard error."""
    last_line: str | None = None
    """The last line of its standard error, where it exited with a code and no exception is known."""
    weight: int = OWN
    on_order: bool = False
    """True when it ended after its supervisor had begun to end it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failure that ends the attempt, and its weight as the cause of other failures."""

    cause: RootCause
    weight: int = CERTAIN
    restartable: bool = False
    """True when a restart of the ranks may help: a rank failed, and all supervisors live."""
    job_restartable: bool = False
    """True when another start of the batch job may help: a node is lost."""

    @classmethod
    def at(cls, host: str, error: str, *, rank: int | None = None, **weighed: Any) -> Failure:
        """Return a failure of which only the place and the message are known."""
        return cls(cause=RootCause(rank=rank, host=host, exit_code=None, error=error, log=None), **weighed)


def read_rank_end(
    attempt: AttemptDir, rank: int, returncode: int, *, on_order: bool, oom_kills: int | None = None
) -> RankEnd:
    """Find out how a rank ended from its return code (negative: a signal), its error file and its standard error.

    `oom_kills`: as many processes had the kernel killed for memory when the ranks began.
    """
    if returncode == 0:
        return RankEnd(rank=rank, exit_code=0, on_order=on_order)
    error, traceback = read_error_file(attempt.error_file(rank))
    stderr = read_tail(attempt.stderr(rank))
    name = signal_name(-returncode) if returncode < 0 else None
    weight = _weigh(f"{error}\n{traceback}" if error else "\n".join(stderr.splitlines()[-5:]))
    if name is not None and (name != "SIGABRT" or weight == OWN):
        # Only SIGABRT may come from the process itself, for example from NCCL's watchdog.
        weight = CERTAIN
    if name == "SIGKILL" and not on_order:
        error = explain_oom_kill(oom_kills) or error
    if name == "SIGABRT" and error is None:
        error = one_line(stderr.rpartition("\n")[2]) or None
    last = find_last_line(stderr) if error is None and name is None else None
    return RankEnd(
        rank=rank,
        exit_code=128 - returncode if returncode < 0 else returncode,
        signal=name,
        error=error,
        traceback=last[1] if last else traceback,
        last_line=one_line(last[0]) if last else None,
        weight=weight,
        on_order=on_order,
    )


def failure_of(end: RankEnd, gang: Gang) -> Failure:
    """Return the failure that a rank's end is for the gang."""
    host = gang.node_of(end.rank).host
    who = f"rank {end.rank} on {host}"
    if gang.entry.spawns:
        who = f"the program of {spell_ranks(gang.carried_by([end.rank]))} on {host}"
    what = spell_end(who, end.exit_code, signal=end.signal, error=end.error)
    what += f"; the last line of its stderr: {end.last_line}" if end.last_line else ""
    cause = RootCause(rank=end.rank, host=host, exit_code=end.exit_code, error=what, log=None, traceback=end.traceback)
    return Failure(cause=cause, weight=end.weight, restartable=True)


def reported_failure(gang: Gang, node: Node, report: Message, *, attempt: AttemptDir | None) -> Failure:
    """Return the failure that a node's supervisor reports; one that names a rank may be mended by another job.

    `attempt`: as for `loss_of_nodes`.
    """
    if report["kind"] == "parent_gone" and report["one_node"]:
        what = f"{node.host} lost the command that carries the run"
        cause = loss_of_nodes(gang, gang.nodes, what, attempt=attempt, place=node, whose="")
        return Failure(cause=cause, job_restartable=True)
    if report["kind"] == "parent_gone":
        what = f"the task that carries the run (pid {report['pid']}) was killed"
        cause = loss_of_nodes(gang, gang.nodes, what, attempt=attempt, whose="")
        return Failure(cause=cause, job_restartable=True)
    rank = int(report.get("rank", min(node.ranks)))
    weight, names_rank = int(report["weight"]), "rank" in report
    return Failure.at(node.host, str(report["error"]), rank=rank, weight=weight, job_restartable=names_rank)


def find_last_line(text: str) -> tuple[str, str] | None:
    """Return the most telling line of an output, and the lines around it: a traceback's, or the last ones.

    None where the output is empty.
    """
    lines = [line for line in text.splitlines() if re.search(r"\w", line)]
    if not lines:
        return None
    if any(line.startswith("torch.distributed.elastic") and _TORCHRUNS in line for line in lines):
        tracebacks = [block for block in _tracebacks(text.splitlines()) if _TORCHRUNS not in block[-1]]
        if tracebacks:
            return tracebacks[-1][-1].strip(), "\n".join(tracebacks[-1])
    return lines[-1].strip(), "\n".join(text.splitlines()[-_LINES:])


def _tracebacks(lines: list[str]) -> list[list[str]]:
    """Find the tracebacks, each from its head to the line of its exception.

    torchrun can put `[rank1]: ` before the lines of its ranks.
    """
    found: list[list[str]] = []
    block: list[str] | None = None
    for line in lines:
        own = re.sub(r"^\[[^\]]*\]:? ?", "", line)
        if own.startswith(_HEAD):
            block = [own]
        elif block is not None:
            block.append(own)
            if own and not own.startswith((" ", "\t")):
                found.append(block)
                block = None
    return found


def _weigh(text: str) -> int:
    if _CASCADE.search(text):
        return CASCADE
    return CONNECTION if _CONNECTION.search(text) else OWN
