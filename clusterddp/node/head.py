"""The head: node 0's supervisor decides for the whole gang. It takes reports, sends orders, and records attempts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from clusterddp.errors import ClusterddpError
from clusterddp.node.attempt import Attempt, Restarts
from clusterddp.node.failure import Failure, RankEnd, reported_failure
from clusterddp.node.gang_nodes import Ending, JoinedNodes
from clusterddp.node.guard import Guard
from clusterddp.node.hang_watch import HangWatch, failure_of_hang
from clusterddp.node.helpers import Helpers
from clusterddp.node.history import StartRecord, log, log_end, make_next_attempt
from clusterddp.node.job_watch import JobWatch, apply_intent
from clusterddp.node.link import facts_of
from clusterddp.node.log import log_line
from clusterddp.node.rank_network import Rendezvous
from clusterddp.node.usage_watch import UsageWatch
from clusterddp.rendezvous.connection import Loss, Message
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Gang, Node
from clusterddp.run.outcome import EndRecord, loss_of_nodes
from clusterddp.system.files import is_file


class Head:
    """The gang from the first join to the last record."""

    def __init__(
        self,
        run: RunDir,
        gang: Gang,
        *,
        first_attempt: int,
        first_restart: int = 0,
        rendezvous_seed: str,
        job: JobWatch | None = None,
        guard: Guard,
        helpers: Helpers,
        send: Callable[[int, Message], None],
        now: float,
    ) -> None:
        """`send` sends a node an order, by its node rank."""
        self.exit_code: int | None = None
        """Set when the run is over and recorded, or cannot be recorded."""
        self.node_is_down = False
        """True once Slurm has lost a node, or is about to kill the job: nodes without heartbeats count as lost."""
        self._run = run
        self._gang = gang
        self._guard = guard
        self._helpers = helpers
        self._send = send
        self._job = job
        self._restarts = Restarts(
            gang, first_attempt=first_attempt, first_restart=first_restart, on_slurm=job is not None
        )
        self.nodes = JoinedNodes(gang, timeout_s=gang.start_timeout_s, now=now)
        self._rendezvous = Rendezvous(gang, rendezvous_seed)
        self._interface = gang.nodes[0].interface or gang.interface
        """This host's; on Slurm known when its ranks have started."""
        self._attempt: Attempt
        self._start: StartRecord
        self._ending: Ending | None
        """Set while the gang is being ended."""
        self._record: EndRecord | None = None
        """Set while the end of the attempt waits for the run's storage."""
        self._set_attempt(first_attempt)

    def _set_attempt(self, number: int) -> None:
        self._attempt = Attempt(self._run, self._gang, number)
        self._hangs = HangWatch(self._run, self._gang, self._run.attempt(number), self._send)
        self._usage = UsageWatch(self._run, self._gang, self._run.attempt(number), self._send)
        self._start = StartRecord(self._run.attempt(number), self._gang, self._rendezvous)
        self._ending = None

    @property
    def changes_fast(self) -> bool:
        return self._attempt.settling or self._ending is not None

    def on_report(self, node_rank: int, report: Message, now: float) -> None:
        """Act on the report of a node."""
        node = self._gang.nodes[node_rank]
        kind = report["kind"]
        if kind == "join":
            self._join(node, report)
        elif kind in {"missing", "started", "transport"}:
            self._on_facts(node, report)
        elif kind in {"silent", "stack", "stacks_done", "usage"}:
            (self._usage if kind == "usage" else self._hangs).on_report(node_rank, report, now)
        elif kind == "rank_ended":
            self._attempt.rank_ended(RankEnd(**facts_of(report)), now)
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
            self._fail(reported_failure(self._gang, node, report, attempt=self._attempt.begun_in), now)

    def _on_facts(self, node: Node, report: Message) -> None:
        if report["kind"] == "missing":
            self.nodes.expect(node.node_rank, report["ranks"])
        elif report["kind"] == "transport":
            where = {"attempt": self._attempt.number, "node_rank": node.node_rank, "host": node.host}
            log(self._run, "nccl_transport", **where, **facts_of(report))
        else:
            self._start.nodes[node.node_rank] = facts_of(report)
            if node.node_rank == 0:
                self._interface = report["interface"]

    def on_loss(self, node_rank: int, why: Loss, now: float) -> None:
        """Act on the loss of the link to a node's supervisor."""
        if self.exit_code is not None or node_rank in self.nodes.lost:
            return
        for node, what in self.nodes.lose(node_rank, why, self._interface):
            self._fail_nodes((node,), what, now)
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
                if self._attempt.begun is not None:
                    self._ending.clean_up(self.nodes.lost)
                self._conclude(self._ending, now)
        else:
            self._go_on(self._attempt, now)

    def _go_on(self, attempt: Attempt, now: float) -> None:
        """Do what is due while the gang starts or runs."""
        if attempt.begun is None and not attempt.is_over(now):
            if self.nodes.complete:
                self._begin(now)
            elif (failure := self.nodes.overdue(now)) is not None:
                self._fail(failure, now)
        if self._start.is_due:
            self._record_start(now)
        if attempt.time_limit_approaches(now):
            self._stop(f"the time limit of {self._gang.time_limit_s:g} s approaches", now, time_limit=True)
        attempt.check_time(now)
        if attempt.begun is not None and not attempt.is_over(now):
            self._look_for_hang(attempt, now)
            self._usage.tick(self.nodes.present, attempt.begun, now)
        if attempt.is_over(now):
            self._end_gang(now)

    def _look_for_hang(self, attempt: Attempt, now: float) -> None:
        """Do what the spec asks for where ranks show no progress; their stacks are written by then."""
        hang = self._hangs.tick(self.nodes.present, attempt.running, now, judges=attempt.stop_reason is None)
        if hang is None:
            return
        self._helpers.on_event("hang", attempt.number, hang.text)
        if self._gang.hang != "report":
            self._restarts.final |= self._gang.hang == "fail"
            attempt.fail(failure_of_hang(hang, self._gang), now)

    def _join(self, node: Node, report: Message) -> None:
        self.nodes.join(node, report)
        if self.exit_code is not None:
            self._finish(self.exit_code)

    def _on_supervisor_end(self, node_rank: int, exit_code: int, now: float) -> None:
        """Act on the end of a supervisor that has not joined; the loss of its link reports that of another one."""
        if node_rank not in self.nodes.pids:
            self._fail_nodes((self._gang.nodes[node_rank],), self.nodes.spell_end(node_rank, exit_code), now)

    def _begin(self, now: float) -> None:
        attempt, gang = self._attempt, self._gang
        try:
            self._rendezvous.open(attempt.number, self.nodes.reached)
        except ClusterddpError as error:
            self._fail(Failure.at(gang.nodes[0].host, error.message), now)
            return
        attempt.begun = now
        self._guard.update(started=True)
        log(self._run, "attempt_started", attempt=attempt.number, master_port=self._rendezvous.port)
        networks = self.nodes.faster_networks(self._rendezvous.address)
        order = self._rendezvous.start_order(attempt.number, self._restarts.before(attempt), networks)
        for node in gang.nodes:
            listener = {"listener": self._rendezvous.listener} if node is gang.nodes[0] else {}
            self._send(node.node_rank, order | listener)

    def _record_start(self, now: float) -> None:
        error = self._start.write(now, last_try=self._ending is not None)
        if error is None and self._start.written:
            self._helpers.on_event("start", self._attempt.number, f"{self._gang.num_ranks} ranks run")
        if error is not None:
            log_line(f"the start could not be recorded: {error}")
            self._fail(Failure.at(self._gang.nodes[0].host, error, rank=0), now)

    def _on_request(self, report: Message, now: float) -> None:
        """Act on a request to cancel the run, or to stop it at a checkpoint."""
        if report["kind"] == "cancel":
            self._restarts.final = True
            if self._ending is None and self._attempt.cancel_reason is None:
                self._attempt.cancel_reason = str(report["reason"])
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
        if intent is not None and apply_intent(intent, self._attempt) and self._ending is None:
            self._stop(intent.reason, now, time_limit=intent.kind == "time_is_up")

    def _stop(self, reason: str, now: float, *, time_limit: bool = False) -> None:
        if self._ending is not None:
            self._restarts.final = True  # a request to stop also forbids another start
            return
        if not self._attempt.stop(reason, now, time_limit=time_limit):
            return
        self._attempt.asks |= is_file(self._run.attempt(self._attempt.number).asked)
        log(self._run, "stop_requested", attempt=self._attempt.number, reason=reason, asks=self._attempt.asks)
        self._send_all({"kind": "stop", "reason": reason})

    def _fail_nodes(self, nodes: tuple[Node, ...], what: str, now: float) -> None:
        """Note that all ranks of `nodes` end because of something that is no rank's fault."""
        cause = loss_of_nodes(self._gang, nodes, what, attempt=self._attempt.begun_in)
        self._fail(Failure(cause=cause, job_restartable=True), now)

    def _fail(self, failure: Failure, now: float) -> None:
        """Note a failure after which these supervisors start nothing again."""
        if self._job is not None and failure.job_restartable:
            self._restarts.incomplete = True
        else:
            self._restarts.final = True
        if self._ending is None:
            self._attempt.fail(failure, now)

    def _end_gang(self, now: float) -> None:
        self._attempt.decide()
        self._ending = Ending(self._gang, self.nodes.present, now)
        self._send_all({"kind": "kill", "whole_gang": False})

    def _confirm(self, node_rank: int, left: list[int]) -> None:
        if self._ending is not None:
            self._ending.confirm(node_rank, left)

    def _conclude(self, ending: Ending, now: float) -> None:
        """Record how the attempt ended, and what follows."""
        attempt = self._attempt
        if attempt.begun is not None and not self._start.written:
            self._record_start(now)
        end = ending.conclude(attempt, self._run, self._rendezvous.address, self._rendezvous.port)
        restart = self._restarts.after(attempt, end, all_gone=ending.all_gone)
        cancelled = is_file(self._run.cancel_file)
        if cancelled or (restart == "here" and not make_next_attempt(self._run, attempt.number + 1)):
            restart = "none"
        if restart != "none":
            end = dataclasses.replace(end, will_restart=True, needs_job=restart == "another job")
        if restart == "here":
            restarts_left = self._job is not None and self._restarts.before(attempt) + 1 < self._gang.restarts
            self._guard.update(attempt=attempt.number + 1, started=False, restarts_left=restarts_left)
        self._record = EndRecord(self._run.attempt(attempt.number), end, self._gang.token)
        self._await_record(self._record, now)

    def _await_record(self, record: EndRecord, now: float) -> None:
        """Start the next attempt or finish once the end is recorded."""
        if not record.step(now):
            return
        self._record, number, end = None, self._attempt.number, record.end
        if record.error is not None:
            log_line(f"the end could not be recorded: {record.error}")
        log_end(self._run, number, end)
        self._helpers.on_end(number, end)
        self._rendezvous.close()
        if end.will_restart and not end.needs_job:
            self._set_attempt(number + 1)
        else:
            self._finish(1 if end.outcome == "FAILED" else 0)

    def _finish(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._send_all({"kind": "finish", "exit_code": exit_code})

    def _send_all(self, order: Message) -> None:
        for node_rank in sorted(self.nodes.present):
            self._send(node_rank, order)
