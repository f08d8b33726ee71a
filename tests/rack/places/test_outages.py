"""A few of the outages that benchmarks/outages.py makes by the dozen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.outages import CUT, STOP, SUSPEND, Outage, Theatre

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]


@pytest.fixture(scope="module")
def theatre(needs_rack: None) -> Iterator[Theatre]:
    with Theatre() as theatre:
        yield theatre


@pytest.mark.parametrize(
    "outage",
    [
        Outage(kind=CUT, node=1, seconds=10, step=10),
        Outage(kind=STOP, node=0, seconds=20, step=10),
    ],
    ids=lambda outage: f"{outage.kind}-{outage.seconds:g}s",
)
def test_a_run_goes_on_undisturbed_after_an_outage(theatre: Theatre, outage: Outage) -> None:
    line = theatre.play(outage)
    assert line["right"], line.pop("logs")


@pytest.mark.slow
@pytest.mark.parametrize(
    "outage",
    [Outage(kind=CUT, node=0, seconds=25, step=10), Outage(kind=SUSPEND, node=0, seconds=90, step=10)],
    ids=lambda outage: f"{outage.kind}-{outage.seconds:g}s",
)
def test_a_run_goes_on_undisturbed_after_a_long_outage(theatre: Theatre, outage: Outage) -> None:
    line = theatre.play(outage)
    assert line["right"], line.pop("logs")
