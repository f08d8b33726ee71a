"""Storage of runs on Slurm and over SSH that is away for a while, full, or read-only."""

import pytest

from tests.support.storage_rounds import Fault, play_round
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(launcher="slurm", what="away", seconds=2),
        Fault(launcher="slurm", what="away", seconds=3, ends=True),
        Fault(launcher="slurm", what="full"),
        Fault(launcher="slurm", what="read-only"),
    ],
    ids=str,
)
def test_a_slurm_run_survives_the_fault_or_names_its_cause(rack: Rack, fault: Fault):
    line, logs = play_round(rack, fault)
    assert line["right"], f"{line}\n{logs}"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(launcher="ssh", what="away", seconds=2, ends=True),
        Fault(launcher="ssh", what="full"),
        Fault(launcher="ssh", what="read-only", host="node2"),
    ],
    ids=str,
)
def test_a_run_over_ssh_survives_the_fault_or_names_its_cause(lan: Rack, fault: Fault):
    line, logs = play_round(lan, fault)
    assert line["right"], f"{line}\n{logs}"
