"""The local ranks of a node: starts them, watches them, ends them, and records how each ended.

It reports to the head and obeys its orders; supervisor.py lists the kinds of both. Nothing here blocks for longer
than one read of the process table. Of the TCP connections of this host, which the kernel lists, a closed one stays
listed for a minute.
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.facts.memory import count_oom_kills
from clusterddp.network.nccl_log import Transport, merge, read_transport
from clusterddp.network.rendezvous.connection import Message
from clusterddp.node.attempt import CERTAIN, OWN, read_rank_end
from clusterddp.node.hang_watch import NodeStacks
from clusterddp.node.link import report_of
from clusterddp.node.preparation import Preparation
from clusterddp.node.rank import ENDING
from clusterddp.node.rank_network import RankNetwork, find_rank_network
from clusterddp.node.rank_starter import Ended, Launch, Lost, RankStarter, Started, plan_launch
from clusterddp.node.usage_watch import NodeUsage
from clusterddp.ranks.environment import rank_cookies
from clusterddp.run.cleanup import Cleanup
from clusterddp.run.directory import AttemptDir, RunDir, make_attempt_dirs
from clusterddp.run.gang import Gang, Node
from clusterddp.run.preload import find_preload
from clusterddp.run.record import RankEnd, RankRecord, write_rank
from clusterddp.run.stop import cancel_reason, is_complete, read_stop, request_stop
from clusterddp.system.files import is_file, open_regular
from clusterddp.system.storage import is_outage, storage_timeout_s

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_NOT_CONNECTED = frozenset({"02", "03", "07", "0A"})
"""SYN_SENT, SYN_RECV, CLOSE, LISTEN. Source: include/net/tcp_states.h of Linux."""
_MAPPED = bytes(10) + b"\xff\xff"
_End = tuple[bytes, int]


def was_connected(address: str, port: int) -> bool | None:
    """Return whether a connection to this address and port has an end on this host, or had one in the last minute.

    None: the kernel lists no connections here, or `address` is a name.
    """
    try:
        wanted = _without_mapping(ipaddress.ip_address(address).packed), port
        return any(wanted in ends for table in _TABLES for ends in _read(Path(table)))
    except (OSError, ValueError):
        return None


def _read(table: Path) -> Iterator[tuple[_End, _End]]:
    """Return the local and the remote end of each connection."""
    if table.name == "tcp6" and not table.exists():  # IPv6 is switched off
        return
    with table.open(encoding="ascii") as lines:
        next(lines, None)
        for line in lines:
            _, local, remote, state, *_ = line.split()
            if state not in _NOT_CONNECTED:
                yield _end(local), _end(remote)


def _end(text: str) -> _End:
    """Read `0100007F:1F90`: each 32 bits of the address in the byte order of the machine."""
    address, _, port = text.partition(":")
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    return _without_mapping(b"".join(struct.pack("=I", word) for word in words)), int(port, 16)


def _without_mapping(address: bytes) -> bytes:
    """Return the IPv4 address of `::ffff:10.0.0.1`, any other as it is."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address


