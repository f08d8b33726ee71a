"""What participants of a meeting say to each other, and what the first one does once another was refused."""

from __future__ import annotations

import dataclasses
import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from clusterddp.errors import PreflightError
from clusterddp.network.rendezvous.client import Found, Search
from clusterddp.places.worker import meeting
from clusterddp.places.worker.meeting import (
    WORKER,
    Hello,
    MeetingServer,
    Seat,
    ask_first,
    digest_spec,
    find_mismatch,
    mask,
    meet,
)
from tests.support.waiting import PATIENCE


class Gang:
    """Rank 0 in a thread of this process, and other ranks that connect to it."""

    def __init__(self, world_size: int, timeout_s: float = 10 * PATIENCE) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.seat = Seat(noun="rank", size=world_size, size_from="WORLD_SIZE", hosts=("127.0.0.1",), port=port)
        self.own = hello(self.seat)
        self.errors: list[str] = []
        self._timeout_s = timeout_s
        self._rank_0 = threading.Thread(target=self._serve, daemon=True)
        self._rank_0.start()

    def refuse(self, rank: int, spec: str = "1") -> str:
        """Connect as a rank, of another spec unless `spec` is 0; return the reason why it is refused."""
        other = dataclasses.replace(self.own, number=rank, nonce=f"nonce{rank}", pid=rank, spec={"name": spec})
        with pytest.raises(PreflightError) as refused:
            ask_first(self.seat, other, self.seat.hosts, time.monotonic() + 10 * PATIENCE, "")
        return refused.value.message

    def ends(self) -> bool:
        self._rank_0.join(5 * PATIENCE)
        return not self._rank_0.is_alive()

    def _serve(self) -> None:
        try:
            meet(self.seat, self.own, lambda met: {"token": ""}, timeout_s=self._timeout_s)
        except PreflightError as error:
            self.errors.append(error.message)


def hello(seat: Seat, **changes: Any) -> Hello:
    own = Hello(
        noun=seat.noun, number=0, size=seat.size, size_from=seat.size_from, spec={"name": "0"}, facts={"torch": "2"}
    )
    return dataclasses.replace(own, **changes)


def test_a_token_is_masked_by_the_key_and_for_one_participant() -> None:
    token = "0123456789abcdef" * 2
    masked = mask(token, "mum", "nonce1")
    assert masked not in {token, mask(token, "dad", "nonce1"), mask(token, "mum", "nonce2")}
    assert mask(masked, "mum", "nonce1") == token


def test_specs_are_compared_by_digests_that_depend_on_the_key_and_differ_by_the_keys_that_both_name() -> None:
    seat = Seat(noun="node", size=2, size_from="ssh.hosts")
    ours = digest_spec({"restarts": "0", "env.API_KEY": "a-secret-value"}, "mum")
    assert "a-secret-value" not in str(ours)
    assert ours != digest_spec({"restarts": "0", "env.API_KEY": "a-secret-value"}, "dad")
    theirs = digest_spec({"restarts": "2"}, "mum")
    error = find_mismatch(hello(seat, spec=ours), hello(seat, number=1, host="b", spec=theirs))
    assert error is not None
    assert "node 1 on b reads another spec than node 0 on" in error.message
    assert error.message.endswith("other values of restarts, 1 more")


def test_a_rank_and_a_node_do_not_match() -> None:
    rank = Seat(noun="rank", size=2, size_from="x")
    node = Seat(noun="node", size=2, size_from="x")
    error = find_mismatch(hello(rank, host="a"), hello(node, host="b", number=1))
    assert error is not None
    assert error.message == "node 1 on b was started for 2 nodes (x), rank 0 on a for 2 ranks (x)"


def test_rank_0_ends_once_every_rank_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LINGER_S", 100 * PATIENCE)
    gang = Gang(3)
    refused = [gang.refuse(1), gang.refuse(2)]
    assert gang.ends()
    assert refused == gang.errors * 2
    assert "rank 1" in refused[0]


def test_a_rank_that_arrives_together_with_one_that_does_not_match_has_the_same_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "LINGER_S", 1.0)
    take_turn = MeetingServer.take_turn

    def take_turns_until_both_are_here(server: MeetingServer) -> Any:
        found = take_turn(server)
        while len(found) < 2:
            found += take_turn(server)
        monkeypatch.setattr(MeetingServer, "take_turn", take_turn)
        return sorted(found, key=lambda each: each.hello.number)

    monkeypatch.setattr(MeetingServer, "take_turn", take_turns_until_both_are_here)
    gang = Gang(3)
    with ThreadPoolExecutor() as pool:
        refused = list(pool.map(gang.refuse, (1, 2), ("1", "0")))
    assert gang.ends()
    assert refused == gang.errors * 2


def test_a_rank_that_has_connected_and_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LINGER_S", 0.0)
    gang = Gang(3, timeout_s=2.0)
    introduction = {"kind": "join", **dataclasses.asdict(gang.own), "number": 1, "nonce": "1", "left_s": 60.0}
    with selectors.DefaultSelector() as selector:
        search = Search(
            lambda: ["127.0.0.1"],
            gang.seat.ports,
            protocol=WORKER,
            key="",
            introduce=lambda connection: introduction,
            selector=selector,
        )
        found = search.wait(time.monotonic() + 10 * PATIENCE)
    assert isinstance(found, Found)
    assert found.messages == [{"kind": "welcome"}]
    found.connection.close()
    assert gang.ends()
    assert f"rank 1 on {gang.own.host} had connected and has disconnected" in gang.errors[0]


def test_rank_0_sleeps_while_it_waits_for_late_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LINGER_S", 1.0)
    turns: list[float] = []
    take_turn = MeetingServer.take_turn

    def counted(server: MeetingServer) -> Any:
        turns.append(time.monotonic())
        return take_turn(server)

    monkeypatch.setattr(MeetingServer, "take_turn", counted)
    gang = Gang(3)
    gang.refuse(1)
    assert gang.ends()
    assert len(turns) < 50
