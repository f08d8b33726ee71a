"""The local ranks of a node: starts them, watches them, ends them, and records how each ended.

It reports to the head and carries out the head's orders; supervisor.py lists the kinds of both. Nothing here blocks for
longer than one read of the process table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable

from clusterddp.errors import ClusterddpError
from clusterddp.facts.memory import count_oom_kills
from clusterddp.node.failure import CERTAIN, OWN, read_rank_end
from clusterddp.node.history import RankRecords, new_record, with_end
from clusterddp.node.node_stacks import NodeStacks
from clusterddp.node.node_usage import NodeUsage
from clusterddp.node.rank import ENDING
from clusterddp.node.rank_network import find_rank_network
from clusterddp.node.rank_starter import Ended, Lost, RankStarter, Started, plan_launch
from clusterddp.node.rank_watch import ConnectionWatch, LocalAttempt, LocalEnding, NcclWatch
from clusterddp.ranks.environment import rank_cookies
from clusterddp.rendezvous.connection import Message
from clusterddp.run.cleanup import Cleanup
from clusterddp.run.directory import RunDir, make_attempt_dirs
from clusterddp.run.gang import Gang, Node
from clusterddp.run.preload import find_preload
from clusterddp.run.stop import cancel_reason, is_complete, request_stop, stop_reason, was_ordered
from clusterddp.system.files import is_file
from clusterddp.system.storage import is_outage

TERM_GRACE_S = 1.0
"""The time between SIGTERM and SIGKILL when the gang is ended."""


class LocalRanks:
    """The ranks of one node, from the head's order to start until the report that nothing of them is left."""

    def __init__(
        self,
        run: RunDir,
        gang: Gang,
        node: Node,
        *,
        first_attempt: int,
        starter: RankStarter,
        report: Callable[[Message], None],
        spared: Callable[[], frozenset[int]],
    ) -> None:
        """`spared`: descendants of this process that the cleanup leaves alone."""
        self._run = run
        self._gang = gang
        self._node = node
        self._starter = starter
        self._report = report
        self._spared = spared
        self.attempt_number = first_attempt
        """Of the attempt that runs now, or ran last."""
        self.interface = node.interface or gang.interface
        """This host's; on Slurm known when its ranks are started."""
        self._attempt: LocalAttempt | None = None
        self._cancel_seen = False
        self._records = RankRecords()
        self._stacks = NodeStacks(node.host, node.node_rank, report)
        self._usage = NodeUsage(report, on_cpu=gang.on_cpu)

    @property
    def idle(self) -> bool:
        """True while this node has no rank and nothing that a rank left behind."""
        return self._attempt is None

    @property
    def ending(self) -> bool:
        return self._attempt is not None and self._attempt.ending is not None

    @property
    def polls_fast(self) -> bool:
        """True while things change within milliseconds: ranks end, or write their stacks."""
        return self.ending or self._stacks.asking or (not self.idle and self._usage.asking)

    def obey(self, order: Message, now: float) -> None:
        """Carry out an order of the head."""
        if order["kind"] == "start":
            self._start(order, now)
        elif order["kind"] == "stop":
            self._stop(str(order["reason"]))
        elif order["kind"] == "stacks":
            self._stacks.ask(str(order["id"]), self._attempt.pids if self._attempt else {})
        elif order["kind"] == "usage":
            self._usage.ask(float(order["asked"]), int(order["most"]), self._attempt.pids if self._attempt else {})
        elif order["kind"] == "kill":
            if self._attempt is None:
                self._report({"kind": "ended", "left": []})
            self.begin_end(now, whole_gang=order["whole_gang"])

    def begin_end(self, now: float, *, whole_gang: bool = False) -> None:
        """End all ranks of this node: SIGTERM, SIGKILL after the grace, then a cleanup; `tick` continues it.

        `whole_gang`: the cleanup also ends ranks of other nodes that are on this host.
        """
        attempt = self._attempt
        if attempt is None:
            return
        nodes = self._gang.nodes if whole_gang else (self._node,)
        cookies = rank_cookies(self._gang.token, *(node.node_rank for node in nodes))
        if attempt.ending is not None:
            attempt.ending.cleanup.cookies = max(attempt.ending.cleanup.cookies, cookies, key=len)
            return
        self._starter.withdraw()
        if attempt.running:
            with contextlib.suppress(OSError):
                attempt.dir.path.joinpath(ENDING).touch()
        for rank in attempt.running:
            self._starter.signal(rank, signal.SIGTERM)
        descendants_but = self._spared() if self._starter.owns_descendants else None
        attempt.ending = LocalEnding(
            kill_at=now + TERM_GRACE_S,
            give_up_at=now + self._gang.give_up_s,
            cleanup=Cleanup(cookies=cookies, descendants_but=descendants_but),
        )

    def tick(self, now: float) -> None:
        """Take in what has happened to the ranks, look for requests of users, and continue an end that has begun."""
        self._take_updates()
        if not self._cancel_seen and is_file(self._run.cancel_file):
            self._cancel_seen = True
            self._report({"kind": "cancel", "reason": cancel_reason(self._run)})
        self._write_records(now)
        attempt = self._attempt
        if attempt is None:
            return
        attempt.watch.tick(now)
        if attempt.stop_wanted is not None:
            self._stop(attempt.stop_wanted)
        if attempt.nccl is not None and (transport := attempt.nccl.look(now)) is not None:
            self._report({"kind": "transport", **transport.to_json()})
        if attempt.ending is not None:
            self._continue_end(attempt, attempt.ending, now)
        else:
            self._look_for_stop(attempt, complete=True)
            self._look_for_stopped_ranks(attempt, now)
            self._stacks.tick(attempt.dir, attempt.pids, now)
            self._usage.tick(attempt.pids)

    def _look_for_stopped_ranks(self, attempt: LocalAttempt, now: float) -> None:
        records = [attempt.records[rank] for rank in sorted(attempt.running)] if attempt.started else []
        for record in attempt.stopped.look(records, now):
            attempt.records[record.rank] = record
            self._records.put(attempt.dir, record)

    def _look_for_stop(self, attempt: LocalAttempt, *, complete: bool) -> None:
        if attempt.stop_seen or attempt.ending is not None:
            return
        if is_complete(attempt.dir.stop_file) if complete else is_file(attempt.dir.stop_file):
            attempt.stop_seen = True
            file = attempt.dir.stop_file
            self._report({"kind": "stop_requested", "reason": stop_reason(file), "ordered": was_ordered(file)})

    def _take_updates(self) -> None:
        """Take in which ranks have started, ended or been lost."""
        attempt = self._attempt
        for update in self._starter.updates():
            if isinstance(update, Lost):
                self._lose(attempt, update)
            elif attempt is None:
                continue
            elif isinstance(update, Started):
                self._rank_started(attempt, update)
            elif update.rank in attempt.running:
                attempt.running.discard(update.rank)
                # It may have seen a request to stop before we did.
                self._look_for_stop(attempt, complete=False)
                self._rank_ended(attempt, update)

    def _start(self, order: Message, now: float) -> None:
        self.attempt_number = int(order["attempt"])
        node, directory = self._node, self._run.attempt(self.attempt_number)
        try:
            network = find_rank_network(self._gang, node, order)
            port = int(order["master_port"])
            watch = ConnectionWatch(network.gang.master_addr, port, now)
            self.interface = network.interface
            attempt = LocalAttempt(
                dir=directory, network=network, master_port=port, oom_kills=count_oom_kills(), watch=watch
            )
            self._attempt = attempt
            self._stacks.begin_attempt()
            self._usage.begin_attempt()
            make_attempt_dirs(directory)
            preload = find_preload(self._gang.entry)
            launches = {rank: plan_launch(self._run, network.gang, rank, order, preload=preload) for rank in node.ranks}
            # All ranks first, because they wait for each other; the records, which wait for the disk, afterwards.
            self._starter.start(launches)
        except (OSError, ClusterddpError) as error:
            self._fail(f"node {node.node_rank} on {node.host} could not start its ranks: {error}")
            return
        self._take_updates()

    def _rank_started(self, attempt: LocalAttempt, started: Started) -> None:
        attempt.running.add(started.rank)
        record = new_record(started.rank, started.pid, self._node, attempt.network, attempt.master_port)
        attempt.records[started.rank] = record
        if len(attempt.records) == len(self._node.ranks):
            self._records.put(attempt.dir, *attempt.records.values())
            self._write_records(time.monotonic())

    def _write_records(self, now: float) -> None:
        """Write the records of ranks; the next ticks retry what the storage refuses."""
        attempt = self._attempt
        try:
            if not self._records.write(now):
                return
        except ClusterddpError as error:
            if attempt is not None and attempt.ending is None:
                self._fail(f"node {self._node.node_rank} on {self._node.host}: {error}")
            return
        if attempt is not None and not attempt.started and len(attempt.records) == len(self._node.ranks):
            attempt.started = True
            self._report({"kind": "started", **attempt.network.facts(), **self._starter.facts()})
            if self._gang.backend == "nccl":
                attempt.nccl = NcclWatch([attempt.dir.nccl(rank) for rank in self._node.ranks], now)

    def _stop(self, reason: str) -> None:
        if self._attempt is None:
            return
        self._attempt.stop_seen = True
        try:
            request_stop(self._attempt.dir.stop_file, reason, ordered=True)
            self._attempt.stop_wanted = None
        except OSError as error:
            if is_outage(error):
                self._attempt.stop_wanted = reason  # the next tick tries again
                return
            self._fail(f"node {self._node.node_rank} on {self._node.host} could not ask its ranks to stop: {error}")

    def _lose(self, attempt: LocalAttempt | None, lost: Lost) -> None:
        """Report a rank that ended through no fault of its own, and that cannot be started again here."""
        if attempt is not None:
            attempt.running.discard(lost.rank)
        self._report({"kind": "failed", "error": lost.error, "weight": CERTAIN, "rank": lost.rank})

    def _rank_ended(self, attempt: LocalAttempt, ended: Ended) -> None:
        rank = ended.rank
        on_order = attempt.ending is not None
        end = read_rank_end(attempt.dir, rank, ended.returncode, on_order=on_order, oom_kills=attempt.oom_kills)
        attempt.watch.look()
        # First the report: the record waits for the disk, and the other ranks should not.
        self._report({"kind": "rank_ended", **dataclasses.asdict(end)})
        attempt.records[rank] = with_end(attempt.records[rank], end)
        self._records.put(attempt.dir, attempt.records[rank])
        self._write_records(time.monotonic())

    def _continue_end(self, attempt: LocalAttempt, ending: LocalEnding, now: float) -> None:
        if attempt.running and now < ending.kill_at:
            return
        if not ending.killed:
            ending.killed = True
            for rank in attempt.running:
                self._starter.signal(rank, signal.SIGKILL)
        ending.cleanup.step()
        if (ending.cleanup.clear and not attempt.running) or now >= ending.give_up_at:
            self._attempt = None
            attempt.watch.look()
            orphans = ending.cleanup.killed - {record.pid for record in attempt.records.values()}
            left = sorted({*ending.cleanup.left, *(attempt.records[rank].pid for rank in attempt.running)})
            facts = {"swept": len(orphans), "connected": attempt.watch.seen, "asked": is_file(attempt.dir.asked)}
            self._report({"kind": "ended", "left": left, **facts})

    def _fail(self, error: str) -> None:
        # It may follow from the end of a rank, which was reported first; of two equal failures the first one counts.
        self._report({"kind": "failed", "error": error, "weight": OWN})
