"""A few of the kills that benchmarks/ssh_kills.py makes by the hundred."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ssh_kill_kinds import (
    BOTH,
    CABLE,
    GUARD,
    LAN,
    LAUNCHER,
    LISTENER,
    POWER,
    RANK,
    SESSION,
    SUPERVISOR,
    Kill,
)
from tests.support.ssh_kills import play_round
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.slow]

KILLS = [
    Kill(victim=RANK, node=1, moment="later", delay_s=0.2),
    Kill(victim=SUPERVISOR, node=0, moment="start", delay_s=0.5),
    Kill(victim=GUARD, node=1, moment="later", delay_s=0.1),
    Kill(victim=BOTH, node=0, moment="later", delay_s=0.1),
    Kill(victim=LAUNCHER, node=0, moment="start", delay_s=1.5),
    Kill(victim=SESSION, node=1, moment="start", delay_s=0.3),
    Kill(victim=LISTENER, node=0, moment="later", delay_s=0.1),
    Kill(victim=POWER, node=0, moment="later", delay_s=0.4),
]


@pytest.fixture(scope="module")
def rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack(LAN) as rack:
        yield rack


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill.victim}-{kill.host}-{kill.moment}")
def test_what_is_killed_leaves_nothing_behind_or_is_borne(rack: Rack, kill: Kill) -> None:
    line, logs = play_round(rack, kill)
    assert line["right"], f"{line}\n{logs}"


def test_a_pulled_cable_ends_a_run_on_both_of_its_ends(rack: Rack) -> None:
    line, logs = play_round(rack, Kill(victim=CABLE, node=0, moment="later", delay_s=0.2), cable_s=0.0)
    assert line["right"], f"{line}\n{logs}"
