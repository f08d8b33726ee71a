"""A question of the head's to all nodes: where their ranks are (hang_watch.py), what they use (usage_watch.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from clusterddp.rendezvous.connection import Message


@dataclass(kw_only=True, slots=True)
class Question:
    """A question under way; subclasses hold the answers."""

    due: float
    """When the head stops waiting."""
    awaited: set[int]
    """The nodes that have not answered, by rank."""

    def send(self, order: Message, send: Callable[[int, Message], None]) -> None:
        """Send it to all nodes."""
        for node_rank in sorted(self.awaited):
            send(node_rank, order)

    def is_over(self, nodes: Iterable[int], now: float) -> bool:
        """Return whether all nodes have answered, or the time is up; `nodes`: those that are not lost."""
        self.awaited &= set(nodes)
        return not self.awaited or now >= self.due
