"""Check the hosts of a spec for SSH, all at once: their facts, clocks, runs, and the network between them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.facts.checks import Check, Result, note, ok, red
from clusterddp.facts.judge import (
    CLOCK_NOTE_S,
    judge_clock,
    judge_hosts,
    judge_locked_memory,
)
from clusterddp.facts.machine import Machine
from clusterddp.network.choice import Findings, speed_text
from clusterddp.places.ssh.connections import call_each
from clusterddp.places.ssh.launcher import ask_hosts, needs_of
from clusterddp.places.ssh.network import GangNetwork, examine_network
from clusterddp.places.ssh.session import Session
from clusterddp.places.ssh.sessions import HostSessions, ask_all, errors_of, good_of, open_host_sessions
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, plan_run
from clusterddp.run.gang import Node
from clusterddp.run.leftovers import RunHere
from clusterddp.system.units import format_bytes

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec

_ROUND_TRIPS = 5
_PROCESSES_SHOWN = 5
_RAISE_LOCKED = "memlock unlimited in /etc/security/limits.conf, then log in again"


def check_hosts(
    resolved: ResolvedSpec, runs_dir: Path, environ: Mapping[str, str]
) -> tuple[list[Check], list[dict[str, Any]]]:
    """Plan the run, and check its hosts and the network between them.

    Returns the checks, and all connections between the hosts that were tried.
    """
    try:
        plan = plan_run(resolved, Request(runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ))
    except ClusterddpError as error:
        return [Check(name="plan", results={"here": red(error.message, error.hint or "clusterddp submit -n")})], []
    ranks = ", ".join(f"{len(node.ranks) or 'a spare'} on {node.host}" for node in plan.gang.nodes)
    checks = [Check(name="plan", results={"here": ok(f"ranks: {ranks}; {plan.gang.backend}")})]
    rows: list[dict[str, Any]] = []
    with open_host_sessions(plan, environ, needed="none") as sessions:
        checks += _judge_failures(sessions.failed)
        if sessions.by_host:
            reached = tuple(node for node in plan.gang.nodes if node.host in sessions.by_host)
            network = examine_network(dataclasses.replace(plan.gang, nodes=reached), sessions.by_host)
            checks += _check_reached(plan, sessions, network)
            rows = network.findings.rows() if network.findings else []
    return _merge(checks), rows


def _check_reached(plan: Plan, sessions: HostSessions, network: GangNetwork) -> list[Check]:
    facts = ask_hosts(plan, sessions.by_host, thorough=True)
    needs = needs_of(plan)
    replies = good_of(ask_all(sessions.by_host, "host.list", {"tokens": None}))
    runs: dict[str, list[RunHere]] = {host: reply.facts["runs"] for host, reply in replies.items()}
    machines = good_of(facts)
    clocks = call_each(lambda host: _judge_clock(sessions.by_host[host]), machines)

    def judge_locked(host: str) -> Result:
        return judge_locked_memory(machines[host], _RAISE_LOCKED, nccl=needs[host].nccl and len(needs) > 1)

    return [
        *_judge_failures(errors_of(facts) | errors_of(clocks)),
        Check(name="ssh", results={host: _judge_session(session) for host, session in sessions.by_host.items()}),
        Check(name="clock", results=good_of(clocks)),
        *judge_hosts(machines, needs),
        Check(name="cores", results={host: judge_machine_size(machine) for host, machine in machines.items()}),
        Check(name="locked memory", results={host: judge_locked(host) for host in machines}),
        Check(name="left over", results={host: _judge_runs(host, found) for host, found in runs.items()}),
        *_judge_network(network),
    ]


def _judge_failures(failed: Mapping[str, SshError]) -> list[Check]:
    """Report hosts that do not answer."""
    found: dict[str, dict[str, Result]] = {}
    for host, error in failed.items():
        inside = error.phase in ("start", "ask")
        phase = "" if inside else f"{error.phase}: "
        fix = error.hint or (f"ssh {host} df -h ~; ssh.dir names another directory" if inside else f"ssh -v {host}")
        found.setdefault("agent" if inside else "ssh", {})[host] = red(f"{phase}{error.found}", fix)
    return [Check(name=name, results=results) for name, results in found.items()]


def _judge_session(session: Session) -> Result:
    """Report how a host was reached; `hosts check` measures the round trip."""
    jumps = ", ".join(jump.host for jump in session.destination.jumps)
    through = f" through {jumps}" if jumps else ""
    return ok(f"user {session.destination.user}{through}, {session.key.type} key")


def _judge_clock(session: Session) -> Result:
    """Read the clock of a host by the quickest of a few answers, to half a round trip, and judge it."""
    clocks = []
    for _ in range(_ROUND_TRIPS):
        started, before = time.time(), time.monotonic()
        there = session.ask("beat").facts["time"]
        passed = time.monotonic() - before
        clocks.append((passed, there - (started + passed / 2)))
    return judge_offset(min(clocks)[1])


def judge_offset(offset_s: float) -> Result:
    """Judge the clock of a host against this machine's; no lease or time limit depends on it, so it is never red."""
    if abs(offset_s) < CLOCK_NOTE_S:
        return ok("agrees with the clock here")
    result = judge_clock(-offset_s, "the clock here")
    return note(f"{result.found}: times in logs differ", "timedatectl set-ntp true, or chronyc makestep, there")


