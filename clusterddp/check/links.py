"""Find bad hosts and links by trials of pairs: every host in a first round, doubtful ones again in a second round.

A pair that fails, or is slow, does not show which of the two hosts is at fault. In the second round each of them is
paired with a good host. Source: DLRover, NetworkCheckRendezvousManager.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clusterddp.facts.checks import Check, Result, note, ok, red

_STRAGGLER = 1.5
"""Times the median: a slower host is named."""
_SLOW = 2.0
"""Times slower than the best pair: doubtful. Shared switches and busy cores make less of a difference."""
_LEAST_OF_CLAIM = 0.1
"""Part of the interfaces' nominal speed, below which a pair is doubtful even without another to compare it with."""
_FIX = "cable, port, switch? ethtool IFACE and ip -s link show errors and speed; iperf3 measures between the two"

Pair = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairTrial:
    """An all-reduce of two hosts, and how it went."""

    hosts: tuple[str, str]
    mbyte_per_s: float | None = None
    latency_ms: float | None = None
    error: str | None = None
    """Why it failed."""


@dataclass(kw_only=True, slots=True)
class Trials:
    """The results of all trials."""

    pairs: list[PairTrial] = field(default_factory=list)
    compute_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """Host -> device -> time of one product of matrices."""
    failed: dict[str, str] = field(default_factory=dict)
    """Hosts whose torch could not compute at all -> why."""


def first_round(hosts: Sequence[str]) -> list[list[Pair]]:
    """Pair neighbours, all at once; of an odd number the last one is paired with the first one afterwards."""
    if len(hosts) == 1:
        return [[(hosts[0],)]]
    pairs = [(hosts[index], hosts[index + 1]) for index in range(0, len(hosts) - 1, 2)]
    return [list(pairs), [(hosts[-1], hosts[0])]] if len(hosts) % 2 else [list(pairs)]


def second_round(trials: Trials, claims: Mapping[str, float]) -> list[list[Pair]]:
    """Pair each doubtful host with a good one; no host is twice in one of the lists."""
    doubtful = _doubtful(trials, claims)
    good = _good_hosts(trials, doubtful)
    suspects = list(dict.fromkeys(host for each in doubtful for host in each.hosts if host not in good))
    tried = {frozenset(each.hosts) for each in trials.pairs}
    waves: list[list[Pair]] = []
    for index, suspect in enumerate(suspects):
        partners = [host for host in good if frozenset((suspect, host)) not in tried]
        if not partners:
            continue
        pair = (partners[index % len(partners)], suspect)
        wave = next((wave for wave in waves if not {host for each in wave for host in each} & set(pair)), None)
        if wave is None:
            waves.append([pair])
        else:
            wave.append(pair)
    return waves


def judge_trials(trials: Trials, claims: Mapping[str, float]) -> list[Check]:
    """Judge how fast each host communicates and computes; `claims`: host -> nominal MB/s of its interface."""
    checks = [
        Check(name="torch", results={host: red(found, "python -c 'import torch' there")})
        for host, found in trials.failed.items()
    ]
    talking = _judge_hosts(trials, claims) if trials.pairs else {}
    if talking:
        checks.append(Check(name="all-reduce", results=talking))
    checks += [
        Check(name="link", results={" - ".join(each.hosts): _judge_link(each, claims)})
        for each in _doubtful(trials, claims)
        if not set(each.hosts) & _bad_hosts(trials, _doubtful(trials, claims))
    ]
    if trials.compute_ms:
        checks.append(Check(name="matmul", results=_judge_compute(trials.compute_ms)))
    return checks


def _judge_hosts(trials: Trials, claims: Mapping[str, float]) -> dict[str, Result]:
    """Judge the hosts whose own pairs show whether they are good or bad."""
    doubtful = _doubtful(trials, claims)
    results = {}
    for host in dict.fromkeys(host for each in trials.pairs for host in each.hosts):
        own = [each for each in trials.pairs if host in each.hosts]
        fine = [each for each in own if each not in doubtful]
        found = "; ".join(f"with {_other(each, host)} {_spell(each)}" for each in fine or own)
        if fine:
            results[host] = ok(found)
        elif host in _bad_hosts(trials, doubtful):
            failed = all(each.error is not None for each in own)
            results[host] = (
                red(found, _FIX) if failed else note(f"slow with each of them: {found}{_best_text(trials)}", _FIX)
            )
    return results


def _judge_link(pair: PairTrial, claims: Mapping[str, float]) -> Result:
    if pair.error is not None:
        return red(pair.error, _FIX)
    claim = min((claims[host] for host in pair.hosts if host in claims), default=None)
    against = f"; the interfaces are rated for {claim:.0f} MB/s" if claim else ""
    return note(f"slow: {_spell(pair)}{against}", _FIX)


def _judge_compute(compute_ms: Mapping[str, Mapping[str, float]]) -> dict[str, Result]:
    """Compare the slowest device of each host with the median of all hosts."""
    slowest = {host: max(times.values()) for host, times in compute_ms.items()}
    median = statistics.median_low(list(slowest.values()))
    results = {}
    for host, times in compute_ms.items():
        device = max(times, key=times.__getitem__)
        found = f"{times[device]:.1f} ms on {device}"
        if times[device] > _STRAGGLER * median:
            found += f", {times[device] / median:.1f} times the median: all ranks wait for it"
            results[host] = note(found, "what else runs there? nvidia-smi -q -d CLOCK,TEMPERATURE; top")
        else:
            results[host] = ok(found)
    return results


def _doubtful(trials: Trials, claims: Mapping[str, float]) -> list[PairTrial]:
    best = _best(trials)

    def is_slow(pair: PairTrial) -> bool:
        claim = min((claims[host] for host in pair.hosts if host in claims), default=0.0)
        least = max(best / _SLOW, claim * _LEAST_OF_CLAIM)
        return pair.mbyte_per_s is None or pair.mbyte_per_s < least

    return [each for each in trials.pairs if is_slow(each)]


def _good_hosts(trials: Trials, doubtful: Iterable[PairTrial]) -> list[str]:
    """List the hosts of good pairs."""
    fine = [each for each in trials.pairs if each not in list(doubtful)]
    return list(dict.fromkeys(host for each in fine for host in each.hosts))


def _bad_hosts(trials: Trials, doubtful: Sequence[PairTrial]) -> set[str]:
    """Return the hosts that are bad with more than one other; with one other, the link may be at fault."""
    good = _good_hosts(trials, doubtful)
    hosts = {host for each in doubtful for host in each.hosts if host not in good}
    return {host for host in hosts if sum(host in each.hosts for each in trials.pairs) > 1}


def _best(trials: Trials) -> float:
    return max((each.mbyte_per_s for each in trials.pairs if each.mbyte_per_s is not None), default=0.0)


def _best_text(trials: Trials) -> str:
    best = _best(trials)
    return f"; the best pair does {best:.0f} MB/s" if best else ""


def _other(pair: PairTrial, host: str) -> str:
    return pair.hosts[1] if host == pair.hosts[0] else pair.hosts[0]


def _spell(pair: PairTrial) -> str:
    return pair.error or f"{pair.mbyte_per_s:.0f} MB/s, {pair.latency_ms:.2g} ms"
