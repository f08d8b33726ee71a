"""Who decides about a run whose hosts lose each other: more than half of the nodes, and never two heads."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from clusterddp.node.term import Term, Terms, Voter


def voters(*nodes: int) -> tuple[Voter, ...]:
    return tuple((node, f"10.0.0.{node}", 7000 + node) for node in nodes)


def term(*nodes: int, number: int = 1, head: int = 0, attempt: int = 0) -> Term:
    return Term(number=number, attempt=attempt, restart=0, head=head, members=nodes, voters=voters(*nodes))


@pytest.mark.parametrize(
    ("nodes", "present", "enough"),
    [
        ((0, 1, 2), {1, 2}, True),
        ((0, 1, 2), {0}, False),
        ((0, 1, 2), {2, 3, 4}, False),
        ((0, 1), {0}, True),
        ((0, 1), {1}, False),
        ((0, 1, 2, 3), {0, 3}, True),
        ((0, 1, 2, 3), {1, 2}, False),
        ((0,), {1, 2}, False),
    ],
)
def test_more_than_half_decide_and_of_exactly_half_those_with_the_head(
    nodes: tuple[int, ...], present: set[int], enough: bool
) -> None:
    assert term(*nodes).suffices(present) is enough


def test_a_term_counts_alone_once_all_its_nodes_have_answered() -> None:
    terms, sent = Terms(term(0, 1, 2), 0, fails_over=True), list[tuple[int, int]]()

    def waits() -> bool:
        return terms.wait(1, 1, (0, 1), voters(0, 1), lambda node, message: sent.append((node, len(message["terms"]))))

    assert waits()
    assert sent == [(1, 2)]
    assert not terms.suffice({0})
    terms.on_answer(1, 1)
    assert waits()
    terms.on_answer(1, 2)
    assert not waits()
    assert sent == [(1, 2), (1, 1)]
    assert terms.suffice({0})
    assert not terms.suffice({1, 2})


def test_who_has_answered_another_head_tells_it() -> None:
    old, other = Terms(term(0, 1, 2), 0, fails_over=True), Terms(term(0, 1, 2), 2, fails_over=True)
    other.learn([term(0, 1, 2).to_json(), term(1, 2, number=2, head=1, attempt=1).to_json()])
    assert (old.next_attempt(1), other.next_attempt(1)) == (1, 2)
    old.learn(other.written())
    assert old.next_attempt(1) == 2
    assert old.suffice({0, 2}) is False
    assert old.suffice({0, 1, 2})
    old.learn([term(1, 2, number=2, head=1, attempt=1).to_json()])
    assert [each.number for each in old.known] == [2]


@pytest.mark.parametrize("seed", range(200))
def test_no_attempt_begins_twice_however_hosts_lose_each_other(seed: int) -> None:
    """Groups of nodes meet at random, each led by one of them; answers get lost at random."""
    chance, size = random.Random(seed), 3 + seed % 3
    nodes = {node: Terms(term(*range(size)), node, fails_over=True) for node in range(size)}
    begun = {0: 0}
    for _ in range(40):
        group = chance.sample(range(size), chance.randint(1, size))
        lead(nodes, group, chance.choice(group), begun, chance)
    assert len(begun) > 1


def lead(
    nodes: dict[int, Terms], group: Collection[int], head: int, begun: dict[int, int], chance: random.Random
) -> None:
    """Let the head of a group that has just met begin an attempt, if it may."""
    own, answers = nodes[head], list[tuple[int, int]]()

    def send(node: int, message: dict[str, list[dict[str, int]]]) -> None:
        if chance.random() < 0.8:
            nodes[node].learn(message["terms"])
            if chance.random() < 0.9:
                answers.append((node, message["terms"][-1]["number"]))

    for node in group:
        own.learn(nodes[node].written())
    attempt = own.next_attempt(max((number for number, by in begun.items() if by == head), default=-1) + 1)
    for _ in range(3):
        if not own.suffice(group):
            return
        waits = own.wait(attempt, 0, sorted(group), voters(*sorted(group)), send)
        while answers:
            own.on_answer(*answers.pop())
        if not waits:
            assert attempt not in begun
            begun[attempt] = head
            return
