"""Trials of hosts over SSH: each computes, and communicates with one other host, by torch as ranks of a run do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.check.links import PairTrial, Trials, first_round, judge_trials, second_round
from clusterddp.errors import PreflightError, SshError
from clusterddp.facts.checks import Check, note
from clusterddp.facts.machine import Machine
from clusterddp.launchers.ssh.gpus import lease_gpus
from clusterddp.launchers.ssh.network import GangNetwork
from clusterddp.launchers.ssh.sessions import HostSessions
from clusterddp.network.paths import Findings
from clusterddp.ssh.fan import AT_ONCE, Fan
from clusterddp.ssh.session import Session

_START_S = 60.0
"""How long importing torch and computing may take."""
_LINK_S = 15.0
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialHost:
    """The interface, address and GPUs of a host in a trial."""

    interface: str | None
    address: str
    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES; none: it computes on the CPU."""


def try_hosts(
    sessions: HostSessions, network: GangNetwork, machines: Mapping[str, Machine], report: Callable[[str], None]
) -> list[Check]:
    """Let the hosts that have torch and a common network compute and communicate, in pairs, in two rounds."""
    if network.chosen is None or network.findings is None:
        return [Check(name="all-reduce", results={"here": note("not tried: there is no network for it")})]
    trial_hosts, checks = _prepare_hosts(sessions, network)
    hosts = [host for host in trial_hosts if host in machines and _has_torch(machines[host])]
    if not hosts:
        return [*checks, Check(name="all-reduce", results={"here": note("not tried: no host has torch")})]
    plan, claims = sessions.plan, _claims(network.findings, trial_hosts)
    with_gpus = plan.gang.backend == "nccl" and all(trial_hosts[host].gpus for host in hosts)
    tryout = _Tryout(
        sessions=sessions.by_host,
        hosts=trial_hosts,
        backend="nccl" if with_gpus else "gloo",
        variables=plan.gang.env | {"OMP_NUM_THREADS": str(plan.gang.threads_per_rank)},
        trials=Trials(),
    )
    report(f"importing torch on {', '.join(hosts)}")
    for pairs in first_round(hosts):
        tryout.run(pairs)
    for pairs in second_round(tryout.trials, claims):
        report(f"again: {', '.join(' with '.join(pair) for pair in pairs)}")
        tryout.run(pairs)
    return checks + judge_trials(tryout.trials, claims)


def _has_torch(machine: Machine) -> bool:
    return machine.torch is not None and machine.torch.version is not None


def _prepare_hosts(sessions: HostSessions, network: GangNetwork) -> tuple[dict[str, TrialHost], list[Check]]:
    """Choose the interface and GPUs of each host; GPUs only if those of the run are free."""
    plan = sessions.plan
    assert network.chosen is not None
    assert plan.ssh is not None
    by_node = {node.node_rank: node.host for node in plan.gang.nodes if node.node_rank in network.chosen.nodes}
    counts = {node.node_rank: node.gpus for node in plan.ssh.hosts if node.node_rank in by_node}
    checks: list[Check] = []
    gpus: dict[int, tuple[str, ...]] = {}
    try:
        needed = {node_rank: sessions.by_host[host] for node_rank, host in by_node.items()}
        grants = lease_gpus(needed, counts, run="doctor", when_busy="refuse")
        gpus = {node_rank: grant.gpus for node_rank, grant in grants.items()}
    except PreflightError as error:
        checks.append(Check(name="matmul", results={"here": note(f"tried on the CPU only: {error.message}")}))
    hosts = {}
    for node_rank, host in by_node.items():
        node = network.chosen.nodes[node_rank]
        hosts[host] = TrialHost(interface=node.interface, address=node.address, gpus=gpus.get(node_rank, ()))
    return hosts, checks


def _claims(findings: Findings, trial_hosts: Mapping[str, TrialHost]) -> dict[str, float]:
    """Return the nominal MB/s of the interfaces that report one."""
    claims = {}
    for host in findings.hosts:
        link = host.link(trial_hosts[host.host].interface or "") if host.host in trial_hosts else None
        if link is not None and link.speed_mbit_per_s and not link.loopback:
            claims[host.host] = link.speed_mbit_per_s / 8
    return claims


