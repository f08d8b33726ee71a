"""The local ranks of a node: starts them, watches them, ends them, records how each ended.

It reports to the head and obeys it; the kinds of both are listed in supervisor.py. Nothing here blocks for longer than
a look at the process table takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from clusterddp.errors import ClusterddpError
from clusterddp.facts.memory import count_oom_kills, explain_oom_kill
from clusterddp.node.failure import CERTAIN, OWN, read_rank_end
from clusterddp.node.history import record_end
from clusterddp.node.log import log_line
from clusterddp.node.node_stacks import NodeStacks
from clusterddp.node.rank import ENDING
from clusterddp.node.rank_network import RankNetwork, find_rank_network
from clusterddp.node.rank_records import RankRecords, new_record, with_end
from clusterddp.node.rank_watch import ConnectionWatch, NcclWatch, StoppedRanks
from clusterddp.node.starter import Ended, Launch, Lost, Started, Starter, choose_cores, plan_launch
from clusterddp.ranks.environment import cookie
from clusterddp.rendezvous.connection import Message
from clusterddp.run.cleanup import Sweep
from clusterddp.run.directory import AttemptDir, RunDir, make_attempt_dirs
from clusterddp.run.gang import Gang, Node
from clusterddp.run.outcome import parse_end
from clusterddp.run.record import RankRecord
from clusterddp.run.stop import cancel_reason, is_complete, request_stop, stop_reason, was_ordered
from clusterddp.system.files import is_file
from clusterddp.system.storage import is_outage

TERM_GRACE_S = 1.0
"""How long ranks have between SIGTERM and SIGKILL when the gang is ended."""


@dataclass(slots=True)
class _Ending:
    kill_at: float
    give_up_at: float
    sweep: Sweep
    killed: bool = False


@dataclass(slots=True)
class _Attempt:
    """The node's part of the attempt that runs now."""

    dir: AttemptDir
    network: RankNetwork
    master_port: int
    oom_kills: int | None
    watch: ConnectionWatch
    running: set[int] = field(default_factory=set)
    """Ranks that have begun and whose end was not heard of."""
    records: dict[int, RankRecord] = field(default_factory=dict)
    started: bool = False
    """True once all ranks have begun, and the head was told."""
    stop_seen: bool = False
    stop_wanted: str | None = None
    """Why the ranks are asked to stop, while the run's storage is away and they cannot be."""
    ending: _Ending | None = None
    stopped: StoppedRanks = field(default_factory=StoppedRanks)
    nccl: NcclWatch | None = None
    cores: dict[int, str] = field(default_factory=dict)
    """Those that a rank keeps to, by rank, where some are nearer to its GPU than others."""


