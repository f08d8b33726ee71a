"""Join a run: `clusterddp join` runs on each machine, without SSH, a scheduler or shared storage.

Each machine finds itself among the hosts of the spec and starts the supervisor of its own node; node 0's is the head,
as in any run. The supervisor ends with this process. With `--resume` every machine starts the next attempt in its own
directory of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.launchers.join import JoinLauncher
from clusterddp.launchers.state import read_state
from clusterddp.network.own_host import find_own_index, look_up, read_own_host
from clusterddp.planning.environment import process_environment
from clusterddp.planning.plan import Plan, move_plan
from clusterddp.planning.prerequisites import check_trainer
from clusterddp.rendezvous.connection import refusal
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.run.attempts import Report, adopt, make_next_attempt, no_report, refuse_resume
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.run.record import ProcessIdentity, log_event, read_run, write_run
from clusterddp.run.supervisors import Link, SupervisorOrder, read_link, start_supervisor, supervisor_log
from clusterddp.submission.join.client import JoinClient
from clusterddp.submission.join.messages import read_facts
from clusterddp.submission.join.plan import LAUNCHER, hosts_of, join_port, lease_own_gpus, plan_join, settle
from clusterddp.submission.join.server import JoinServer
from clusterddp.submission.join.updates import Joined
from clusterddp.submission.staging import make_run
from clusterddp.system.files import read_tail, write_json, write_text
from clusterddp.system.gpu_lease import Lease

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What this machine does in the run; known before the other machines have joined."""

    plan: Plan
    node_rank: int
    lease: Lease
    """The lease on the GPUs of its node."""
    interface: str | None
    """The interface that the spec names; None: it is chosen."""
    environ: Mapping[str, str]
    earlier: RunDir | None
    """The run to resume, in this machine's runs directory; None: a new run."""

    def settled(self, *, run: str, token: str, master_addr: str) -> Plan:
        """Return the plan with the values that are known once all machines have joined."""
        names = {"run": run, "token": token, "master_addr": master_addr}
        return settle(self.plan, self.node_rank, interface=self.interface, **names)


def join(
    resolved: ResolvedSpec,
    *,
    runs_dir: Path,
    working_dir: Path,
    environ: Mapping[str, str],
    node_rank: int | None = None,
    timeout_s: float = TIMEOUT_S,
    resume: str | None = None,
    report: Report = no_report,
) -> Joined:
    """Join a run with this machine: wait for the others, then start the ranks of its node.

    `node_rank`: which node it is, if its names and addresses do not show that. `resume`: the run to resume.
    Raises: UsageError, PreflightError, ClusterddpError: it cannot join, or not all machines join; nothing is left.
    """
    from clusterddp.spec.load import flatten

    plan = plan_join(resolved, runs_dir=runs_dir, working_dir=working_dir, environ=environ)
    check_trainer(plan.gang, elsewhere=plan.elsewhere)
    earlier = _find_earlier(runs_dir, resume) if resume else None
    if earlier:  # its leftover processes may hold the GPUs
        JoinLauncher(environ).clear_away(earlier, read_run(earlier))
        plan = _under_its_name(plan, earlier)
    rank = _own_rank(hosts_of(plan), node_rank)
    plan, lease = lease_own_gpus(plan, resolved, rank, environ)
    with contextlib.closing(lease):
        named = resolved.job.network.interface
        interface = None if named == "auto" else named
        part = Part(plan=plan, node_rank=rank, lease=lease, interface=interface, environ=environ, earlier=earlier)
        rendezvous = _Rendezvous(
            hosts=hosts_of(plan),
            port=join_port(resolved),
            key=environ.get(JOIN_KEY, ""),
            spec=flatten(resolved.job.model_dump(mode="json")),
            facts=read_facts() | {"--resume": earlier.name if earlier else None},
            timeout_s=timeout_s,
            report=report,
        )
        return _follow(part, rendezvous) if rank else _lead(part, rendezvous)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendezvous:
    """How the machines find and check each other."""

    hosts: tuple[str, ...]
    port: int
    key: str
    spec: Mapping[str, Any]
    facts: Mapping[str, str | None]
    timeout_s: float
    report: Report


def start_timeout_s(job: JobSpec) -> float:
    """Return how long to wait for the other machines: network.start_timeout of the spec, else `TIMEOUT_S`."""
    return float(job.network.start_timeout.seconds) if job.network.start_timeout else TIMEOUT_S


def _own_rank(hosts: tuple[str, ...], named: int | None) -> int:
    if named is None:
        return find_own_index(look_up(hosts), read_own_host())
    if not 0 <= named < len(hosts):
        raise UsageError(f"--node-rank {named}: the spec has nodes 0 to {len(hosts) - 1}: {', '.join(hosts)}")
    return named


