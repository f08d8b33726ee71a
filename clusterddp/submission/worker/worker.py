"""A run whose ranks another launcher starts: rank 0 decides for all ranks, and each rank applies the decision.

Rank 0 makes the run's directory before it sends the decision. Ranks that see the directory use it; on hosts that share
no storage the first rank of each host makes its own, with the same name and token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, PreflightError, UsageError
from clusterddp.network.interface import read_links
from clusterddp.network.nccl_log import VARIABLES
from clusterddp.network.socket_links import names_in
from clusterddp.planning.command_lines import rank_command
from clusterddp.planning.entry import plan_entry
from clusterddp.planning.environment import python_path
from clusterddp.planning.job_values import filled_in, spec_text, with_absolute_paths
from clusterddp.planning.names import choose_run_name
from clusterddp.planning.plan import Plan, move_plan
from clusterddp.planning.program import plan_program
from clusterddp.ranks.environment import ALONE, COOKIE, GPU, USERS, Variable, cookie
from clusterddp.ranks.launched import Launched
from clusterddp.rendezvous.rank_messages import RanksMet
from clusterddp.run.attempts import make_attempt
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.find import find_run
from clusterddp.run.gang import Gang
from clusterddp.run.preload import find_preload
from clusterddp.run.record import (
    FOREIGN,
    ProcessIdentity,
    RankRecord,
    log_event,
    read_gang,
    read_run,
    write_rank,
    write_run,
)
from clusterddp.submission.staging import make_run
from clusterddp.submission.worker.place import (
    Decided,
    choose_interface,
    count_gpus,
    decide_gpus,
    decide_networks,
    gang_of,
    nodes_of,
)
from clusterddp.system.files import write_json

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One rank of a run that another launcher has started, before it becomes the rank."""

    resolved: ResolvedSpec
    launched: Launched
    runs_dir: Path
    working_dir: Path
    environ: Mapping[str, str]
    resume: str | None = None
    """The run whose next attempt this is."""

    @property
    def job(self) -> JobSpec:
        # Its place is decided already; as a local job its paths are those of this host.
        return self.resolved.job.model_copy(update={"launcher": "local"})

    @property
    def takes_listener(self) -> bool:
        """True when rank 0 takes over the socket that listens at the master port; see `Entry.takes_listener`."""
        entry = self.job.entry
        return entry is None or (entry.command is None and entry.counts == "processes")

    def decide(self, met: RanksMet) -> dict[str, Any]:
        """Decide on rank 0 for all ranks, and make the run's directory here.

        Raises: ClusterddpError: these ranks cannot form a gang.
        """
        if met.hellos[0].torch == "" and self.job.entry is None:
            raise PreflightError(
                f"{met.hellos[0].name}: the built-in trainer needs torch, which is not installed there",
                hint='pip install "clusterddp[train]"',
            )
        gpus = decide_gpus(self.job, met.hellos)
        port = self.launched.master_port if self.launched.port_is_taken else met.port
        earlier = self._find_earlier()
        decided = Decided(
            run=earlier.name if earlier else self._choose_name(),
            token=read_run(earlier).token if earlier else secrets.token_hex(16),
            attempt=earlier.attempts()[-1].number + 1 if earlier else 0,
            identity=self.launched.identity or "hand",
            nodes=nodes_of(met.hellos),
            gpus=gpus,
            backend="nccl" if gpus and self.job.network.backend != "gloo" else "gloo",
            master_addr=self._master_addr(met),
            master_port=port or 0,
            reached=met.reached,
            networks=decide_networks(self.job, met),
        )
        return dataclasses.asdict(dataclasses.replace(decided, run=self._make(decided).name))

    def settle(self, decided: Decided) -> RunDir:
        """Find the run's directory on this host, or make one where hosts share no storage."""
        run = self._found(decided) or self._make(decided)
        with contextlib.suppress(FileExistsError):
            make_attempt(run, decided.attempt)
        return run

    def become_rank(self, decided: Decided, run: RunDir) -> tuple[tuple[str, ...], dict[str, str]]:
        """Record this process as the rank that it becomes; return the command and the environment for that."""
        gang = gang_of(decided, self.job, rank=self.launched.rank, working_dir=run.path)
        interface = choose_interface(self.job, decided)
        variables = self.variables(decided, gang, run, interface)
        self._record(run.attempt(decided.attempt), gang, variables, interface)
        chosen = {name: variable.value for name, variable in variables.items()}
        chosen |= find_preload(read_gang(run).entry).environment()
        return rank_command(run.path), dict(self.environ) | python_path(self.environ) | chosen

    def variables(self, decided: Decided, gang: Gang, run: RunDir, interface: str | None) -> dict[str, Variable]:
        """Compute the variables that this rank's environment lacks; those that the launcher has set stay."""
        rank = self.launched.rank
        faster = names_in(decided.networks, read_links()) if decided.networks else ()
        nodes = tuple(dataclasses.replace(node, nccl_interfaces=faster) for node in gang.nodes)
        gang = dataclasses.replace(gang, interface=interface, nodes=nodes)
        variables = gang.variables_of(
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
            or not (self.environ.get(name) or name in VARIABLES)  # no supervisor reads NCCL's log
        }
        node = gang.node_of(rank)
        kept[COOKIE] = Variable(cookie(decided.token, f"w{node.node_rank}"), "the run")
        kept[ALONE] = Variable("1", "clusterddp worker")
        if not decided.gpus:
            kept["CUDA_VISIBLE_DEVICES"] = Variable("", "the plan: no GPU for this run")
        elif count_gpus(self.job, self.environ) == 1 < len(node.ranks):
            kept[GPU] = Variable("0", "the one GPU that the launcher shows this rank")
        return kept

    def _find_earlier(self) -> RunDir | None:
        """Find the run that this start continues: the named one, or the one that the launcher restarts."""
        if self.resume is not None:
            run = RunDir(find_run(self.runs_dir, self.resume).path.absolute())
            self._refuse_resume(run)
            return run
        if not self.launched.start:
            return None
        run = RunDir(self.runs_dir.absolute() / self._name())
        try:
            record = read_run(run)
        except (OSError, ClusterddpError):
            return None
        return run if record.job_id == self.launched.identity and run.attempts() else None

    def _refuse_resume(self, run: RunDir) -> None:
        from clusterddp.launchers.state import read_state
        from clusterddp.run.view import RunState

        if read_run(run).launcher != FOREIGN:
            raise UsageError(f"{run.name}: is no run of clusterddp worker", hint=f"clusterddp resume {run.name}")
        view = read_state(run)
        if view.state in {RunState.COMPLETED, RunState.RUNNING}:
            raise UsageError(f"{run.name}: is {view.state.value} ({view.reason})")

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

    def _master_addr(self, met: RanksMet) -> str:
        """Take the address that the launcher has set; without one the address by which the others reached rank 0."""
        given = self.launched.variables.get("MASTER_ADDR")
        if given and given.origin.endswith("MASTER_ADDR"):
            return given.value
        return met.reached

    def _found(self, decided: Decided) -> RunDir | None:
        for name in (decided.run, f"{decided.run}.{decided.token[:8]}"):
            run = RunDir(self.runs_dir.absolute() / name)
            with contextlib.suppress(OSError, ClusterddpError):
                if read_run(run).token == decided.token:
                    return run
        return None

    def _make(self, decided: Decided) -> RunDir:
        """Make the directory, unless another rank of this host has made it."""
        found = self._found(decided)
        if found is None:
            try:
                plan = make_run(self._plan(decided), self.environ, rename=lambda plan: self._next_name(plan, decided))
                found = RunDir(plan.run_dir)
                write_run(found, dataclasses.replace(read_run(found), job_id=decided.identity))
            except _MadeMeanwhile as made:
                found = made.run
        elif self.launched.rank == 0:
            submitter = dataclasses.asdict(ProcessIdentity.of())
            record = dataclasses.replace(read_run(found), submitter=submitter, job_id=decided.identity)
            write_run(found, dataclasses.replace(record, base_attempt=decided.attempt))
            write_json(found.plan, self._plan(dataclasses.replace(decided, run=found.name)).to_json())
        if self.launched.rank == 0:
            with contextlib.suppress(FileExistsError):
                make_attempt(found, decided.attempt)
            found.cancel_file.unlink(missing_ok=True)
            log_event(found, "started", attempt=decided.attempt, by=decided.identity)
        return found

    def _next_name(self, plan: Plan, decided: Decided) -> Plan:
        """Name the run when its name is taken by another run; another rank may have made this run meanwhile."""
        found = self._found(decided)
        if found is not None:
            raise _MadeMeanwhile(found)
        return move_plan(plan, plan.runs_dir / f"{decided.run}.{decided.token[:8]}")

    def _plan(self, decided: Decided) -> Plan:
        """Plan the run as it is on this host."""
        runs_dir, working_dir = self.runs_dir.absolute(), self.working_dir.absolute()
        job = with_absolute_paths(self.job, working_dir)
        program = plan_program(job, working_dir=working_dir, runs_dir=runs_dir, environ=self.environ)
        run_dir = runs_dir / decided.run
        entry = plan_entry(program, job, run_dir=run_dir, working_dir=working_dir)
        gang = gang_of(decided, self.job, rank=self.launched.rank, working_dir=run_dir)
        gang = dataclasses.replace(gang, entry=entry)
        variables = gang.variables_of(0, run_dir=str(run_dir), attempt=0, master_port=decided.master_port)
        return Plan(
            run=decided.run,
            token=decided.token,
            name=job.name,
            launcher=FOREIGN,
            runs_dir=runs_dir,
            working_dir=working_dir,
            spec=filled_in(job),
            spec_text=spec_text(job),
            gang=gang,
            rank0={name: {"value": each.value, "origin": each.origin} for name, each in variables.items()},
            changes=tuple(dataclasses.asdict(change) for change in self.resolved.changes()),
            notes=program.notes,
            snapshot=program.snapshot_summary,
            secrets=tuple(job.secrets),
            parent=None,
            files=(),
            commands=(rank_command(run_dir),),
        )

    def _record(
        self, attempt: AttemptDir, gang: Gang, variables: Mapping[str, Variable], interface: str | None
    ) -> None:
        now, identity = time.time(), ProcessIdentity.of()
        rank, node = self.launched.rank, gang.node_of(self.launched.rank)
        if rank == 0:
            start = {"supervisor": dataclasses.asdict(identity), "time": now, "launcher": self.launched.title}
            place: dict[str, Any] = {"master_addr": gang.master_addr, "master_port": gang.master_port, "nodes": []}
            write_json(attempt.start, start | place, exclusive=True)
        record = RankRecord(
            rank=rank,
            node_rank=node.node_rank,
            local_rank=int(variables["LOCAL_RANK"].value if "LOCAL_RANK" in variables else self.environ["LOCAL_RANK"]),
            host=identity.host,
            pid=identity.pid,
            interface=interface,
            master_addr=gang.master_addr,
            master_port=gang.master_port or 0,
            started=now,
            process=dataclasses.asdict(identity),
        )
        write_rank(attempt, record)


class _MadeMeanwhile(Exception):  # noqa: N818  not an error: another rank of this host has made the run
    def __init__(self, run: RunDir) -> None:
        super().__init__(run.name)
        self.run = run
