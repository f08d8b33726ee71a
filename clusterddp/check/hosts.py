"""What is good to know of the hosts of a run, beside what decides (facts/judge_hosts.py): one value for each check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from clusterddp.errors import ClusterddpError, SshError
from clusterddp.facts.checks import Check, Result, note, ok, red
from clusterddp.facts.host import HostFacts
from clusterddp.facts.judge import CLOCK_NOTE_S, judge_clock, size
from clusterddp.network.explanation import speed_words
from clusterddp.network.interface import is_loopback
from clusterddp.network.paths import Findings
from clusterddp.run.leftovers import RunHere

_ROUND_TRIPS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_SLOW_ROUND_TRIP_MS = 200
_PROCESSES_SHOWN = 5


def judge_failures(failed: Mapping[str, SshError]) -> list[Check]:
    """Tell of hosts that cannot be asked."""
    found: dict[str, dict[str, Result]] = {}
    for host, error in failed.items():
        inside = error.phase in ("start", "ask")
        phase = "" if inside else f"{error.phase}: "
        fix = error.hint or (f"ssh {host} df -h ~; ssh.dir names another directory" if inside else f"ssh -v {host}")
        found.setdefault("agent" if inside else "ssh", {})[host] = red(f"{phase}{error.found}", fix)
    return [Check(name=name, results=results) for name, results in found.items()]


def judge_connection(key_type: str, user: str, jumps: Sequence[str], round_trip_s: float | None) -> Result:
    """Tell how a host was reached."""
    way = f" through {', '.join(jumps)}" if jumps else ""
    words = f"user {user}{way}, {key_type} key"
    if round_trip_s is None:
        return note(f"{words}; it does not tell the time")
    round_trip_ms = 1000 * round_trip_s
    least = next((limit for limit in _ROUND_TRIPS_MS if round_trip_ms <= limit), None)
    spelled = f"round trip {f'under {least}' if least else f'{round_trip_ms:.0f}'} ms"
    if round_trip_ms > _SLOW_ROUND_TRIP_MS:
        return note(f"{words}, {spelled}: the submit takes a while, the run itself does not wait for it")
    return ok(f"{words}, {spelled}")


def judge_offset(offset_s: float) -> Result:
    """Judge the clock of a host against ours; leases and time limits do not go by it, so it never keeps a run back."""
    if abs(offset_s) < CLOCK_NOTE_S:
        return ok("agrees with the clock here")
    result = judge_clock(-offset_s, "the clock here")
    return note(f"{result.found}: times in logs differ", "timedatectl set-ntp true, or chronyc makestep, there")


def judge_machine_size(facts: HostFacts) -> Result:
    """Tell how much of the machine a process of ours may use."""
    machine = facts.machine
    words = f"{machine.cores} cores, {size(machine.memory_bytes)} memory"
    limits = []
    if machine.cpu_limit is not None and machine.cpu_limit < machine.cores:
        limits.append(f"{machine.cpu_limit:g} cores' worth of time")
    if machine.memory_limit_bytes is not None and machine.memory_limit_bytes < machine.memory_bytes:
        limits.append(size(machine.memory_limit_bytes))
    if limits:
        return note(f"{words}; the control group allows {' and '.join(limits)}", "systemctl show user-$(id -u).slice")
    return ok(words)


def judge_runs(host: str, runs: Iterable[RunHere]) -> Result:
    """Tell which runs of this user live on a host, and what is left over of old ones."""
    left = [run for run in runs if run.answered_by is None]
    others = [run.label for run in runs if run.answered_by is not None]
    beside = f"; {', '.join(others)} runs there" if others else ""
    if not left:
        return ok(f"nothing is left over{beside}")
    pids = [process.pid for run in left for process in run.processes]
    more = f" and {len(pids) - _PROCESSES_SHOWN} more" if len(pids) > _PROCESSES_SHOWN else ""
    shown = ", ".join(map(str, pids[:_PROCESSES_SHOWN]))
    names = ", ".join(run.label for run in left)
    return note(f"left over of {names}: pid {shown}{more}{beside}", f"clusterddp gc --hosts {host}")


def judge_network(
    findings: Findings | None,
    chosen: Mapping[str, tuple[str, str, str]],
    *,
    remarks: Sequence[str] = (),
    error: ClusterddpError | None = None,
) -> list[Check]:
    """Tell of the network between hosts; `chosen`: host -> interface, address, why, if anything carries the run."""
    checks = []
    if findings is not None:
        names = {host.host: _judge_own_name(host.own_addresses) for host in findings.hosts}
        checks.append(Check(name="own name", results=names))
    if error is not None:
        fix = error.hint or "clusterddp submit -n shows the plan"
        hosts = [each.host for each in findings.hosts] if findings else ["here"]
        return [*checks, Check(name="network", results=dict.fromkeys(hosts, red(error.message, fix)))]
    if findings is None or not chosen:
        return checks
    used = {host.host: _describe(findings, host.host, chosen[host.host]) for host in findings.hosts}
    checks.append(Check(name="network", results=used))
    first = findings.hosts[0].host
    return checks + [Check(name="network", results={first: note(remark)}) for remark in remarks]


def _describe(findings: Findings, host: str, chosen: tuple[str, str, str]) -> Result:
    interface, address, why = chosen
    told = next(each for each in findings.hosts if each.host == host)
    link = told.link(interface)
    facts = f", {speed_words(link)}, MTU {link.mtu}" if link and not link.loopback else ""
    return ok(f"{interface} {address}{facts}: {why.partition(';')[0]}")


def _judge_own_name(addresses: tuple[str, ...] | None) -> Result:
    if addresses is None:
        return note("looking it up takes more than a second", "resolvectl status there: is its name server gone?")
    if not addresses:
        return note("does not resolve there", "a line with the host's real address in its /etc/hosts")
    words = ", ".join(addresses)
    if all(map(is_loopback, addresses)):
        return note(
            f"is {words} there: ranks are told addresses instead, but a script that binds to its host name reaches "
            "nobody",
            "the host's real address in its /etc/hosts",
        )
    return ok(f"is {words}")


def merge(checks: Iterable[Check]) -> list[Check]:
    """Put checks of one name together, unless they tell of the same host."""
    found: list[Check] = []
    for check in checks:
        for index, other in enumerate(found):
            if other.name == check.name and not other.results.keys() & check.results.keys():
                found[index] = Check(name=check.name, results={**other.results, **check.results})
                break
        else:
            found.append(check)
    return found
