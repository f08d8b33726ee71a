"""The ssh launcher: starts one supervisor per node on hosts that SSH reaches, on all of them or on none.

Until all supervisors run they depend on our heartbeats: they exit if this process dies. Then they are released, and the
run no longer depends on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from clusterddp.errors import ClusterddpError, NonsenseError, PreflightError, SshError
from clusterddp.facts.checks import Needs, reds_of
from clusterddp.facts.judge import judge_hosts
from clusterddp.facts.machine import Machine
from clusterddp.places.base import Launcher, Report, no_report
from clusterddp.places.ssh.connections import call_each
from clusterddp.places.ssh.host_run import ask_reports, checkpoint_age, read_reports
from clusterddp.places.ssh.network import settle_network
from clusterddp.places.ssh.session import Reply, Session, ssh_argv
from clusterddp.places.ssh.sessions import Heartbeats, HostSessions, all_or_raise, ask_all, open_host_sessions
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.ssh.upload import UPLOAD_TIMEOUT_S, Progress, Watch, upload_run
from clusterddp.planning.placement import GpusInUseError
from clusterddp.planning.plan import Plan, move_plan, plan_json, read_plan
from clusterddp.planning.processes import EXEC_MODULE
from clusterddp.planning.program import TRAINER
from clusterddp.planning.ssh import directory_name
from clusterddp.run.call import MAX_PICKLE_BYTES, different_python, read_origin
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RankRecord, RunRecord, log_event, read_run, write_run
from clusterddp.run.stacks import new_report_id
from clusterddp.run.supervisors import SupervisorOrder
from clusterddp.spec.train import GENERATED
from clusterddp.system.files import read_regular, write_json
from clusterddp.system.gpu_lease import spell_busy

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Slurm
    from clusterddp.run.directory import AttemptDir
    from clusterddp.run.state import Answer, Records

_ANSWER_S = 30.0
"""How much longer than `start_timeout_s` a host may take to answer that its supervisor has started."""
_NODES_PER_S = 16
"""The heartbeat timeout grows by 1 s for this many nodes: this process serves all of them."""
_MIN_REPORTED_BYTES = 5_000_000
_REPORT_INTERVAL_S = 5.0
_END_PATIENCE_S = 8.0
"""How long supervisors and guards may take to clean up when a run is ended."""
_TIMEOUT_S = 60.0
"""How long a host may take to list its GPUs: nvidia-smi may have to wake each."""


class Grant(NamedTuple):
    """The leased GPUs of a host; the agent holds the lease, too, until it ends."""

    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES."""
    hold: tuple[int, ...] = ()
    """For the supervisor's order: descriptors that it inherits from the agent."""


