"""The GPUs of a run over SSH: leased on all hosts or on none, waited for in line where the spec says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from clusterddp.errors import PreflightError, SshError
from clusterddp.planning.local import GpusInUseError
from clusterddp.ssh.session import Reply, Session, ask_all
from clusterddp.system.gpu_lease import spell_busy

_LEASE_TIMEOUT_S = 60.0
"""Two calls of nvidia-smi, each of which may have to wake every GPU."""
ENDING_S = 3.0
"""How long a run that has ended may take until its last process, and with it the lease on its GPUs, is gone."""
_FEW_HINT = "ssh.hosts says how many GPUs each host is to give: {host: gpu09, gpus: 4}"
_FIRST_POLL_S = 0.2
_MAX_POLL_S = 10.0
_BEAT_S = 30.0
"""How often the hosts that need not be asked hear that their launcher lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """What a node was given; its session holds it until its supervisor does."""

    gpus: tuple[str, ...]
    """For CUDA_VISIBLE_DEVICES."""
    hold: tuple[int, ...]
    """For the supervisor's order: descriptors of the agent that the supervisor inherits."""


def lease_gpus(
    sessions: Mapping[int, Session],
    counts: Mapping[int, int],
    *,
    run: str,
    when_busy: Literal["refuse", "wait"],
    tell: Callable[[str], object] = lambda words: None,
) -> dict[int, Grant]:
    """Lease GPUs for every node (`sessions` and `counts` by node rank); `tell` is told what is waited for.

    Machines are asked one after the other, in an order that is the same for all submits, so no two of them wait for
    each other. The caller closes the sessions when it fails, and with them goes what was leased.
    Raises: PreflightError: GPUs are in use, with their users; hosts have too few. SshError: one does not answer.
    """
    wanted = {node: sessions[node] for node in sorted(sessions) if counts.get(node)}
    grants = {node: Grant(gpus=(), hold=()) for node in sessions}
    deadline = time.monotonic() + ENDING_S
    while (busy := _look(run, wanted, counts)) and when_busy == "refuse":
        if time.monotonic() > deadline:
            raise _refusal(run, busy)
        time.sleep(_FIRST_POLL_S)
    for machine in sorted({_machine(session) for session in wanted.values()}):
        nodes = [node for node in wanted if _machine(wanted[node]) == machine]
        for node in nodes:
            others = {each.host: each for each in sessions.values() if each is not wanted[node]}
            asked = {"count": counts[node], "run": run, "when_busy": when_busy}
            grants[node] = _lease(wanted[node], asked, others, tell)
        for node in nodes:  # a machine with two names is had as a whole before anybody else's turn comes
            if when_busy == "wait":
                wanted[node].ask("gpus.leave_line")
    return grants


def _look(run: str, sessions: Mapping[int, Session], counts: Mapping[int, int]) -> dict[str, str]:
    """Have all hosts look at their GPUs at once; host -> who uses them, of hosts with too few that are free.

    Each needs its nvidia-smi, which takes longer than everything else; what they lease next relies on what they see.
    Raises: PreflightError: hosts have too few, whoever uses them.
    """
    wanted: dict[str, int] = {}
    for node, session in sessions.items():
        wanted[session.host] = wanted.get(session.host, 0) + counts[node]
    answers = ask_all({each.host: each for each in sessions.values()}, "gpus.look", timeout_s=_LEASE_TIMEOUT_S)
    busy, few = {}, []
    for host, answer in answers.items():
        if isinstance(answer, SshError):
            raise answer
        gpus, users = answer.facts["gpus"], answer.facts["busy"]
        if len(gpus) < wanted[host]:
            few.append(f"{host}: {wanted[host]} are asked for, and it shows {len(gpus)}{answer.facts['because']}")
        elif len(gpus) - len(users) < wanted[host]:
            busy[host] = spell_busy(users)
    if few:
        raise PreflightError("\n".join([f"{run}: too few GPUs", *few]), hint=_FEW_HINT)
    return busy


def _lease(
    session: Session, asked: Mapping[str, Any], others: Mapping[str, Session], tell: Callable[[str], object]
) -> Grant:
    """Lease the GPUs of one node; wait for them if `asked` says so."""
    interval, told = _FIRST_POLL_S, ""
    last_beat = begun = time.monotonic()
    while True:
        answer = session.ask("gpus.lease", asked, timeout_s=_LEASE_TIMEOUT_S).facts
        if answer["gpus"] is not None:
            return Grant(gpus=tuple(answer["gpus"]), hold=tuple(answer["hold"]))
        if asked["when_busy"] == "refuse" and time.monotonic() > begun + ENDING_S:
            raise _refusal(str(asked["run"]), {session.host: spell_busy(answer["busy"])})
        words = _spell_wait(session.host, int(asked["count"]), answer)
        if words != told and asked["when_busy"] == "wait":
            tell(words)
            told = words
        time.sleep(interval)
        interval = min(_MAX_POLL_S, interval * 1.2)
        if time.monotonic() - last_beat > _BEAT_S:
            _beat(others)
            last_beat = time.monotonic()


def _beat(sessions: Mapping[str, Session]) -> None:
    for answer in ask_all(sessions, "beat").values():
        if not isinstance(answer, Reply):
            raise answer


def _spell_wait(host: str, count: int, answer: Mapping[str, Any]) -> str:
    needs = f"waiting for {count} GPU{'' if count == 1 else 's'} of {host}"
    if answer["ahead"]:
        return f"{needs}, in line after {', '.join(answer['ahead'])}"
    return f"{needs}: {spell_busy(answer['busy'])}"


def _refusal(run: str, busy: Mapping[str, str]) -> GpusInUseError:
    users = "\n".join(f"{host}: {words}" for host, words in busy.items())
    return GpusInUseError(f"{run}: GPUs are in use\n{users}", hint="ssh.when_busy=wait waits in line for them")


def _machine(session: Session) -> tuple[str, str]:
    """Identify the machine, whichever of its names was used to reach it."""
    return str(session.hello["hostname"]), str(session.hello["boot_id"])
