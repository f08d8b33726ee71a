"""The link: what is said arrives, once, what a stranger says does not, and silence is noticed."""

import contextlib
import random
import select
import selectors
import socket
import time

import pytest

from clusterddp.node.clock import MAX_TURN_S, Clock
from clusterddp.node.connecting import Connecting
from clusterddp.node.link import GONE, Channel, connect, listen
from clusterddp.node.peer import Limits, Peer

TOKEN = "3f" * 16


def make_sockets():
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def make_pair(head_token=TOKEN, member_token=TOKEN, now=0.0):
    left, right = make_sockets()
    return (
        Channel(left, token=head_token, side="head", now=now),
        Channel(right, token=member_token, side="member", now=now),
    )


def bare(side):
    """Return a channel and the naked socket at its other end."""
    left, right = make_sockets()
    return Channel(left, token=TOKEN, side=side, now=0.0), right


def hear(channel, now=0.0):
    select.select([channel.sock], [], [], 0.5)
    return channel.receive(now)


def meet(head, wire, member, member_wire):
    """Carry the nonces across by hand; return what the member had to say, its nonce first."""
    member_wire.sendall(wire.recv(4096))
    hear(member)
    time.sleep(0.01)
    return member_wire.recv(4096)


def test_messages_arrive_in_both_directions_and_in_order():
    head, member = make_pair()
    member.send({"kind": "join", "node_rank": 1, "pid": 7, "port": 9})
    member.send({"kind": "started"})
    head.send({"kind": "start", "text": "ü\n"})
    heard_by_head, heard_by_member = [], []
    for _ in range(3):  # nonces first, in however many pieces
        heard_by_head += hear(head)
        heard_by_member += hear(member)
    assert heard_by_head == [{"kind": "join", "node_rank": 1, "pid": 7, "port": 9}, {"kind": "started"}]
    assert heard_by_member == [{"kind": "start", "text": "ü\n"}]
    assert (head.lost, member.lost, head.proven) == (None, None, True)


def test_another_token_is_not_heard():
    head, member = make_pair(member_token="0" * 32)
    member.send({"kind": "join", "node_rank": 1, "pid": 7, "port": 9})
    hear(head), hear(member)
    assert hear(head) == []
    assert head.lost == "it said something that is not of this run"


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n",
        b"\n",
        b"{}\n",
        b'{"nonce": 7}\n',
        b'{"nonce": "short"}\n',
        b'{"nonce": "' + b"0" * 32 + b'"}\nnonsense\n',
        b'{"nonce": "' + b"0" * 32 + b'"}\n' + b"0" * 64 + b' {"kind": "join"}\n',
        b"[" * 3000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_what_is_not_of_the_run_ends_the_connection(words):
    head, stranger = bare("head")
    stranger.sendall(words)
    assert hear(head) == []
    assert head.lost is not None


def test_a_line_without_an_end_is_not_kept():
    head, stranger = bare("head")
    stranger.setblocking(False)
    for _ in range(200):
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            stranger.send(b"x" * 65536)
        hear(head)
    assert head.lost == "it said a line without an end"
    assert len(head._unread) == 0


def test_half_a_line_is_heard_when_its_rest_has_come():
    head, wire = bare("head")
    member, member_wire = bare("member")
    member.send({"kind": "started"})
    said = meet(head, wire, member, member_wire)
    wire.sendall(said[:-20])
    assert hear(head) == []
    wire.sendall(said[-20:])
    assert hear(head) == [{"kind": "started"}]


def test_what_was_said_cannot_be_said_again():
    head, wire = bare("head")
    member, member_wire = bare("member")
    member.send({"kind": "ended"})
    said = meet(head, wire, member, member_wire)
    wire.sendall(said + said.partition(b"\n")[2])
    assert hear(head) == [{"kind": "ended"}]
    assert head.lost is not None


def test_what_was_said_cannot_be_said_on_another_connection():
    head, wire = bare("head")
    member, member_wire = bare("member")
    member.send({"kind": "ended"})
    said = meet(head, wire, member, member_wire)
    other, other_wire = bare("head")
    other_wire.sendall(said)
    assert hear(other) == []
    assert other.lost is not None


def test_what_was_said_cannot_be_sent_back():
    head, wire = bare("head")
    member, member_wire = bare("member")
    member.send({"kind": "ended"})
    said = meet(head, wire, member, member_wire)
    member_wire.sendall(said.partition(b"\n")[2])
    assert hear(member) == []
    assert member.lost is not None


