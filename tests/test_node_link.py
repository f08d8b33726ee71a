"""The link: what is said arrives, what a stranger says does not, and silence is noticed."""

import contextlib
import select
import socket
import time

import pytest

from clusterddp.node.link import Channel, connect, listen

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
    member.send({"kind": "join", "node_rank": 1})
    member.send({"kind": "started"})
    head.send({"kind": "start", "text": "ü\n"})
    heard_by_head, heard_by_member = [], []
    for _ in range(3):  # nonces first, in however many pieces
        heard_by_head += hear(head)
        heard_by_member += hear(member)
    assert heard_by_head == [{"kind": "join", "node_rank": 1}, {"kind": "started"}]
    assert heard_by_member == [{"kind": "start", "text": "ü\n"}]
    assert (head.lost, member.lost, head.proven) == (None, None, True)


def test_another_token_is_not_heard():
    head, member = make_pair(member_token="0" * 32)
    member.send({"kind": "join", "node_rank": 1})
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


def test_beats_keep_a_lease_and_silence_ends_it():
    start = time.monotonic()
    head, member = make_pair(now=start)
    hear(head, start), hear(member, start)
    for step in range(1, 5):
        member.keep_alive(start + step * 10, 15.0)
        hear(head, start + step * 10)
        head.keep_alive(start + step * 10, 15.0)
        hear(member, start + step * 10)
    assert head.lost is None
    head.keep_alive(start + 40 + 14, 15.0)
    assert head.lost is None
    head.keep_alive(start + 40 + 16, 15.0)
    assert head.lost == "no sign of life for 15 s"


def test_a_head_that_is_gone_is_not_waited_for():
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    connect("127.0.0.1", port, 5).close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", port, 60)
