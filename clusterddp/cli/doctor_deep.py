"""`doctor --deep`: torch computes on every host of a run, and hosts talk to each other in pairs, in two rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from clusterddp.errors import PreflightError

if TYPE_CHECKING:
    from clusterddp.check.hosts_network import Network
    from clusterddp.check.trials import Ground
    from clusterddp.facts.checks import Check
    from clusterddp.launchers.ssh.preflight import Told
    from clusterddp.launchers.ssh.sessions import Crew
    from clusterddp.planning.plan import Plan


def try_hosts(plan: Plan, crew: Crew, network: Network, told: Told, tell: Callable[[str], None]) -> list[Check]:
    """Try those hosts that have torch and a network in common."""
    from clusterddp.check.links import first_round, judge_trials, second_round
    from clusterddp.check.trials import Tryout
    from clusterddp.facts.checks import Check, note
    from clusterddp.facts.trial import Trials

    if network.settled is None or network.findings is None:
        return [Check(name="all-reduce", results={"here": note("not tried: there is no network for it")})]
    grounds, checks = _grounds(plan, crew, network)
    hosts = [host for host in grounds if host in told.facts and told.facts[host].packages.torch]
    if not hosts:
        return [*checks, Check(name="all-reduce", results={"here": note("not tried: no host has torch")})]
    claims = _claims(network, grounds)
    with_gpus = plan.gang.backend == "nccl" and all(grounds[host].gpus for host in hosts)
    tryout = Tryout(
        sessions=crew.sessions,
        grounds=grounds,
        backend="nccl" if with_gpus else "gloo",
        variables=plan.gang.env | {"OMP_NUM_THREADS": str(plan.gang.threads_per_rank)},
        trials=Trials(),
    )
    tell(f"importing torch on {', '.join(hosts)}")
    for pairs in first_round(hosts):
        tryout.run(pairs)
    for pairs in second_round(tryout.trials, claims):
        tell(f"again: {', '.join(' with '.join(pair) for pair in pairs)}")
        tryout.run(pairs)
    return checks + judge_trials(tryout.trials, claims)


def _grounds(plan: Plan, crew: Crew, network: Network) -> tuple[dict[str, Ground], list[Check]]:
    """Return where each host stands, with GPUs if those that the run asks for are free."""
    from clusterddp.check.trials import Ground
    from clusterddp.facts.checks import Check, note
    from clusterddp.launchers.ssh.gpus import lease_gpus

    assert network.settled is not None
    assert plan.ssh is not None
    by_node = {node.node_rank: node.host for node in plan.gang.nodes if node.node_rank in network.settled.nodes}
    counts = {node.node_rank: node.gpus for node in plan.ssh.hosts if node.node_rank in by_node}
    checks: list[Check] = []
    gpus: dict[int, tuple[str, ...]] = {}
    try:
        sessions = {node_rank: crew.sessions[host] for node_rank, host in by_node.items()}
        grants = lease_gpus(sessions, counts, run="doctor", when_busy="refuse")
        gpus = {node_rank: grant.gpus for node_rank, grant in grants.items()}
    except PreflightError as error:
        checks.append(Check(name="matmul", results={"here": note(f"tried on the CPU only: {error.message}")}))
    grounds = {}
    for node_rank, host in by_node.items():
        place = network.settled.nodes[node_rank]
        grounds[host] = Ground(interface=place.interface, address=place.address, gpus=gpus.get(node_rank, ()))
    return grounds, checks


def _claims(network: Network, grounds: dict[str, Ground]) -> dict[str, float]:
    """Say how many MB/s the interfaces claim to carry, of those that do."""
    assert network.findings is not None
    claims = {}
    for host in network.findings.hosts:
        link = host.link(grounds[host.host].interface or "") if host.host in grounds else None
        if link is not None and link.speed_mbit_per_s and not link.loopback:
            claims[host.host] = link.speed_mbit_per_s / 8
    return claims