@dataclass(kw_only=True)
class _Tryout:
    """Runs trials on hosts and keeps their results."""

    sessions: Mapping[str, Session]
    hosts: Mapping[str, TrialHost]
    backend: str
    variables: Mapping[str, str]
    trials: Trials

    def run(self, pairs: Iterable[tuple[str, ...]]) -> None:
        """Try these pairs at the same time, of which no two have a host in common; a single host only computes."""
        for pair_trial in Fan(list(pairs), self._try, lambda result: None).results(AT_ONCE).values():
            if pair_trial is not None:
                self.trials.pairs.append(pair_trial)

    def _try(self, hosts: tuple[str, ...]) -> PairTrial | None:
        processes = [_TrialProcess(self.sessions[host], self.trials) for host in hosts]
        try:
            for rank, process in enumerate(processes):
                process.start(self._order(hosts, rank), self._variables(process.host))
            if len(processes) == 1:
                processes[0].await_report("compute", _START_S)
                return None
            return self._measure_link(processes[0], processes[1])
        except (SshError, _TrialError) as error:
            reason = error.found if isinstance(error, SshError) else str(error)
            if len(hosts) == 1:
                self.trials.failed[hosts[0]] = reason
                return None
            return PairTrial(hosts=(hosts[0], hosts[1]), error=reason)
        finally:
            for process in processes:
                with contextlib.suppress(SshError):
                    process.session.ask("trial.stop")

    def _measure_link(self, first: _TrialProcess, second: _TrialProcess) -> PairTrial:
        port = first.await_report("port", _START_S)
        second.send({"port": port})
        links = [process.await_report("link", _START_S + _LINK_S) for process in (first, second)]
        return PairTrial(
            hosts=(first.host, second.host),
            mbyte_per_s=min(link["mbyte_per_s"] for link in links),
            latency_ms=max(link["latency_ms"] for link in links),
        )

    def _order(self, hosts: Sequence[str], rank: int) -> dict[str, Any]:
        address = self.hosts[hosts[0]].address
        pair = {"rank": rank, "address": address, "timeout_s": _LINK_S} if len(hosts) > 1 else None
        host = hosts[rank]
        return {
            "compute": host not in self.trials.compute_ms,
            "gpus": len(self.hosts[host].gpus),
            "pair": pair,
            "backend": self.backend,
        }

    def _variables(self, host: str) -> dict[str, str]:
        trial_host = self.hosts[host]
        found = {"CUDA_VISIBLE_DEVICES": ",".join(trial_host.gpus)}
        if trial_host.interface:
            found["GLOO_SOCKET_IFNAME"] = trial_host.interface
            if not trial_host.interface.startswith("lo"):
                found["NCCL_SOCKET_IFNAME"] = f"={trial_host.interface}"
        return found | dict(self.variables)


class _TrialError(Exception):
    """A trial has failed; the message has the reason."""


class _TrialProcess:
    """One host of a trial."""

    def __init__(self, session: Session, trials: Trials) -> None:
        self.session = session
        self.host = session.host
        self._trials = trials
        self._reports: dict[str, Any] = {}

    def start(self, order: dict[str, Any], variables: dict[str, str]) -> None:
        self.session.ask("trial.start", {"order": order, "variables": variables})

    def send(self, message: dict[str, Any]) -> None:
        self.session.ask("trial.send", {"message": message})

    def await_report(self, name: str, within_s: float) -> Any:
        """Wait for the host's report of this name.

        Raises: _TrialError, SshError.
        """
        deadline = time.monotonic() + within_s
        while name not in self._reports:
            if time.monotonic() > deadline:
                raise _TrialError(f"{self.host}: no {name} within {within_s:.0f} s")
            answer = self.session.ask("trial.read", {"wait_s": _POLL_S}).facts
            for report in answer["reports"]:
                self._reports |= report
            if "compute" in self._reports:
                self._trials.compute_ms[self.host] = self._reports["compute"]
            if "error" in self._reports:
                raise _TrialError(f"{self.host}: {self._reports['error']}")
            if answer["ended"] is not None and name not in self._reports:
                raise _TrialError(f"{self.host}: {answer['ended']}")
        return self._reports[name]
