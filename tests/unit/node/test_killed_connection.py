"""A connection between the head and a node that is killed while its first message is under way (`ss -K`, a reset)."""

import os
import selectors
import socket
import struct
import time

import pytest

from clusterddp.network.rendezvous.client import AuthenticatedAttempt, Search
from clusterddp.network.rendezvous.server import Server
from clusterddp.node.head import Head
from clusterddp.node.link import SUPERVISORS, HeadElsewhere, HeadHere, Limits, listen
from clusterddp.node.term import Term, Terms
from clusterddp.run.directory import RunDir
from tests.support.handmade_runs import make_gang
from tests.support.waiting import PATIENCE

LIMITS = Limits(host_silence_s=8.0, heartbeat_timeout_s=15.0, spans_hosts=True)


@pytest.fixture
def selector():
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def listeners():
    listeners = [listen("127.0.0.1") for _ in range(2)]
    yield listeners
    for listener in listeners:
        listener.close()


def wait_until(done):
    deadline = time.monotonic() + PATIENCE
    while not (result := done()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return result


def reset(sock):
    """Close a connection so that the kernel at its other end has no peer to name any more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_the_head_counts_a_node_whose_connection_was_killed_after_its_join(tmp_path, selector, listeners):
    gang = make_gang(2)
    join = {"kind": "join", "node_rank": 0, "pid": os.getpid(), "missing": [0]}
    here = HeadHere(gang, selector, LIMITS, listener=listeners[0], join=join)
    here.head = Head(
        RunDir(tmp_path),
        gang,
        terms=Terms(Term(number=0, attempt=0, restart=0, head=0, voters=((0, "", 0),)), 0, fails_over=False),
        first_attempt=0,
        rendezvous_seed="seed",
        guard=None,
        helpers=None,
        send=here.send,
        now=0.0,
    )
    sent = []

    def introduce(connection):
        sent.append({"kind": "join", "node_rank": 1, "pid": 7, "port": listeners[1].getsockname()[1]})
        return sent[0]

    attempt = AuthenticatedAttempt(here.address, 0.0, protocol=SUPERVISORS, key=gang.token, introduce=introduce)
    wait_until(lambda: (here.pump(0.0), attempt.look(0.0), sent)[-1])
    reset(attempt.sock)
    wait_until(lambda: (here.pump(0.0), not here.head.nodes.may_join(1))[-1])
    here.report_fatal_error("the test is over")


def test_a_node_connects_again_when_its_connection_was_killed_after_the_welcome(selector, listeners):
    gang = make_gang(2)
    server = Server(listeners[0], selector, protocol=SUPERVISORS, key=gang.token, num_expected=2, report=print)
    host, port = listeners[0].getsockname()
    search = Search(
        lambda: [host],
        [port],
        protocol=SUPERVISORS,
        key=gang.token,
        introduce=lambda connection: {"kind": "join", "node_rank": 1, "pid": 7, "port": 9},
        selector=selector,
    )
    uplink = HeadElsewhere(gang, 1, search, selector, LIMITS, listener=listeners[1], known=None, in_job=False, now=0.0)
    ((connection, message),) = wait_until(lambda: (uplink.pump(0.0), server.accept(0.0))[-1])
    assert message["kind"] == "join"
    connection.send({"kind": "welcome", "session": "s", "received": 0})
    selector.unregister(connection.sock)
    reset(connection.sock)
    ((_, again),) = wait_until(lambda: (uplink.pump(0.0), server.accept(0.0))[-1])
    assert again == {"kind": "join_again", "node_rank": 1, "session": "s", "received": 0}
    uplink.report_fatal_error("the test is over")
    server.close()
