"""The doctor's questions to the hosts of a spec for SSH: asked all at once, shown as checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clusterddp.errors import ClusterddpError

if TYPE_CHECKING:
    from clusterddp.check.hosts_network import Clock, Network
    from clusterddp.facts.checks import Check, Result
    from clusterddp.launchers.ssh.sessions import Crew
    from clusterddp.planning.plan import Plan
    from clusterddp.spec.load import ResolvedSpec

_Told = TypeVar("_Told")
_RAISE_LOCKED = "memlock unlimited in /etc/security/limits.conf, then log in anew"


def look_at_hosts(
    resolved: ResolvedSpec, runs_dir: Path, environ: Mapping[str, str], *, deep: bool, tell: Callable[[str], None]
) -> tuple[list[Check], list[dict[str, Any]]]:
    """Plan the run, look at its hosts and at what is between them; `deep`: let them compute and talk, too.

    Returns the checks, and all ways between the hosts that were tried.
    """
    from clusterddp.check.hosts import judge_failures, merge
    from clusterddp.check.hosts_network import examine_network
    from clusterddp.facts.checks import Check, ok, red
    from clusterddp.launchers.ssh.sessions import try_crew
    from clusterddp.planning.plan import plan_run

    try:
        plan = plan_run(resolved, runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ)
    except ClusterddpError as error:
        return [Check(name="plan", results={"here": red(error.message, error.hint or "clusterddp submit -n")})], []
    ranks = ", ".join(f"{len(node.ranks)} on {node.host}" for node in plan.gang.nodes)
    checks = [Check(name="plan", results={"here": ok(f"ranks: {ranks}; {plan.gang.backend}")})]
    ways: list[dict[str, Any]] = []
    with try_crew(plan, environ) as crew:
        checks += judge_failures(crew.failed)
        if crew.sessions:
            network = examine_network(plan.gang, crew.sessions)
            checks += _look(plan, crew, network, deep=deep, tell=tell)
            ways = network.findings.rows() if network.findings else []
    return merge(checks), ways


def _look(plan: Plan, crew: Crew, network: Network, *, deep: bool, tell: Callable[[str], None]) -> list[Check]:
    from clusterddp.check.hosts import (
        judge_failures,
        judge_machine_size,
        judge_offset,
        judge_runs,
    )
    from clusterddp.check.hosts_network import look_for_runs, read_clocks
    from clusterddp.facts.checks import Check
    from clusterddp.facts.judge import judge_locked_memory
    from clusterddp.facts.judge_hosts import judge_hosts
    from clusterddp.launchers.ssh.preflight import ask_hosts, needs_of

    told = ask_hosts(plan, crew.sessions, thorough=True)
    needs = needs_of(plan)
    clocks = read_clocks(crew.sessions)
    runs = look_for_runs(crew.sessions)
    checks = [
        *judge_failures(told.failed),
        Check(name="ssh", results=_connections(crew, clocks)),
        Check(name="clock", results={host: judge_offset(clock.offset_s) for host, clock in clocks.items()}),
        *judge_hosts(told.facts, needs, told.gpus),
        Check(name="cores", results=_each(told.facts, judge_machine_size)),
        Check(
            name="locked memory",
            results={
                host: judge_locked_memory(facts.machine, _RAISE_LOCKED, nccl=needs[host].nccl and len(needs) > 1)
                for host, facts in told.facts.items()
            },
        ),
        Check(name="left over", results={host: judge_runs(host, found) for host, found in runs.items()}),
        *_judge_network(plan, network),
    ]
    if deep:
        from clusterddp.cli.doctor_deep import try_hosts

        checks += try_hosts(plan, crew, network, told, tell)
    return checks


def _each(told: Mapping[str, _Told], judge: Callable[[_Told], Result]) -> dict[str, Result]:
    return {host: judge(facts) for host, facts in told.items()}


def _connections(crew: Crew, clocks: Mapping[str, Clock]) -> dict[str, Result]:
    from clusterddp.check.hosts import judge_connection

    results = {}
    for host, session in crew.sessions.items():
        way, clock = session.connection.destination, clocks.get(host)
        jumps = [jump.host for jump in way.jumps]
        round_trip_s = clock.round_trip_s if clock else None
        results[host] = judge_connection(session.connection.key.type, way.user, jumps, round_trip_s)
    return results


def _judge_network(plan: Plan, network: Network) -> list[Check]:
    from clusterddp.check.hosts import judge_network
    from clusterddp.network.explanation import say_shared

    settled, findings = network.settled, network.findings
    if settled is None or findings is None:
        return judge_network(findings, {}, error=network.error)
    chosen = {node.host: settled.nodes[node.node_rank] for node in plan.gang.nodes if node.node_rank in settled.nodes}
    return judge_network(findings, chosen, remarks=[*settled.notes, *say_shared(findings)])
