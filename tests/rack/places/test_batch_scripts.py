"""Batch scripts of every kind, by `sbatch` and by `clusterddp submit`: what their ranks see, and what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.batch_outcomes import FIRST_JOB_ID, SIDES, Outcome, Side, differences, make_conda
from tests.support.batch_scripts import Script, all_scripts
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("needs_rack")]

SCRIPTS = {script.name: script for script in all_scripts()}
PAIRS_AT_ONCE = 3
Results = dict[str, "Future[list[Outcome]]"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, needs_rack: None) -> Iterator[Results]:
    """Run the scripts that are asked for, some at once, each by both ways."""
    callspecs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    names = [spec.params["name"] for spec in callspecs if spec.params.get("name") in SCRIPTS]
    with contextlib.ExitStack() as stack:
        racks = {
            confined: stack.enter_context(
                running_rack(RackPlan(first_job_id=FIRST_JOB_ID, debian_hosts=False, **settings))
            )
            for confined, settings in ((False, {}), (True, {"confine": True, "cores_per_host": 2}))
            if any(SCRIPTS[name].confined == confined for name in names)
        }
        for rack in racks.values():
            make_conda(rack.dir / "shared" / "conda")
        pool = stack.enter_context(ThreadPoolExecutor(PAIRS_AT_ONCE))
        yield {name: pool.submit(run, racks[SCRIPTS[name].confined], SCRIPTS[name]) for name in names}
        pool.shutdown(wait=False, cancel_futures=True)


def run(rack: Rack, script: Script) -> list[Outcome]:
    """Run a script by both ways at the same time."""
    sides = [Side(rack=rack, script=script, how=how) for how in SIDES]
    started = [side.start() for side in sides]
    return [side.collect(outcome) for side, outcome in zip(sides, started, strict=True)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_submit_gives_what_sbatch_gives(name: str, results: Results) -> None:
    plain, ours = results[name].result()
    script = SCRIPTS[name]
    assert (set(plain.states) or {"refused"}) == {script.state}, plain
    assert differences(plain, ours, racy=script.racy) == []
