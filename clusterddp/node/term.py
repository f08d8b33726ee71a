"""Who decides about a run whose hosts may lose each other: one head, which reaches enough of the nodes.

Before the ranks of an attempt start, the head sends the nodes that are there its `Term`, and waits for their answers.
When it is lost, another node takes its place if it reaches more than half of the nodes of the newest term; of exactly
half only those go on that have the head. Two such groups have a node in common; it tells whoever it joins which terms
it has answered, so no attempt begins twice, and a head that is cut off begins none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from clusterddp.network.rendezvous.connection import Message
from clusterddp.wire import Written, build

Send = Callable[[int, Message], None]
"""Sends a node, by its node rank, an order."""

Voter = tuple[int, str, int]
"""The node rank of a node of a term, and where its supervisor listens: address and port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term(Written):
    """What the head of an attempt tells all nodes."""

    number: int
    attempt: int
    restart: int
    """How many restarts lie before the attempt."""
    head: int
    """The node rank of its supervisor."""
    members: tuple[int, ...] = ()
    """The nodes that take part in the attempt."""
    voters: tuple[Voter, ...]
    """The nodes that are there, spares among them."""

    @property
    def nodes(self) -> set[int]:
        return {node_rank for node_rank, _, _ in self.voters}

    @property
    def head_place(self) -> Voter:
        """Where the head listens."""
        return next(voter for voter in self.voters if voter[0] == self.head)

    def suffices(self, present: Collection[int]) -> bool:
        """Return whether these nodes are enough to go on without the others."""
        there = 2 * len(self.nodes.intersection(present))
        return there > len(self.voters) or (there == len(self.voters) and self.head in present)


class Terms:
    """The terms that a node knows: the one that all its nodes have answered, and those that were proposed since."""

    def __init__(self, first: Term, own: int, *, fails_over: bool) -> None:
        """`own`: the node. `fails_over`: another one than the first may become the head."""
        self.fails_over = fails_over
        self.own = own
        self.known: tuple[Term, ...] = (first,)
        self._claimed = first.attempt if first.head != own else -1
        """The last attempt that another head may have begun."""
        self._awaited: set[int] = set()
        """The nodes that have not answered the newest term, where this one has proposed it."""

    @property
    def newest(self) -> Term:
        return self.known[-1]

    def suffice(self, present: Collection[int]) -> bool:
        """Return whether these nodes may decide: they are enough by each term."""
        return all(term.suffices(present) for term in self.known)

    def written(self) -> list[dict[str, Any]]:
        return [term.to_json() for term in self.known]

    def learn(self, written: Any) -> None:
        """Add what another node knows.

        Raises: ValueError: it is no list of terms.
        """
        theirs: tuple[Term, ...] = build(tuple[Term, ...], written, "terms")
        if theirs:
            self._claimed = max([self._claimed, *(term.attempt for term in theirs if term.head != self.own)])
            answered = max(self.known[0].number, theirs[0].number)
            terms = {*self.known, *theirs}
            newer = [term for term in terms if term.number >= answered]
            self.known = tuple(sorted(newer, key=lambda term: (term.number, term.head)))

    def next_attempt(self, number: int = 0) -> int:
        """Return the number of an attempt that this node may begin as the head, `number` at least."""
        return max(number, self._claimed + 1)

    def on_answer(self, node_rank: int, number: int) -> None:
        """Take in the answer of a node to a term that this one has proposed."""
        if number == self.newest.number:
            self._awaited.discard(node_rank)

    def wait(self, attempt: int, restart: int, members: Iterable[int], voters: Iterable[Voter], send: Send) -> bool:
        """Propose the term of an attempt with these nodes; return whether answers are missing."""
        term = Term(
            number=self.newest.number + 1,
            attempt=attempt,
            restart=restart,
            head=self.own,
            members=tuple(members),
            voters=tuple(voters),
        )
        if dataclasses.replace(term, number=self.newest.number) != self.newest:
            self.known = (*self.known, term)
            self._awaited = term.nodes - {self.own}
        elif not self._awaited and len(self.known) > 1:
            self.known = (self.newest,)
        else:
            return bool(self._awaited)
        for node_rank in sorted(term.nodes - {self.own}):
            send(node_rank, {"kind": "terms", "terms": self.written()})
        return len(self.known) > 1
