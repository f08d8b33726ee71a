"""The cleanup of machines (gc): find what is left over, then end and remove it, with an answer of each machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from clusterddp.errors import ClusterddpError, PreflightError, SshError

if TYPE_CHECKING:
    from clusterddp.look.ps import Machines
    from clusterddp.run.leftovers import Ended, RunHere
    from clusterddp.run.stored import Removed, Storage

_T = TypeVar("_T")


@dataclass(kw_only=True)
class Cleanup:
    """One cleanup of machines: `look` comes first, then `carry_out`."""

    machines: Machines
    tokens: list[str] | None
    """The runs that it is about; None: all."""
    older_than_s: float | None
    """The age from which directories are removed; None: none is removed."""
    found: Mapping[str, list[RunHere] | SshError] = field(default_factory=dict)
    storages: Mapping[str, Storage | SshError] = field(default_factory=dict)
    ended: Mapping[str, list[Ended] | SshError] = field(default_factory=dict)
    removed: Mapping[str, list[Removed] | SshError] = field(default_factory=dict)

    @property
    def left_over(self) -> dict[str, list[RunHere]]:
        """The runs without a supervisor, guard or task, by machine; machines without such runs are left out."""
        return left_over_of(self.found)

    @property
    def removable(self) -> dict[str, list[str]]:
        """The places that can be removed, by machine; machines without are left out."""
        places = {host: [each.place for each in storage.removable] for host, storage in answers(self.storages).items()}
        return {host: of_host for host, of_host in places.items() if of_host}

    @property
    def exit_code(self) -> int:
        replies = [*self.found.values(), *self.storages.values(), *self.ended.values(), *self.removed.values()]
        if any(isinstance(reply, SshError) for reply in replies):
            return PreflightError.exit_code
        alive = any(each.left for ended in answers(self.ended).values() for each in ended)
        kept = any(each.error for removed in answers(self.removed).values() for each in removed)
        return ClusterddpError.exit_code if alive or kept else 0

    def look(self) -> None:
        """Find what is left over and what can be removed."""
        self.found = self.machines.look(self.tokens)
        if self.older_than_s is not None:
            self.storages = self.machines.stored(self.older_than_s)

    def carry_out(self) -> None:
        """End and remove what was found, as far as it is still left over."""
        left_over = {host: [run.token for run in runs] for host, runs in self.left_over.items()}
        self.ended = self.machines.end(left_over)
        if self.older_than_s is not None:
            self.removed = self.machines.remove(self.removable, self.older_than_s)


def answers(replies: Mapping[str, _T | SshError]) -> dict[str, _T]:
    """Return the answers, without the errors."""
    return {host: reply for host, reply in replies.items() if not isinstance(reply, SshError)}


def left_over_of(found: Mapping[str, list[RunHere] | SshError]) -> dict[str, list[RunHere]]:
    """Return the runs without a live supervisor, guard or task, by machine; machines without such runs are left out."""
    runs = {host: [run for run in of_host if run.answered_by is None] for host, of_host in answers(found).items()}
    return {host: of_host for host, of_host in runs.items() if of_host}
