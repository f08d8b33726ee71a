"""The head: one supervisor decides for the whole gang. It takes reports, sends orders, and records attempts.

It is node 0's at first; over SSH another node's takes its place where an elastic run loses it (term.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from clusterddp.errors import ClusterddpError
from clusterddp.network.interface import is_cut_off
from clusterddp.network.rendezvous.connection import Loss, Message
from clusterddp.network.socket_links import faster_networks
from clusterddp.node.attempt import Attempt, Restarts
from clusterddp.node.copies import CopyWatch, newest_here
from clusterddp.node.guard import Guard
from clusterddp.node.hang_watch import HangWatch, failure_of_hang
from clusterddp.node.helpers import Helpers
from clusterddp.node.link import end_of, facts_of
from clusterddp.node.log import log, log_end, log_line
from clusterddp.node.preflight import Preflight
from clusterddp.node.rank import ENDING
from clusterddp.node.rank_network import Rendezvous
from clusterddp.node.term import Term, Terms, Voter
from clusterddp.node.usage_watch import UsageWatch
from clusterddp.ranks.environment import RENDEZVOUS_FILE, STOP_FILE, rank_cookies, spell_ranks
from clusterddp.run.attempts import AttemptEnd, EndRecord, loss_of_nodes, make_attempt, spell_exit
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import AttemptDir, RunDir, make_attempt_dirs
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.run.record import ProcessIdentity, RankEnd
from clusterddp.run.stop import KILL_WAIT_S
from clusterddp.system.files import is_file, write_json
from clusterddp.system.own_directory import demand_own
from clusterddp.system.storage import storage_timeout_s
from clusterddp.system.units import format_count

_CONFIRM_S = 4.0
"""How long nodes may take to confirm their end after they have given up."""
_NOTE_WAIT_S = 60.0
"""After so long a start that waits for nodes names them."""
_SETTLE_S = 10.0
"""How long a node must have been there, and the ranks must have run, before they are asked to stop for its sake."""
_CUT_OFF_S = 24 * 3600.0
"""How long a node that is cut off waits for the others."""
_MAX_FILES, _MAX_BYTES = 5000, 100_000_000
"""Of the code of a program, which `may_look_for_file` reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """What is about to happen to the batch job of a run."""

    kind: Literal["goes_on", "cancelled", "time_is_up", "failed"]
    reason: str
    ends_by: float | None = None
    """When everything must be over, on the supervisor's clock; None: there is no limit."""
    node_is_down: bool = False
    """True when the job ends because it has lost a node."""

    def apply(self, attempt: Attempt) -> bool:
        """Note it in the attempt; True when its ranks have yet to be asked to stop."""
        log_line(f"the job: {self.reason}")
        if self.kind == "time_is_up" and attempt.unchanged:
            return attempt.stop_reason is None  # who looks for the stop file has time; nobody is ended before the limit
        if self.kind == "cancelled":
            attempt.cancel_reason = attempt.cancel_reason or self.reason
        attempt.ends_by = min(attempt.ends_by, self.ends_by or float("inf"))
        if self.kind == "cancelled":
            return False
        if attempt.stopped_by_people or (self.kind == "time_is_up" and attempt.job_ends):
            return False
        if self.kind == "failed":
            attempt.job_failure = self.reason  # no process is left that starts the job again
        else:
            attempt.job_ends = True
        if attempt.stop_reason is None:
            return True
        attempt.stop_reason = self.reason
        return False


class LostHead(NamedTuple):
    """The loss of a head whose place another node takes."""

    loss: Loss
    end: AttemptEnd
    """How its last attempt has ended with it."""