class LocalRanks:
    """The ranks of one node, from the head's order to start until the report that nothing of them is left."""

    def __init__(
        self,
        run: RunDir,
        gang: Gang,
        node: Node,
        *,
        first_attempt: int,
        starter: Starter,
        report: Callable[[Message], None],
        guard_pid: Callable[[], int],
    ) -> None:
        self._run = run
        self._gang = gang
        self._node = node
        self._starter = starter
        self._report = report
        self._guard_pid = guard_pid
        self.attempt_number = first_attempt
        """Of the attempt that runs now, or ran last."""
        self.interface = node.interface or gang.interface
        """This host's; on Slurm known when its ranks are started."""
        self._attempt: _Attempt | None = None
        self._cancel_seen = False
        self._records = RankRecords()
        self._stacks = NodeStacks(node.host, report)

    @property
    def idle(self) -> bool:
        """True while this node has no rank and nothing that a rank left behind."""
        return self._attempt is None

    @property
    def ending(self) -> bool:
        return self._attempt is not None and self._attempt.ending is not None

    @property
    def hurried(self) -> bool:
        """True while things change within milliseconds: ranks end, or write their stacks."""
        return self.ending or self._stacks.asking

    def obey(self, order: Message, now: float) -> None:
        """Carry out an order of the head."""
        if order["kind"] == "start":
            self._start(order, now)
        elif order["kind"] == "stop":
            self._stop(str(order["reason"]))
        elif order["kind"] == "stacks":
            self._stacks.ask(str(order["id"]), self._pids())
        elif order["kind"] == "record":
            # What the head's storage did not take, this node's may.
            attempt, end = self._run.attempt(int(order["attempt"])), parse_end(order["end"])
            record_end(attempt, end, self._gang.token, patience_s=0.0)
        elif order["kind"] == "kill":
            if self._attempt is None:
                self._report({"kind": "ended", "left": []})
            self.begin_end(now, whole_gang=order["whole_gang"])

    def begin_end(self, now: float, *, whole_gang: bool = False) -> None:
        """End all ranks of this node: SIGTERM, SIGKILL after the grace, then a sweep; `tick` carries it on.

        `whole_gang`: the sweep is for the ranks of all nodes as far as they are on this host; nobody else may be left
        to end them.
        """
        attempt = self._attempt
        if attempt is None:
            return
        nodes = self._gang.nodes if whole_gang else (self._node,)
        cookies = tuple(cookie(self._gang.token, f"n{node.node_rank}") for node in nodes)
        if attempt.ending is not None:
            attempt.ending.sweep.cookies = max(attempt.ending.sweep.cookies, cookies, key=len)
            return
        self._starter.withdraw()
        if attempt.running:
            with contextlib.suppress(OSError):
                attempt.dir.path.joinpath(ENDING).touch()
        for rank in attempt.running:
            self._starter.signal(rank, signal.SIGTERM)
        attempt.ending = _Ending(
            kill_at=now + TERM_GRACE_S,
            give_up_at=now + self._gang.give_up_s,
            sweep=Sweep(
                cookies=cookies, descendants_but=self._guard_pid() if self._starter.sweeps_descendants else None
            ),
        )

    def tick(self, now: float) -> None:
        """Look at the files by which people speak to the run, and go on with an end that was begun."""
        self._hear_news()
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
            self._go_on_ending(attempt, attempt.ending, now)
        else:
            self._look_for_stop(attempt, complete=True)
            self._look_for_stopped_ranks(attempt, now)
            self._stacks.tick(attempt.dir, self._pids(), now)

    def _pids(self) -> dict[int, int]:
        """Return the pids of the ranks that run, none of which was reaped."""
        attempt = self._attempt
        return {} if attempt is None else {rank: attempt.records[rank].pid for rank in attempt.running}

    def _look_for_stopped_ranks(self, attempt: _Attempt, now: float) -> None:
        if not attempt.started:
            return
        for record in attempt.stopped.look([attempt.records[rank] for rank in sorted(attempt.running)], now):
            attempt.records[record.rank] = record
            self._records.put(attempt.dir, record)
            log_line(
                f"rank {record.rank} (pid {record.pid}) {'was stopped by a signal' if record.stopped else 'goes on'}"
            )

    def _look_for_stop(self, attempt: _Attempt, *, complete: bool) -> None:
        if attempt.stop_seen or attempt.ending is not None:
            return
        if is_complete(attempt.dir.stop_file) if complete else is_file(attempt.dir.stop_file):
            attempt.stop_seen = True
            file = attempt.dir.stop_file
            self._report({"kind": "stop_requested", "reason": stop_reason(file), "ordered": was_ordered(file)})

    def _hear_news(self) -> None:
        """Take in what has become of the ranks."""
        attempt = self._attempt
        for news in self._starter.news():
            if isinstance(news, Lost):
                self._lose(attempt, news)
            elif attempt is None:
                continue
            elif isinstance(news, Started):
                self._rank_started(attempt, news)
            elif news.rank in attempt.running:
                attempt.running.discard(news.rank)
                # It may have seen a request to stop before we did.
                self._look_for_stop(attempt, complete=False)
                self._rank_ended(attempt, news)

    def _start(self, order: Message, now: float) -> None:
        self.attempt_number = int(order["attempt"])
        node, directory = self._node, self._run.attempt(self.attempt_number)
        try:
            network = find_rank_network(self._gang, self._node, order)
            port = int(order["master_port"])
            watch = ConnectionWatch(network.gang.master_addr, port, now)
            self.interface = network.interface
            attempt = _Attempt(
                dir=directory, network=network, master_port=port, oom_kills=count_oom_kills(), watch=watch
            )
            self._attempt = attempt
            self._stacks.begin_attempt()
            make_attempt_dirs(directory)
            attempt.cores = choose_cores(self._node, self._gang.env)
            # All ranks first, for they wait for each other; the records, which wait for the disk, afterwards.
            self._starter.start({rank: self._launch(rank, order, attempt) for rank in node.ranks})
        except (OSError, ClusterddpError) as error:
            self._fail(f"node {node.node_rank} on {node.host} could not start its ranks: {error}")
            return
        self._hear_news()

    def _launch(self, rank: int, order: Message, attempt: _Attempt) -> Launch:
        gang, cores = attempt.network.gang, attempt.cores.get(rank)
        return plan_launch(self._run, gang, rank, order, master_port=attempt.master_port, cores=cores)

    def _rank_started(self, attempt: _Attempt, news: Started) -> None:
        node, network = self._node, attempt.network
        attempt.running.add(news.rank)
        attempt.records[news.rank] = new_record(
            news.rank,
            news.pid,
            node,
            interface=network.interface,
            master=(network.gang.master_addr, attempt.master_port),
        )
        if len(attempt.records) == len(node.ranks):
            self._records.put(attempt.dir, *attempt.records.values())
            self._write_records(time.monotonic())

    def _write_records(self, now: float) -> None:
        """Write what is to be written of the ranks; storage that refuses is tried again by the next ticks."""
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

    def _lose(self, attempt: _Attempt | None, news: Lost) -> None:
        """Report a rank that ended for no reason of its own, and that cannot be started again here."""
        if attempt is not None:
            attempt.running.discard(news.rank)
        self._report({"kind": "failed", "error": news.error, "weight": CERTAIN, "rank": news.rank})

    def _rank_ended(self, attempt: _Attempt, news: Ended) -> None:
        rank = news.rank
        end = read_rank_end(attempt.dir, rank, news.returncode, on_order=attempt.ending is not None)
        if end.signal == "SIGKILL" and not end.on_order and (words := explain_oom_kill(attempt.oom_kills)):
            end = dataclasses.replace(end, error=words)
        attempt.watch.look()
        # Report first: the record waits for the disk, the other ranks should not.
        self._report({"kind": "rank_ended", **dataclasses.asdict(end)})
        attempt.records[rank] = with_end(attempt.records[rank], end)
        self._records.put(attempt.dir, attempt.records[rank])
        self._write_records(time.monotonic())

    def _go_on_ending(self, attempt: _Attempt, ending: _Ending, now: float) -> None:
        if attempt.running and now < ending.kill_at:
            return
        if not ending.killed:
            ending.killed = True
            for rank in attempt.running:
                self._starter.signal(rank, signal.SIGKILL)
        ending.sweep.step()
        if (ending.sweep.clear and not attempt.running) or now >= ending.give_up_at:
            self._attempt = None
            attempt.watch.look()
            orphans = ending.sweep.killed - {record.pid for record in attempt.records.values()}
            left = sorted({*ending.sweep.left, *(attempt.records[rank].pid for rank in attempt.running)})
            self._report({"kind": "ended", "left": left, "swept": len(orphans), "connected": attempt.watch.seen})

    def _fail(self, error: str) -> None:
        # It may follow from how a rank ended: that one is then the first of two equals.
        self._report({"kind": "failed", "error": error, "weight": OWN})
