"""Equal lines of several ranks, put together: ranks mostly print the same, with some lines of their own in between."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from clusterddp.look.log_pieces import LogPiece

_WINDOW_BYTES = 64 * 1024
"""How far the lines of a rank are compared with those of the others."""


class Folding:
    """The lines of one stream of several ranks, between their files and the output; it keeps the order of each rank."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lines: dict[int, deque[tuple[LogPiece, int]]] = {}
        """By rank: what was read and is not shown yet, each with the round in which it was read."""
        self._counts: dict[int, Counter[bytes]] = {}
        self._bytes: Counter[int] = Counter()

    def add(self, piece: LogPiece, round_: int = 0) -> None:
        """Add the next line of a rank."""
        self._lines.setdefault(piece.rank, deque()).append((piece, round_))
        self._counts.setdefault(piece.rank, Counter())[piece.data] += 1
        self._bytes[piece.rank] += len(piece.data)

    def is_full(self, rank: int) -> bool:
        """Return whether there are enough lines of a rank to compare."""
        return self._bytes[rank] >= _WINDOW_BYTES

    def take(self, *, until: int | None = None) -> LogPiece | None:
        """Return the next line with all ranks that have it next, too; None: there is none.

        `until`: a line that not all ranks have is returned if it was read in this round or earlier.
        """
        waiting = [rank for rank in sorted(self._lines) if self._lines[rank]]
        if not waiting:
            return None
        lead, seen = waiting[0], set[int]()
        while (before := self._must_precede(lead, waiting)) is not None and lead not in seen:
            seen.add(lead)
            lead = before
        line = self._lines[lead][0][0]
        ranks = [rank for rank in waiting if self._lines[rank][0][0].data == line.data]
        is_due = until is None or any(self._lines[rank][0][1] <= until for rank in ranks)
        if not is_due and len(ranks) < self._num_ranks:
            return None
        for rank in ranks:
            self._drop(rank)
        return dataclasses.replace(line, others=tuple(rank for rank in ranks if rank != lead))

    def _must_precede(self, lead: int, waiting: list[int]) -> int | None:
        """Return a rank that has the next line of `lead` later; its lines before that one come first."""
        line = self._lines[lead][0][0].data
        for rank in waiting:
            head = self._lines[rank][0][0].data
            if head == line or not self._counts[rank][line]:
                continue
            # The nearer of two meetings is the likelier one: empty lines, for one, are everywhere.
            if not self._counts[lead][head] or self._depth(rank, line) < self._depth(lead, head):
                return rank
        return None

    def _depth(self, rank: int, line: bytes) -> int:
        return next(depth for depth, (piece, _) in enumerate(self._lines[rank]) if piece.data == line)

    def _drop(self, rank: int) -> None:
        data = self._lines[rank].popleft()[0].data
        self._bytes[rank] -= len(data)
        self._counts[rank][data] -= 1
        if not self._counts[rank][data]:
            del self._counts[rank][data]


def fold(pieces_of: Mapping[int, Iterator[LogPiece]], folding: Folding | None = None) -> Iterator[LogPiece]:
    """Fold one stream of several ranks, after what is in `folding`; of each rank only the next lines are in memory."""
    folding = folding or Folding(len(pieces_of))
    ranks: tuple[int, ...] = tuple(pieces_of)
    while True:
        for rank in ranks:
            while not folding.is_full(rank) and (piece := next(pieces_of[rank], None)):
                folding.add(piece)
        taken = folding.take()
        if taken is None:
            return
        yield taken
        ranks = (taken.rank, *taken.others)
