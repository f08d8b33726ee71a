"""A probe of an address: what it finds where a host of the run listens, another process, or none."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from clusterddp.network.choice import Probe, Target
from clusterddp.network.port import bind_port
from clusterddp.places.ssh.agent.network import PAYLOAD, Listener, probe_address

NONCE = "0" * 32


@contextmanager
def listening(name: str, nonce: str = NONCE) -> Iterator[int]:
    with closing(Listener(nonce, name, bind_port(0, shared=True, listening=True))) as listener:
        yield listener.port


@contextmanager
def stranger(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Serve one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def probe(port: int, *, address: str = "127.0.0.1", within_s: float = 10.0) -> Probe:
    target = Target(target=1, address=address, port=port, name="gpu02")
    return probe_address(target, NONCE, 0, within_s)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_host_is_reached_and_the_way_is_recorded(address: str) -> None:
    with listening("gpu02") as port:
        found = probe(port, address=address)
    assert (found.outcome, found.left_from, found.detail) == ("reached", address, "")


def test_another_host_of_the_run_is_named() -> None:
    with listening("gpu07") as port:
        found = probe(port)
    assert (found.outcome, found.detail) == ("stranger", "gpu07")


def test_a_host_of_another_run_is_a_stranger() -> None:
    with listening("gpu02", nonce="1" * 32) as port:
        assert probe(port).outcome == "stranger"


def test_a_port_where_no_process_listens_refuses() -> None:
    with listening("gpu02") as port:
        pass
    assert probe(port).outcome == "refused"


@pytest.mark.parametrize(
    "answer",
    [
        lambda sock: None,
        lambda sock: sock.sendall(b"gpu02 " + b"0" * 64),
        lambda sock: sock.sendall(sock.recv(PAYLOAD)),
        lambda sock: sock.sendall(b"\xff" * PAYLOAD),
        lambda sock: sock.sendall("gpu02 \u00e9".encode().ljust(PAYLOAD)),
    ],
    ids=["hangs up", "short", "echo", "bytes", "other signature"],
)
def test_what_another_process_answers_is_a_stranger_s(answer: Callable[[socket.socket], object]) -> None:
    with stranger(answer) as port:
        assert probe(port).outcome == "stranger"


def test_a_connection_without_an_answer_is_stuck() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert probe(server.getsockname()[1], within_s=0.2).outcome == "stuck"


def test_strangers_at_a_listener_are_few_at_a_time_and_gone_after_seconds() -> None:
    with listening("gpu02") as port:
        before, begun = threading.active_count(), time.monotonic()
        strangers = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(300)]
        while time.monotonic() < begun + 4:
            for sock in strangers[:10]:
                sock.sendall(b"x")  # a byte now and then makes it no longer
            time.sleep(0.2)
        assert threading.active_count() - before <= 256
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < begun + 10 and not is_readable(strangers[0]):
                strangers[0].sendall(b"x")
                time.sleep(0.2)
        assert time.monotonic() < begun + 8
        assert probe(port).outcome == "reached"
        for sock in strangers:
            sock.close()


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def test_a_listener_answers_no_one_who_sends_less() -> None:
    with listening("gpu02") as port, socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
