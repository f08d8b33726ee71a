"""The supervisor: the one process per node that starts the node's ranks, watches them and ends them.

    python -m clusterddp.node.supervisor        with CLUSTERDDP_COOKIE=<token>.s<node rank> in its environment

It reads its order, a `SupervisorOrder`, as one line of JSON from standard input; run/supervisors.py lists what else
passes between it and its parent. It logs to `launcher/supervisor-<node>.log` in its run directory. It exits with 0 when
the run was completed, stopped or cancelled, with 1 when it failed; the head writes how the run ended to the last
attempt's `end.json` before it exits. SIGTERM, SIGINT and SIGUSR2 ask all ranks of the gang to stop (the stop contract).

Kinds of messages between a node and the head, by direct call on node 0, over a link (link.py) elsewhere:

* Reports: `join` (pid, node_rank; checkpoint: the newest one here; missing: ranks whose tasks have not connected;
  setup: the setup lines still run; check: a preflight runs; links: see socket_links.py), `missing` (missing, setup),
  `preflight` (awaited: the start waits for it; a NodeHealth, or link: MB/s to the head), `filler` (data, to measure the
  link), `started` (interface, address, why, nccl_interfaces, python), `transport` (a Transport), `rank_ended` (a
  RankEnd), `stop_requested` (reason, signal; ordered: by the head), `cancel` (reason), `parent_gone` (pid, one_node),
  `failed` (a RankEnd), `ended` (left: pids that cannot be killed; connected: a connection to the master was seen),
  `supervisor_ended` (node_rank, exit_code), `silent` (silent_s: without a sign of progress), `stack` (id, stack: a
  RankStack), `stacks_done` (id), `usage` (asked, received, sent; ranks: see usage_watch.py), `sending` (name, host,
  port), `copied` (name, bytes or error: see copies.py), `answered` (term: its number).
* Orders: `start` (attempt, restart, master_addr, master_port; networks: those of NCCL's sockets; nodes: those that take
  part, where they may differ), `preflight` (seconds: measure the node again; or link: the link), `stop` (reason),
  `kill` (whole_gang), `stacks` (id), `usage` (asked, most), `send` (name), `receive` (name, host, port, prunes),
  `terms` (terms: see term.py), `finish` (exit_code).
* Both ways: `gave_up` (why), the last message before the link is closed.
* Without a number (link.py): `join`, here with port (again, terms: after a loss of the link); `join_again` (node_rank,
  session, received); the answer to both, `welcome` (session, received); `heartbeat` (received).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import LOOPBACK_ADDRESS, addresses_of, is_cut_off, is_loopback, read_links
from clusterddp.network.port import walk_ports
from clusterddp.network.rendezvous.client import Search
from clusterddp.network.rendezvous.connection import Loss, Message
from clusterddp.network.socket_links import report_links
from clusterddp.node.copies import Copies, newest_here
from clusterddp.node.guard import Guard, clean_up
from clusterddp.node.head import Head, JobWatch, LostHead
from clusterddp.node.helpers import Helpers
from clusterddp.node.link import (
    SUPERVISORS,
    Clock,
    HeadElsewhere,
    HeadHere,
    HeadNotFoundError,
    Limits,
    Uplink,
    listen,
    listen_on_walk,
    report_of,
)
from clusterddp.node.local_ranks import LocalRanks
from clusterddp.node.log import log_end, log_line, open_log
from clusterddp.node.preflight import NodeCheck, is_checked
from clusterddp.node.preparation import Preparation
from clusterddp.node.processes import STOP_SIGNALS, Signals, become_subreaper, reap
from clusterddp.node.rank import drop_unwritten_output
from clusterddp.node.rank_starter import Children, RankStarter
from clusterddp.node.term import Term, Terms, Voter
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.attempts import (
    AttemptEnd,
    cancelled,
    close_attempt,
    failed_by,
    later_claimed,
    loss_of_nodes,
    read_end,
)
from clusterddp.run.directory import AttemptDir
from clusterddp.run.record import RankEnd
from clusterddp.run.stop import cancel_reason
from clusterddp.run.supervisors import JobOrder, Link, SupervisorOrder
from clusterddp.system.files import is_file
from clusterddp.system.storage import set_storage_timeout
from clusterddp.wire import read_object

_POLL_S = 0.2
_FAST_POLL_S = 0.02
GUARD_PATIENCE_S = 4.0
"""How long the guard of a head that was killed has to record the end when its host is up."""
STEP_PATIENCE_S = 10.0
"""The same in a batch job, for the head itself, too."""
_LOOK_EVERY_S = 2.0
"""Between two looks for a later attempt of the run."""
LINK_PORTS = 16
"""The number of ports at which a job's head may listen; so many jobs with the same first port fit on one host."""