class SshLauncher(Launcher):
    """Runs on hosts that are reached over SSH."""

    def start(self, run: RunDir, attempt: int, report: Report = no_report) -> str:
        """Start the attempt on its hosts; the job id is the head's pid and host. `report` receives progress messages.

        Raises: SshError, PreflightError, ClusterddpError: the attempt could not start. Hosts that answer have no
        process of it left; on a host that does not answer, its processes exit when our connection ends.
        """
        plan = read_plan(run)
        _demand_checkpoint(run, plan, report)
        sessions = open_host_sessions(plan, self._environ)
        name = directory_name(plan.run, plan.token)
        try:
            with Heartbeats(sessions):
                job_id = _start(run, attempt, sessions, self._environ, report)
            sessions.ask_all("run.ask", {"name": name, "what": "release", "reason": ""})
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            with contextlib.suppress(ClusterddpError):
                if interrupted:  # the hosts record that the user pressed Ctrl-C
                    sessions.ask_willing("run.ask", {"name": name, "what": "cancel", "reason": "Ctrl-C"})
                patience_s = _END_PATIENCE_S if interrupted else 0.0
                sessions.ask_willing("run.end", {"tokens": [plan.token], "patience_s": patience_s})
            sessions.close()
            raise
        sessions.close()
        return job_id

    def renew(self, plan: Plan) -> Plan:
        """Return the plan for the next start, which chooses interfaces, addresses and GPUs again."""
        nodes = tuple(
            dataclasses.replace(node, gpus=(), interface=None, address=None, why="") for node in plan.gang.nodes
        )
        return dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, nodes=nodes, master_addr=""))

    def request_end(self, run: RunDir, record: RunRecord, sync: Synchroniser) -> bool:
        """Ask the supervisors on all hosts that answer to end the run at once; True when a host has the run.

        Raises: SshError: no host can be reached.
        """
        return self._ask(run, "cancel", "clusterddp cancel", sync)

    def request_stop(self, run: RunDir, record: RunRecord, sync: Synchroniser) -> None:
        """Ask the run, on all hosts that answer, to checkpoint and end.

        Raises: SshError: no host can be reached.
        """
        self._ask(run, "stop", "clusterddp cancel --save", sync)

    def request_stacks(self, run: RunDir, attempt: AttemptDir, sync: Synchroniser) -> str:
        """Ask the head by the agent of its host.

        Raises: SshError: no host can be reached.
        """
        wanted = new_report_id()
        self._ask(run, "stacks", wanted, sync)
        return wanted

    def exec_argv(
        self, run: RunDir, record: RunRecord, rank: RankRecord, words: Sequence[str], *, terminal: bool
    ) -> list[str]:
        """Return the user's own ssh with the host's alias.

        The package is there: the agent of the host has been asked for the state.
        """
        plan = read_plan(run)
        assert plan.ssh is not None
        run_dir = f"{plan.ssh.root}/runs/{directory_name(plan.run, plan.token)}"
        return ssh_argv(plan.ssh.hosts[rank.node_rank], EXEC_MODULE, [run_dir, *words], terminal=terminal)

    def end_by_force(self, run: RunDir, record: RunRecord, timeout_s: float) -> bool:
        """Kill the run's processes on the hosts that answer; False when there are none.

        Raises: SshError: no host can be reached. ClusterddpError: a process cannot be killed.
        """
        return self._end(run, patience_s=0.0, needed="one") > 0

    def clear_away(self, run: RunDir, record: RunRecord, *, left_out: Collection[str] = ()) -> int:
        """Kill leftover processes of a run that has ended, on all hosts; return their number.

        Raises: SshError: a host cannot be reached that is not `left_out`. ClusterddpError: a process cannot be killed.
        """
        return self._end(run, patience_s=_END_PATIENCE_S, needed="all", left_out=left_out)

    def probe(self, records: Records, slurm: Slurm) -> Answer:
        """Say what the hosts have last reported; a command that needs the current state synchronises first."""
        return ask_reports(records)

    def _ask(self, run: RunDir, what: str, reason: str, sync: Synchroniser) -> bool:
        """Ask the hosts that answer; return whether one of them has the run."""
        plan = read_plan(run)
        facts = {"name": directory_name(plan.run, plan.token), "what": what, "reason": reason}
        replies = [reply for reply in sync.ask_hosts(run, "run.ask", facts).values() if not isinstance(reply, SshError)]
        if not replies:
            with open_host_sessions(plan, self._environ, needed="one") as sessions:
                replies = [reply.facts for reply in sessions.ask_willing("run.ask", facts).values()]
        return any(reply["found"] for reply in replies)

    def _end(
        self, run: RunDir, *, patience_s: float, needed: Literal["all", "one"], left_out: Collection[str] = ()
    ) -> int:
        """End the run's processes on its hosts; return their number."""
        plan = read_plan(run)
        with open_host_sessions(plan, self._environ, needed=needed, left_out=left_out) as sessions:
            facts = {"tokens": [plan.token], "patience_s": patience_s}
            replies = sessions.ask_willing("run.end", facts, timeout_s=patience_s + 30)
        ended = {host: ended for host, reply in replies.items() for ended in reply.facts["ended"]}
        left = [f"{', '.join(each.left)} on {host}" for host, each in ended.items() if each.left]
        if left:
            raise ClusterddpError(f"{run.name}: processes that cannot be killed: {'; '.join(left)}")
        return sum(each.ended for each in ended.values())


