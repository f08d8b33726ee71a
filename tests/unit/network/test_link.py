"""The link: messages arrive, once; those of unauthenticated clients do not; a missing heartbeat is detected."""

import contextlib
import random
import select
import selectors
import socket
import threading
import time

import pytest

from clusterddp.network.rendezvous.client import Attempt, Found, Search
from clusterddp.network.rendezvous.connection import CLOSED, NOT_OURS, VERSION, Connection, Protocol, no_key
from clusterddp.network.rendezvous.server import Server
from clusterddp.node.link import MAX_TURN_S, PROCESS_ENDED, SUPERVISORS, Clock, Limits, Peer, listen
from tests.support.waiting import PATIENCE

TOKEN = "3f" * 16
HELLO = b'{"clusterddp": "supervisor", "version": %d, "nonce": "NONCE"}\n' % VERSION


def make_sockets():
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def make_pair(head_token=TOKEN, client_token=TOKEN, now=0.0, protocol=SUPERVISORS):
    left, right = make_sockets()
    return (
        Connection(left, protocol=protocol, key=head_token, role="server", now=now),
        Connection(right, protocol=protocol, key=client_token, role="client", now=now),
    )


def bare(role):
    """Return a connection and the naked socket at its other end."""
    left, right = make_sockets()
    return Connection(left, protocol=SUPERVISORS, key=TOKEN, role=role, now=0.0), right


def receive(channel, now=0.0):
    select.select([channel.sock], [], [], 0.5)
    return channel.receive(now)


def meet(head, wire, client, client_wire):
    """Carry hellos and proofs across by hand; return the proof of the client and what it had to send."""
    client_wire.sendall(wire.recv(4096))
    receive(client)
    time.sleep(0.01)
    hello, _, proof = client_wire.recv(4096).partition(b"\n")
    wire.sendall(hello + b"\n")
    assert receive(head) == []
    time.sleep(0.01)
    client_wire.sendall(wire.recv(4096))
    receive(client)
    time.sleep(0.01)
    return proof + client_wire.recv(4096)


def test_messages_arrive_in_both_directions_and_in_order():
    head, client = make_pair()
    client.send({"kind": "join", "node_rank": 1, "pid": 7, "port": 9})
    client.send({"kind": "started"})
    head.send({"kind": "start", "text": "ü\n"})
    received_by_head, received_by_client = [], []
    for _ in range(3):  # nonces first, in however many pieces
        received_by_head += receive(head)
        received_by_client += receive(client)
    assert received_by_head == [{"kind": "join", "node_rank": 1, "pid": 7, "port": 9}, {"kind": "started"}]
    assert received_by_client == [{"kind": "start", "text": "ü\n"}]
    assert (head.lost, client.lost, head.proven) == (None, None, True)


def test_messages_with_another_token_are_not_received():
    head, client = make_pair(client_token="0" * 32)
    client.send({"kind": "join", "node_rank": 1, "pid": 7, "port": 9})
    for _ in range(2):
        assert (receive(head), receive(client)) == ([], [])
    assert (head.lost, client.lost) == (no_key(SUPERVISORS),) * 2


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n",
        b"\n",
        b"{}\n",
        b'{"nonce": 7}\n',
        HELLO.replace(b"NONCE", b"short"),
        HELLO.replace(b"NONCE", b"0" * 32) + b"nonsense\n",
        HELLO.replace(b"NONCE", b"0" * 32) + b"0" * 64 + b' {"kind": "join"}\n',
        HELLO.replace(b"supervisor", b"worker").replace(b"NONCE", b"0" * 32),
        b"[" * 3000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_what_is_not_of_the_run_ends_the_connection(words):
    head, stranger = bare("server")
    stranger.sendall(words)
    assert receive(head) == []
    assert head.lost is not None


def test_a_line_without_an_end_is_not_kept():
    head, stranger = bare("server")
    stranger.setblocking(False)
    for _ in range(200):
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            stranger.send(b"x" * 65536)
        receive(head)
    assert head.lost == NOT_OURS
    assert len(head._unread) == 0


