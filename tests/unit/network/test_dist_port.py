"""The master port: two runs never share one, strangers cannot take it, rank 0 can."""

import socket

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.network.port import FIRST_PORT, LAST_PORT, hold_port, reserve_port


def listen_on(port, *, reuse):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    server.bind(("", port))
    server.listen()
    return server


def test_the_port_follows_from_the_seed_and_lies_below_the_ephemeral_ones():
    holder, port = reserve_port("a run")
    holder.close()
    again, same = reserve_port("a run")
    again.close()
    assert port == same
    assert FIRST_PORT <= port <= LAST_PORT


def test_two_reservations_of_one_seed_get_two_ports():
    holders = [reserve_port("a run") for _ in range(3)]
    assert len({port for _, port in holders}) == 3
    for holder, _ in holders:
        holder.close()


def test_a_taken_port_is_passed_over():
    holder, port = reserve_port("another run")
    holder.close()
    with listen_on(port, reuse=True):
        holder, other = reserve_port("another run")
        holder.close()
        assert other != port


def test_a_held_port_cannot_be_taken_by_a_stranger_and_can_by_the_store():
    holder, port = reserve_port("held")
    with pytest.raises(OSError, match="in use"):
        listen_on(port, reuse=False)
    with listen_on(port, reuse=True):  # as torch's TCPStore does
        socket.create_connection(("127.0.0.1", port)).close()
    holder.close()


def test_torchs_store_listens_on_a_held_port():
    distributed = pytest.importorskip("torch.distributed")
    holder, port = reserve_port("store")
    store = distributed.TCPStore("127.0.0.1", port, 1, True)
    store.set("key", "value")
    assert store.get("key") == b"value"
    holder.close()


def test_a_named_port_with_a_listener_is_refused():
    holder, port = reserve_port("named")
    holder.close()
    with listen_on(port, reuse=True), pytest.raises(ClusterddpError, match=f"port {port} is in use"):
        hold_port(port)
    hold_port(port).close()
