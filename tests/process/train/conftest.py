"""Ranks that stay up for all tests of the trainer that one worker runs."""

from collections.abc import Iterator

import pytest

from tests.support.train_gang import Gang, open_gang


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    """Ranks that import torch once; each call of `run` makes a new group of some of them."""
    with open_gang() as gang:
        yield gang


@pytest.fixture
def gang_on_one_host(gang: Gang) -> Gang:
    """The same ranks, which know that they are on one host: they exchange gradients through memory that all see."""
    return gang.on_one_host()


@pytest.fixture(params=["sockets", "memory"])
def either_gang(request: pytest.FixtureRequest, gang: Gang) -> Gang:
    """Ranks that exchange by DistributedDataParallel, and ranks that do so through memory that all of them see."""
    return gang.on_one_host() if request.param == "memory" else gang