def judge_machine_size(machine: Machine) -> Result:
    """Report how much of the machine a process of this user may use."""
    found = f"{machine.cores} cores, {format_bytes(machine.memory_bytes)} memory"
    limits = []
    if machine.cpu_limit is not None and machine.cpu_limit < machine.cores:
        limits.append(f"{machine.cpu_limit:g} cores' worth of time")
    if machine.memory_limit_bytes is not None and machine.memory_limit_bytes < machine.memory_bytes:
        limits.append(format_bytes(machine.memory_limit_bytes))
    if limits:
        return note(f"{found}; the control group allows {' and '.join(limits)}", "systemctl show user-$(id -u).slice")
    return ok(found)


def _judge_runs(host: str, runs: Iterable[RunHere]) -> Result:
    """Report which runs of this user live on a host, and which processes are left over of old ones."""
    left = [run for run in runs if run.answered_by is None]
    others = [run.label for run in runs if run.answered_by is not None]
    beside = f"; {', '.join(others)} runs there" if others else ""
    if not left:
        return ok(f"no orphaned processes{beside}")
    pids = [process.pid for run in left for process in run.processes]
    more = f" and {len(pids) - _PROCESSES_SHOWN} more" if len(pids) > _PROCESSES_SHOWN else ""
    shown = ", ".join(map(str, pids[:_PROCESSES_SHOWN]))
    names = ", ".join(run.label for run in left)
    return note(f"orphaned processes of {names}: pid {shown}{more}{beside}", f"clusterddp gc --hosts {host}")


def _judge_network(network: GangNetwork) -> list[Check]:
    """Report the network between hosts: the interface for each host."""
    findings = network.findings
    if network.error is not None:
        fix = network.error.hint or "clusterddp submit -n shows the plan"
        hosts = [each.host for each in findings.hosts] if findings else ["here"]
        return [Check(name="network", results=dict.fromkeys(hosts, red(network.error.message, fix)))]
    if findings is None or network.gang is None:
        return []
    used = {node.host: _describe(findings, node) for node in network.gang.nodes}
    remarks = [Check(name="network", results={findings.hosts[0].host: note(remark)}) for remark in network.notes]
    return [Check(name="network", results=used), *remarks]


def _describe(findings: Findings, node: Node) -> Result:
    interface = node.interface or ""
    link = next(each for each in findings.hosts if each.host == node.host).link(interface)
    facts = f", {speed_text(link)}, MTU {link.mtu}" if link and not link.loopback else ""
    return ok(f"{interface} {node.address}{facts}: {node.why.partition(';')[0]}")


def _merge(checks: Iterable[Check]) -> list[Check]:
    """Merge checks of one name, unless they have a host in common."""
    found: list[Check] = []
    for check in checks:
        for index, other in enumerate(found):
            if other.name == check.name and not other.results.keys() & check.results.keys():
                found[index] = Check(name=check.name, results={**other.results, **check.results})
                break
        else:
            found.append(check)
    return found
