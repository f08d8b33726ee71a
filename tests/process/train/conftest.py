"""Ranks that stay up for all tests of the trainer that one worker runs."""

from collections.abc import Iterator

import pytest

from tests.support.train_gang import Gang, open_gang


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    """Ranks that import torch once; each call of `run` makes a new group of some of them."""
    with open_gang() as gang:
        yield gang
