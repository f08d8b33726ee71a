"""The live processes of runs on this machine: which are supervised, and the end of those that are not.

It finds this user's processes by the cookie in the environment that they were started with, or by their mark.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import COOKIE
from clusterddp.run.cleanup import Cleanup, hash_token, is_supervising, read_cookie, read_mark
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.system.files import read_json
from clusterddp.system.processes import (
    Process,
    find_carriers,
    find_descendants,
    read_command,
    read_environment,
    read_owner,
    read_process,
)

END_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProcess:
    """One process of a run."""

    pid: int
    role: str
    """`task`, `s2`, `g2`, `n2`: the role in its cookie (cleanup.py)."""
    age_s: float
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHere:
    """The live processes of one run on this machine."""

    token: str = dataclasses.field(repr=False)
    """Its hash (cleanup.py) where neither a cookie nor a record here has it."""
    run: str | None
    """Its name; None if neither its processes nor a record here has it."""
    processes: tuple[RunProcess, ...]
    gpus: tuple[str, ...]
    """The GPUs in CUDA_VISIBLE_DEVICES of its ranks."""
    answered_by: str | None
    """The processes that will end these, for people; None: they are left over."""
    unmarked: tuple[int, ...] = ()
    """If they are left over: pids of their descendants without a cookie or a mark."""

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.run or f"run {self.token[:8]}"

    @property
    def age_s(self) -> float:
        return max(process.age_s for process in self.processes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The result of ending the left-over processes of one run."""

    token: str = dataclasses.field(repr=False)
    ended: int
    left: tuple[str, ...] = ()
    """Processes that could not be killed: pid and command."""
    answered_by: str | None = None
    """The processes that supervise the run now; then the rest of it was not touched."""


def find_runs(records: Iterable[Path] = (), *, only: Collection[str] | None = None) -> list[RunHere]:
    """Find this user's live runs on this machine, the oldest first; `only`: those with these tokens.

    `records`: directories of runs, which are searched for the name of a run if its processes do not have it.
    """
    ours = _own_ancestors()
    found = [_describe(token, family, ours) for token, family in _find_families(only).items()]
    named = _read_names(records, {hash_token(run.token) for run in found if run.run is None})
    runs = []
    for run in found:
        token, name = named.get(hash_token(run.token), (run.token, run.run))
        runs.append(dataclasses.replace(run, token=token, run=name))
    return sorted(runs, key=lambda run: -run.age_s)


def end_left_over(token: str, *, timeout_s: float = END_TIMEOUT_S) -> Ended:
    """Kill every process of a run that is not supervised."""
    ours = _own_ancestors()

    def answered_by(found: Collection[Process]) -> str | None:
        return _answered_by([_carrier(process) for process in found], ours)

    cleanup = Cleanup(cookies=(f"{token}.",), answered_by=answered_by)
    cleanup.run(timeout_s)
    left = cleanup.left if cleanup.answer is None else []
    ended = len(cleanup.killed.difference(cleanup.left))
    return Ended(token=token, ended=ended, left=tuple(map(_spell_left, left)), answered_by=cleanup.answer)


@dataclass(frozen=True, slots=True)
class _Carrier:
    """A live process, and the environment that it was started with."""

    process: Process
    environment: dict[str, str]
    cookie: str

    @property
    def token(self) -> str:
        """That of the run, without the step."""
        return self.cookie.partition(".")[0]

    @property
    def role(self) -> str:
        return self.cookie.rpartition(".")[2]


def _carrier(process: Process) -> _Carrier:
    return _Carrier(process, read_environment(process.pid), read_cookie(process))


def _find_families(only: Collection[str] | None) -> dict[str, list[_Carrier]]:
    """Find this user's live processes that carry a cookie or a mark, by token."""
    tokens = {hash_token(token): token for token in only or ()}

    def wanted(cookie: str) -> bool:
        token, _, role = cookie.partition(".")
        return bool(token and role) and (only is None or hash_token(token) in tokens)

    found = map(_carrier, find_carriers(COOKIE, wanted, uid=os.getuid(), otherwise=read_mark))
    carriers = [carrier for carrier in found if wanted(carrier.cookie)]  # others have ended meanwhile
    tokens |= {hash_token(each.token): each.token for each in carriers if not each.token.startswith("#")}
    families: dict[str, list[_Carrier]] = {}
    for carrier in carriers:
        families.setdefault(tokens.get(hash_token(carrier.token), carrier.token), []).append(carrier)
    return families


