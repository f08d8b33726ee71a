"""What a run over SSH asks its hosts before anything is sent: the questions that decide whether it can start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterddp.errors import PreflightError, SshError
from clusterddp.facts.checks import Result
from clusterddp.facts.host import HostFacts
from clusterddp.facts.judge_hosts import HostGpus, HostNeeds, judge_hosts, reds_of
from clusterddp.planning.program import TRAINER
from clusterddp.spec.image_sets import GENERATED
from clusterddp.ssh.session import Reply, Session, ask_all

if TYPE_CHECKING:
    from clusterddp.launchers.ssh.sessions import Crew
    from clusterddp.planning.plan import Plan

_GPU_TIMEOUT_S = 60.0
"""nvidia-smi may have to wake every GPU first."""


@dataclass(kw_only=True)
class Told:
    """What hosts have told; those that could not are in `failed`."""

    facts: dict[str, HostFacts]
    gpus: dict[str, HostGpus] = field(default_factory=dict)
    failed: dict[str, SshError] = field(default_factory=dict)


def preflight(plan: Plan, crew: Crew) -> None:
    """Look whether the run can start on its hosts; nothing is imported or written there.

    Raises: PreflightError: it cannot, with everything that is in the way and what mends it. SshError: a host does not
    answer.
    """
    told = ask_hosts(plan, crew.sessions)
    for error in told.failed.values():
        raise error
    # Who has the GPUs is settled when they are leased: one that is just ending may be waited for.
    gpus = {host: HostGpus(gpus=has.gpus, busy={}) for host, has in told.gpus.items()}
    raise_reds(plan.name, list(reds_of(judge_hosts(told.facts, needs_of(plan), gpus))))


def raise_reds(name: str, reds: list[tuple[str, str, Result]]) -> None:
    """Raise one error for everything that keeps a run from starting, if anything does."""
    if len(reds) == 1:
        host, check, result = reds[0]
        raise PreflightError(f"{host}: {check}: {result.found}", hint=result.fix)
    if reds:
        lines = [f"{host}: {check}: {result.found}\n    hint: {result.fix}" for host, check, result in reds]
        raise PreflightError("\n  ".join([f"{name} cannot start:", *lines]))


def ask_hosts(plan: Plan, sessions: Mapping[str, Session], *, thorough: bool = False) -> Told:
    """Ask hosts for their facts, all at once; `thorough`: with what tells something and decides nothing."""
    needs = needs_of(plan)
    data_dir = data_dir_of(plan)

    def question(host: str) -> dict[str, object]:
        with_driver = thorough and needs[host].gpus > 0
        return {"variables": plan.gang.env, "data_dir": data_dir, "with_driver": with_driver}

    told = Told(facts={})
    for host, reply in ask_all(sessions, "facts.machine", question).items():
        if isinstance(reply, Reply):
            told.facts[host] = reply.facts["facts"]
        else:
            told.failed[host] = reply
    with_gpus = {host: sessions[host] for host in told.facts if needs[host].gpus or thorough}
    for host, reply in ask_all(with_gpus, "gpus.look", timeout_s=_GPU_TIMEOUT_S).items():
        if isinstance(reply, Reply):
            told.gpus[host] = HostGpus(gpus=tuple(reply.facts["gpus"]), busy=reply.facts["busy"])
        else:
            told.failed[host] = reply
    return told


def needs_of(plan: Plan) -> dict[str, HostNeeds]:
    """Return what the run asks of each of its hosts."""
    assert plan.ssh is not None
    train = plan.spec.get("train") or {}
    counts: dict[str, int] = {}
    for node in plan.ssh.hosts:
        counts[node.host] = counts.get(node.host, 0) + node.gpus
    return {
        host: HostNeeds(
            trainer=plan.gang.entry.target == TRAINER,
            gpus=count,
            nccl=plan.gang.backend == "nccl",
            download=bool(train.get("download", True)),
            sent_bytes=sum(send.bytes for send in plan.ssh.send),
            waits=plan.ssh.when_busy == "wait",
        )
        for host, count in counts.items()
    }


def data_dir_of(plan: Plan) -> str | None:
    """Return the directory on the hosts that the trainer reads its data from, unless it is sent there."""
    train = plan.spec.get("train")
    if plan.gang.entry.target != TRAINER or not train or train["dataset"] in GENERATED or plan.ssh is None:
        return None
    directory = str(train["data_dir"])
    return None if any(_overlap(directory, send.target) for send in plan.ssh.send) else directory


def _overlap(one: str, other: str) -> bool:
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)
