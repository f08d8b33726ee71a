"""What the fuzzer reads: the table of its targets."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.hosts import answers, listings, mirrored, requests, trees
from tests.fuzz.mutations import Target
from tests.fuzz.records import login_notes, nodes_reports, records
from tests.fuzz.sockets import said_over_sockets
from tests.fuzz.texts import imported, printed_by_ranks, printed_by_slurm, printed_by_ssh, specs


def make_targets(root: Path) -> list[Target]:
    """Make the table below the directory of the cases."""
    of_runs = records(root)
    return [
        *[of_runs] * 8,  # most of what is read
        answers(),
        mirrored(root),
        *listings(root),
        requests(root),
        *said_over_sockets(root),
        printed_by_ranks(),
        *printed_by_slurm(),
        *printed_by_ssh(root),
        *specs(root),
        imported(root),
        login_notes(root),
        trees(root),
        nodes_reports(root),
    ]