def test_each_end_reads_a_line_up_to_the_limit_of_its_own_direction():
    protocol = Protocol(name="x", key="key", max_bytes_to_server=10_000, max_bytes_to_client=30_000)
    server, client = make_pair(protocol=protocol)
    for _ in range(3):
        receive(server)
        receive(client)
    assert server.proven
    assert client.proven
    for each, limit in ((server, 10_000), (client, 30_000)):
        other = client if each is server else server
        other.sock.sendall(b"x" * limit)
        assert (receive(each), each.lost) == ([], None)
        other.sock.sendall(b"x")
        assert (receive(each), each.lost) == ([], NOT_OURS)


def test_half_a_line_is_received_once_it_is_complete():
    head, wire = bare("server")
    client, client_wire = bare("client")
    client.send({"kind": "started"})
    sent = meet(head, wire, client, client_wire)
    wire.sendall(sent[:-20])
    assert receive(head) == []
    wire.sendall(sent[-20:])
    assert receive(head) == [{"kind": "started"}]


def test_a_line_cannot_be_sent_again():
    head, wire = bare("server")
    client, client_wire = bare("client")
    client.send({"kind": "ended"})
    sent = meet(head, wire, client, client_wire)
    wire.sendall(sent + sent.partition(b"\n")[2])
    assert receive(head) == [{"kind": "ended"}]
    assert head.lost is not None


def test_a_line_cannot_be_sent_on_another_connection():
    head, wire = bare("server")
    client, client_wire = bare("client")
    client.send({"kind": "ended"})
    sent = meet(head, wire, client, client_wire)
    other, other_wire = bare("server")
    other_wire.sendall(sent)
    assert receive(other) == []
    assert other.lost is not None


def test_a_line_cannot_be_sent_back():
    head, wire = bare("server")
    client, client_wire = bare("client")
    client.send({"kind": "ended"})
    sent = meet(head, wire, client, client_wire)
    client_wire.sendall(sent.partition(b"\n")[2])
    assert receive(client) == []
    assert client.lost is not None


def test_a_line_before_the_end_is_still_received():
    head, client = make_pair()
    for _ in range(2):
        receive(head), receive(client)
    client.send({"kind": "failed"})
    client.close()
    assert receive(head) == [{"kind": "failed"}]
    assert head.lost == CLOSED


class Ends:
    """Both ends of a link, each with a listener, over as many connections as the test makes."""

    def __init__(self, *, host_silence_s=8.0, heartbeat_timeout_s=15.0):
        self.limits = Limits(host_silence_s=host_silence_s, heartbeat_timeout_s=heartbeat_timeout_s, spans_hosts=True)
        self.listeners = [listen("127.0.0.1") for _ in range(2)]
        self.head = self.make_peer(self.listeners[1])
        self.client = self.make_peer(self.listeners[0])

    def make_peer(self, listener):
        address = listener.getsockname()
        return Peer(self.limits, lambda now: Attempt(address, now), when_quiet=False)

    def connect(self, now=0.0):
        """Connect both ends anew; the sockets are returned for the test to break."""
        head, client = make_pair(now=now)
        received = self.head.received, self.client.received
        self.head.connect(head, received[1], now)
        self.client.connect(client, received[0], now)
        return head.sock, client.sock

    def turn(self, now=0.0):
        """Let both ends listen and keep up; return what each has received."""
        received = self.head.receive(now), self.client.receive(now)
        self.head.keep_up(now)
        self.client.keep_up(now)
        return received

    def turn_until_settled(self, now=0.0):
        received = [], []
        for _ in range(200):
            for all_of, some in zip(received, self.turn(now), strict=True):
                all_of.extend(some)
            if not (self.head.owes_acknowledgement(now) or self.client.owes_acknowledgement(now)):
                return received
            time.sleep(0.002)
        raise AssertionError("they never acknowledge")

    def close(self):
        for peer in (self.head, self.client):
            peer.lose(CLOSED)
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


