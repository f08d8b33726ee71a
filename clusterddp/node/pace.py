"""How fast each rank is, by when it entered the collectives of the last steps: the others wait for the last one.

Ranks number their collectives alike. Their clocks may differ: a node's is corrected by the times of a question and its
answer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Entered = Mapping[int, tuple[int, float]]
"""By the number of a collective: what it is, and when a rank entered it, in seconds of the head's clock."""
_FEWEST_STEPS = 3
_MUCH_LONGER = 3.0
_OUTLIERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The steps of all ranks; empty where too little is known."""

    period_s: float | None = None
    """Seconds of a step."""
    late_s: dict[int, float] = field(default_factory=dict)
    """By rank: how much later than the median of the others it enters collectives, where that is most."""
    step_s: dict[int, float] = field(default_factory=dict)
    """By rank: a step without its waiting for others."""


def pace_of_collectives(entered: Mapping[int, Entered], period_s: float | None) -> Pace:
    """Judge by the collectives that all ranks have entered; `period_s`: of a step, where that is known."""
    if len(entered) < 2:
        return Pace(period_s=period_s)
    first, *others = entered.values()
    numbers = sorted(n for n in first if all(n in each and each[n][0] == first[n][0] for each in others))
    places: dict[int, list[int]] = {}
    for number in numbers:
        places.setdefault(first[number][0], []).append(number)
    places = {kind: found for kind, found in places.items() if len(found) >= _FEWEST_STEPS}
    if not places:
        return Pace(period_s=period_s)
    if period_s is None:
        # The last rank to enter does not wait: its times have no pauses but between steps.
        times = {number: max(each[number][1] for each in entered.values()) for number in numbers}
        kinds = [[times[number] for number in found] for found in places.values()]
        period_s = _period(list(times.values()), kinds)
        if period_s is None:
            return Pace()
    late = dict.fromkeys(entered, 0.0)
    for found in places.values():
        for rank, late_s in _lateness([{rank: each[number][1] for rank, each in entered.items()} for number in found]):
            late[rank] = max(late[rank], late_s)
    return _pace(period_s, {rank: min(late_s, period_s) for rank, late_s in late.items()})


def pace_of_own_steps(own_s: Mapping[int, float], period_s: float | None) -> Pace:
    """Judge by what the program measures itself: a step without waiting, of each rank."""
    ((_, slowest_s),) = sorted(own_s.items(), key=lambda each: each[1])[-1:]
    return Pace(period_s=max(slowest_s, period_s or 0.0), late_s=dict(_lateness([own_s])), step_s=dict(own_s))


def _period(times: Sequence[float], kinds: Sequence[Sequence[float]]) -> float | None:
    """Return the time from one step to the next; None: it is not known, as where a clock was set back.

    `times`: of all collectives; `kinds`: of those of each kind. Kinds that come equally often come once a step, such as
    buckets of gradients of different sizes. Otherwise steps are parted by long gaps. Where several numbers of steps are
    possible, as one of the kinds comes every so many steps, the gaps decide, too.
    """
    gaps = [after - before for before, after in itertools.pairwise(times)]
    long_s = _long_gap(gaps)
    begins = [after for gap, after in zip(gaps, times[1:], strict=True) if gap > long_s]
    by_gaps_s = max(0.0, _distance(begins)) if len(begins) >= _FEWEST_STEPS else 0.0
    alike: list[list[Sequence[float]]] = []
    for found in sorted(kinds, key=len):
        if alike and len(found) - len(alike[-1][0]) <= 1:  # one more or less at the ends of what is known
            alike[-1].append(found)
        else:
            alike.append([found])
    distances = [statistics.median(map(_distance, group)) for group in alike if len(group) > 1]
    periods = [period_s for period_s in distances if period_s > 0]  # not of kinds that come several times at once
    if not periods:
        return by_gaps_s or min((each for each in map(_distance, kinds) if each > 0), default=None)
    if not by_gaps_s:
        return periods[-1]
    return min(periods, key=lambda period_s: max(period_s / by_gaps_s, by_gaps_s / period_s))


def _distance(times: Sequence[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def _long_gap(gaps: Sequence[float]) -> float:
    """Return what parts gaps into short and long ones, where the long ones are much longer; infinite: they are alike.

    The two means differ most there (Otsu's method). The longest ones are left out: an evaluation, a checkpoint.
    """
    in_order = sorted(gaps)[:-_OUTLIERS]
    total, below, best, found = sum(in_order), 0.0, 0.0, float("inf")
    for count, gap in enumerate(in_order[:-1], start=1):
        below += gap
        short, long = below / count, (total - below) / (len(in_order) - count)
        apart = count * (len(in_order) - count) * (long - short) ** 2
        if apart > best:
            best, found = apart, gap if long >= _MUCH_LONGER * short else float("inf")
    return found


def _pace(period_s: float, late_s: dict[int, float]) -> Pace:
    latest_s = max(late_s.values())
    return Pace(
        period_s=period_s,
        late_s=late_s,
        step_s={rank: max(0.0, period_s - latest_s + each) for rank, each in late_s.items()},
    )


def _lateness(samples: Sequence[Mapping[int, float]]) -> list[tuple[int, float]]:
    """Return how much later, or longer, than the median of the others each rank is, in the median of the samples."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        in_order = sorted(sample.items(), key=lambda each: each[1])
        for place, (rank, value) in enumerate(in_order):
            found.setdefault(rank, []).append(value - _median_without(in_order, place))
    return [(rank, statistics.median(each)) for rank, each in found.items()]


def _median_without(in_order: Sequence[tuple[int, float]], place: int) -> float:
    """Return the median of sorted values but the one at `place`; there are two values at least."""
    count = len(in_order) - 1
    low, high = ((middle + (middle >= place)) for middle in ((count - 1) // 2, count // 2))
    return (in_order[low][1] + in_order[high][1]) / 2
