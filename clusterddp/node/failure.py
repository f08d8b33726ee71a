"""How a rank ended, in words, and which of several failures is the cause of the others.

When one rank of a gang dies the others fail soon after, for they lose the connection to it, and what is seen first is
not always what came first. So each failure is weighed: what other ranks' failures can hardly bring about weighs most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.ranks.spelling import spell_ranks
from clusterddp.run.directory import AttemptDir
from clusterddp.run.gang import Gang, Node
from clusterddp.run.outcome import RootCause, loss_of_node, signal_name
from clusterddp.system.files import read_tail

CERTAIN = 0
"""A signal from outside, a lost node: no other rank's end brings it about."""
OWN = 1
"""An exception or exit code of the rank's own."""
CONNECTION = 2
"""A connection that broke, though perhaps not one to another rank."""
CASCADE = 3
"""A collective that failed because another rank was gone, or kept waiting."""

_CONNECTION = re.compile(r"Connection (?:closed|reset|refused|aborted)|Broken pipe|ConnectionError|EOFError", re.I)
# What torch 2.13's gloo, TCPStore and NCCL say to the ranks that are left (gloo's and the store's measured here, with 4
# ranks in an all_reduce loop; NCCL's from nccl.h and ProcessGroupNCCL.cpp).
_CASCADE = re.compile(
    r"gloo[/\\]transport|ncclRemoteError|DistNetworkError|DistStoreError|Connection closed by (?:remote )?peer"
    r"|remote process exit|Watchdog caught collective|NCCL watchdog|(?:recvValue|sendBytes|recvVector) failed"
    r"|failed to recv, got 0 bytes|wait timeout after|Timed out (?:after|waiting)|monitoredBarrier",
    re.I,
)
_LINES = 20
_HEAD = "Traceback (most recent call last):"
_TORCHRUNS = "ChildFailedError"
"""torchrun's own exception, which says only that a rank had one; the rank's stands before it."""
_WORDS = 400
_TRACEBACK = 8_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    exit_code: int
    """As a shell would say it: 128 + signal for a rank that a signal ended."""
    signal: str | None = None
    error: str | None = None
    """One line: the exception, or what else is known; None for an exit code without a word."""
    traceback: str | None = None
    """The exception's; where there is none, the last lines of standard error."""
    last_line: str | None = None
    """One line that it said, where it left with an exit code and no exception is known."""
    weight: int = OWN
    on_order: bool = False
    """True when it ended after its supervisor had begun to end it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something that ends the attempt, and what it is worth as the cause of other failures."""

    cause: RootCause
    weight: int = CERTAIN
    restartable: bool = False
    """True when starting the ranks again may help: a rank failed, while all supervisors are well."""
    job_restartable: bool = False
    """True when another start of the job may help, where there is a job: a node is lost."""

    @classmethod
    def at(cls, host: str, error: str, *, rank: int | None = None, **weighed: Any) -> Failure:
        """Return a failure of which nothing is known but where it was seen."""
        return cls(cause=RootCause(rank=rank, host=host, exit_code=None, error=error, log=None), **weighed)


def read_rank_end(attempt: AttemptDir, rank: int, returncode: int, *, on_order: bool) -> RankEnd:
    """Find out how a rank ended from its return code (negative: a signal), its error file and its standard error."""
    if returncode == 0:
        return RankEnd(rank=rank, exit_code=0, on_order=on_order)
    error, traceback = read_error_file(attempt.error_file(rank))
    said = read_tail(attempt.stderr(rank))
    name = signal_name(-returncode) if returncode < 0 else None
    told = f"{error}\n{traceback}" if error else "\n".join(said.splitlines()[-5:])
    weight = _weigh(told)
    if name is not None and (name != "SIGABRT" or weight == OWN):
        # Only SIGABRT is what a library does to its own process, NCCL's watchdog for one.
        weight = CERTAIN
    if name == "SIGABRT" and error is None:
        error = _one_line(said.rpartition("\n")[2]) or None
    words = find_last_line(said) if error is None and name is None else None
    return RankEnd(
        rank=rank,
        exit_code=128 - returncode if returncode < 0 else returncode,
        signal=name,
        error=error,
        traceback=words[1] if words else traceback,
        last_line=_one_line(words[0]) if words else None,
        weight=weight,
        on_order=on_order,
    )