class Parent:
    """The process that started this one, at the other end of standard input."""

    def __init__(self) -> None:
        self.pid = os.getppid()
        self._unread = b""

    def read_order(self) -> SupervisorOrder:
        """Wait for the order; `read` returns the lines after it."""
        while b"\n" not in self._unread:
            data = os.read(sys.stdin.fileno(), 65536)
            if not data:
                raise SystemExit("clusterddp.node.supervisor: no order on standard input")
            self._unread += data
        os.set_blocking(sys.stdin.fileno(), False)
        line, _, self._unread = self._unread.partition(b"\n")
        return SupervisorOrder.from_json(read_object(line))

    def read(self) -> tuple[list[bytes], bool]:
        """Return the lines since the last call, and whether the pipe has ended."""
        ended = False
        try:
            while data := os.read(sys.stdin.fileno(), 4096):
                self._unread += data
            ended = True
        except BlockingIOError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        return lines, ended


class JobTasks(RankStarter, Protocol):
    """Starts the ranks of one node through the tasks of a batch job."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose task has not connected yet."""

    def dismiss(self, exit_code: int) -> None:
        """Let the tasks exit; the first one with this code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlace:
    """What a place with batch jobs does otherwise on a node: its tasks start the ranks, and the job is watched."""

    open_tasks: Callable[[socket.socket, Sequence[int], str, selectors.BaseSelector], JobTasks]
    """Listens for the tasks of the node: (socket, ranks, host, selector)."""
    watch_job: Callable[[JobOrder, Mapping[str, str], Clock, float], JobWatch]
    """Watches the job for the head: (job, environment, clock, seconds before the time limit to ask for a stop)."""
    without_tasks: type[Children] = Children
    """Starts the ranks of a node that has no tasks of the job."""


class Supervisor:
    """The loop of one supervisor, in one thread: a rank's parent-death signal follows the thread that started it."""

    def __init__(
        self, order: SupervisorOrder, parent: Parent, signals: Signals, guard: Guard, place: JobPlace | None
    ) -> None:
        self._order = order
        self._guard = guard
        self._signals = signals
        self._parent = parent
        self._parent_bound = order.parent_bound
        self._selector = selectors.PollSelector()
        self._selector.register(signals.reader, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        self._stdin_open = True
        self._joined = False
        environment = inherited_environment()
        self._clock = Clock()
        self._tasks: JobTasks | None = None
        if order.tasks is not None:
            assert place is not None
            listener = socket.socket(fileno=order.tasks)
            self._tasks = place.open_tasks(listener, order.node.ranks, order.node.host, self._selector)
        kind = place.without_tasks if place is not None else Children
        children = self._children = kind(environment, os.getpid(), order.gang) if self._tasks is None else None
        self._imports_ahead = bool(order.terms)
        """Whether another attempt may want ranks of this node, which are imported for now."""
        rank_starter = children or self._tasks
        assert rank_starter is not None
        self._preparation = Preparation(order, environment)
        self._missing = self._find_missing()
        job: JobWatch | None = None
        if order.job is not None and order.is_head:
            assert place is not None
            job = place.watch_job(order.job, environment, self._clock, order.gang.stop_lead_s)
        self._helpers = Helpers(order, environment)
        self._copies = Copies(order, environment, self._report)
        self._limits = Limits(
            host_silence_s=order.gang.host_silence_s,
            heartbeat_timeout_s=order.gang.heartbeat_timeout_s,
            spans_hosts=order.spans_hosts,
        )
        link = order.link or Link(host="", port=0)
        first = Term(number=0, attempt=order.attempt, restart=0, head=0, voters=((0, link["host"], link["port"]),))
        fails_over = order.over_ssh and order.gang.min_nodes is not None
        self._terms = Terms(first, order.node_rank, fails_over=fails_over)
        self._terms.learn(list(order.terms))
        self._searches: dict[int, Search] = {}
        """For another head, by node rank, while that of this node may not decide."""
        begins = order.is_head and not order.terms
        self.uplink: Uplink = self._open_head(job=job) if begins else self._find_head()
        self._check = NodeCheck(order, self._report)
        parts = (guard, self._helpers, self._preparation, self._check, children, job, self._copies)
        self._parts = [part for part in parts if part is not None]
        """What has started processes, and learns which of them have ended."""
        self._look_at = 0.0 if order.job is not None else float("inf")
        """When to look whether others have ended the attempt, or claimed a later one; restarts in place claim none."""
        self._record_at: float | None = None
        """When to record the end, once the head is lost."""
        self._ranks = LocalRanks(
            order.run,
            order.gang,
            order.node,
            first_attempt=order.attempt,
            starter=rank_starter,
            preparation=self._preparation,
            report=self._report,
            spared=lambda: frozenset(
                [guard.pid, *self._helpers.pids, *self._copies.pids, *(children.pids if children else ())]
            ),
        )

    def run(self) -> int:
        """Run until the head ends the run, or is lost, and nothing of this node is left."""
        while True:
            polls_fast = self._ranks.polls_fast or self.uplink.polls_fast
            self._selector.select(_FAST_POLL_S if polls_fast else _POLL_S)
            now = self._clock.tick()
            self._take_signals()
            self._read_parent(now)
            exits = reap()
            for part in self._parts:
                part.on_exits(exits)
            self._ranks.tick(now)
            self._follow_preparation()
            self._import_ahead()
            self._seek(now)
            if now >= self._look_at:
                self._look_for_takeover(now)
            while orders := self.uplink.pump(now):
                for order in orders:
                    self._obey(order, now)
            if self._order.over_ssh and not self._order.is_head and not self._joined and self.uplink.joined:
                self._joined = True
                with contextlib.suppress(BrokenPipeError):
                    print(json.dumps({"joined": True}), flush=True)
            if self.uplink.exit_code is not None and self._is_done(now):
                if self._children is not None:
                    self._children.end()
                return self.uplink.exit_code

    def _open_head(self, *, job: JobWatch | None = None, before: LostHead | None = None) -> HeadHere:
        """Let the head be in this process, and print its address if it is the first one.

        `before`: the head whose place it may take.
        Raises: OSError, ClusterddpError: no port is free to listen at.
        """
        order, gang = self._order, self._order.gang
        address = gang.master_addr or LOOPBACK_ADDRESS
        if before is not None:  # the others know where this node listens
            address = order.node.address or address
            gang = dataclasses.replace(gang, master_addr=address)
            self.uplink.close()
        elif order.job is not None and order.spans_hosts:
            self._listener = listen_on_walk(walk_ports(f"link:{order.job.job_id}", LINK_PORTS))
        else:
            self._listener = listen(address)
        join = self._join_message(again=before is not None) | {"address": address}
        here = HeadHere(gang, self._selector, self._limits, listener=self._listener.dup(), join=join)
        here.head = Head(
            order.run,
            gang,
            terms=self._terms,
            before=before,
            first_attempt=order.attempt if before is None else self._terms.next_attempt(),
            first_restart=order.first_restart if before is None else self._terms.newest.restart + 1,
            rendezvous_seed=f"slurm:{order.job.job_id}" if order.job else gang.token,
            job=job,
            guard=self._guard,
            helpers=self._helpers,
            send=here.send,
            now=self._clock.now,
        )
        if order.job is None and before is None:
            print(json.dumps({"link": dict(zip(("host", "port"), here.address, strict=True))}), flush=True)
        return here

    def _find_head(self) -> HeadElsewhere:
        """Search the head, which listens already where the order says so; in a job on the hosts that may run it.

        Raises: OSError: no port is free to listen at.
        """
        self._listener = listen_on_walk([0]) if self._order.spans_hosts else listen(LOOPBACK_ADDRESS)
        again, term = bool(self._order.terms), self._terms.newest
        search = self._search(term.head_place, again=again)
        return self._elsewhere(search, term.head, probes=is_checked(self._order) and not again)

    def _search(self, place: Voter, *, again: bool = False) -> Search:
        job, (_, host, port) = self._order.job, place
        return Search(
            lambda: [host] if job is None else resolve(job.heads),
            [port] if job is None else walk_ports(f"link:{job.job_id}", LINK_PORTS),
            protocol=SUPERVISORS,
            key=self._order.gang.token,
            introduce=lambda connection: self._join_message(again=again),
            selector=self._selector,
        )

    def _join_message(self, *, again: bool) -> Message:
        order = self._order
        join: Message = {"kind": "join", "node_rank": order.node_rank, "pid": os.getpid(), **self._missing}
        join |= {"port": self._listener.getsockname()[1], "check": is_checked(order) and not again}
        join |= {"again": True, "terms": self._terms.written()} if again else {}
        join |= {} if order.job is not None else {"checkpoint": newest_here(order.run)}
        if order.gang.backend == "nccl" and order.spans_hosts and not (order.gang.interface or order.over_ssh):
            # Over SSH the hosts have tried all networks, and the plan has the fastest that works.
            join["links"] = report_links(read_links())
        return join

    def _elsewhere(self, search: Search, head: int = 0, *, probes: bool = False) -> HeadElsewhere:
        order = self._order
        return HeadElsewhere(
            order.gang,
            order.node_rank,
            search,
            self._selector,
            self._limits,
            listener=self._listener.dup(),
            known=order.link,
            in_job=order.job is not None,
            head=head,
            probes=probes,
            now=self._clock.now,
        )

    def _obey(self, order: Message, now: float) -> None:
        if order["kind"] in {"kill", "finish"}:
            self._preparation.end()
        elif order["kind"] == "start":
            self._guard.update(attempt=int(order["attempt"]))
        elif order["kind"] == "terms":
            self._terms.learn(order["terms"])
            self._imports_ahead = True
            self._guard.update(terms=self._terms.written())  # also another supervisor in this one's place knows them
            self._report({"kind": "answered", "term": order["terms"][-1]["number"]})
        elif order["kind"] == "preflight" and "seconds" in order:
            self._check.measure(float(order["seconds"]))
        self._ranks.obey(order, now)
        self._copies.obey(order)

    def _report(self, message: Message) -> None:
        self.uplink.report(message)  # that of now: after a loss there is another one

    def _find_missing(self) -> Message:
        """Return what the start waits for: ranks whose tasks have not connected, and the setup lines."""
        ranks = self._tasks.missing if self._tasks is not None else ()
        return {"missing": ranks, "setup": not self._preparation.is_over}

    def _follow_preparation(self) -> None:
        """Report what the start no longer waits for, or why it cannot be."""
        if self._missing["missing"] or self._missing["setup"]:
            missing, self._missing = self._missing, self._find_missing()
            if missing != self._missing:
                self.uplink.report({"kind": "missing", **self._missing})
        if (error := self._preparation.error) is not None:
            self._preparation.error = None
            self.uplink.report(report_of("failed", error))

    def _import_ahead(self) -> None:
        """Import for the ranks of a spare while it has none; a node of the attempt is then ordered to start."""
        if self._imports_ahead and self._preparation.is_over and self._ranks.idle and self._children is not None:
            self._imports_ahead = False
            with contextlib.suppress(OSError, ClusterddpError):  # the start of the ranks tries again, and reports it
                self._children.import_for(self._ranks.plan_ahead())

    def _take_place(self, loss: Loss, now: float) -> None:
        """With no ranks left after the loss of the head, let a head of this node decide, if enough nodes join it."""
        end = self._end_by_lost_head(self._order.run.attempt(self._ranks.attempt_number), loss)
        log_line("this node searches another one that decides")
        self.uplink = self._open_head(before=LostHead(loss, dataclasses.replace(end, will_restart=True)))

    def _seek(self, now: float) -> None:
        """Join another head while that of this node may not decide."""
        here, own = self.uplink, self._order.node_rank
        if not isinstance(here, HeadHere) or here.head is None or not here.head.seeks:
            self._end_searches()
            return
        for place in (voter for term in reversed(self._terms.known) for voter in term.voters):
            if place[0] not in (own, *self._searches):
                self._searches[place[0]] = self._search(place, again=True)
        losses = [search.failure and search.failure.loss.kind for search in self._searches.values()]
        if losses and losses.count("refused") == len(losses):
            here.head.nodes.give_up(now)
        for node_rank, search in self._searches.items():
            if (found := search.find(now)) is not None:
                del self._searches[node_rank]
                self._end_searches()
                here.close()
                self.uplink = uplink = self._elsewhere(search, node_rank)
                uplink.enter(found, now)
                self._guard.update(is_head=False)
                return

    def _end_searches(self) -> None:
        for search in self._searches.values():
            search.close()
        self._searches.clear()

    def _is_done(self, now: float) -> bool:
        loss = self.uplink.head_lost
        if loss is not None and self._goes_on(loss):
            if self._ranks.idle:
                self._take_place(loss, now)
            return False
        if loss is None or not self._order.spans_hosts:  # on one host the guard of the head records the end
            return self._ranks.idle
        if self._record_at is None:
            # On a host that is up, others record the end. In a batch job the end of a node's tasks ends the whole step,
            # and with it a head or guard that is still recording.
            patience_s = STEP_PATIENCE_S if self._order.job is not None else GUARD_PATIENCE_S
            self._record_at = now + (0.0 if loss.kind == "host_silent" else patience_s)
        return self._ranks.idle and self._is_recorded(loss, late=now >= self._record_at)

    def _goes_on(self, loss: Loss) -> bool:
        """Return whether the run may go on after the loss of the head: without this node, or without the head."""
        gang, term = self._order.gang, self._terms.newest
        if not self.uplink.joined or gang.min_nodes is None or is_file(self._order.run.cancel_file):
            return False
        # Of a process that has ended, others than this node record the end.
        can_replace = term.restart < gang.restarts and self._terms.suffice(term.nodes - {term.head})
        return loss.kind != "process_ended" or can_replace

    def _end_by_lost_head(self, attempt: AttemptDir, loss: Loss) -> AttemptEnd:
        """Return the end of an attempt for this node, which has lost the head."""
        order, interface = self._order, self._ranks.interface
        if order.gang.min_nodes is not None and is_file(order.run.cancel_file):
            return cancelled(cancel_reason(order.run))
        lost = order.gang.node(self._terms.newest.head)
        what = f"node {lost.node_rank} on {lost.host} is lost: {loss}"
        if loss.kind == "given_up":
            lost, what = order.node, f"node {order.node.node_rank} on {order.node.host} is lost: {loss}"
        elif loss.kind == "host_silent" and is_cut_off(interface):
            lost, what = order.node, f"{order.node.host} is cut off, its {interface} is down"
        started = attempt.ranks.is_dir() and any(attempt.ranks.glob("*.json"))
        cause = loss_of_nodes(order.gang, (lost,), what, attempt=attempt if started else None)
        goes_on = order.job is not None and order.restarts_left_after(attempt.number)
        return failed_by(cause, goes_on=goes_on and not is_file(order.run.cancel_file))

    def _is_recorded(self, loss: Loss, *, late: bool) -> bool:
        """Return whether the end is recorded; record it when nobody else has in time.

        The head and its guard know more and go first, but their host may be gone for good. Over SSH the record is in
        this host's own copy of the run. In a batch job it is in the directory that all nodes share, and the batch
        system itself requeues a job that has lost its first node.
        """
        attempt = self._order.run.attempt(self._ranks.attempt_number)
        with contextlib.suppress(OSError):  # storage that is away: the next turn reads again
            if read_end(attempt) is not None:
                return True
        if late:
            record = close_attempt(attempt, self._end_by_lost_head(attempt, loss), self._order.gang.token)
            if record.is_first:
                log_end(self._order.run, attempt.number, record.end)
        return late

    def _look_for_takeover(self, now: float) -> None:
        """End this node's ranks when another start of the job has taken the run over.

        The same when the attempt has an end before its start: a task records that its supervisor was killed.
        Raises: ClusterddpError: the head, which would act on it, was not found yet.
        """
        self._look_at = now + _LOOK_EVERY_S
        node, later, end = self._order.node, None, None
        with contextlib.suppress(OSError):
            later = later_claimed(self._order.run, self._order.attempt)
            end = None if self._ranks.ordered else read_end(self._order.run.attempt(self._order.attempt))
        if later is not None:
            error = f"attempt {later} of the run has begun elsewhere"
            failure = RankEnd(rank=min(node.ranks, default=None), host=node.host, error=error)
        elif end is not None and end.root_cause is not None:
            failure = end.root_cause
        else:
            return
        self._look_at = float("inf")
        log_line(failure.error)
        if not self.uplink.joined:
            raise ClusterddpError(failure.error)
        self.uplink.report(report_of("failed", failure))
        self._ranks.begin_end(now)

    def dismiss_tasks(self, exit_code: int) -> None:
        """Let the job's tasks exit, once the helpers have; from then on its end may end this process at any moment."""
        if self._order.job is not None:
            self._helpers.finish()
        if self._tasks is not None:
            self._tasks.dismiss(exit_code)

    def _take_signals(self) -> None:
        for number in self._signals.take() & STOP_SIGNALS:
            name = signal.Signals(number).name
            reason = f"{name} to the supervisor of node {self._order.node.node_rank}"
            self.uplink.report({"kind": "stop_requested", "reason": reason, "signal": name})

    def _read_parent(self, now: float) -> None:
        if not self._stdin_open:
            return
        lines, ended = self._parent.read()
        for line in lines:
            self._on_parent_line(line)
        if not ended:
            return
        self._stdin_open = False
        self._selector.unregister(sys.stdin.fileno())
        if self._parent_bound:
            log_line(f"the process that started this supervisor (pid {self._parent.pid}) is gone")
            one_node = self._order.over_ssh or self._order.one_node
            self.uplink.report({"kind": "parent_gone", "pid": self._parent.pid, "one_node": one_node})
            self._ranks.begin_end(now)

    def _on_parent_line(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            if message.get("detach"):
                self._parent_bound = False
                return
            report = {"kind": "supervisor_ended", "node_rank": message["ended"], "exit_code": message["exit_code"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            log_line(f"not understood on standard input: {line[:200]!r}")
            return
        self.uplink.report(report)


def main(place: JobPlace | None = None) -> int:
    """Read the order and supervise the node; no process of the run is left afterwards."""
    gc.freeze()  # what was imported stays until the end, and is not to be visited there
    signals = Signals()
    parent = Parent()
    order = parent.read_order()
    set_storage_timeout(order.gang.host_silence_s)
    with contextlib.suppress(OSError):  # it then logs to the standard error that it has inherited
        open_log(order.run, order.node.node_rank)
    become_subreaper()
    keep = order.hold if order.tasks is None else (order.tasks, *order.hold)
    for descriptor in keep:
        os.set_inheritable(descriptor, False)
    guard = Guard(order, inherited_environment(), log=sys.stderr.fileno(), keep=keep)
    supervisor: Supervisor | None = None
    try:
        supervisor = Supervisor(order, parent, signals, guard, place)
        exit_code = supervisor.run()
    except Exception as error:
        # Any error, a bug or the machine's, ends all ranks and is recorded as the cause.
        log_line(error.message if isinstance(error, ClusterddpError) else traceback.format_exc())
        # Programs of a batch script then run without supervisors.
        exit_code = 0 if isinstance(error, HeadNotFoundError) and order.gang.entry.unchanged else 1
        if exit_code != 0:
            _end_after_error(order, guard, supervisor, error)
    guard.dismiss()
    if supervisor is not None:
        supervisor.dismiss_tasks(exit_code)
    drop_unwritten_output()
    return exit_code


def _end_after_error(order: SupervisorOrder, guard: Guard, supervisor: Supervisor | None, error: Exception) -> None:
    node = order.node
    what = f"supervisor of node {node.node_rank} on {node.host} failed: {type(error).__name__}: {error}"
    if supervisor is not None:
        with contextlib.suppress(Exception):
            supervisor.uplink.report_fatal_error(what)
    try:
        clean_up(guard.facts, what)
    except Exception:
        log_line(traceback.format_exc())


def resolve(hosts: Sequence[str]) -> list[str]:
    """Return the addresses of these hosts, in order, without loopback addresses to which names lead."""
    addresses: list[str] = []
    for host in hosts:
        found = addresses_of(host)
        if not found:
            log_line(f"{host} is not resolved by {socket.gethostname()}")
        addresses += found
    return [address for address in dict.fromkeys(addresses) if not is_loopback(address) or address in hosts]


if __name__ == "__main__":
    sys.exit(main())
