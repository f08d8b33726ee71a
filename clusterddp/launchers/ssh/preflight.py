"""The preflight of a run over SSH: reads facts from its hosts and checks before the upload that the run can start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from clusterddp.errors import PreflightError, SshError
from clusterddp.facts.checks import Needs, Result, reds_of
from clusterddp.facts.judge import judge_hosts
from clusterddp.facts.machine import Machine
from clusterddp.planning.program import TRAINER
from clusterddp.remote.session import Reply, Session
from clusterddp.remote.sessions import ask_all
from clusterddp.spec.image_sets import GENERATED

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.remote.sessions import HostSessions

_TIMEOUT_S = 60.0
"""Long, because nvidia-smi may have to wake every GPU."""


def preflight(plan: Plan, sessions: HostSessions) -> None:
    """Check that the run can start on its hosts; nothing is imported or written there.

    Raises: PreflightError: it cannot start; the message has all red checks with their remedies. SshError: a host does
    not answer.
    """
    facts = ask_hosts(plan, sessions.by_host)
    machines = {}
    for host, machine in facts.items():
        if isinstance(machine, SshError):
            raise machine
        # The lease decides whether GPUs are free: it waits for a run that is ending.
        machines[host] = dataclasses.replace(machine, busy_gpus={})
    raise_reds(plan.name, list(reds_of(judge_hosts(machines, needs_of(plan)))))


def raise_reds(name: str, reds: list[tuple[str, str, Result]]) -> None:
    """Raise one error for all red checks, if there are any."""
    if len(reds) == 1:
        host, check, result = reds[0]
        raise PreflightError(f"{host}: {check}: {result.found}", hint=result.fix)
    if reds:
        lines = [f"{host}: {check}: {result.found}\n    hint: {result.fix}" for host, check, result in reds]
        raise PreflightError("\n  ".join([f"{name} cannot start:", *lines]))


def ask_hosts(plan: Plan, sessions: Mapping[str, Session], *, thorough: bool = False) -> dict[str, Machine | SshError]:
    """Read the facts of all hosts at once; `thorough`: also those that never prevent a start."""
    needs = needs_of(plan)
    data_dir = data_dir_of(plan)

    def question(host: str) -> dict[str, object]:
        has_gpus = needs[host].num_gpus > 0
        asked = {"with_gpus": has_gpus or thorough, "with_driver": has_gpus and thorough}
        return {"variables": plan.gang.env, "data_dir": data_dir, **asked}

    replies = ask_all(sessions, "host.facts", question, timeout_s=_TIMEOUT_S)
    return {host: reply.facts["facts"] if isinstance(reply, Reply) else reply for host, reply in replies.items()}


def needs_of(plan: Plan) -> dict[str, Needs]:
    """Return what the run needs on each of its hosts."""
    assert plan.ssh is not None
    train = plan.spec.get("train") or {}
    counts: dict[str, int] = {}
    for node in plan.ssh.hosts:
        counts[node.host] = counts.get(node.host, 0) + node.gpus
    return {
        host: Needs(
            trainer=plan.gang.entry.target == TRAINER,
            use_gpus=count > 0,
            num_gpus=count,
            nccl=plan.gang.backend == "nccl",
            download=bool(train.get("download", True)),
            sent_bytes=sum(send.bytes for send in plan.ssh.send),
        )
        for host, count in counts.items()
    }


def data_dir_of(plan: Plan) -> str | None:
    """Return the trainer's data directory on the hosts; None if `ssh.send` fills it."""
    train = plan.spec.get("train")
    if plan.gang.entry.target != TRAINER or not train or train["dataset"] in GENERATED or plan.ssh is None:
        return None
    directory = str(train["data_dir"])
    return None if any(_overlap(directory, send.target) for send in plan.ssh.send) else directory


def _overlap(one: str, other: str) -> bool:
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)