def _demand_checkpoint(run: RunDir, plan: Plan, report: Report) -> None:
    """Report when the newest checkpoint that was seen is on none of the hosts, which then go on from an older one.

    Raises: PreflightError: the run has checkpoints, and none of these hosts has one.
    """
    found = {host: each.checkpoints[-1] for host, each in read_reports(run).items() if each.checkpoints}
    assert plan.ssh is not None
    here = {node.host: found[node.host] for node in plan.ssh.hosts if node.host in found}
    if not found:
        return
    host = max(found, key=lambda each: checkpoint_age(found[each]))
    if not here:
        raise PreflightError(
            f"{run.name}: its checkpoints are on {', '.join(sorted(found))}, and none of its hosts has one now",
            hint=f"name {host} among ssh.hosts",
        )
    newest = max(here.values(), key=checkpoint_age)
    if checkpoint_age(newest) < checkpoint_age(found[host]):
        report(f"note: the newest checkpoint, {found[host]}, is on {host}; the run goes on from {newest}")


def _upload_report(report: Report) -> Watch:
    """Report the progress of an upload of 5 MB or more: at once, then every 5 s."""
    reported_at: float | None = None

    def watch(progress: Progress) -> None:
        nonlocal reported_at
        now = time.monotonic()
        too_soon = reported_at and now - reported_at < _REPORT_INTERVAL_S
        if progress.total_bytes >= _MIN_REPORTED_BYTES and not too_soon:
            done = f", {progress.sent_bytes / progress.total_bytes:.0%} done" if reported_at else ""
            reported_at = now
            report(f"{progress}{done}")

    return watch


def lease_gpus(
    sessions: Mapping[str, Session], counts: Mapping[str, int], *, run: str, hold: str | None = None
) -> dict[str, Grant]:
    """Lease GPUs on every host (`sessions` and `counts` by host). `hold`: see `take_leases`.

    After an error the caller closes the sessions, which ends the leases.
    Raises: GpusInUseError: GPUs are in use; the message names their users. SshError: a host has too few GPUs, or does
    not answer.
    """
    asked = {host: session for host, session in sessions.items() if counts[host] or hold}

    def wanted(host: str) -> dict[str, Any]:
        return {"run": run, "count": counts[host], "hold": hold}

    grants = dict.fromkeys(sessions, Grant())
    busy = []
    for host, reply in all_or_raise(ask_all(asked, "host.lease", wanted, timeout_s=_TIMEOUT_S)).items():
        gpus = reply.facts["gpus"]
        if gpus is None:
            busy.append(f"{host}: {spell_busy(reply.facts['busy'])}")
        elif len(gpus) != counts[host]:
            raise NonsenseError(host, f"a lease of {len(gpus)} GPUs, for {counts[host]}")
        else:
            grants[host] = Grant(tuple(gpus), tuple(reply.facts["hold"]))
    if busy:
        first = f"{run}: {'GPUs' if any(counts.values()) else 'hosts'} are in use"
        raise GpusInUseError("\n".join([first, *sorted(busy)]), hint="submit it when they are free")
    return grants


def preflight(plan: Plan, sessions: HostSessions) -> None:
    """Check that the run can start on its hosts; nothing is imported or written there.

    Raises: PreflightError: it cannot start; the message has all red checks with their remedies. SshError: a host does
    not answer.
    """
    facts = all_or_raise(ask_hosts(plan, sessions.by_host))
    # The lease decides whether GPUs are free: it waits for a run that is ending.
    machines = {host: dataclasses.replace(machine, busy_gpus={}) for host, machine in facts.items()}
    reds = list(reds_of(judge_hosts(machines, needs_of(plan))))
    if len(reds) == 1:
        host, check, result = reds[0]
        raise PreflightError(f"{host}: {check}: {result.found}", hint=result.fix)
    if reds:
        lines = [f"{host}: {check}: {result.found}\n    hint: {result.fix}" for host, check, result in reds]
        raise PreflightError("\n  ".join([f"{plan.name} cannot start:", *lines]))