def _lead(part: Part, rendezvous: _Rendezvous) -> Joined:
    """On node 0: wait for the others, start the head, and send them its address."""
    hosts = rendezvous.hosts
    server = JoinServer(
        hosts=hosts,
        spec=rendezvous.spec,
        facts=rendezvous.facts,
        key=rendezvous.key,
        port=rendezvous.port,
        report=rendezvous.report,
    )
    try:
        if len(hosts) > 1:
            server.gather(rendezvous.timeout_s)
        plan = part.settled(run=part.plan.run, token=part.plan.token, master_addr=server.master_addr())
        attempt = _next_attempt(part.earlier) if part.earlier else 0
        if part.earlier:
            _open_again(part.earlier, plan, attempt)
        else:
            plan = make_run(plan, part.environ)
        run = _own(plan)
        supervisor = _start(part, plan, run, attempt, None)
        link = read_link(supervisor, plan.gang.start_timeout_s)
        if link is None:
            supervisor.kill()
            raise ClusterddpError(f"{run.name}: the supervisor of node 0 sent no address: {_last_line(run)}")
        server.begin(plan.run, plan.token, attempt, dict(link))
    except BaseException:
        server.send_all(refusal(ClusterddpError(f"node 0 ({hosts[0]}) could not start; its terminal shows the reason")))
        server.close()
        raise
    return Joined(run, 0, supervisor, server if server.clients else None).watch()


def _follow(part: Part, rendezvous: _Rendezvous) -> Joined:
    """On the other nodes: wait at node 0 until all machines have joined, then start this node's supervisor."""
    rank = part.node_rank
    client = JoinClient(
        hosts=rendezvous.hosts, node_rank=rank, port=rendezvous.port, key=rendezvous.key, report=rendezvous.report
    )
    try:
        begin = client.join(rendezvous.spec, rendezvous.facts, rendezvous.timeout_s)
        plan = part.settled(run=begin.run, token=begin.token, master_addr=begin.master_addr)
        run, attempt = RunDir(plan.run_dir), begin.attempt
        shared = run.attempt(attempt).path.exists() and read_run(run).token == begin.token
        if part.earlier and not shared:
            _open_again(run, plan, attempt)
        elif not shared:
            plan = make_run(plan, part.environ)
        run = run if shared else _own(plan)
        supervisor = _start(part, plan, run, attempt, begin.link)
    except BaseException:
        client.close()
        raise
    return Joined(run, rank, supervisor, client, shares_files=shared).watch()


def _own(plan: Plan) -> RunDir:
    """Write into the record that this process carries the run on this machine."""
    run = RunDir(plan.run_dir)
    keeper = dataclasses.asdict(ProcessIdentity.of())
    job_id = f"{os.getpid()}@{socket.gethostname()}"
    write_run(run, dataclasses.replace(read_run(run), keeper=keeper, job_id=job_id))
    return run


def _start(part: Part, plan: Plan, run: RunDir, attempt: int, link: Link | None) -> subprocess.Popen[bytes]:
    order = SupervisorOrder(
        run_dir=run.path,
        gang=plan.gang,
        node_rank=part.node_rank,
        attempt=attempt,
        link=link,
        parent_bound=True,
        hold=part.lease.descriptors,
        over_ssh=True,  # this process carries only its own node, as an agent does
    )
    return start_supervisor(order, process_environment("", part.environ), answers=order.is_head)


def _last_line(run: RunDir) -> str:
    return read_tail(supervisor_log(run, 0)).rpartition("\n")[2].strip() or "its log is empty"


def _find_earlier(runs_dir: Path, name: str) -> RunDir:
    """Find the run to resume in this machine's runs directory.

    Raises: RunNotFoundError: it has no such run. UsageError: the run was not joined, still runs, or has completed.
    """
    run = RunDir(find_run(runs_dir, name).path.absolute())
    if read_run(run).launcher != LAUNCHER:
        raise UsageError(f"{run.name}: was not started by clusterddp join", hint=f"clusterddp resume {run.name}")
    refuse_resume(run, read_state(run), instead="clusterddp join without --resume starts a new run")
    return run


def _under_its_name(plan: Plan, run: RunDir) -> Plan:
    """Return the plan with the name, the directory and the token of an earlier run."""
    token = read_run(run).token
    return move_plan(dataclasses.replace(plan, token=token, gang=dataclasses.replace(plan.gang, token=token)), run.path)


def _next_attempt(run: RunDir) -> int:
    """Return the number of the next attempt."""
    attempts = run.attempts()
    return attempts[-1].number + 1 if attempts else 0


def _open_again(run: RunDir, plan: Plan, attempt: int) -> None:
    """Make the directory of the next attempt, and write its plan.

    Raises: UsageError: another process has made it. ClusterddpError: the file system refuses.
    """
    make_next_attempt(run, attempt)
    write_json(run.plan, plan.to_json())
    write_text(run.spec, plan.spec_text)
    adopt(run, attempt)
    log_event(run, "resumed", attempt=attempt)
