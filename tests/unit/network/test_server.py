"""What a server does with clients that do not authenticate, and which clients it counts."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from clusterddp.network.rendezvous.client import AuthenticatedAttempt
from clusterddp.network.rendezvous.connection import Protocol
from clusterddp.network.rendezvous.server import INTRODUCTION_S, Server
from tests.support.waiting import PATIENCE, wait_until

TEST = Protocol(name="test", key="key", max_bytes_to_server=4096, max_bytes_to_client=4096)


@dataclass
class Place:
    """A server on this machine, and what it has reported."""

    listener: socket.socket
    selector: selectors.BaseSelector
    reports: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = Server(
            self.listener, self.selector, protocol=TEST, key="k", num_expected=1, report=self.reports.append
        )

    def call(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname())


@pytest.fixture
def place() -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener, selectors.DefaultSelector() as selector:
        yield Place(listener, selector)


def test_a_stranger_that_sends_nothing_is_disconnected_in_time(place: Place) -> None:
    with place.call() as stranger:
        assert place.server.accept(10.0) == []
        assert place.server.accept(10.0 + INTRODUCTION_S + 0.1) == []
        assert place.reports == ["a connection was refused: 127.0.0.1: it did not authenticate within 5 s"]
        stranger.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass


def test_of_too_many_strangers_the_first_ones_are_disconnected(place: Place) -> None:
    strangers = [place.call() for _ in range(70)]
    for _ in range(5):
        assert place.server.accept(10.0) == []
    assert place.reports == ["a connection was refused: 127.0.0.1: too many connections at once have not authenticated"]
    assert len(place.selector.get_map()) == 1 + 68
    for stranger in strangers:
        stranger.close()


def test_a_client_with_another_key_is_counted_by_its_address(place: Place) -> None:
    attempt = _attempt(place.listener.getsockname(), "other")
    wait_until(lambda: bool(place.server.accept(0.0) or attempt.look(0.0)) or place.server.unproven.total() == 1)
    assert dict(place.server.unproven) == {"127.0.0.1": 1}
    wait_until(lambda: attempt.look(0.0) is None and attempt.is_over(0.0))
    assert str(attempt.loss) == "it does not know the same key"
    attempt.close()


def _attempt(address: tuple[str, int], key: str) -> AuthenticatedAttempt:
    return AuthenticatedAttempt(
        address, time.monotonic(), protocol=TEST, key=key, introduce=lambda connection: {"kind": "join"}
    )
