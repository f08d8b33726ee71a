"""The cells of docs/launchers.md's table that need several machines: real sshd, real Slurm, and no SSH at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.launch_cells import Cell, Row, Where
from tests.support.launch_places import Places, check, machines_without_slurm, own_directory, slurm_cluster
from tests.support.launch_table import ROWS
from tests.support.worker_ranks import demand_open_mpi_4

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]


def cases(*places: Where) -> list[object]:
    """List the cells whose commands are typed at these places."""
    keyed = [(row, key, cell) for row in ROWS for key, cell in row.cases.items()]
    return [pytest.param(row, cell, id=key) for row, key, cell in keyed if cell.where in places]


@pytest.fixture(scope="module")
def lan(needs_rack: None) -> Iterator[Places]:
    with machines_without_slurm() as places:
        yield places


@pytest.fixture(scope="module")
def cluster(needs_rack: None) -> Iterator[Places]:
    with slurm_cluster() as places:
        yield places


@pytest.mark.parametrize(("row", "cell"), cases(Where.LAPTOP, Where.MACHINES))
def test_ranks_on_hosts_that_share_nothing_become_one_gang(
    row: Row, cell: Cell, lan: Places, record_property: Callable[[str, object], None]
) -> None:
    record_property("command", "\n".join(cell.commands))
    if row.key == "openmpi":
        demand_open_mpi_4()
    check(row, cell, lan, own_directory(lan))


@pytest.mark.parametrize(("row", "cell"), cases(Where.LOGIN))
def test_ranks_on_slurm_become_one_gang(
    row: Row, cell: Cell, cluster: Places, record_property: Callable[[str, object], None]
) -> None:
    record_property("command", "\n".join(cell.commands))
    check(row, cell, cluster, own_directory(cluster))