def test_what_was_said_before_the_end_is_still_heard():
    head, member = make_pair()
    hear(head), hear(member)
    member.send({"kind": "failed"})
    member.close()
    assert hear(head) == [{"kind": "failed"}]
    assert head.lost == "the connection was closed"


class Ends:
    """Both ends of a link, each with a listener, over as many connections as the test makes."""

    def __init__(self, *, host_silence_s=8.0, heartbeat_timeout_s=15.0):
        self.limits = Limits(host_silence_s=host_silence_s, heartbeat_timeout_s=heartbeat_timeout_s, spans_hosts=True)
        self.listeners = [listen("127.0.0.1") for _ in range(2)]
        self.selector = selectors.SelectSelector()
        self.head = self.make_peer(self.listeners[1])
        self.member = self.make_peer(self.listeners[0])

    def make_peer(self, listener):
        address = listener.getsockname()
        return Peer(self.limits, self.selector, lambda now: Connecting(address, now), when_quiet=False)

    def connect(self, now=0.0):
        """Connect both ends anew; the sockets are returned for the test to break."""
        head, member = make_pair(now=now)
        for channel in (head, member):
            self.selector.register(channel.sock, selectors.EVENT_READ)
        heard = self.head.heard, self.member.heard
        self.head.connect(head, heard[1], now)
        self.member.connect(member, heard[0], now)
        return head.sock, member.sock

    def turn(self, now=0.0):
        """Let both ends listen and keep up; return what each has heard."""
        heard = self.head.receive(now), self.member.receive(now)
        self.head.keep_up(now)
        self.member.keep_up(now)
        return heard

    def turn_until_settled(self, now=0.0):
        heard = [], []
        for _ in range(200):
            for all_of, some in zip(heard, self.turn(now), strict=True):
                all_of.extend(some)
            if not (self.head.owes_acknowledgement(now) or self.member.owes_acknowledgement(now)):
                return heard
            time.sleep(0.002)
        raise AssertionError("they never acknowledge")

    def close(self):
        for peer in (self.head, self.member):
            peer.lose("the test is over")
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
    heard = [], []
    socks = ends.connect()
    for number in range(300):
        chance.choice((ends.head, ends.member)).send({"kind": "x", "of": number})
        breaks = chance.random() < 0.1
        if breaks:
            chance.choice(socks).shutdown(chance.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))
        for _ in range(chance.randrange(3)):
            for all_of, some in zip(heard, ends.turn(), strict=True):
                all_of.extend(some)
        if breaks:
            socks = ends.connect()
    for all_of, some in zip(heard, ends.turn_until_settled(), strict=True):
        all_of.extend(some)
    by_head, by_member = ([message["of"] for message in each] for each in heard)
    assert sorted(by_head + by_member) == list(range(300))
    assert (by_head, by_member) == (sorted(by_head), sorted(by_member))


def test_heartbeats_keep_a_link_and_a_silent_process_ends_it(ends):
    ends.connect()
    for step in range(1, 5):
        ends.turn(step * 10.0)
        time.sleep(0.01)
    assert (ends.head.lost, ends.member.lost) == (None, None)
    ends.head.keep_up(40 + 14.0)
    assert ends.head.lost is None
    ends.head.keep_up(40 + 16.0)
    assert ends.head.lost == "no heartbeat for 15 s"
    assert ends.member.receive(40.0)[-1] == {"kind": "gave_up", "why": "no heartbeat for 15 s"}


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
    assert ends.head.lost == "the connection was closed, and no other one came within 8 s"


def test_a_process_that_refuses_the_next_connection_is_gone_at_once(ends):
    (_, sock) = ends.connect()
    ends.listeners[1].close()
    sock.shutdown(socket.SHUT_RDWR)
    for _ in range(20):
        ends.turn(0.01)
    assert ends.head.lost == GONE


def test_time_in_which_a_process_did_not_run_counts_for_little():
    clock = Clock()
    before = clock.tick()
    time.sleep(MAX_TURN_S + 0.5)
    assert before + MAX_TURN_S == clock.tick()


def test_a_head_that_is_gone_is_not_waited_for():
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    connect("127.0.0.1", port, 5).close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", port, 60)
