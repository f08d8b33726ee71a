"""Take part in a run: as a rank that another launcher has started, or as a node that starts its own ranks.

Participant 0 decides for all and makes the run's directory before it sends the decision. Those that see the directory
use it; on hosts that share no storage the first one of each host makes its own, with the same name and token.

A rank becomes the entry's process, and its launcher ends the run. A node starts the supervisor of its ranks, which
depends on this process; node 0's is the head, as in any run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, PreflightError, UsageError
from clusterddp.network.rendezvous.connection import JOIN_KEY, Connection, Message, flush_all
from clusterddp.places.registry import launcher_named
from clusterddp.places.staging import make_run
from clusterddp.places.state import read_state
from clusterddp.places.worker.meeting import MasterPort, Met, Seat
from clusterddp.places.worker.place import (
    choose_interface,
    count_gpus,
    count_threads,
    decide_gpus,
    group_by_host,
)
from clusterddp.planning.placement import Placement, Request, free_gpus, read_machine
from clusterddp.planning.plan import (
    Plan,
    choose_run_name,
    move_plan,
    plan_json,
    plan_run,
    with_batch_of,
)
from clusterddp.planning.prerequisites import check_trainer
from clusterddp.planning.processes import process_environment, python_path, rank_command
from clusterddp.planning.program import with_absolute_paths
from clusterddp.planning.ssh import place_nodes
from clusterddp.ranks.environment import ALONE, COOKIE, GPU, NCCL_VARIABLES, USERS, Variable, cookie
from clusterddp.ranks.launched import Launched
from clusterddp.run.attempts import adopt, make_attempt, parse_end, write_end
from clusterddp.run.directory import MAX_ATTEMPTS, AttemptDir, RunDir, is_run_name, is_token, make_attempt_dirs
from clusterddp.run.find import find_run
from clusterddp.run.gang import Gang, Node
from clusterddp.run.preload import find_preload
from clusterddp.run.record import (
    FOREIGN,
    WORKER,
    ProcessIdentity,
    RankRecord,
    RunRecord,
    log_event,
    read_gang,
    read_run,
    write_rank,
    write_run,
)
from clusterddp.run.seal import demand_sealed
from clusterddp.run.state import RunState, refuse_resume
from clusterddp.run.supervisors import Link, SupervisorOrder, read_link, start_supervisor, supervisor_log
from clusterddp.system.devices import list_gpus
from clusterddp.system.files import read_json, read_tail, write_json, write_text
from clusterddp.system.gpu_lease import Lease, take_leases
from clusterddp.system.storage import retry_outage
from clusterddp.wire import build

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

_MAX_TEXT = 1024
"""Of a host's name or address, or of the identity of the job."""
_TRIES = 5
"""How often another run may take a GPU between our look and our lease."""
_POLL_S = 0.1
_FLUSH_S = 2.0
_LAST_UPDATE_S = 10.0
"""How long after the end of their supervisors the other nodes wait for the end of the run from node 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """What participant 0 decides and sends to all."""

    run: str
    token: str = dataclasses.field(repr=False)
    attempt: int
    reached: str
    """The address by which the others reach participant 0's host."""
    link: Link | None = None
    """Where node 0's supervisor listens for those of the other nodes; ranks have none, and the fields below."""
    identity: str = ""
    nodes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """By node rank: the host and its ranks, in the order of their local ranks."""
    gpus: bool = False
    """True: each rank computes on a GPU."""
    backend: str = "gloo"
    master_addr: str = ""
    master_port: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any], seat: Seat) -> Decided:
        """Check the answer of participant 0: without a key, any process at its port may have sent it."""
        another = f"another process answers as {seat.noun} 0"
        try:
            decided: Decided = build(cls, data, "the answer")
        except ValueError as error:
            raise PreflightError(f"{another}: {error}") from error
        if not (is_run_name(decided.run) and is_token(decided.token) and 0 <= decided.attempt < MAX_ATTEMPTS):
            raise PreflightError(f"{another}: it names the run {decided.run!r:.60}")
        if (decided.link is None) != (seat.noun == "rank"):
            raise PreflightError(f"{another}: it has sent no decision for a {seat.noun}")
        ranks = sorted(rank for _, of_host in decided.nodes for rank in of_host)
        if seat.noun == "rank" and ranks != list(range(seat.size)):
            raise PreflightError(f"{another}: its ranks are not 0 to {seat.size - 1}")
        texts = [decided.identity, decided.master_addr, decided.reached, *(host for host, _ in decided.nodes)]
        texts += [decided.link["host"]] if decided.link else []
        port = decided.link["port"] if decided.link else decided.master_port
        if not (0 < port < 65536 and all(text.isprintable() and len(text) < _MAX_TEXT for text in texts)):
            raise PreflightError(f"{another}: it sends an address that no host has")
        return decided