TERM_GRACE_S = 1.0
"""The time between SIGTERM and SIGKILL when the gang is ended; our own trainer has nothing to do at SIGTERM."""
_CONNECTIONS_FIRST_S = 1.0
_CONNECTIONS_EVERY_S = 20.0
"""The kernel lists a connection for 60 s after its end, unless it was reset."""
_NCCL_FIRST_S, _NCCL_LAST_S = 2.0, 300.0
"""After the start of the ranks: NCCL chooses when they first communicate, and opens links as it needs them."""
_MAX_NCCL_BYTES = 1 << 20


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
        preparation: Preparation,
        report: Callable[[Message], None],
        spared: Callable[[], frozenset[int]],
    ) -> None:
        """`spared`: pids that the cleanup leaves alone, with their descendants."""
        self._run = run
        self._gang = gang
        self._members = gang
        """The gang of the attempt."""
        self._node = node
        """With its ranks in the attempt."""
        self._starter = starter
        self._preparation = preparation
        self._report = report
        self._spared = spared
        self.attempt_number = first_attempt
        """Of the attempt that runs now, or ran last."""
        self.interface = node.interface or gang.interface
        """This host's; in a batch job known when its ranks are started."""
        self.ordered = False
        """True once the head has ordered a start."""
        self._attempt: LocalAttempt | None = None
        self._cancel_seen = False
        self._records = RankRecords()

    @property
    def idle(self) -> bool:
        """True while this node has no rank and nothing that a rank left behind."""
        return self._attempt is None

    @property
    def polls_fast(self) -> bool:
        """True while things change within milliseconds: ranks end, or write their stacks."""
        attempt = self._attempt
        return attempt is not None and (attempt.ending is not None or attempt.stacks.asking or attempt.usage.asking)

    def obey(self, order: Message, now: float) -> None:
        """Carry out an order of the head."""
        if order["kind"] == "start":
            self._start(order, now)
        elif order["kind"] == "stop":
            self._stop(str(order["reason"]))
        elif order["kind"] == "stacks" and self._attempt is not None:
            self._attempt.stacks.ask(str(order["id"]), self._attempt.pids)
        elif order["kind"] == "usage" and self._attempt is not None:
            self._attempt.usage.ask(float(order["asked"]), int(order["most"]), self._attempt.pids)
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
        attempt.ending = LocalEnding(
            kill_at=now if self._gang.entry.is_ours else now + TERM_GRACE_S,
            give_up_at=now + self._gang.give_up_s,
            cleanup=Cleanup(cookies=cookies, but=self._spared(), descendants=self._starter.owns_descendants),
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
            attempt.stacks.tick(attempt.pids, now)
            attempt.usage.tick(attempt.pids)

    def _look_for_stop(self, attempt: LocalAttempt, *, complete: bool) -> None:
        if attempt.stop_seen or attempt.ending is not None:
            return
        if is_complete(attempt.dir.stop_file) if complete else is_file(attempt.dir.stop_file):
            attempt.stop_seen = True
            reason, ordered = read_stop(attempt.dir.stop_file)
            self._report({"kind": "stop_requested", "reason": reason, "ordered": ordered})

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

    def plan_ahead(self) -> dict[int, Launch]:
        """Plan the start of this node's ranks in some attempt: what is imported for them is known before."""
        gang = self._gang.of_nodes([self._node.node_rank])
        return self._plan(gang, {"attempt": self.attempt_number, "master_port": 0, "restart": 0})

    def _plan(self, gang: Gang, order: Message) -> dict[int, Launch]:
        preload, prepared = find_preload(gang.entry), self._preparation.prepared
        ranks = gang.node(self._node.node_rank).ranks
        return {rank: plan_launch(self._run, gang, rank, order, preload=preload, prepared=prepared) for rank in ranks}

    def _start(self, order: Message, now: float) -> None:
        self.attempt_number, self.ordered = int(order["attempt"]), True
        directory = self._run.attempt(self.attempt_number)
        if "nodes" in order:
            self._members = self._gang.of_nodes(order["nodes"])
        node = self._node = self._members.node(self._node.node_rank)
        try:
            network = find_rank_network(self._members, node, order)
            port = int(order["master_port"])
            watch = ConnectionWatch(network.gang.master_addr, port, now)
            self.interface = network.interface
            attempt = LocalAttempt(
                dir=directory,
                network=network,
                master_port=port,
                oom_kills=count_oom_kills(),
                watch=watch,
                stacks=NodeStacks(node, directory, self._report),
                usage=NodeUsage(self._report, on_cpu=self._gang.on_cpu),
            )
            self._attempt = attempt
            make_attempt_dirs(directory)
            # All ranks first, because they wait for each other; the records, which wait for the disk, afterwards.
            self._starter.start(self._plan(network.gang, order))
        except (OSError, ClusterddpError) as error:
            self._fail(f"node {node.node_rank} on {node.host} could not start its ranks: {error}")
            return
        self._take_updates()

    def _rank_started(self, attempt: LocalAttempt, started: Started) -> None:
        attempt.running.add(started.rank)
        master_addr, master_port = started.master or (attempt.network.gang.master_addr, attempt.master_port)
        attempt.records[started.rank] = RankRecord(
            rank=started.rank,
            node_rank=self._node.node_rank,
            local_rank=self._node.ranks.index(started.rank),
            host=self._node.host,
            pid=started.pid,
            interface=attempt.network.interface,
            master_addr=master_addr,
            master_port=master_port,
            started=time.time(),
        )
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
            runs = self._preparation.prepared.runs
            facts = {**attempt.network.facts(), **self._starter.facts(), "python": runs and asdict(runs)}
            self._report({"kind": "started", **facts})
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
        end = RankEnd(rank=lost.rank, host=self._node.host, error=lost.error, weight=CERTAIN, restart="another job")
        self._report(report_of("failed", end))

    def _rank_ended(self, attempt: LocalAttempt, ended: Ended) -> None:
        rank = ended.rank
        end = read_rank_end(
            attempt.dir,
            rank,
            ended.returncode,
            host=self._node.host,
            on_order=attempt.ending is not None,
            oom_kills=attempt.oom_kills,
        )
        attempt.watch.look()
        # First the report: the record waits for the disk, and the other ranks should not.
        self._report(report_of("rank_ended", end))
        record = attempt.records[rank].at_end(end)
        attempt.records[rank] = record
        self._records.put(attempt.dir, record)
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
            attempt.usage.close()
            attempt.watch.look()
            left = sorted({*ending.cleanup.left, *(attempt.records[rank].pid for rank in attempt.running)})
            facts = {"connected": attempt.watch.seen, "asked": is_file(attempt.dir.asked)}
            self._report({"kind": "ended", "left": left, **facts})

    def _fail(self, error: str) -> None:
        # It may follow from the end of a rank, which was reported first; of two equal failures the first one counts.
        end = RankEnd(rank=min(self._node.ranks, default=None), host=self._node.host, error=error, weight=OWN)
        self._report(report_of("failed", end))


class RankRecords:
    """The records of a node's ranks that are not written yet."""

    def __init__(self) -> None:
        self._unwritten: dict[tuple[AttemptDir, int], RankRecord] = {}
        self._write_by = float("inf")
        """When the storage must have taken all records, once it has refused one."""

    def put(self, attempt: AttemptDir, *records: RankRecord) -> None:
        """Add records; a newer one of the same rank replaces an older one."""
        self._unwritten |= {(attempt, record.rank): record for record in records}

    def write(self, now: float) -> bool:
        """Write all records; False when the storage refuses one, and the write is to be retried.

        Raises: ClusterddpError: the storage has refused for the storage timeout; the records are dropped.
        """
        try:
            for attempt, rank in list(self._unwritten):
                write_rank(attempt, self._unwritten[attempt, rank])
                del self._unwritten[attempt, rank]
        except ClusterddpError:
            self._write_by = min(self._write_by, now + storage_timeout_s())
            if now < self._write_by:
                return False
            self._unwritten.clear()
            raise
        self._write_by = float("inf")
        return True


class ConnectionWatch:
    """Looks for a connection of this node's ranks to the master: ranks that never connect train apart."""

    def __init__(self, address: str, port: int, now: float) -> None:
        self._address = address
        self._port = port
        self._wait_s = _CONNECTIONS_FIRST_S
        self._next = now + self._wait_s
        self.seen = False
        """True also where it cannot be known."""

    def tick(self, now: float) -> None:
        """Look when it is due, until a connection was seen."""
        if not self.seen and now >= self._next:
            self._wait_s = min(2 * self._wait_s, _CONNECTIONS_EVERY_S)
            self._next = now + self._wait_s
            self.look()

    def look(self) -> None:
        """Look now."""
        self.seen = self.seen or was_connected(self._address, self._port) is not False


class NcclWatch:
    """Reads the transport from NCCL's logs, at growing intervals; it changes as NCCL opens links."""

    def __init__(self, logs: Sequence[Path], now: float) -> None:
        self._logs = logs
        self._begun = now
        self._look_at = now + _NCCL_FIRST_S
        self._last: Transport | None = None

    def look(self, now: float) -> Transport | None:
        """Return the transport when it is new."""
        if now < self._look_at or now > self._begun + _NCCL_LAST_S:
            return None
        self._look_at = now + max(_NCCL_FIRST_S, (now - self._begun) / 2)
        found = []
        for log in self._logs:
            with contextlib.suppress(OSError, ClusterddpError), open_regular(log) as file:
                transport = read_transport(file.read(_MAX_NCCL_BYTES).decode(errors="replace"))
                found += [transport] if transport else []
        if len(found) < len(self._logs) or (merged := merge(found)) == self._last:
            return None
        self._last = merged
        return merged


@dataclass(slots=True)
class LocalEnding:
    """The end of the node's ranks, once it is ordered."""

    kill_at: float
    give_up_at: float
    cleanup: Cleanup
    killed: bool = False


@dataclass(slots=True)
class LocalAttempt:
    """The node's part of the attempt that runs now."""

    dir: AttemptDir
    network: RankNetwork
    master_port: int
    oom_kills: int | None
    watch: ConnectionWatch
    stacks: NodeStacks
    usage: NodeUsage
    running: set[int] = field(default_factory=set)
    """Ranks that have started and whose end was not reported."""
    records: dict[int, RankRecord] = field(default_factory=dict)
    started: bool = False
    """True once all ranks have started, and the head has the report."""
    stop_seen: bool = False
    stop_wanted: str | None = None
    """The reason of a request to stop that the run's storage, which is away, has not taken yet."""
    ending: LocalEnding | None = None
    nccl: NcclWatch | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Of the ranks that run, none of which was reaped."""
        return {rank: self.records[rank].pid for rank in self.running}
