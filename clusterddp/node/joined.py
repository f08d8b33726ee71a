"""The supervisors that have joined the head, and the ranks that their nodes still lack."""

from __future__ import annotations

from collections.abc import Iterable

from clusterddp.network.socket_links import faster_networks
from clusterddp.node.failure import Failure
from clusterddp.node.log import log_line
from clusterddp.ranks.spelling import spell_ranks
from clusterddp.rendezvous.connection import Message
from clusterddp.run.gang import Gang, Node


class JoinedNodes:
    """The nodes of a gang whose supervisors have joined the head."""

    def __init__(self, gang: Gang, *, timeout_s: float, now: float) -> None:
        self.pids: dict[int, int] = {}
        """Of the supervisors that have joined, by node rank."""
        self.reached: dict[int, str] = {}
        """The address at which each other node has reached the head."""
        self._links: dict[int, dict[str, int]] = {}
        """What nodes have reported of their links, by node rank; see `report_links`."""
        self._gang = gang
        self._timeout_s = timeout_s
        self._until = now + timeout_s
        self._unready: dict[int, tuple[int, ...]] = {}
        """Ranks that a node cannot start yet, for it waits for their tasks."""

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