def ask_hosts(plan: Plan, sessions: Mapping[str, Session], *, thorough: bool = False) -> dict[str, Machine | SshError]:
    """Read the facts of all hosts at once; `thorough`: also those that never prevent a start."""
    needs = needs_of(plan)
    data_dir = data_dir_of(plan)

    def question(host: str) -> dict[str, object]:
        has_gpus = needs[host].num_gpus > 0
        asked = {"with_gpus": has_gpus or thorough, "with_driver": has_gpus and thorough}
        return {"variables": plan.gang.env, "data_dir": data_dir, **asked}

    replies = ask_all(sessions, "host.facts", question, timeout_s=_TIMEOUT_S)
    return {host: reply.facts["facts"] if isinstance(reply, Reply) else reply for host, reply in replies.items()}


def needs_of(plan: Plan) -> dict[str, Needs]:
    """Return what the run needs on each of its hosts."""
    assert plan.ssh is not None
    train = plan.spec.get("train") or {}
    return {
        node.host: Needs(
            trainer=plan.gang.entry.target == TRAINER,
            use_gpus=node.gpus > 0,
            num_gpus=node.gpus,
            nccl=plan.gang.backend == "nccl",
            download=bool(train.get("download", True)),
            sent_bytes=sum(send.bytes for send in plan.ssh.send),
        )
        for node in plan.ssh.hosts
    }


def data_dir_of(plan: Plan) -> str | None:
    """Return the trainer's data directory on the hosts; None if `ssh.send` fills it."""
    train = plan.spec.get("train")
    if plan.gang.entry.target != TRAINER or not train or train["dataset"] in GENERATED or plan.ssh is None:
        return None
    directory = str(train["data_dir"])
    return None if any(_overlap(directory, send.target) for send in plan.ssh.send) else directory


def _start(run: RunDir, attempt: int, sessions: HostSessions, environ: Mapping[str, str], report: Report) -> str:
    preflight(sessions.plan, sessions)
    submission = read_regular(run.submission, MAX_PICKLE_BYTES) if sessions.plan.gang.entry.is_call else b""
    if submission:
        _refuse_other_pythons(run, sessions)
    assert sessions.plan.ssh is not None
    counts = {node.host: node.gpus for node in sessions.plan.ssh.hosts}
    grants = lease_gpus(sessions.by_host, counts, run=sessions.plan.run, hold=sessions.plan.hold)
    code = run.code.resolve() if run.code.is_symlink() else None
    uploaded = upload_run(
        sessions.by_host,
        code=code,
        send=[(each.source, each.target) for each in sessions.plan.ssh.send],
        watch=_upload_report(report),
    )
    gang, warnings = settle_network(sessions.plan.gang, sessions.by_host)
    nodes = tuple(dataclasses.replace(node, gpus=grants[node.host].gpus) for node in gang.nodes)
    plan = dataclasses.replace(sessions.plan, gang=dataclasses.replace(gang, nodes=nodes))
    plan = dataclasses.replace(plan, notes=(*plan.notes, *warnings))
    for note in (*uploaded.notes, *warnings):
        report(f"note: {note}")
    write_json(run.plan, plan_json(plan))
    record = dataclasses.replace(read_run(run), job_id=None, keeper=None)
    facts = {"attempt": attempt, "record": dataclasses.asdict(record), "code": code.name if code else None}
    orders = _prepare(plan, sessions, grants, facts, submission)
    secrets = {name: environ[name] for name in plan.secrets}
    patience_s = int(plan.gang.heartbeat_timeout_s) + len(orders) // _NODES_PER_S
    answer_s = plan.gang.start_timeout_s + _ANSWER_S

    def supervise(order: SupervisorOrder) -> dict[str, Any]:
        facts = {"order": order.to_json(), "variables": secrets, "patience_s": patience_s}
        return sessions.of_node(order.node_rank).ask("run.supervise", facts, timeout_s=answer_s).facts

    head = supervise(orders[0])
    others = {order.node_rank: dataclasses.replace(order, link=head["link"]) for order in orders[1:]}
    try:
        all_or_raise(call_each(lambda node_rank: supervise(others[node_rank]), others))
    except PreflightError as error:
        raise _explain_failed_start(error, sessions, attempt) from error
    job_id = f"{head['pid']}@{plan.gang.nodes[0].host}"
    write_run(run, dataclasses.replace(record, job_id=job_id))
    log_event(run, "submitted", attempt=attempt, job_id=job_id)
    return job_id