@pytest.mark.parametrize("seed", range(4))
def test_no_message_is_lost_or_doubled_however_often_the_connection_breaks(ends, seed):
    chance = random.Random(seed)
    received = [], []
    socks = ends.connect()
    for number in range(300):
        chance.choice((ends.head, ends.client)).send({"kind": "x", "of": number})
        breaks = chance.random() < 0.1
        if breaks:
            chance.choice(socks).shutdown(chance.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))
        for _ in range(chance.randrange(3)):
            for all_of, some in zip(received, ends.turn(), strict=True):
                all_of.extend(some)
        if breaks:
            socks = ends.connect()
    for all_of, some in zip(received, ends.turn_until_settled(), strict=True):
        all_of.extend(some)
    by_head, by_member = ([message["of"] for message in each] for each in received)
    assert sorted(by_head + by_member) == list(range(300))
    assert (by_head, by_member) == (sorted(by_head), sorted(by_member))


def test_heartbeats_keep_a_link_and_a_silent_process_ends_it(ends):
    ends.connect()
    for step in range(1, 5):
        ends.turn(step * 10.0)
        time.sleep(0.01)
    assert (ends.head.lost, ends.client.lost) == (None, None)
    ends.head.keep_up(40 + 14.0)
    assert ends.head.lost is None
    ends.head.keep_up(40 + 16.0)
    assert str(ends.head.lost) == "no heartbeat for 15 s"
    assert ends.client.receive(40.0)[-1] == {"kind": "gave_up", "why": "no heartbeat for 15 s"}


def test_a_connection_that_breaks_ends_no_link_while_both_processes_live(ends):
    (sock, _) = ends.connect()
    sock.shutdown(socket.SHUT_RDWR)
    for step in range(70):
        ends.turn(step / 10)
    assert (ends.head.broken, ends.head.lost) == (True, None)
    ends.connect(7.0)
    ends.head.send({"kind": "stop"})
    assert ends.turn_until_settled(7.0)[1] == [{"kind": "stop"}]


def test_a_broken_connection_that_is_not_replaced_in_time_ends_the_link(ends):
    (sock, _) = ends.connect()
    sock.shutdown(socket.SHUT_RDWR)
    for step in range(100):
        ends.turn(step / 10)
    assert str(ends.head.lost) == "the connection was closed, and no other one came within 8 s"


def test_a_process_that_refuses_the_next_connection_is_gone_at_once(ends):
    (_, sock) = ends.connect()
    ends.listeners[1].close()
    sock.shutdown(socket.SHUT_RDWR)
    for _ in range(20):
        ends.turn(0.01)
    assert ends.head.lost == PROCESS_ENDED


def test_time_in_which_a_process_did_not_run_counts_for_little():
    clock = Clock()
    before = clock.tick()
    time.sleep(MAX_TURN_S + 0.5)
    assert before + MAX_TURN_S == clock.tick()


def find(*ports):
    """Look for a server on these ports; return what was found."""
    with selectors.DefaultSelector() as selector:
        search = Search(
            lambda: ["127.0.0.1"],
            ports,
            protocol=SUPERVISORS,
            key=TOKEN,
            introduce=lambda connection: {"kind": "join", "node_rank": 1, "pid": 7, "port": 9},
            selector=selector,
        )
        with contextlib.closing(search):
            return search.wait(time.monotonic() + PATIENCE)


def test_a_host_without_a_listener_refuses():
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    listener.close()
    assert find(port).loss.kind == "refused"


def test_the_server_is_found_among_ports_with_strangers():
    listeners = [listen("127.0.0.1") for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in listeners]
    serving = threading.Thread(target=serve, args=(listeners[2],))
    serving.start()
    found = find(*ports)
    serving.join()
    assert isinstance(found, Found)
    assert found.connection.peer_port == ports[2]
    assert found.messages == [{"kind": "welcome", "session": "s", "received": 0}]
    for sock in (found.connection, *listeners):
        sock.close()


def serve(listener):
    """Welcome one client."""
    with selectors.DefaultSelector() as selector:
        server = Server(listener, selector, protocol=SUPERVISORS, key=TOKEN, num_expected=1, report=print)
        while not (arrived := server.accept(time.monotonic())):
            selector.select(0.1)
        ((connection, message),) = arrived
        assert message["kind"] == "join"
        connection.send({"kind": "welcome", "session": "s", "received": 0})
        connection.close()
