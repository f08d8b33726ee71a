"""Batch scripts of every kind, by `sbatch`, by `clusterddp submit` and without Slurm: what ranks see, what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.batch_outcomes import (
    FIRST_JOB_ID,
    SIDES,
    Outcome,
    Side,
    differences,
    differences_without_slurm,
    make_conda,
)
from tests.support.batch_scripts import NEEDS_SLURM, Script, all_scripts
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("needs_rack")]

SCRIPTS = {script.name: script for script in all_scripts()}
AT_ONCE = 3
STAND_INS_ARE = " 22.05."
"""The Slurm whose variables the stand-ins set: later ones have more."""
Results = dict[str, "Future[dict[str, Outcome]]"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, needs_rack: None) -> Iterator[Results]:
    """Run the scripts that are asked for, some at once, each by all ways."""
    callspecs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    names = dict.fromkeys(spec.params["name"] for spec in callspecs if spec.params.get("name") in SCRIPTS)
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
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        yield {name: pool.submit(run, racks[SCRIPTS[name].confined], SCRIPTS[name]) for name in names}
        pool.shutdown(wait=False, cancel_futures=True)


def run(rack: Rack, script: Script) -> dict[str, Outcome]:
    """Run a script by all ways at the same time."""
    release = rack.run(HEAD, ["sbatch", "--version"]).stdout
    hows = SIDES if script.name not in NEEDS_SLURM and STAND_INS_ARE in release else SIDES[:2]
    sides = [Side(rack=rack, script=script, how=how) for how in hows]
    started = [side.start() for side in sides]
    return {side.how: side.collect(outcome) for side, outcome in zip(sides, started, strict=True)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_submit_gives_what_sbatch_gives(name: str, results: Results) -> None:
    outcomes = results[name].result()
    script, plain = SCRIPTS[name], outcomes["sbatch"]
    assert (set(plain.states) or {"refused"}) == {script.state}, plain
    assert differences(plain, outcomes["submit"], racy=script.racy) == []


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NEEDS_SLURM])
def test_a_run_without_slurm_gives_what_sbatch_gives(name: str, results: Results) -> None:
    outcomes = results[name].result()
    if "local" not in outcomes:
        pytest.skip(f"the stand-ins have the variables of Slurm{STAND_INS_ARE}x")
    assert differences_without_slurm(outcomes["sbatch"], outcomes["local"], racy=SCRIPTS[name].racy) == []