def _describe(token: str, family: list[_Carrier], ours: Collection[int]) -> RunHere:
    answered_by = _answered_by(family, ours)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    processes = [
        RunProcess(
            pid=carrier.process.pid,
            role=carrier.role,
            age_s=round(max(0.0, now - carrier.process.started), 1),
            command=" ".join(read_command(carrier.process.pid)),
        )
        for carrier in family
    ]
    return RunHere(
        token=token,
        run=_name(token, family),
        processes=tuple(sorted(processes, key=lambda process: (-process.age_s, process.pid))),
        gpus=_gpus(family),
        answered_by=answered_by,
        unmarked=() if answered_by else _unmarked(family),
    )


def _answered_by(family: list[_Carrier], ours: Collection[int]) -> str | None:
    """Name the processes that will end a run's processes on this machine."""
    if any(carrier.process.pid in ours for carrier in family):
        return "this command, which was started inside the run"
    supervising = [_spell(carrier) for carrier in family if is_supervising(carrier.process)]
    if supervising:
        return ", ".join(supervising)
    for ancestor in (ancestor for carrier in family for ancestor in _ancestors(carrier.process)):
        # Slurm ends the processes of its steps, also a step of a rank on a host without a supervisor.
        if "".join(read_command(ancestor.pid)[:1]).startswith("slurmstepd"):
            return f"Slurm (slurmstepd {ancestor.pid})"
    return None


def _spell(carrier: _Carrier) -> str:
    word = {"s": "supervisor", "g": "guard"}.get(carrier.role[:1], carrier.role)
    return f"{word} {carrier.process.pid}"


def _spell_left(pid: int) -> str:
    command = " ".join(read_command(pid))
    return f"{pid} ({command[:60]})" if command else str(pid)


def _own_ancestors() -> set[int]:
    """Return the pids of this process and its ancestors: a command that runs inside a run must not end that run."""
    me = read_process(os.getpid())
    return {me.pid, *(process.pid for process in _ancestors(me))}


def _ancestors(process: Process) -> Iterator[Process]:
    while process.parent:
        try:
            process = read_process(process.parent)
        except (OSError, ValueError):
            return
        yield process


def _gpus(family: list[_Carrier]) -> tuple[str, ...]:
    lists = [each.environment.get("CUDA_VISIBLE_DEVICES", "") for each in family if each.role.startswith("n")]
    gpus = {gpu for text in lists for gpu in text.split(",") if gpu}
    return tuple(sorted(gpus, key=lambda gpu: (len(gpu), gpu)))


def _unmarked(family: list[_Carrier]) -> tuple[int, ...]:
    """Find the descendants of a run's processes that carry no cookie or mark, neither this run's nor another's."""
    known = {carrier.process.pid for carrier in family}
    others = [process for pid, process in find_descendants(known).items() if pid not in known]
    return tuple(sorted(process.pid for process in others if _is_ours_unmarked(process)))


def _is_ours_unmarked(process: Process) -> bool:
    try:
        return read_owner(process.pid) == os.getuid() and not read_cookie(process)
    except (OSError, ValueError):
        return False


def _name(token: str, family: list[_Carrier]) -> str | None:
    """Find the name of a run in the environment of its ranks, or by the working directory of its supervisors."""
    for carrier in family:
        if name := carrier.environment.get("CLUSTERDDP_RUN"):
            return name
    for carrier in family:
        try:
            launcher_dir = Path(f"/proc/{carrier.process.pid}/cwd").readlink()
        except OSError:
            continue
        for _, name in _read_name(launcher_dir.parent, {hash_token(token)}).values():
            return name
    return None


def _read_names(records: Iterable[Path], hashes: set[str]) -> dict[str, tuple[str, str]]:
    names: dict[str, tuple[str, str]] = {}
    for directory in records if hashes else ():
        for run in list_runs(directory):
            names |= _read_name(run.path, hashes)
    return names


def _read_name(folder: Path, hashes: set[str]) -> dict[str, tuple[str, str]]:
    """Read the token and the name of the run in a directory, by the hash of its token, if that is among these."""
    try:
        record = read_json(RunDir(folder).record) or {}
        token, name = str(record["token"]), str(record["run"])
    except (ClusterddpError, OSError, KeyError, TypeError):
        return {}
    return {hash_token(token): (token, name)} if hash_token(token) in hashes else {}
