"""The nodes of a gang as the head sees them: which have joined, which are lost, and which have confirmed their end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from clusterddp.network.interface import is_cut_off
from clusterddp.network.socket_links import faster_networks
from clusterddp.node.attempt import Attempt
from clusterddp.node.failure import Failure
from clusterddp.node.log import log_line
from clusterddp.node.rank import ENDING
from clusterddp.ranks.entry_environment import RENDEZVOUS_FILE
from clusterddp.ranks.environment import STOP_FILE, rank_cookies
from clusterddp.ranks.spelling import spell_ranks
from clusterddp.rendezvous.connection import Loss, Message
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.run.outcome import AttemptEnd, signal_name
from clusterddp.system.files import is_file

_CONFIRM_S = 4.0
"""How long nodes may take to confirm their end after they have given up."""
_MAX_FILES, _MAX_BYTES = 5000, 100_000_000
"""Of the code of a program, which `may_look_for_file` reads."""


class JoinedNodes:
    """The nodes of a gang whose supervisors have joined the head."""

    def __init__(self, gang: Gang, *, timeout_s: float, now: float) -> None:
        self.pids: dict[int, int] = {}
        """Of the supervisors that have joined, by node rank."""
        self.lost: set[int] = set()
        """Node ranks."""
        self.reached: dict[int, str] = {}
        """The address at which each other node has reached the head."""
        self._links: dict[int, dict[str, int]] = {}
        """The links that nodes have reported, by node rank; see `report_links`."""
        self._gang = gang
        self._timeout_s = timeout_s
        self._until = now + timeout_s
        self._unready: dict[int, tuple[int, ...]] = {}
        """Ranks that a node cannot start yet, because it waits for their tasks."""

    @property
    def present(self) -> set[int]:
        """The ranks of the nodes that have joined and are not lost."""
        return set(self.pids) - self.lost

    def may_join(self, node_rank: int) -> bool:
        return node_rank not in self.pids and 0 <= node_rank < len(self._gang.nodes)

    def join(self, node: Node, report: Message) -> None:
        """Count a supervisor."""
        pid = self.pids[node.node_rank] = int(report["pid"])
        self.expect(node.node_rank, report.get("missing", ()))
        self._links[node.node_rank] = dict(report.get("links", {}))
        if "reached" in report:
            self.reached[node.node_rank] = str(report["reached"])
        log_line(f"node {node.node_rank} on {node.host} has joined (supervisor {pid})")

    def expect(self, node_rank: int, ranks: Iterable[int]) -> None:
        """Note which ranks of a node cannot be started yet."""
        self._unready[node_rank] = tuple(ranks)

    def spell_end(self, node_rank: int, exit_code: int) -> str:
        """Say how the supervisor of a node ended, by its exit code."""
        how = f"exited with code {exit_code}" if exit_code >= 0 else f"was killed by {signal_name(-exit_code)}"
        return f"supervisor of node {node_rank} on {self._gang.nodes[node_rank].host} {how}"

    def lose(self, node_rank: int, why: Loss, interface: str | None) -> list[tuple[Node, str]]:
        """Count a node as lost; return what happened, each time with the node at fault.

        `interface`: the one that carries the gang's traffic on this host. `given_up`: the node counts this one as lost,
        as it does after this process was stopped for long.
        """
        self.lost.add(node_rank)
        node, own = self._gang.nodes[node_rank], self._gang.nodes[0]
        if why.kind == "given_up":
            return [(own, f"node 0 on {own.host} was given up by node {node_rank} on {node.host}: {why}")]
        name = f"supervisor of node {node_rank} on {node.host} (pid {self.pids[node_rank]})"
        if why.kind == "process_ended":  # one that ends for a reason of its own reports it first
            return [(node, f"{name} was killed")]
        losses = [(node, f"{name} is lost: {why}")]
        if why.kind == "host_silent" and is_cut_off(interface):
            losses.insert(0, (own, f"{own.host} is cut off, its {interface} is down"))
        return losses

    def faster_networks(self, master_addr: str) -> tuple[str, ...]:
        """Return the networks that NCCL's sockets take in place of the one of the master's address."""
        return faster_networks([self._links[node_rank] for node_rank in sorted(self._links)], master_addr)

    @property
    def complete(self) -> bool:
        return len(self.pids) == len(self._gang.nodes) and not any(self._unready.values())

    def overdue(self, now: float) -> Failure | None:
        """Name the nodes and tasks that are missing once the time is up."""
        if now < self._until:
            return None
        absent = [node for node in self._gang.nodes if node.node_rank not in self.pids]
        unready = [node for node in self._gang.nodes if self._unready.get(node.node_rank)]
        missing = []
        if absent:
            missing.append(" and ".join(f"node {node.node_rank} on {node.host}" for node in absent) + " did not join")
        for node in unready:
            missing.append(f"the tasks of {spell_ranks(self._unready[node.node_rank])} on {node.host} did not start")
        error = f"{' and '.join(missing)} within {self._timeout_s:g} s"
        return Failure.at((absent + unready)[0].host, error, job_restartable=True)


class Ending:
    """The end of one gang, until every node has confirmed that nothing of it is left."""

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
        """Count a node as ended; `left`: pids there that cannot be killed."""
        self.unconfirmed.discard(node_rank)
        if left:
            self._left[node_rank] = left

    def is_over(self, now: float, *, waits: bool) -> bool:
        """Return whether all nodes have confirmed, or the time is up; `waits`: for something else."""
        return (not self.unconfirmed and not waits) or now >= self._until

    def clean_up(self, lost: Iterable[int]) -> None:
        """End what is left on this host of lost nodes: one may have run here, its guard killed too."""
        cookies = rank_cookies(self._gang.token, *lost)
        if cookies:
            end_processes(*cookies, timeout_s=3.0)

    def conclude(self, attempt: Attempt, run: RunDir, address: str, port: int) -> AttemptEnd:
        """Remove the files that only a running attempt needs; return how it ended, and what may be left of it.

        `address`, `port`: the master's, where the ranks connect.
        """
        directory = run.attempt(attempt.number)
        for name in (ENDING, RENDEZVOUS_FILE):
            with contextlib.suppress(OSError):
                directory.path.joinpath(name).unlink(missing_ok=True)
        attempt.asks |= is_file(directory.asked) or is_file(directory.stopped)
        end = self._add_leftovers(attempt.verdict(stop_confirmed=self._has_stopped(attempt, directory)))
        return dataclasses.replace(end, warning=end.warning or attempt.warn_of_apart(end, address, port))

    def _has_stopped(self, attempt: Attempt, directory: AttemptDir) -> bool:
        """Return whether the program that was asked to stop takes part in the stop contract."""
        if attempt.stop_reason is None or self._gang.entry.stop_aware:
            return is_file(directory.stopped)
        return attempt.asks or may_look_for_file(self._gang.entry)

    def _add_leftovers(self, end: AttemptEnd) -> AttemptEnd:
        """Add to the end's reason what may be left, and where."""
        nodes = self._gang.nodes
        missing = [nodes[node_rank] for node_rank in sorted(self.unconfirmed)]
        places = [f"node {node.node_rank} on {node.host} did not confirm its end" for node in missing]
        places += [
            f"processes {', '.join(map(str, pids))} on {nodes[node_rank].host} could not be killed"
            for node_rank, pids in sorted(self._left.items())
        ]
        return dataclasses.replace(end, reason="; ".join([end.reason, *places]))


def may_look_for_file(entry: Entry) -> bool:
    """Return whether a program may look for the stop file by itself: its code names the variable with the path.

    No process sees that a program looks for a file. True also where the code is too much to read.
    """
    if STOP_FILE in " ".join(map(str, (entry.target, *entry.words, *entry.args))):
        return True
    words = (entry.target, entry.target.partition(":")[0], *entry.words, *map(str, entry.args))
    left = _MAX_BYTES
    for number, file in enumerate(_code_files(entry, words)):
        with contextlib.suppress(OSError, ValueError):
            if not file.is_file():
                continue
            left -= file.stat().st_size
            if number > _MAX_FILES or left < 0 or STOP_FILE.encode() in file.read_bytes():
                return True
    return False


def _code_files(entry: Entry, words: Iterable[str]) -> Iterator[Path]:
    """List the files of a program: those that its words name, and those of the snapshot of its code."""
    yield from (Path(entry.working_dir, word) for word in words)
    for top in {entry.code_dir, *entry.import_paths} - {None}:
        for folder, _, names in os.walk(str(top)):
            yield from (Path(folder, name) for name in names)
