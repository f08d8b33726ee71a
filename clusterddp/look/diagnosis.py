"""What kind of failure a root cause is, by its words, and what helps against that kind."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterddp.run.outcome import RootCause


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The kind of a failure."""

    category: str
    """gpu_memory, memory, storage, time_limit, hang, node_lost, network, data, killed, setup (before any rank ran), or
    code: the program."""
    text: str
    """The category for people."""
    hint: str
    """What helps against it; may be empty."""


_MEMORY = r"lack of memory|OUT_OF_MEMORY|MemoryError|[Cc]annot allocate memory|can't allocate memory|[Oo]ut of memory"
_STORAGE = r"No space left on device|[Dd]isk quota|Read-only file system|Stale file handle|Input/output error"
_TIME = (
    r"time limit|TIME LIMIT|\bTIMEOUT\b|before Slurm takes the job away|Slurm ended the job before|did not stop within"
)
_NETWORK = (
    r"\bgloo\b|\bnccl|\bNCCL|DistNetworkError|DistStoreError|Connection(Error)?:? ?(closed|reset|refused|aborted|timed)"
    r"|ConnectionResetError|ConnectionRefusedError|BrokenPipeError|Broken pipe|[Aa]ddress already in use"
    r"|No route to host|Network is unreachable|Name or service not known|Temporary failure in name resolution"
    r"|socket has timed out|remote process exit|have not joined|did not join|did not reach"
)
_DATA = (
    r"FileNotFoundError|NotADirectoryError|UnidentifiedImageError|BadZipFile|DataLoader worker|cannot read folder"
    r"|data_dir|\bdata set\b|HTTPError|URLError"
)
_KINDS: tuple[tuple[re.Pattern[str], Diagnosis], ...] = tuple(
    (re.compile(pattern), diagnosis)
    for pattern, diagnosis in (
        (
            r"CUDA out of memory|HIP out of memory|CUDA error: out of memory|OutOfMemoryError|ALLOC_FAILED",
            Diagnosis("gpu_memory", "out of GPU memory", "a smaller batch per rank needs less"),
        ),
        (
            _MEMORY,
            Diagnosis("memory", "out of memory", "resources.memory_gb asks Slurm for more; fewer loaders need less"),
        ),
        (_STORAGE, Diagnosis("storage", "storage", "make room, or mend the file system, then go on")),
        (
            r"^hang:|Watchdog caught collective|collective operation timeout|[Tt]imed out waiting|wait timeout after",
            Diagnosis("hang", "a hang", "attempts/N/stacks has where each rank waited"),
        ),
        (_TIME, Diagnosis("time_limit", "time limit", "more resources.time, or restarts, which go on at a checkpoint")),
        (
            r"\bis lost\b|NODE.FAIL|BOOT_FAIL|is cut off|; (its |all )?ranks? .*ended with it",
            Diagnosis("node_lost", "node lost", "restarts: 1 in the spec starts again after a loss"),
        ),
        (_NETWORK, Diagnosis("network", "network", "clusterddp doctor SPEC checks the network between the hosts")),
        (_DATA, Diagnosis("data", "data", "every node needs the files under the same path")),
        (
            r"was killed by SIG(KILL|TERM|HUP|INT|XCPU)\b",
            Diagnosis("killed", "killed from outside", "another process, or the kernel for lack of memory, ended it"),
        ),
    )
)
_SETUP = Diagnosis("setup", "before any rank ran", "clusterddp doctor SPEC checks the machines")
_CODE = Diagnosis("code", "the program", "")


def diagnose(cause: RootCause) -> Diagnosis:
    """Find the kind of a failure: by its own words, then by the exception at the end of its traceback."""
    last_line = (cause.traceback or "").rstrip().rpartition("\n")[2]
    for text in (cause.error, last_line):
        for pattern, diagnosis in _KINDS:
            if pattern.search(text):
                return diagnosis
    return _SETUP if cause.rank is None else _CODE
