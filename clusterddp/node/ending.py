"""The end of a gang as the head sees it: which nodes have not confirmed yet that nothing of them is left."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable

from clusterddp.node.attempt import Attempt
from clusterddp.node.rank import ENDING
from clusterddp.ranks.entry_environment import RENDEZVOUS_FILE
from clusterddp.ranks.environment import node_cookies
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.outcome import AttemptEnd
from clusterddp.system.files import is_file

_CONFIRM_S = 4.0
"""How long nodes may take to confirm once they have given up."""


class Ending:
    """One gang being ended."""

    def __init__(self, gang: Gang, nodes: Iterable[int], now: float) -> None:
        self.unconfirmed = set(nodes)
        """Node ranks."""
        self._gang = gang
        self._until = now + gang.give_up_s + _CONFIRM_S
        self._left: dict[int, list[int]] = {}

    @property
    def all_gone(self) -> bool:
        """True when every node has confirmed that nothing of it is left."""
        return not (self._left or self.unconfirmed)

    def confirm(self, node_rank: int, left: list[int]) -> None:
        """Take in that a node has done what it could; `left`: pids that cannot be killed."""
        self.unconfirmed.discard(node_rank)
        if left:
            self._left[node_rank] = left

    def is_over(self, now: float, *, waits: bool) -> bool:
        """Say whether all have confirmed, or had their time; `waits`: for something else."""
        return (not self.unconfirmed and not waits) or now >= self._until

    def sweep(self, lost: Iterable[int]) -> None:
        """End what is left here of lost nodes: one may be a slot of this very machine, its guard killed too."""
        cookies = node_cookies(self._gang.token, *lost)
        if cookies:
            end_processes(*cookies, timeout_s=3.0)

    def conclude(self, attempt: Attempt, run: RunDir, address: str, port: int) -> AttemptEnd:
        """Remove what only a running attempt needs; return how it ended, with what may be left of it.

        `address`, `port`: the master's, where ranks connect that train together.
        """
        directory = run.attempt(attempt.number)
        for name in (ENDING, RENDEZVOUS_FILE):
            with contextlib.suppress(OSError):
                directory.path.joinpath(name).unlink(missing_ok=True)
        confirmed = not self._gang.entry.stop_aware or is_file(directory.stopped)
        end = self.add_leftovers(attempt.verdict(stop_confirmed=confirmed))
        return dataclasses.replace(end, warning=attempt.warn_of_apart(end, address, port))

    def add_leftovers(self, end: AttemptEnd) -> AttemptEnd:
        """Say in the end's reason what may be left, and where."""
        nodes = self._gang.nodes
        silent = [nodes[node_rank] for node_rank in sorted(self.unconfirmed)]
        places = [f"node {node.node_rank} on {node.host} did not confirm its end" for node in silent]
        places += [
            f"processes {', '.join(map(str, pids))} on {nodes[node_rank].host} could not be killed"
            for node_rank, pids in sorted(self._left.items())
        ]
        return dataclasses.replace(end, reason="; ".join([end.reason, *places]))