@dataclass(kw_only=True)
class Worker:
    """One participant of a run; `RankWorker` and `NodeWorker` say what differs."""

    resolved: ResolvedSpec
    seat: Seat
    runs_dir: Path
    working_dir: Path
    environ: Mapping[str, str]
    resume: str | None = None
    """The run whose next attempt this is."""

    @property
    def job(self) -> JobSpec:
        # Its place is decided already; as a local job its paths are those of this host.
        return self.resolved.job.model_copy(update={"launcher": "local"})

    def plan(self, decided: Decided) -> Plan:
        """Plan the run as it is on this host."""
        raise NotImplementedError

    def signed(self, record: RunRecord, decided: Decided) -> RunRecord:
        """Return the record of a run whose directory this process has made, with what has started the run."""
        raise NotImplementedError

    def decide(self, met: Met) -> dict[str, Any]:
        """Decide for all, and make the run's directory here."""
        raise NotImplementedError

    def settle(self, decided: Decided) -> tuple[RunDir, bool]:
        """Find the run's directory on this host, or make one where hosts share no storage; True: this process made it.

        A run that goes on gets the directory of its next attempt, which counts as made, and the plan for that.
        """
        run, made = self._found(decided), False
        if run is None:
            try:
                plan = make_run(self.plan(decided), self.environ, rename=lambda plan: self._rename(plan, decided))
                run, made = RunDir(plan.run_dir), True
            except _MadeMeanwhile as meanwhile:
                run = meanwhile.run
        with contextlib.suppress(FileExistsError):
            make_attempt(run, decided.attempt)
            if not made:
                earlier = Plan.from_json(read_json(run.plan) or {})
                plan = with_batch_of(earlier, self.plan(dataclasses.replace(decided, run=run.name)))
                write_json(run.plan, plan_json(plan))
                write_text(run.spec, plan.spec_text)
            adopt(run, decided.attempt)
            made = True
        if made:
            write_run(run, self.signed(read_run(run), decided))
        return run, made

    def find_earlier(self) -> RunDir | None:
        """Find the run that `resume` names.

        Raises: RunNotFoundError: there is none. UsageError: it is no run of worker's or not this user's own,
        still runs, or has completed.
        """
        if self.resume is None:
            return None
        run = RunDir(find_run(self.runs_dir, self.resume).path.absolute())
        started_by = (FOREIGN,) if self.seat.noun == "rank" else (WORKER, "join")
        if read_run(run).launcher not in started_by:
            what = f"was not started by clusterddp worker on {self.seat.noun}s"
            raise UsageError(f"{run.name}: {what}", hint=f"clusterddp resume {run.name}")
        demand_sealed(run)
        view = read_state(run)
        if view.state is not RunState.UNKNOWN:
            refuse_resume(run, view, instead="clusterddp worker without --resume starts a new run")
        return run

    def _planned(self, run: str, placement: Placement) -> Plan:
        """Plan the run by the one builder, with the code and the paths of this host."""
        request = Request(
            runs_dir=self.runs_dir,
            working_dir=self.working_dir,
            environ=self.environ,
            run=run,
            placed=placement,
        )
        plan = plan_run(dataclasses.replace(self.resolved, job=self.job), request)
        launcher = FOREIGN if self.seat.noun == "rank" else WORKER
        return dataclasses.replace(plan, launcher=launcher, changes=self.resolved.changes())

    def _found(self, decided: Decided) -> RunDir | None:
        for name in (decided.run, f"{decided.run}.{decided.token[:8]}"):
            run = RunDir(self.runs_dir.absolute() / name)
            with contextlib.suppress(OSError, ClusterddpError):
                if read_run(run).token == decided.token:
                    return run
        return None

    def _rename(self, plan: Plan, decided: Decided) -> Plan:
        """Name the run when its name is taken by another run; another participant may have made this run meanwhile."""
        found = self._found(decided)
        if found is not None:
            raise _MadeMeanwhile(found)
        return move_plan(plan, plan.runs_dir / f"{decided.run}.{decided.token[:8]}")