class JobWatch(Protocol):
    """Watches one start of the batch job that a run is in; a place with jobs hands it to the head."""

    @property
    def undecided(self) -> bool:
        """True from SIGTERM until the reason for it is known."""

    def on_term(self, now: float) -> None:
        """Note that SIGTERM came; a later `tick` returns why."""

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Read the answers of questions among the children that have ended."""

    def tick(self, now: float) -> Intent | None:
        """Return what is newly about to happen to the job."""


class Head:
    """The gang from the first join to the last record."""

    def __init__(
        self,
        run: RunDir,
        gang: Gang,
        *,
        terms: Terms,
        before: LostHead | None = None,
        first_attempt: int,
        first_restart: int = 0,
        rendezvous_seed: str,
        job: JobWatch | None = None,
        guard: Guard,
        helpers: Helpers,
        send: Callable[[int, Message], None],
        now: float,
    ) -> None:
        """`send` sends a node an order, by its node rank. `before`: the head whose place this one takes."""
        self.exit_code: int | None = None
        """Set when the run is over and recorded, or cannot be recorded."""
        self.node_is_down = False
        """True once the job has lost a node, or is about to be killed: nodes without heartbeats count as lost."""
        self.gives_up: dict[int, Loss] = {}
        """Nodes whose links are to be given up, and why; the uplink takes them out."""
        self._run = run
        self._gang = gang
        self._own = gang.node(terms.own)
        self._terms = terms
        self._before = before
        self._members = gang if gang.min_nodes is None else gang.of_nodes(node.node_rank for node in gang.members)
        """The gang of the attempt: the nodes that take part in it, with their ranks there."""
        self._guard = guard
        self._helpers = helpers
        self._send = send
        self._job = job
        self._restarts = Restarts(
            gang, first_attempt=first_attempt, first_restart=first_restart, in_job=job is not None
        )
        self._interface = self._own.interface or gang.interface
        """This host's; in a batch job known when its ranks have started."""
        self.nodes = JoinedNodes(gang, timeout_s=gang.start_timeout_s, now=now, own=terms.own)
        if before is not None:
            self.nodes.take_over(terms.newest, str(before.loss), now)
            self.nodes.wait_anew(now, self._patience_s(cut_off=before.loss.kind == "given_up"))
        self._preflight = Preflight(gang, send)
        self._rendezvous = Rendezvous(gang, rendezvous_seed)
        self._attempt: Attempt
        self._start: StartRecord
        self._copies: CopyWatch | None = None
        """On storage that all nodes share, as in a batch job, no copies are made."""
        if job is None and len({node.host for node in gang.nodes}) > 1:
            self._copies = CopyWatch(run, gang, terms.own, send)
        self._ending: Ending | None
        """Set while the gang is being ended."""
        self._record: EndRecord | None = None
        """Set while the end of the attempt waits for the run's storage."""
        self._set_attempt(first_attempt)

    def _set_attempt(self, number: int) -> None:
        self._attempt = Attempt(self._run, self._members, number)
        self._ending = None
        self._watch_members()

    def _watch_members(self) -> None:
        gang, directory = self._members, self._run.attempt(self._attempt.number)
        self._hangs = HangWatch(self._run, gang, directory, self._send)
        self._usage = UsageWatch(self._run, gang, directory, self._send)
        self._start = StartRecord(directory, gang, self._rendezvous)

    @property
    def changes_fast(self) -> bool:
        return self._attempt.settling or self._ending is not None

    @property
    def decides(self) -> bool:
        """True while this head reaches enough of the nodes to begin an attempt."""
        return self._terms.suffice(self.nodes.present)

    @property
    def seeks(self) -> bool:
        """True while this head can only wait, and another one may be there that decides."""
        idle = self._attempt.begun is None and self._ending is None and self._record is None
        return idle and self.exit_code is None and not self.decides

    def on_report(self, node_rank: int, report: Message, now: float) -> None:
        """Act on the report of a node."""
        node = self._gang.node(node_rank)
        kind = report["kind"]
        if kind == "join":
            self._join(node, report, now)
        elif kind in {"missing", "started", "transport", "preflight", "answered"}:
            self._on_facts(node, report)
        elif kind in {"silent", "stack", "stacks_done", "usage", "sending", "copied"}:
            self._watch_of(kind).on_report(node_rank, report, now)
        elif kind == "rank_ended":
            self._attempt.rank_ended(end_of(report), now)
        elif kind in {"stop_requested", "cancel"}:
            self._on_request(report, now)
        elif kind == "supervisor_ended":
            self._on_supervisor_end(int(report["node_rank"]), int(report["exit_code"]), now)
        elif kind == "ended":
            self._attempt.connected |= bool(report.get("connected", True))
            self._attempt.asks |= bool(report.get("asked"))  # the ranks of another host may be the ones that ask
            self._confirm(node_rank, [int(pid) for pid in report["left"]])
        elif kind == "gave_up":
            self.on_loss(node_rank, Loss("given_up", str(report["why"])), now)
        elif kind in {"failed", "parent_gone"}:
            self._fail(self._failure_of(node, report), now)

    def _watch_of(self, kind: str) -> HangWatch | UsageWatch | CopyWatch:
        if kind in {"sending", "copied"} and self._copies is not None:
            return self._copies
        return self._usage if kind == "usage" else self._hangs

    def _failure_of(self, node: Node, report: Message) -> RankEnd:
        """Return what a node has reported as the end of all ranks; another attempt may do without that node."""
        if report["kind"] == "parent_gone":
            return self._loss_of_parent(node, report)
        end = end_of(report)
        goes_on = self._gang.min_nodes is not None and self._attempt.begun is not None and node != self._own
        return dataclasses.replace(end, restart="here") if goes_on else end

    def _on_facts(self, node: Node, report: Message) -> None:
        if report["kind"] == "missing":
            self.nodes.expect(node.node_rank, report)
        elif report["kind"] == "answered":
            self._terms.on_answer(node.node_rank, int(report["term"]))
        elif report["kind"] == "preflight":
            self._preflight.on_report(node.node_rank, report)
        elif report["kind"] == "transport":
            where = {"attempt": self._attempt.number, "node_rank": node.node_rank, "host": node.host}
            log(self._run, "nccl_transport", **where, **facts_of(report))
        else:
            self._start.nodes[node.node_rank] = facts_of(report)
            if node == self._own:
                self._interface = report["interface"]

    def on_loss(self, node_rank: int, why: Loss, now: float, *, silent_s: float = 0.0) -> None:
        """Act on the loss of the link to a node's supervisor, which was last heard `silent_s` ago."""
        if self.exit_code is not None or node_rank in self.nodes.lost:
            return
        losses = self.nodes.lose(node_rank, why, self._interface)
        if self._copies is not None:
            self._copies.lose(node_rank)
        # A batch system that ends a job kills supervisors; it silences no host.
        of_node = why.kind == "host_silent" or not self._attempt.stop_reason
        if self._gang.min_nodes is None:
            for node, what in losses:
                self._fail_nodes((node,), what, now, of_node=of_node, silent_s=silent_s)
        elif self._attempt.begun is not None and self._ending is None:
            # Another attempt may do without the node; a spare's loss changes nothing in this one.
            members = {node.node_rank: node for node in self._members.nodes}
            for _, what in losses if node_rank in members else ():
                cause = loss_of_nodes(self._members, (members[node_rank],), what, attempt=self._attempt.begun_in)
                cause = dataclasses.replace(cause, restart="here", of_node=of_node)
                self._attempt.fail(cause, now, silent_s=silent_s)
        self._confirm(node_rank, [])

    def tick(self, now: float) -> None:
        """Do what is due, and what follows from the reports."""
        if self.exit_code is not None:
            return
        if self._job is not None:
            self._watch_job(self._job, now)
        if self._record is not None:
            self._await_record(self._record, now)
        elif self._ending is not None:
            if self._ending.is_over(now, waits=self._job is not None and self._job.undecided):
                if self._gang.min_nodes is not None and (silent := self._ending.unconfirmed - {self._own.node_rank}):
                    loss = Loss("no_answer", "it has not ended its ranks in time")
                    self.gives_up |= dict.fromkeys(silent, loss)
                    self._ending.unconfirmed -= silent
                    return
                if self._attempt.begun is not None and self.decides:  # else others may go on
                    self._ending.clean_up(self.nodes.lost)
                self._conclude(self._ending, now)
        else:
            self._go_on(self._attempt, now)

    def _go_on(self, attempt: Attempt, now: float) -> None:
        """Do what is due while the gang starts or runs."""
        if ready := self._choose(now) is not None and self._preflight.is_over(now):
            self._mark_nodes(attempt, now)
        if attempt.begun is None and not attempt.is_over(now):
            self._await_nodes(attempt, now, ready=ready)
        if self._start.is_due:
            self._record_start(now)
        if attempt.time_limit_approaches(now):
            self._stop(f"the time limit of {self._gang.time_limit_s:g} s approaches", now, time_limit=True)
        attempt.check_time(now)
        if attempt.begun is not None and not attempt.is_over(now):
            present = self.nodes.present & {node.node_rank for node in self._members.nodes}
            self._look_for_hang(attempt, present, now)
            self._usage.tick(present, attempt.begun, now)
            self._look_for_nodes(attempt, attempt.begun, now)
            self._keep_term(attempt, now)
            if self._copies is not None:
                self._copies.tick(self.nodes.present, now)
        if attempt.is_over(now):
            attempt.decide()
            self._ending = Ending(self._gang, self.nodes.present, now)
            self._send_all({"kind": "kill", "whole_gang": False})

    def _await_nodes(self, attempt: Attempt, now: float, *, ready: bool) -> None:
        """Start the ranks once the nodes are `ready`, and the newest checkpoint is on the first of them."""
        chosen = self._choose(now)
        if chosen is not None and ready:
            if not (self._copies and self._copies.fetches(now)) and not self._waits_for_term(attempt, chosen):
                self._take_part(chosen)
                self._begin(now)
        elif chosen is None and (failure := self.nodes.overdue(now)) is not None:
            total = len(self._terms.newest.voters)
            few = (
                "" if self.decides or total == 1 else f"; of {total} nodes only more than half go on without the others"
            )
            self._fail(dataclasses.replace(failure, error=failure.error + few), now)
        attempt.missing = self.nodes.missing()[0]
        if waited := self.nodes.note_wait(now):
            log(self._run, "start_waits", attempt=attempt.number, text=f"{attempt.missing} {waited}")

    def _choose(self, now: float, *, since: float = math.inf) -> tuple[int, ...] | None:
        """Choose the nodes of the next attempt, see `JoinedNodes.choose`; None also while this head may not decide."""
        return self.nodes.choose(now, since=since) if self.decides else None

    def _waits_for_term(self, attempt: Attempt, members: Iterable[int]) -> bool:
        """Return whether nodes have yet to answer who decides now."""
        if not self._terms.fails_over:
            return False
        voters = [self.nodes.voters[node_rank] for node_rank in sorted(self.nodes.present)]
        return self._terms.wait(attempt.number, self._restarts.before(attempt), members, voters, self._send)

    def _keep_term(self, attempt: Attempt, now: float) -> None:
        """End the ranks when too few nodes are there: the others may go on. Else count those that are there."""
        if self.decides:
            self._waits_for_term(attempt, [node.node_rank for node in self._members.nodes])
        elif not attempt.settling:
            here, total = self._own, len(self._terms.newest.voters)
            error = f"node {here.node_rank} on {here.host} reaches {len(self.nodes.present) - 1} of {total - 1} nodes"
            why = "; ".join(self.nodes.lost.values())
            self._attempt.fail(RankEnd(rank=None, host=here.host, error=f"{error} ({why})", restart="here"), now)

    def _take_part(self, chosen: tuple[int, ...]) -> None:
        """Let these nodes take part in the attempt, and log what differs from the one before."""
        if self._gang.min_nodes is None:
            return
        text = self.nodes.explain(chosen)
        if text and self._own.node_rank != self.nodes.taken[0] and not newest_here(self._run):
            text += "; no host that is left has a checkpoint: it begins anew"
        self.nodes.take(chosen)
        if text:
            log(self._run, "nodes_changed", attempt=self._attempt.number, nodes=chosen, text=text)
        self._members = self._rendezvous.gang = self._attempt.gang = self._gang.of_nodes(chosen)
        self._watch_members()

    def _look_for_nodes(self, attempt: Attempt, begun: float, now: float) -> None:
        """Ask for a stop at a checkpoint once more nodes could take part than do."""
        if self._gang.min_nodes is None or attempt.stop_reason is not None or now < begun + _SETTLE_S:
            return
        chosen = self._choose(now, since=now - _SETTLE_S)
        asks = attempt.asks or is_file(self._run.attempt(attempt.number).asked)
        if chosen is None or len(chosen) <= len(self._members.nodes) or not (self._start.written and asks):
            return
        attempt.regroups = True
        self._stop(self.nodes.explain(chosen), now)

    def _look_for_hang(self, attempt: Attempt, present: set[int], now: float) -> None:
        """Do what the spec asks for where ranks show no progress; their stacks are written by then."""
        hang = self._hangs.tick(present, attempt.running, now, judges=attempt.stop_reason is None)
        if hang is None:
            return
        self._helpers.on_event("hang", attempt.number, hang.text)
        if self._gang.hang != "report":
            self._restarts.final |= self._gang.hang == "fail"
            attempt.fail(failure_of_hang(hang, self._gang), now, silent_s=hang.silent_s)

    def _mark_nodes(self, attempt: Attempt, now: float) -> None:
        """Record what the preflight has found; a node whose ranks need not start ends the start, or is left out."""
        for found in self._preflight.take():
            host = self._gang.node(found.node_rank).host
            log(self._run, "node_marked", attempt=attempt.number, host=host, why=found.why, failed=found.failed)
            if found.failed and self._gang.min_nodes is not None and found.node_rank != self._own.node_rank:
                self.nodes.leave_out(found.node_rank, f"its preflight failed: {found.why}")
            elif found.failed:
                error = f"the preflight of node {found.node_rank} on {host} failed: {found.why}"
                self._fail(RankEnd(rank=None, host=host, error=error, restart="another job", of_node=True), now)

    def _join(self, node: Node, report: Message, now: float) -> None:
        self.nodes.join(node, report, now)
        if report.get("check"):
            self._preflight.expect(node.node_rank, now)
        if self._copies is not None:
            self._copies.on_join(node.node_rank, report)
        if self._terms.fails_over and "terms" in report:
            self._terms.learn(report["terms"])
            self._send(node.node_rank, {"kind": "terms", "terms": self._terms.written()})
            number = self._terms.next_attempt(self._attempt.number)
            if number != self._attempt.number and self._attempt.begun is None:
                self._set_attempt(number)
        if self.exit_code is not None:
            self._finish(self.exit_code)

    def _on_supervisor_end(self, node_rank: int, exit_code: int, now: float) -> None:
        """Act on the end of a supervisor that has not joined; the loss of its link reports that of another one."""
        if node_rank not in self.nodes.pids:
            node = self._gang.node(node_rank)
            what = f"supervisor of node {node_rank} on {node.host} {spell_exit(exit_code)}"
            self._fail_nodes((node,), what, now)

    def _loss_of_parent(self, node: Node, report: Message) -> RankEnd:
        """Return the end of all ranks with the process that carries a node, or the whole run."""
        what, place = f"the task that carries the run (pid {report['pid']}) was killed", None
        if report["one_node"]:
            what, place = f"{node.host} lost the command that carries the run", node
        attempt = self._attempt.begun_in
        return loss_of_nodes(self._gang, self._members.nodes, what, attempt=attempt, place=place, whose="")

    def _begin(self, now: float) -> None:
        attempt, gang, run = self._attempt, self._members, self._run
        try:
            demand_own(run.path)
            self._rendezvous.open(attempt.number, self.nodes.reached)
        except ClusterddpError as error:
            self._fail(RankEnd(rank=None, host=gang.nodes[0].host, error=error.message), now)
            return
        attempt.begun = now
        if self._before is not None:
            # The last one of the head that was lost.
            record, self._before = EndRecord(run.attempt(attempt.number - 1), self._before.end, gang.token), None
            if record.step(now) and record.is_first:
                log_end(run, attempt.number - 1, record.end)
        self._guard.update(attempt=attempt.number, started=True, is_head=True)
        if self._terms.fails_over:
            others_suffice = self._terms.suffice(self.nodes.present - {self._own.node_rank})
            self._guard.update(restarts_left=others_suffice and self._restarts.before(attempt) < gang.restarts)
        log(self._run, "attempt_started", attempt=attempt.number, master_port=self._rendezvous.port)
        if facts := self._preflight.facts():
            log(self._run, "preflight", attempt=attempt.number, nodes=facts)
        networks = self.nodes.faster_networks(self._rendezvous.address)
        order = self._rendezvous.start_order(attempt.number, self._restarts.before(attempt), networks)
        order |= {} if gang is self._gang else {"nodes": [node.node_rank for node in gang.nodes]}
        for node in gang.nodes:
            listener = {"listener": self._rendezvous.listener} if node is gang.nodes[0] else {}
            self._send(node.node_rank, order | listener)

    def _record_start(self, now: float) -> None:
        error = self._start.write(now, last_try=self._ending is not None)
        if error is None and self._start.written:
            self._helpers.on_event("start", self._attempt.number, f"{self._gang.num_ranks} ranks run")
        if error is not None:
            log_line(f"the start could not be recorded: {error}")
            self._fail(RankEnd(rank=0, host=self._own.host, error=error), now)

    def _on_request(self, report: Message, now: float) -> None:
        """Act on a request to cancel the run, or to stop it at a checkpoint."""
        if report["kind"] == "cancel":
            self._restarts.final = True
            if self._ending is None and self._attempt.cancel_reason is None:
                self._attempt.cancel_reason = str(report["reason"])
                self._attempt.ends_by = min(self._attempt.ends_by, now + KILL_WAIT_S)
            return
        if report.get("ordered"):
            return  # a stop file that a node has written on this head's order
        if self._job is not None and report.get("signal") == "SIGTERM":
            self._job.on_term(now)
            if self._ending is not None:
                return  # srun ends what is left of a step when one of its tasks was killed
        reason = str(report["reason"])
        self._stop(reason, now)
        if report.get("signal") != "SIGTERM" and self._attempt.stop_reason == reason:
            self._attempt.stopped_by_people = True

    def _watch_job(self, job: JobWatch, now: float) -> None:
        intent = job.tick(now)
        self.node_is_down |= intent is not None and intent.node_is_down
        self.node_is_down |= self._attempt.is_about_to_be_killed(now)
        if intent is not None and intent.apply(self._attempt) and self._ending is None:
            self._stop(intent.reason, now, time_limit=intent.kind == "time_is_up")

    def _stop(self, reason: str, now: float, *, time_limit: bool = False) -> None:
        if self._ending is not None:
            self._restarts.final = True  # a request to stop also forbids another start
            return
        if self._attempt.regroups and self._attempt.stop_reason is not None:
            # The ranks stop already, for another node to take part; now the run is to end there.
            self._attempt.regroups, self._attempt.stop_reason = False, reason
            log(self._run, "stop_requested", attempt=self._attempt.number, reason=reason, asks=self._attempt.asks)
        if not self._attempt.stop(reason, now, time_limit=time_limit):
            return
        self._attempt.asks |= is_file(self._run.attempt(self._attempt.number).asked)
        log(self._run, "stop_requested", attempt=self._attempt.number, reason=reason, asks=self._attempt.asks)
        self._send_all({"kind": "stop", "reason": reason})

    def _fail_nodes(
        self, nodes: tuple[Node, ...], what: str, now: float, *, of_node: bool = True, silent_s: float = 0.0
    ) -> None:
        """Note that all ranks of `nodes` end because of something that is no rank's fault."""
        cause = loss_of_nodes(self._gang, nodes, what, attempt=self._attempt.begun_in)
        self._fail(dataclasses.replace(cause, of_node=of_node), now, silent_s=silent_s)

    def _fail(self, failure: RankEnd, now: float, *, silent_s: float = 0.0) -> None:
        """Note a failure after which these supervisors start nothing again, unless the failure says otherwise."""
        if self._job is not None and failure.restart == "another job":
            self._restarts.incomplete = True
        elif failure.restart != "here":
            self._restarts.final = True
        if self._ending is None:
            self._attempt.fail(failure, now, silent_s=silent_s)

    def _confirm(self, node_rank: int, left: list[int]) -> None:
        if self._ending is not None:
            self._ending.confirm(node_rank, left)

    def _conclude(self, ending: Ending, now: float) -> None:
        """Record how the attempt ended, and what follows."""
        attempt = self._attempt
        if attempt.begun is not None and not self._start.written:
            self._record_start(now)
        attempt.meets = self._usage.meets
        end = ending.conclude(attempt, self._run, self._rendezvous.address, self._rendezvous.port)
        restart = self._restarts.after(attempt, end, all_gone=ending.all_gone)
        cancelled, number = is_file(self._run.cancel_file), self._terms.next_attempt(attempt.number + 1)
        if cancelled or (restart == "here" and not make_next_attempt(self._run, number)):
            restart = "none"
        if restart != "none":
            end = dataclasses.replace(end, will_restart=True, needs_job=restart == "another job")
        if restart == "here":
            self._restarts.uncounted += attempt.regroups and end.outcome == "STOPPED"
            restarts_left = self._job is not None and self._restarts.before(attempt) + 1 < self._gang.restarts
            self._guard.update(attempt=number, started=False, restarts_left=restarts_left)
        self._record = EndRecord(self._run.attempt(attempt.number), end, self._gang.token)
        self._await_record(self._record, now)

    def _await_record(self, record: EndRecord, now: float) -> None:
        """Start the next attempt or finish once the end is recorded."""
        if not record.step(now):
            return
        self._record, number, end = None, self._attempt.number, record.end
        if record.error is not None:
            log_line(f"the end could not be recorded: {record.error}")
        log_end(self._run, number, end, noticed=self._attempt.noticed, silent_s=self._attempt.silent_s)
        self._helpers.on_end(number, end)
        self._rendezvous.close()
        if end.will_restart and not end.needs_job:
            self._set_attempt(self._terms.next_attempt(number + 1))
            self.nodes.wait_anew(now, self._patience_s())
        else:
            self._finish(self._exit_code(end))

    def _patience_s(self, *, cut_off: bool = False) -> float:
        """Return how long to wait for nodes; without this one, if it is cut off, the others may go on."""
        return (
            _CUT_OFF_S if not self.decides and (cut_off or is_cut_off(self._interface)) else self._gang.start_timeout_s
        )

    def _exit_code(self, end: AttemptEnd) -> int:
        """Return 1 for a failure; of the program of a batch script the first failure's own, which its launcher gets.

        A program of a batch script that was not ordered to start gets 1, or 0 to run without supervisors.
        """
        if self._gang.entry.unchanged and self._attempt.begun is None:
            return 0 if self.nodes.given_up else 1
        if end.outcome != "FAILED":
            return 0
        cause = end.root_cause
        return (self._gang.entry.unchanged and cause and cause.exit_code) or 1

    def _finish(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._send_all({"kind": "finish", "exit_code": exit_code})

    def _send_all(self, order: Message) -> None:
        for node_rank in sorted(self.nodes.present):
            self._send(node_rank, order)


class StartRecord:
    """The record that the ranks of an attempt were started by the calling process, the head."""

    def __init__(self, attempt: AttemptDir, gang: Gang, rendezvous: Rendezvous) -> None:
        self.nodes: dict[int, Message] = {}
        """For each node whose ranks run, by node rank: the interface, its address, and why it was chosen."""
        self.written = False
        """True also after the write was given up."""
        self._attempt = attempt
        self._gang = gang
        self._rendezvous = rendezvous
        self._write_by = float("inf")
        """When the storage must have taken the record, once it has refused it."""

    @property
    def is_due(self) -> bool:
        """True when the ranks of all nodes run and the record is not written."""
        return len(self.nodes) == len(self._gang.nodes) and not self.written

    def write(self, now: float, *, last_try: bool) -> str | None:
        """Write the record; return why it is given up: the time is up, or this was the last try."""
        try:
            make_attempt_dirs(self._attempt)
            write_json(self._attempt.start, self._facts())
        except (ClusterddpError, OSError) as error:
            self._write_by = min(self._write_by, now + storage_timeout_s())
            if now < self._write_by and not last_try:
                return None  # the next tick retries
            self.written = True
            return str(error)
        self.written = True
        return None

    def _facts(self) -> dict[str, Any]:
        return {
            "attempt": self._attempt.number,
            "started": time.time(),
            "world_size": self._gang.world_size,
            "master_addr": self._rendezvous.address,
            "master_port": self._rendezvous.port,
            "backend": self._gang.backend,
            "supervisor": dataclasses.asdict(ProcessIdentity.of()),
            "nodes": [
                {"node_rank": node.node_rank, "host": node.host, "ranks": node.ranks}
                | self.nodes.get(node.node_rank, {})
                for node in self._gang.nodes
            ],
        }


def make_next_attempt(run: RunDir, number: int) -> bool:
    """Make the next attempt's directory; False: another start of the job has made it, while this one was cut off."""
    try:
        make_attempt(run, number)
    except FileExistsError:
        return False
    except OSError as error:
        log_line(f"the next attempt's directory cannot be made: {error}")
    return True


class JoinedNodes:
    """The nodes of a gang whose supervisors have joined the head."""

    def __init__(self, gang: Gang, *, timeout_s: float, now: float, own: int = 0) -> None:
        """`own`: the head's node."""
        self.pids: dict[int, int] = {}
        """Of the supervisors that have joined, by node rank."""
        self.lost: dict[int, str] = {}
        """Why, by node rank."""
        self.reached: dict[int, str] = {}
        """The address at which each other node has reached the head."""
        self.voters: dict[int, Voter] = {}
        """Where the supervisors listen, by node rank."""
        self._links: dict[int, dict[str, int]] = {}
        """The links that nodes have reported, by node rank; see `report_links`."""
        self.given_up = False
        """True once nodes or tasks are missing, and the time is up."""
        self._gang = gang
        self._own = gang.node(own)
        self._joined: dict[int, float] = {}
        """When each node that is there has joined, by node rank."""
        self.taken = tuple(node.node_rank for node in gang.members)
        """The nodes of the last attempt."""
        self._losses: dict[int, str] = {}
        """Why nodes were lost since it began."""
        self._left_out: set[int] = set()
        self._timeout_s = timeout_s
        self._until = self._settled = now + timeout_s
        """When the time is up; and when nodes that have not joined yet are waited for no longer."""
        self._gone = False
        self._note_s = min(_NOTE_WAIT_S, timeout_s / 2)
        self._note_at = now + self._note_s
        self._unready: dict[int, tuple[int, ...]] = {}
        """Ranks that a node cannot start yet, because it waits for their tasks."""
        self._in_setup: set[int] = set()
        """Node ranks."""

    @property
    def present(self) -> set[int]:
        """The ranks of the nodes that have joined and are not lost."""
        return set(self.pids) - self.lost.keys()

    def may_join(self, node_rank: int) -> bool:
        """Return whether a node may join; a lost one may do so again where another attempt can take it in."""
        is_new = node_rank not in self.pids or (self._gang.min_nodes is not None and node_rank in self.lost)
        return is_new and 0 <= node_rank < len(self._gang.nodes)

    def join(self, node: Node, report: Message, now: float) -> None:
        """Count a supervisor."""
        self.lost.pop(node.node_rank, None)
        self._joined[node.node_rank] = now
        pid = self.pids[node.node_rank] = int(report["pid"])
        self.expect(node.node_rank, report)
        if "address" in report:
            self.voters[node.node_rank] = (node.node_rank, str(report["address"]), int(report["port"]))
        self._links[node.node_rank] = dict(report.get("links", {}))
        if "reached" in report:
            self.reached[node.node_rank] = str(report["reached"])
        log_line(f"node {node.node_rank} on {node.host} has joined (supervisor {pid})")

    def take_over(self, term: Term, why: str, now: float) -> None:
        """Count the nodes as they were in the last term of a head that is lost; `why`: a sentence about that."""
        self.taken = term.members
        self._losses[term.head] = why
        self.lost |= {
            node.node_rank: why for node in self._gang.nodes if node.node_rank not in term.nodes - {term.head}
        }
        self.lost.pop(self._own.node_rank, None)
        self._settled = now + self._gang.host_silence_s

    def expect(self, node_rank: int, report: Message) -> None:
        """Note which ranks of a node cannot be started yet, and whether its setup lines still run."""
        self._unready[node_rank] = tuple(report.get("missing", ()))
        (self._in_setup.add if report.get("setup") else self._in_setup.discard)(node_rank)

    def lose(self, node_rank: int, why: Loss, interface: str | None) -> list[tuple[Node, str]]:
        """Count a node as lost; return what happened, each time with the node at fault.

        `interface`: the one that carries the gang's traffic on this host. `given_up`: the node counts this one as lost,
        as it does after this process was stopped for long.
        """
        self.lost[node_rank] = self._losses[node_rank] = str(why)
        self._joined.pop(node_rank, None)
        self.expect(node_rank, {})
        node, own = self._gang.node(node_rank), self._own
        if why.kind == "given_up":
            return [(own, f"node {own.node_rank} on {own.host} was given up by node {node_rank} on {node.host}: {why}")]
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

    def choose(self, now: float, *, since: float = math.inf) -> tuple[int, ...] | None:
        """Choose the nodes of the next attempt; None: it has to wait. `since`: nodes that joined later do not count.

        It waits for nodes that may still come, but not for those that were lost, unless there are too few without them.
        """
        busy = self._in_setup | {node_rank for node_rank, ranks in self._unready.items() if ranks}
        absent = len(self.pids.keys() | self.lost.keys()) < len(self._gang.nodes) and now < self._settled
        waits = self._gang.min_nodes is None or now < self._until
        if self._own.node_rank in busy or ((busy or absent) and waits):
            return None
        busy |= self._left_out
        there = [each for each, joined in self._joined.items() if joined <= since and each not in busy]
        first = self._own.node_rank  # of the head's node, which holds the port for rank 0
        return self._gang.choose_nodes(sorted(there, key=lambda each: (each != first, each not in self.taken, each)))

    def leave_out(self, node_rank: int, why: str) -> None:
        """Let a node take part in no attempt any more."""
        self._left_out.add(node_rank)
        self._losses[node_rank] = why

    def take(self, chosen: tuple[int, ...]) -> None:
        """Note which nodes take part in the attempt that begins."""
        self.taken = chosen
        self._losses.clear()

    def explain(self, chosen: Sequence[int]) -> str:
        """Say why an attempt with these nodes has others than the one before; empty: it has the same."""
        came = [node_rank for node_rank in chosen if node_rank not in self.taken]
        facts = []
        for node_rank in self.taken:
            if node_rank in self._losses:
                what = "is left out" if node_rank in self._left_out else "was lost"
                fact = f"{self._name(node_rank)} {what} ({self._losses[node_rank]})"
                if node_rank in chosen:
                    fact += " and has come back"
                elif came:
                    spare = ", a spare," if self._gang.node(came[0]).spare else ""
                    fact += f"; {self._name(came.pop(0))}{spare} took its place"
                facts.append(fact)
        if came:
            facts.append(f"{' and '.join(map(self._name, came))} can take part again")
        if len(chosen) != len(self.taken):
            facts.append(f"the run goes on with {len(chosen)} of {len(self._gang.members)} nodes")
        return "; ".join(facts)

    def _name(self, node_rank: int) -> str:
        return f"node {node_rank} on {self._gang.node(node_rank).host}"

    def wait_anew(self, now: float, timeout_s: float) -> None:
        """Let the start of another attempt wait for so long."""
        self._timeout_s = timeout_s
        self._until = now + timeout_s
        self._note_at = now + self._note_s

    def give_up(self, now: float) -> None:
        """Wait no longer: the supervisors of all other nodes have ended."""
        self._gone, self._until = True, now

    def overdue(self, now: float) -> RankEnd | None:
        """Name the nodes and tasks that are missing once the time is up."""
        if now < self._until:
            return None
        self.given_up = True
        what, nodes = self.missing()
        error = f"{what} within {self._timeout_s:g} s" if not self._gone else f"{what}: their supervisors have ended"
        absent = nodes[0].node_rank not in self.present
        if self._gang.min_nodes is not None:
            number = len(self.present)
            there = f"{format_count(number, 'node')} {'is' if number == 1 else 'are'} there"
            error += f"; {there}, and min_nodes is {self._gang.min_nodes}"
        return RankEnd(rank=None, host=nodes[0].host, error=error, restart="another job", of_node=absent)

    def missing(self) -> tuple[str, list[Node]]:
        """Name the nodes and tasks that are missing now; return those nodes, too."""
        absent = [node for node in self._gang.nodes if node.node_rank not in self.present]
        unready = [node for node in self._gang.nodes if self._unready.get(node.node_rank)]
        missing = []
        if absent:
            names = " and ".join(self._name(node.node_rank) for node in absent)
            missing.append(f"{names} did not {'come back' if self.lost else 'join'}")
        for node in unready:
            missing.append(f"the tasks of {spell_ranks(self._unready[node.node_rank])} on {node.host} did not start")
        busy = [self._gang.node(node_rank) for node_rank in sorted(self._in_setup)]
        if busy:
            missing.append(f"the setup lines on {', '.join(node.host for node in busy)} did not end")
        return " and ".join(missing), absent + unready + busy

    def note_wait(self, now: float) -> str:
        """Return once, when the start has waited for long, for how long that is."""
        if now < self._note_at or not self.missing()[0]:
            return ""
        self._note_at = float("inf")
        return f"within {self._note_s:g} s; the start waits up to {self._timeout_s:g} s"


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
        if attempt.stop_reason is None or self._gang.entry.stop_aware:
            has_stopped = is_file(directory.stopped)
        else:
            has_stopped = attempt.asks or may_look_for_file(self._gang.entry)
        end = self._add_leftovers(attempt.verdict(stop_confirmed=has_stopped))
        return dataclasses.replace(end, warning=end.warning or attempt.warn_of_apart(end, address, port))

    def _add_leftovers(self, end: AttemptEnd) -> AttemptEnd:
        """Add to the end's reason what may be left, and where."""
        missing = [self._gang.node(node_rank) for node_rank in sorted(self.unconfirmed)]
        places = [f"node {node.node_rank} on {node.host} did not confirm its end" for node in missing]
        places += [
            f"processes {', '.join(map(str, pids))} on {self._gang.node(node_rank).host} could not be killed"
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
