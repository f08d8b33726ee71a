"""Reads jobs from the output of squeue and sacct, and maps Slurm's state words to phases of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from clusterddp.run.job_tag import tag_of

SEPARATOR = "\x1f"
"""Separates fields. The job's name, which may contain any text, is the last field."""
SQUEUE_FIELDS = ("%A", "%F", "%K", "%T", "%V", "%S", "%e", "%P", "%D", "%N", "%r", "%j")
"""Job, array, task, state, submit, start, end, partition, number of nodes, hosts, reason, name; without widths, so that
squeue cuts no field."""
SACCT_FIELDS = ("JobID", "State", "ExitCode", "Submit", "Start", "End", "Partition", "NNodes", "NodeList", "JobName")


class Phase(Enum):
    """What a state word means for a process that waits for the job."""

    WAITING = "waiting"
    STARTING = "starting"
    """It has its nodes, which are not ready yet."""
    RUNNING = "running"
    ENDING = "ending"
    """Slurm ends its processes, or cleans up after it."""
    ENDED = "ended"
    UNKNOWN = "unknown"
    """A word that is not in `_PHASES`."""


_PHASES = {
    Phase.WAITING: "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT EXPEDITING",
    Phase.STARTING: "CONFIGURING POWER_UP_NODE",
    Phase.RUNNING: "RUNNING SUSPENDED STOPPED SIGNALING RESIZING UPDATE_DB",
    Phase.ENDING: "COMPLETING STAGE_OUT",
    Phase.ENDED: "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY PREEMPTED BOOT_FAIL DEADLINE REVOKED "
    "LAUNCH_FAILED RECONFIG_FAIL",
}
_PHASE_OF_WORD = {word: phase for phase, words in _PHASES.items() for word in words.split()}
_MAX_DIGITS = 18
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job, or one task of a job array, at the time of the query."""

    job_id: str
    """As people write it: `123`, or `123_7` for the task of an array."""
    tag: str
    array_index: int | None
    """None also for the tasks of an array that never started: sacct prints one line for them."""
    state: str
    """Slurm's own word."""
    cancelled_by: int | None = None
    """The uid of `CANCELLED by 0`; None when Slurm prints none."""
    reason: str = ""
    """Why it waits or ended, in Slurm's word; empty where there is none."""
    exit_code: str = ""
    """`3:0`: exit code and signal of the batch script; empty where Slurm prints none."""
    partition: str = ""
    num_nodes: int | None = None
    nodes: str = ""
    """Host list, as Slurm writes it; empty before the job has nodes."""
    submitted: float | None = None
    started: float | None = None
    """For a job that waits: when Slurm expects it to start."""
    ended: float | None = None
    """For a job that runs: when its time limit ends it."""
    source: Literal["squeue", "sacct"]
    twins: tuple[str, ...] = ()
    """Ids of older jobs with the same tag; normally none."""

    @property
    def phase(self) -> Phase:
        return _PHASE_OF_WORD.get(self.state, Phase.UNKNOWN)


def read_squeue(text: str) -> list[Job]:
    """Read clusterddp's jobs in squeue's output; skip lines that do not parse, and names without a tag."""
    jobs = []
    for fields in _rows(text, len(SQUEUE_FIELDS)):
        job_id, array_id, task, state, submitted, started, ended, partition, num_nodes, nodes, reason, name = fields
        tag = tag_of(name)
        if tag is None or not (_is_number(job_id) and _is_number(array_id)) or not state:
            continue
        jobs.append(
            Job(
                job_id=f"{array_id}_{task}" if _is_number(task) else array_id,
                tag=tag,
                array_index=int(task) if _is_number(task) else None,
                state=_word(state),
                reason="" if reason == "None" else reason,
                partition=partition,
                num_nodes=int(num_nodes) if _is_number(num_nodes) else None,
                nodes=nodes,
                submitted=read_time(submitted),
                started=read_time(started),
                ended=read_time(ended),
                source="squeue",
            )
        )
    return jobs


def read_sacct(text: str) -> list[Job]:
    """Read clusterddp's jobs in sacct's output; each start of a requeued job is a job of its own."""
    jobs = []
    for fields in _rows(text, len(SACCT_FIELDS)):
        job_id, state, exit_code, submitted, started, ended, partition, num_nodes, nodes, name = fields
        tag = tag_of(name)
        number, _, task = job_id.partition("_")
        if tag is None or not _is_number(number) or not state:
            continue
        by = re.search(r" by (\d{1,10})\b", state)
        jobs.append(
            Job(
                job_id=job_id if _is_number(task) else number,
                tag=tag,
                array_index=int(task) if _is_number(task) else None,
                state=_word(state),
                cancelled_by=int(by[1]) if by else None,
                exit_code=exit_code,
                partition=partition,
                num_nodes=int(num_nodes) if _is_number(num_nodes) else None,
                nodes="" if nodes == "None assigned" else nodes,
                submitted=read_time(submitted),
                started=read_time(started),
                ended=read_time(ended),
                source="sacct",
            )
        )
    return jobs


def read_time(text: str) -> float | None:
    """Read a local time, as seconds since the epoch; None for N/A, Unknown and the like."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = map(int, match.groups())
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MAX_DIGITS


def _word(state: str) -> str:
    """`CANCELLED by 0` and `cancelled+` are CANCELLED."""
    return state.split(maxsplit=1)[0].rstrip("+").upper()


def _rows(text: str, num_fields: int) -> Iterator[list[str]]:
    for line in text.split("\n"):
        fields = line.split(SEPARATOR, num_fields - 1)
        if len(fields) == num_fields:
            yield [*(field.strip() for field in fields[:-1]), fields[-1]]