@dataclass(kw_only=True)
class RankWorker(Worker):
    """One rank that another launcher has started, before it becomes the rank."""

    launched: Launched

    def decide(self, met: Met) -> dict[str, Any]:
        if met.hellos[0].facts["torch"] == "" and self.job.entry is None:
            raise PreflightError(
                f"{met.hellos[0].name}: the built-in trainer needs torch, which is not installed there",
                hint='pip install "clusterddp[train]"',
            )
        gpus = decide_gpus(self.job, met.hellos)
        port = self.launched.master_port if self.launched.port_is_taken else met.port
        earlier = self.find_earlier() or self._find_restarted()
        given = self.launched.variables.get("MASTER_ADDR")
        decided = Decided(
            run=earlier.name if earlier else self._choose_name(),
            token=read_run(earlier).token if earlier else secrets.token_hex(16),
            attempt=earlier.attempts()[-1].number + 1 if earlier else 0,
            identity=self.launched.identity or "hand",
            nodes=group_by_host(met.hellos),
            gpus=gpus,
            backend="nccl" if gpus and self.job.network.backend != "gloo" else "gloo",
            master_addr=given.value if given and given.origin.endswith("MASTER_ADDR") else met.reached,
            master_port=port or 0,
            reached=met.reached,
        )
        run, _ = self.settle(decided)
        log_event(run, "started", attempt=decided.attempt, by=decided.identity)
        return dataclasses.asdict(dataclasses.replace(decided, run=run.name))

    def plan(self, decided: Decided) -> Plan:
        placement = Placement(
            nodes=_nodes(decided), threads_per_rank=1, backend="gloo", on_cpu=True, interface=None, notes=()
        )
        plan = self._planned(decided.run, placement)
        plan = dataclasses.replace(plan, token=decided.token, gang=self._placed(plan.gang, decided))
        return dataclasses.replace(move_plan(plan, plan.run_dir), commands=(rank_command(plan.run_dir),))

    def signed(self, record: RunRecord, decided: Decided) -> RunRecord:
        submitter = dataclasses.asdict(ProcessIdentity.of())
        return dataclasses.replace(record, submitter=submitter, job_id=decided.identity)

    def become_rank(
        self, decided: Decided, run: RunDir, port: MasterPort | None
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Record this process as the rank that it becomes; return the command and the environment for that.

        `port`: rank 0's, which stays open in the rank.
        """
        planned = read_gang(run)
        interface = choose_interface(self.job, decided.reached, len(decided.nodes)).name
        variables = self._variables(decided, self._placed(planned, decided), run, interface)
        self._record(run.attempt(decided.attempt), decided, variables, interface)
        chosen = {name: variable.value for name, variable in variables.items()}
        environment = (
            dict(self.environ) | python_path(self.environ) | chosen | find_preload(planned.entry).environment()
        )
        environment.pop(JOIN_KEY, None)  # the program does not need it
        if port is not None and not self.launched.port_is_taken:
            environment |= port.keep_over_exec(listening=planned.entry.takes_listener)
        return rank_command(run.path), environment

    def _placed(self, gang: Gang, decided: Decided) -> Gang:
        """Return the gang with what was decided, as it is on this rank's host."""
        own = next(ranks for _, ranks in decided.nodes if self.seat.number in ranks)
        return dataclasses.replace(
            gang,
            token=decided.token,
            nodes=_nodes(decided),
            threads_per_rank=self.job.resources.cpus_per_task or count_threads(len(own)),
            backend="nccl" if decided.backend == "nccl" else "gloo",
            on_cpu=not decided.gpus,
            master_addr=decided.master_addr,
            master_port=decided.master_port,
        )

    def _variables(self, decided: Decided, gang: Gang, run: RunDir, interface: str | None) -> dict[str, Variable]:
        """Compute the variables that this rank's environment lacks; those that the launcher has set stay."""
        rank = self.seat.number
        variables = dataclasses.replace(gang, interface=interface).variables_of(
            rank,
            run_dir=str(run.path),
            attempt=decided.attempt,
            master_port=decided.master_port,
            restart=self.launched.start,
        )
        kept = {
            name: variable
            for name, variable in variables.items()
            if name.startswith("CLUSTERDDP_")
            or variable.origin == USERS
            or not (self.environ.get(name) or name in NCCL_VARIABLES)  # no supervisor reads NCCL's log
        }
        node = gang.node_of(rank)
        kept[COOKIE] = Variable(cookie(decided.token, f"w{node.node_rank}"), "the run")
        kept[ALONE] = Variable("1", "clusterddp worker")
        if not decided.gpus:
            kept["CUDA_VISIBLE_DEVICES"] = Variable("", "the plan: no GPU for this run")
        elif count_gpus(self.job, self.environ) == 1 < len(node.ranks):
            kept[GPU] = Variable("0", "the one GPU that the launcher shows this rank")
        return kept

    def _find_restarted(self) -> RunDir | None:
        """Find the run that the launcher restarts."""
        if not self.launched.start:
            return None
        run = RunDir(self.runs_dir.absolute() / self._name())
        try:
            record = read_run(run)
        except (OSError, ClusterddpError):
            return None
        return run if record.job_id == self.launched.identity and run.attempts() else None

    def _name(self) -> str:
        return f"{self.job.name[:48]}-{hashlib.sha256(self.launched.identity.encode()).hexdigest()[:6]}"

    def _choose_name(self) -> str:
        """Name a new run after its spec and its launcher's job, where the launcher names one."""
        if not self.launched.identity:
            return choose_run_name(self.runs_dir)
        name, number = self._name(), 1
        while (self.runs_dir / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        return name if number == 1 else f"{name}-{number}"

    def _record(
        self, attempt: AttemptDir, decided: Decided, variables: Mapping[str, Variable], interface: str | None
    ) -> None:
        now, identity, rank = time.time(), ProcessIdentity.of(), self.seat.number
        place: dict[str, Any] = {"master_addr": decided.master_addr, "master_port": decided.master_port}
        if rank == 0:
            start = {"supervisor": dataclasses.asdict(identity), "time": now, "launcher": self.launched.title}
            write_json(attempt.start, start | place | {"nodes": []}, exclusive=True)
        record = RankRecord(
            rank=rank,
            node_rank=next(number for number, (_, ranks) in enumerate(decided.nodes) if rank in ranks),
            local_rank=int(variables["LOCAL_RANK"].value if "LOCAL_RANK" in variables else self.environ["LOCAL_RANK"]),
            host=identity.host,
            pid=identity.pid,
            interface=interface,
            started=now,
            process=dataclasses.asdict(identity),
            **place,
        )
        write_rank(attempt, record)


class NodeWorker(Worker):
    """One node of a run, on a machine of ssh.hosts: it starts the supervisor of its ranks and stays with it."""

    def prepare(self) -> Lease:
        """Plan the run and lease the GPUs of this node, before anyone is met; the caller closes the lease."""
        from clusterddp.spec.hosts import share_out
        from clusterddp.spec.yamlfile import resolved_yaml

        job, number = self.resolved.job, self.seat.number
        plan = self._planned(choose_run_name(self.runs_dir), place_nodes(job))
        here = with_absolute_paths(self.job, self.working_dir.absolute())
        plan = dataclasses.replace(plan, spec_text=resolved_yaml(here.model_copy(update={"launcher": job.launcher})))
        check_trainer(plan.gang, elsewhere=plan.elsewhere)
        self._earlier = self.find_earlier()
        if self._earlier:  # its leftover processes may hold the GPUs
            record = read_run(self._earlier)
            launcher_named(record.launcher, self.environ).clear_away(self._earlier, record)
        gpus, self._lease = _lease_gpus(plan.name, number, share_out(job)[number].gpus, self.environ)
        self._planned_run = _with_node(plan, number, gpus=gpus)
        return self._lease

    @property
    def resumes(self) -> str | None:
        return self._earlier.name if self._earlier else None

    def decide(self, met: Met) -> dict[str, Any]:
        earlier, plan = self._earlier, self._planned_run
        attempts = earlier.attempts() if earlier else []
        decided = Decided(
            run=earlier.name if earlier else plan.run,
            token=read_run(earlier).token if earlier else plan.token,
            attempt=attempts[-1].number + 1 if attempts else 0,
            reached=met.reached,
        )
        self._carried = self._start(decided)
        supervisor, run = self._carried.supervisor, self._carried.run
        link = read_link(supervisor, read_gang(run).start_timeout_s)
        if link is None:
            supervisor.kill()
            last_line = read_tail(supervisor_log(run, 0)).rpartition("\n")[2].strip() or "its log is empty"
            raise ClusterddpError(f"{run.name}: the supervisor of node 0 sent no address: {last_line}")
        return dataclasses.asdict(dataclasses.replace(decided, run=run.name, link=link))

    def carry(self, decided: Decided, connections: list[Connection], unread: list[Message]) -> Carried:
        """Start this node's supervisor, unless `decide` has; return the run, which ends with this process."""
        carried = self._carried if self.seat.number == 0 else self._start(decided)
        return carried.watch(connections, unread)

    def plan(self, decided: Decided) -> Plan:
        here = choose_interface(self.job, decided.reached, self.seat.size)
        plan = _with_node(self._planned_run, self.seat.number, interface=here.name, address=here.address, why=here.why)
        gang = dataclasses.replace(plan.gang, token=decided.token, master_addr=decided.reached)
        plan = dataclasses.replace(plan, token=decided.token, gang=gang)
        return move_plan(plan, plan.runs_dir / decided.run)

    def signed(self, record: RunRecord, decided: Decided) -> RunRecord:
        job_id = f"{os.getpid()}@{socket.gethostname()}"
        return dataclasses.replace(record, keeper=dataclasses.asdict(ProcessIdentity.of()), job_id=job_id)

    def _start(self, decided: Decided) -> Carried:
        """Find or make the run's directory, and start the supervisor of this node."""
        run, made = self.settle(decided)
        if made and decided.attempt:
            log_event(run, "resumed", attempt=decided.attempt)
        order = SupervisorOrder(
            run_dir=run.path,
            gang=self.plan(dataclasses.replace(decided, run=run.name)).gang,
            node_rank=self.seat.number,
            attempt=decided.attempt,
            link=decided.link,
            parent_bound=True,
            one_node=True,
            hold=self._lease.descriptors,
        )
        supervisor = start_supervisor(order, process_environment(self.environ), answers=order.is_head)
        return Carried(run, self.seat.number, supervisor, writes=made and self.seat.number > 0)


class Carried:
    """The run on one of its nodes; `close`, or the end of this process, ends it on all of them.

    Node 0 sends the start of each attempt and the end of the run to the others, which write them into their files.
    """

    def __init__(self, run: RunDir, number: int, supervisor: subprocess.Popen[bytes], *, writes: bool) -> None:
        """`writes`: the run's directory on this machine is not node 0's."""
        self.run = run
        self.number = number
        self.supervisor = supervisor
        self._writes = writes
        self._connections: list[Connection] = []
        self._sent_start = -1
        self._thread = threading.Thread(target=self._stay, daemon=True)

    def watch(self, connections: list[Connection], unread: list[Message]) -> Carried:
        """Start the thread that sends or receives records of the run."""
        self._connections, self._unread = connections, unread
        self._thread.start()
        return self

    def close(self) -> None:
        """End the supervisor, which ends all ranks; wait until the end was sent or received."""
        if self.supervisor.stdin is not None:
            with contextlib.suppress(OSError):
                self.supervisor.stdin.close()
        self._thread.join()

    def _stay(self) -> None:
        exchange = self._receive if self.number else self._send_start
        while self.supervisor.poll() is None:
            exchange()
            time.sleep(_POLL_S)
        deadline = time.monotonic() + _LAST_UPDATE_S
        while self.number and self._connections[0].lost is None and time.monotonic() < deadline:
            exchange()
            time.sleep(_POLL_S)
        exchange()
        if not self.number:
            with contextlib.suppress(OSError, ClusterddpError):
                self._send("end", retry_outage(self.run.newest_attempt))
        flush_all(self._connections, _FLUSH_S)
        for connection in self._connections:
            connection.close()

    def _send_start(self) -> None:
        flush_all(self._connections, 0.0)
        with contextlib.suppress(OSError, ClusterddpError):  # the next call tries the storage again
            attempts = self.run.attempts()
            if attempts and attempts[-1].number > self._sent_start and self._send("start", attempts[-1]):
                self._sent_start = attempts[-1].number

    def _send(self, file: str, attempt: AttemptDir) -> bool:
        record = read_json(attempt.start if file == "start" else attempt.end)
        if record is not None:
            for connection in self._connections:
                connection.send({"kind": "record", "file": file, "attempt": attempt.number, "record": record})
        return record is not None

    def _receive(self) -> None:
        messages, self._unread = self._unread + self._connections[0].receive(time.monotonic()), []
        for message in messages if self._writes else []:
            with contextlib.suppress(OSError, ClusterddpError, ValueError, ProcessLookupError):
                self._write(build({"file": str, "attempt": int, "record": dict[str, Any]}, message))

    def _write(self, message: Mapping[str, Any]) -> None:
        if not 0 <= message["attempt"] < MAX_ATTEMPTS:
            return
        attempt = self.run.attempt(message["attempt"])
        make_attempt_dirs(attempt)
        if message["file"] == "start":  # the state of the run here follows this node's supervisor
            own = dataclasses.asdict(ProcessIdentity.of(self.supervisor.pid))
            write_json(attempt.start, message["record"] | {"supervisor": own})
        else:
            write_end(attempt, parse_end(message["record"]))


class _MadeMeanwhile(Exception):  # noqa: N818  not an error: another participant on this host has made the run
    def __init__(self, run: RunDir) -> None:
        super().__init__(run.name)
        self.run = run


def _nodes(decided: Decided) -> tuple[Node, ...]:
    return tuple(
        Node(node_rank=node_rank, host=host, ranks=ranks, slurm_chooses_gpus=True)
        for node_rank, (host, ranks) in enumerate(decided.nodes)
    )


def _with_node(plan: Plan, node_rank: int, **facts: Any) -> Plan:
    """Return the plan with what is known of one node."""
    nodes = tuple(
        dataclasses.replace(node, **facts) if node.node_rank == node_rank else node for node in plan.gang.nodes
    )
    return dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, nodes=nodes))


def _lease_gpus(name: str, node_rank: int, count: int, environ: Mapping[str, str]) -> tuple[tuple[str, ...], Lease]:
    """Lease so many GPUs of this machine; return them, and the lease."""
    for _ in range(_TRIES):
        gpus = free_gpus(f"node {node_rank} of {name}", count, read_machine(environ))
        lease = take_leases(gpus, name, list_gpus(environ))
        if lease is not None:
            return gpus, lease
    raise PreflightError(f"{name}: other runs took the free GPUs in {_TRIES} tries")
