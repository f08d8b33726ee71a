"""What rank 0 does once a rank was refused: it tells the others, waits for late ones, and for nothing else."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from clusterddp.errors import PreflightError
from clusterddp.ranks.launched import Launched
from clusterddp.rendezvous import rank_server
from clusterddp.rendezvous.rank_client import ask_rank_0
from clusterddp.rendezvous.rank_messages import introduce_rank
from clusterddp.rendezvous.rank_server import RankServer, serve_ranks
from tests.support.waiting import PATIENCE


class Gang:
    """Rank 0 in a thread of this process, and other ranks that connect to it."""

    def __init__(self, listener: socket.socket, world_size: int) -> None:
        self.port = listener.getsockname()[1]
        self.own = introduce_rank(
            rank=0, world_size=world_size, world_size_from="WORLD_SIZE", spec="0" * 64, identity="job"
        )
        self.errors: list[str] = []
        self._rank_0 = threading.Thread(target=self._serve, args=(listener, world_size), daemon=True)
        self._rank_0.start()

    def refuse(self, rank: int, spec: str = "1") -> str:
        """Connect as a rank, of another spec unless `spec` is 0; return the reason why it is refused."""
        hello = dataclasses.replace(self.own, rank=rank, nonce=f"nonce{rank}", pid=rank, spec=spec * 64)
        with pytest.raises(PreflightError) as refused:
            ask_rank_0(["127.0.0.1"], hello, [self.port], time.monotonic() + 10 * PATIENCE, "")
        return refused.value.message

    def ends(self) -> bool:
        self._rank_0.join(5 * PATIENCE)
        return not self._rank_0.is_alive()

    def _serve(self, listener: socket.socket, world_size: int) -> None:
        launched = Launched(launcher=None, world_size=world_size)
        deadline = time.monotonic() + 10 * PATIENCE
        try:
            serve_ranks(listener, launched, self.own, lambda met: {}, deadline=deadline, timeout_s=60.0, key="")
        except PreflightError as error:
            self.errors.append(error.message)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_rank_0_ends_once_every_rank_was_refused(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "LINGER_S", 100 * PATIENCE)
    gang = Gang(listener, 3)
    refused = [gang.refuse(1), gang.refuse(2)]
    assert gang.ends()
    assert refused == gang.errors * 2
    assert "rank 1" in refused[0]


def test_a_rank_that_arrives_together_with_one_that_does_not_match_has_the_same_reason(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_server, "LINGER_S", 1.0)
    take_turn = RankServer.take_turn

    def take_turns_until_both_are_here(server: RankServer) -> Any:
        found = take_turn(server)
        while len(found) < 2:
            found += take_turn(server)
        monkeypatch.setattr(RankServer, "take_turn", take_turn)
        return sorted(found, key=lambda each: each.introduction.rank)

    monkeypatch.setattr(RankServer, "take_turn", take_turns_until_both_are_here)
    gang = Gang(listener, 3)
    with ThreadPoolExecutor() as pool:
        refused = list(pool.map(gang.refuse, (1, 2), ("1", "0")))
    assert gang.ends()
    assert refused == gang.errors * 2


def test_rank_0_sleeps_while_it_waits_for_late_ranks(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "LINGER_S", 1.0)
    turns: list[float] = []
    take_turn = RankServer.take_turn

    def counted(server: RankServer) -> Any:
        turns.append(time.monotonic())
        return take_turn(server)

    monkeypatch.setattr(RankServer, "take_turn", counted)
    gang = Gang(listener, 3)
    gang.refuse(1)
    assert gang.ends()
    assert len(turns) < 50
