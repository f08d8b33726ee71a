"""The GPUs of a run over SSH: leased on all hosts or on none; with `when_busy: wait` the run queues for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from clusterddp.errors import PreflightError, SshError
from clusterddp.planning.local import GpusInUseError
from clusterddp.ssh.session import Reply, Session
from clusterddp.ssh.sessions import ask_all
from clusterddp.system.gpu_lease import ENDING_S, spell_busy

_LEASE_TIMEOUT_S = 60.0
"""Enough for two calls of nvidia-smi, each of which may have to wake every GPU."""
_FEW_HINT = "ssh.hosts says how many GPUs each host is to give: {host: gpu09, gpus: 4}"
_FIRST_POLL_S = 0.2
_MAX_POLL_S = 10.0
_HEARTBEAT_INTERVAL_S = 30.0
"""How often to send heartbeats to the other hosts while one host is polled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """The leased GPUs of a node; the session holds the leases until the supervisor does."""

    gpus: tuple[str, ...]
    """For CUDA_VISIBLE_DEVICES."""
    hold: tuple[int, ...]
    """For the supervisor's order: descriptors that it inherits from the agent."""


def lease_gpus(
    sessions: Mapping[int, Session],
    counts: Mapping[int, int],
    *,
    run: str,
    when_busy: Literal["refuse", "wait"],
    report: Callable[[str], object] = lambda message: None,
) -> dict[int, Grant]:
    """Lease GPUs for every node (`sessions` and `counts` by node rank); `report` receives what the run waits for.

    All submits ask the machines in the same order, one after the other, so no two submits wait for each other. After an
    error the caller closes the sessions, which ends the leases.
    Raises: PreflightError: GPUs are in use (the message names their users), or hosts have too few. SshError: a host
    does not answer.
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
            grants[node] = _lease(wanted[node], asked, others, report)
        for node in nodes:  # only after all nodes of a machine with two names have their leases
            if when_busy == "wait":
                wanted[node].ask("gpus.leave_line")
    return grants


def _look(run: str, sessions: Mapping[int, Session], counts: Mapping[int, int]) -> dict[str, str]:
    """Have all hosts list their GPUs at once; return host -> users, for hosts with too few free GPUs.

    Each host runs nvidia-smi, the slowest step; the leases that follow use its result.
    Raises: PreflightError: hosts have too few GPUs, free or not.
    """
    wanted: dict[str, int] = {}
    for node, session in sessions.items():
        wanted[session.host] = wanted.get(session.host, 0) + counts[node]
    replies = ask_all({each.host: each for each in sessions.values()}, "gpus.look", timeout_s=_LEASE_TIMEOUT_S)
    busy, few = {}, []
    for host, reply in replies.items():
        if isinstance(reply, SshError):
            raise reply
        gpus, users = reply.facts["gpus"], reply.facts["busy"]
        if len(gpus) < wanted[host]:
            few.append(f"{host}: {wanted[host]} are asked for, and it has {len(gpus)}{reply.facts['because']}")
        elif len(gpus) - len(users) < wanted[host]:
            busy[host] = spell_busy(users)
    if few:
        raise PreflightError("\n".join([f"{run}: too few GPUs", *few]), hint=_FEW_HINT)
    return busy


def _lease(
    session: Session, asked: Mapping[str, Any], others: Mapping[str, Session], report: Callable[[str], object]
) -> Grant:
    """Lease the GPUs of one node; with `when_busy: wait` in `asked`, wait for them."""
    interval, last_message = _FIRST_POLL_S, ""
    last_heartbeat = begun = time.monotonic()
    while True:
        answer = session.ask("gpus.lease", asked, timeout_s=_LEASE_TIMEOUT_S).facts
        if answer["gpus"] is not None:
            return Grant(gpus=tuple(answer["gpus"]), hold=tuple(answer["hold"]))
        if asked["when_busy"] == "refuse" and time.monotonic() > begun + ENDING_S:
            raise _refusal(str(asked["run"]), {session.host: spell_busy(answer["busy"])})
        message = _describe_wait(session.host, int(asked["count"]), answer)
        if message != last_message and asked["when_busy"] == "wait":
            report(message)
            last_message = message
        time.sleep(interval)
        interval = min(_MAX_POLL_S, interval * 1.2)
        if time.monotonic() - last_heartbeat > _HEARTBEAT_INTERVAL_S:
            _send_heartbeats(others)
            last_heartbeat = time.monotonic()


def _send_heartbeats(sessions: Mapping[str, Session]) -> None:
    for answer in ask_all(sessions, "beat").values():
        if not isinstance(answer, Reply):
            raise answer


def _describe_wait(host: str, count: int, answer: Mapping[str, Any]) -> str:
    needs = f"waiting for {count} GPU{'' if count == 1 else 's'} of {host}"
    if answer["ahead"]:
        return f"{needs}, in line after {', '.join(answer['ahead'])}"
    return f"{needs}: {spell_busy(answer['busy'])}"


def _refusal(run: str, busy: Mapping[str, str]) -> GpusInUseError:
    lines = "\n".join(f"{host}: {users}" for host, users in busy.items())
    return GpusInUseError(f"{run}: GPUs are in use\n{lines}", hint="ssh.when_busy=wait waits in line for them")


def _machine(session: Session) -> tuple[str, str]:
    """Identify the machine independently of the name that was used to reach it."""
    return str(session.hello["hostname"]), str(session.hello["boot_id"])