def _refuse_other_pythons(run: RunDir, sessions: HostSessions) -> None:
    """Raises: PreflightError: the Python of a host cannot load a function that another one pickled."""
    theirs = read_origin(run.submission)["python"]
    for host, session in sessions.by_host.items():
        here = ".".join(session.hello["version"].split(".")[:2])
        if here != theirs:
            raise PreflightError(
                f"{host}: {different_python(theirs, here)} ({session.hello['python']})",
                hint="python, venv or conda of the spec, and ssh.modules, choose the Python on the host",
            )


def _explain_failed_start(error: PreflightError, sessions: HostSessions, attempt: int) -> PreflightError:
    """Add the reason why node 0 ended the start, if it did; the other nodes report only that they cannot reach it."""
    plan, head = sessions.plan, sessions.plan.gang.nodes[0].host
    name = directory_name(plan.run, plan.token)
    try:
        asked = {"name": name, "token": plan.token, "begin": 0, "rejoins": False}
        facts = sessions.of_node(0).ask("run.look", {"runs": [asked]}).facts
    except SshError:
        return error
    listed = facts["runs"].get(name)
    if listed is None or listed["end"] is None or listed["end_attempt"] != attempt:
        return error
    return PreflightError(f"{head}: node 0 has ended the start: {listed['end'].get('reason')}\n  {error.message}")


def _prepare(
    plan: Plan, sessions: HostSessions, grants: Mapping[str, Grant], of_run: Mapping[str, Any], submission: bytes
) -> list[SupervisorOrder]:
    """Make the run's directory on every host; return each supervisor's order.

    `of_run`: the attempt, the record and the digest of the code, the same for all hosts. `submission`: a function from
    Python, or nothing.
    """
    name = directory_name(plan.run, plan.token)
    there = {
        host: move_plan(plan, Path(session.hello["root"]) / "runs" / name, home=session.hello["home"])
        for host, session in sessions.by_host.items()
    }

    def facts(host: str) -> dict[str, Any]:
        return {**of_run, "name": name, "plan": there[host].to_json(), "spec": plan.spec_text}

    # The first host alone: those that share its storage then find the run's copy of the code.
    first = plan.gang.nodes[0].host
    prepared = sessions.ask_all("run.prepare", facts, timeout_s=UPLOAD_TIMEOUT_S, hosts=[first], body=submission)
    others = [host for host in sessions.by_host if host != first]
    prepared |= sessions.ask_all("run.prepare", facts, timeout_s=UPLOAD_TIMEOUT_S, hosts=others, body=submission)
    return [
        SupervisorOrder(
            run_dir=Path(prepared[node.host].facts["run_dir"]),
            gang=there[node.host].gang,
            node_rank=node.node_rank,
            attempt=of_run["attempt"],
            link=None,
            parent_bound=True,
            hold=grants[node.host].hold,
            over_ssh=True,
        )
        for node in plan.gang.nodes
    ]


def _overlap(one: str, other: str) -> bool:
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)