def failure_of(end: RankEnd, gang: Gang) -> Failure:
    """Say what a rank's end means for the gang."""
    host = gang.node_of(end.rank).host
    who = f"rank {end.rank} on {host}"
    if gang.entry.spawns:
        who = f"the program of {spell_ranks(gang.carried_by([end.rank]))} on {host}"
    if end.signal is not None:
        words = f"{who} was killed by {end.signal}" + (f" ({end.error})" if end.error else "")
    elif end.error is not None:
        words = f"{who}: {end.error}"
    else:
        words = f"{who} left with exit code {end.exit_code}"
        words += f"; the last line of its stderr: {end.last_line}" if end.last_line else ""
    cause = RootCause(rank=end.rank, host=host, exit_code=end.exit_code, error=words, log=None, traceback=end.traceback)
    return Failure(cause=cause, weight=end.weight, restartable=True)


def failure_of_nodes(
    gang: Gang, nodes: Sequence[Node], what: str, *, attempt: AttemptDir | None, place: Node | None
) -> Failure:
    """Return the failure of all ranks of `nodes` by something that is no rank's fault, seen at `place` if not there.

    `attempt`: the one whose ranks had started; None: none had.
    """
    ranks, seen = [rank for node in nodes for rank in node.ranks], place or nodes[0]
    cause = loss_of_node(
        what,
        host=seen.host,
        ranks=seen.ranks if place else ranks,
        ranks_in_words=spell_ranks(gang.carried_by(ranks)),
        attempt=attempt,
        whose="its " if len(nodes) < len(gang.nodes) else "",
    )
    return Failure(cause=cause, job_restartable=True)


def read_error_file(path: Path) -> tuple[str | None, str | None]:
    """Read what the rank, or torch's @record, wrote into TORCHELASTIC_ERROR_FILE: the exception, the traceback."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            message: Any = json.loads(file.read(1_000_000))["message"]
        if not isinstance(message, dict):
            return _gist(str(message)), None
        traceback = (message.get("extraInfo") or {}).get("py_callstack")
        return _gist(str(message["message"])), str(traceback)[-_TRACEBACK:] if traceback else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, None


def find_last_line(said: str) -> tuple[str, str] | None:
    """Return the line that says the most, and the lines around it: a traceback's, or the last ones.

    None where nothing was said.
    """
    lines = [line for line in said.splitlines() if re.search(r"\w", line)]
    if not lines:
        return None
    if any(line.startswith("torch.distributed.elastic") and _TORCHRUNS in line for line in lines):
        told = [block for block in _tracebacks(said.splitlines()) if _TORCHRUNS not in block[-1]]
        if told:
            return told[-1][-1].strip(), "\n".join(told[-1])
    return lines[-1].strip(), "\n".join(said.splitlines()[-_LINES:])


def _tracebacks(lines: list[str]) -> list[list[str]]:
    """Find the tracebacks, each from its head to the line of its exception.

    torchrun puts `[rank1]: ` before the lines of its ranks, when it is asked to show them all.
    """
    found: list[list[str]] = []
    block: list[str] | None = None
    for line in lines:
        words = re.sub(r"^\[[^\]]*\]:? ?", "", line)
        if words.startswith(_HEAD):
            block = [words]
        elif block is not None:
            block.append(words)
            if words and not words.startswith((" ", "\t")):
                found.append(block)
                block = None
    return found


def _weigh(told: str) -> int:
    if _CASCADE.search(told):
        return CASCADE
    return CONNECTION if _CONNECTION.search(told) else OWN


def _gist(text: str) -> str:
    """Say in one line what an exception says; of one that carries another process's traceback, how that ends.

    torch.multiprocessing.spawn raises such ones.
    """
    if "Traceback (most recent call last):" not in text:
        return _one_line(text)
    kind = text.strip().partition(":")[0].rpartition(".")[2]
    return _one_line(f"{kind}: {text.strip().splitlines()[-1]}")


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _WORDS else words[: _WORDS - 3] + "..."
