"""The slurm launcher: submits a run as one job; when sbatch's answer is unclear, it finds the job by its tag.

The scheduler's verdict on a job before it is submitted (`sbatch --test-only`): accepted, and its estimated start.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import ClusterddpError, PreflightError, SlurmError, UsageError
from clusterddp.places.base import Launcher, Report, no_report
from clusterddp.places.slurm.commands import call_slurm, run_slurm
from clusterddp.places.slurm.explain import advise_refusal
from clusterddp.places.slurm.hold import ask_hold, ask_in_hold, await_release, leave_queue, refuse_ended
from clusterddp.places.slurm.nodes import leave_out, notes_on_nodes
from clusterddp.places.slurm.queue import Phase, Slurm, scancel
from clusterddp.places.slurm.state import (
    ask_slurm,
    find_job,
    is_over,
    wait_for_end,
    wait_for_job,
)
from clusterddp.planning.plan import Plan, move_plan, read_plan
from clusterddp.planning.processes import EXEC_MODULE, python_path, travelling_variables
from clusterddp.planning.program import TRAINER
from clusterddp.planning.slurm import IMPORT_PATH, SlurmPlan, find_dependency, option_argv, without_waiting
from clusterddp.run.directory import RunDir
from clusterddp.run.job_tag import job_tag
from clusterddp.run.record import (
    JobAnswer,
    RankRecord,
    RunRecord,
    drop_secrets,
    log_event,
    read_run,
    write_job_answer,
    write_run,
)
from clusterddp.run.state import Answer, Records
from clusterddp.run.steps import read_batch_script
from clusterddp.run.sweep import SweepDir
from clusterddp.spec.batch_script import options_of
from clusterddp.spec.train import FOLDER, is_there
from clusterddp.system.files import write_json
from clusterddp.system.python import module_command

if TYPE_CHECKING:
    from clusterddp.places.ssh.sync import Synchroniser


_END_TIMEOUT_S = 60.0
"""How long a job may take to end after scancel: Slurm's KillWait (30 s by default) and a reserve."""

_SHARES_GPUS_SINCE = (22, 5)
"""The release from which on an overlapping step shares GPUs: before, it waits for those that the ranks have."""


class SlurmLauncher(Launcher):
    """Runs as jobs of Slurm."""

    killed = "cancelled; Slurm has ended its job"
    things = "jobs"

    def check(self, plan: Plan) -> None:
        """Check that the data set is there before the job takes its GPUs: nodes often have no internet.

        A directory that does not exist here may exist on the nodes only; then the plan has a note on it.
        Raises: PreflightError: the directory exists here and lacks the data set. UsageError: its hold has ended.
        """
        train = plan.spec.get("train")
        if plan.in_hold:
            refuse_ended(RunDir(plan.runs_dir / plan.in_hold), self._environ)
        elif plan.hold:
            return  # it reads no data
        if plan.slurm is None or plan.gang.on_cpu or plan.gang.entry.target != TRAINER or not train:
            return
        name, data_dir = str(train["dataset"]), Path(train["data_dir"])
        if is_there(name, data_dir) or _is_elsewhere(plan, data_dir):
            return
        if name != FOLDER:
            argv = module_command("clusterddp.train.data", name, str(data_dir))
            path = "".join(f"{key}={shlex.quote(value)} " for key, value in python_path({}).items())
            hint = f"{path}{shlex.join(argv)}  # downloads it here; train.data_dir names a directory that has it"
        else:
            hint = "train.data_dir names the directory that has it: train/CLASS/ and test/CLASS/"
        raise PreflightError(
            f"{plan.name}: {name} is not in {data_dir}, and the nodes would look for it only after the job has started",
            hint=hint,
        )

    def look_ahead(self, plan: Plan) -> Plan:
        """Leave out nodes that earlier runs have marked; note nodes that cannot start, and a maintenance."""
        assert plan.slurm is not None
        slurm, notes = leave_out(plan.slurm, self._environ), notes_on_nodes(plan.slurm, self._environ)
        plan = dataclasses.replace(plan, slurm=slurm, notes=(*plan.notes, *slurm.left_out.values(), *notes))
        return move_plan(plan, plan.run_dir)

    def renew(self, plan: Plan) -> Plan:
        """Return the plan for the next submit, with the dependencies that are left, without marked nodes."""
        assert plan.slurm is not None
        plan = dataclasses.replace(plan, slurm=leave_out(plan.slurm, self._environ))
        assert plan.slurm is not None
        if not plan.spec.get("after"):
            return plan
        dependency, _ = find_dependency(plan.spec["after"], plan.runs_dir)
        options = {name: value for name, value in plan.slurm.sbatch_options.items() if name != "dependency"}
        if dependency:
            options["dependency"] = dependency
        return dataclasses.replace(plan, slurm=dataclasses.replace(plan.slurm, sbatch_options=options))

    def request_end(self, run: RunDir, record: RunRecord, sync: Synchroniser) -> bool:
        """Have Slurm cancel the run's job; True when the job may be running and will record the end itself.

        In a hold the supervisors see the CANCEL file; a run that waits there is ended here.
        """
        if record.in_hold:
            leave_queue(run, record)
            return True
        try:
            job = find_job(run, record, self._environ)
            if job is None or is_over(job):
                return False
            scancel(job.name, job.job_id, record.cluster, self._environ)
        except SlurmError as error:
            if not error.transient:
                raise
            return True  # the supervisors see the CANCEL file without the controller
        return job.phase is not Phase.WAITING

    def request_stop(self, run: RunDir, record: RunRecord, sync: Synchroniser) -> None:
        """Signal the job's batch process: over a slow file system it may see the STOP file late."""
        if record.in_hold:
            return
        job = find_job(run, record, self._environ)
        if job is not None and not is_over(job):
            scancel(job.name, job.job_id, record.cluster, self._environ, "--batch", "--signal=USR2")

    def signal_script(self, run: RunDir, record: RunRecord) -> bool:
        """Have Slurm signal what `--signal` says: the batch shell (`B:`), or the tasks of the job's steps."""
        plan, job = read_plan(run), find_job(run, record, self._environ)
        assert plan.slurm is not None
        wanted = options_of(read_batch_script(run), plan.slurm.sbatch_options).value("signal")
        found = re.fullmatch(r"(?:([BR]+):)?([A-Z0-9+]+)(?:@[0-9]+)?", wanted.upper())
        if found is None or job is None or is_over(job):
            return False
        batch = ["--batch"] if "B" in (found[1] or "") else []
        scancel(job.name, job.job_id, record.cluster, self._environ, *batch, f"--signal={found[2]}")
        return True

    def exec_argv(
        self, run: RunDir, record: RunRecord, rank: RankRecord, words: Sequence[str], *, terminal: bool
    ) -> list[str]:
        """Return the srun of a step of the run's job on the rank's node.

        The step has the cores of a rank, all memory of the job, and all of its GPUs, because it asks for none.
        Raises: SlurmError: Slurm could not be asked. UsageError: the ranks are in a container, whose files and
        processes the command would not see. ClusterddpError: the job does not run.
        """
        plan = read_plan(run)
        assert plan.slurm is not None
        job = find_job(run, record, self._environ)
        if job is None or job.phase is not Phase.RUNNING:
            raise ClusterddpError(f"{run.name}: its job does not run: {job.state if job else 'Slurm has none'}")
        job_id = job.job_id
        if "_" in job_id:  # srun finds the task of an array by its own number
            job_id = run_slurm(
                ["squeue", "--noheader", "--format=%A", f"--jobs={job_id}"], environ=self._environ
            ).strip()
        step = ["srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={rank.host}"]
        of_the_step = plan.slurm.sbatch_options | plan.slurm.srun_options
        cores = {"cpus_per_task": of_the_step.get("cpus_per_task", False)}
        step += [*option_argv(cores), "--mem=0", "--mpi=none"]
        if plan.slurm.container is not None:
            raise UsageError(
                f"{run.name}: its ranks are in a container, in which clusterddp starts no command",
                hint=f"{shlex.join(step)} --pty, and your container's own options, start another one of its image",
            )
        version = re.findall(r"\d+", run_slurm(["srun", "--version"], environ=self._environ))[:2]
        if version and tuple(map(int, version)) < _SHARES_GPUS_SINCE:
            step += ["--gres=none"]
        # With --disable-status the first Ctrl-C goes to the command; a second one within 1 s ends srun.
        step += ["--quiet", "--disable-status", "--pty" if terminal else "--unbuffered", f"--chdir={run.launcher_dir}"]
        return [*step, *module_command(EXEC_MODULE, str(run.path), *words)]

    def end_by_force(self, run: RunDir, record: RunRecord, timeout_s: float) -> bool:
        """Wait for the end of a job whose supervisors do not answer; False when it still runs after `timeout_s`.

        In a hold its batch process ends them.
        """
        if not is_over(wait_for_end(run, record, self._environ, timeout_s)):
            return False
        drop_secrets(run)
        return True

    def clear_away(self, run: RunDir, record: RunRecord, *, left_out: Collection[str] = ()) -> int:
        """Cancel a leftover job of a run that has ended; return the number of cancelled jobs."""
        if record.in_hold:
            await_release(run, record)
            return 0
        job = find_job(run, record, self._environ)
        if job is None or is_over(job):
            return 0
        # The job may still clean up.
        job = wait_for_end(run, record, self._environ, 5.0)
        if job is None or is_over(job):
            return 0
        scancel(job.name, job.job_id, record.cluster, self._environ)
        job = wait_for_end(run, record, self._environ, _END_TIMEOUT_S)
        if job is not None and not is_over(job):
            raise ClusterddpError(f"{run.name}: its job {job.job_id} does not end: its state is {job.state}")
        return 1

    def start(self, run: RunDir, attempt: int, report: Report = no_report) -> str:
        """Submit the job that starts with this attempt; see `submit_attempt`. Or ask a hold to start it."""
        plan = read_plan(run)
        if plan.in_hold:
            write_variables(run, plan, self._environ)
            return ask_hold(run, attempt)
        return submit_attempt(run, attempt, self._environ, report=report)

    def withdraw(self, run: RunDir) -> str:
        """Cancel a job whose submit was interrupted; see `withdraw_job`."""
        record = read_run(run)
        if record.in_hold:
            write_json(run.cancel_file, {"by": "an interrupt", "time": time.time()}, exclusive=True)
            return "" if leave_queue(run, record) else "its hold ends it"
        return withdraw_job(run, self._environ)

    def probe(self, records: Records, slurm: Slurm) -> Answer:
        """Say what queue and accounting know of the run's job."""
        if records.record.in_hold:
            return ask_in_hold(records, slurm)
        return ask_slurm(records, slurm)


def submit_attempt(
    run: RunDir,
    attempt: int,
    environ: Mapping[str, str],
    *,
    keep_variables: bool = False,
    report: Report = no_report,
) -> str:
    """Submit the job that starts with this attempt; sbatch runs once.

    The job's tag is written into the record before sbatch runs. The job's id goes into a file of its own afterwards,
    because the record may name a follow-up job by then. `keep_variables`: a job submits its follow-up job, which keeps
    the variables and secrets of the earlier submit and waits for none of its dependencies.
    Raises: SlurmError: Slurm refused the job. `transient`: it is unknown whether Slurm has the job.
    """
    plan = read_plan(run, in_job=keep_variables)
    assert plan.slurm is not None
    if keep_variables:
        options = without_waiting(plan.slurm.sbatch_options)
        slurm = leave_out(dataclasses.replace(plan.slurm, sbatch_options=options), environ)
        plan = dataclasses.replace(plan, slurm=slurm)
    plan = move_plan(plan, run.path, attempt)
    assert plan.slurm is not None
    if plan.slurm.left_out:
        log_event(run, "left_out", attempt=attempt, text="; ".join(plan.slurm.left_out.values()))
    if not keep_variables and plan.slurm.directory is None:
        write_variables(run, plan, environ)
    tag = job_tag(plan.token, attempt)
    task = str(plan.slurm.sbatch_options.get("array", "")) if plan.slurm.directory is not None else ""
    record = dataclasses.replace(
        read_run(run),
        job_tag=tag,
        job_attempt=attempt,
        job_id=None,
        cluster=None,
        keeper=None,
        array_index=int(task) if task.isdecimal() else None,
        job_directory=plan.slurm.job_directory,
        hold=plan.hold,
    )
    write_run(run, record)
    answer, warnings = submit_job(run, plan, record, environ)
    if warnings and plan.slurm.directory is not None:  # about options that the user has written
        report(warnings)
    job_id, _, cluster = answer.partition(";")
    try:
        job_id = f"{job_id}_{task}" if record.array_index is not None and "_" not in job_id else job_id
        write_job_answer(run, tag, JobAnswer(job_id=job_id, cluster=cluster or None))
    except ClusterddpError:  # the disk is full: the job's id would be lost
        withdraw_job(run, environ)
        raise
    log_event(run, "submitted", attempt=attempt, job_id=job_id, **({"sbatch": warnings} if warnings else {}))
    return job_id


def withdraw_job(run: RunDir, environ: Mapping[str, str]) -> str:
    """Cancel a job whose submit was interrupted; return a sentence on the result."""
    record = read_run(run)
    try:
        job = wait_for_job(run, record, environ, num_looks=3)
        if job is None:
            return "Slurm has no job of this run"
        scancel(job.name, job.job_id, record.cluster, environ)
    except SlurmError as error:
        return f"Slurm may have a job of this run ({error.message}); that job would start nothing"
    finally:
        drop_secrets(run)
    return f"its job {job.job_id} was cancelled"


def write_variables(run: RunDir, plan: Plan, environ: Mapping[str, str]) -> None:
    """Write the variables that the ranks get from this shell; secrets go into a file that is deleted at the end."""
    write_json(run.job_environment, variables_for(plan, environ))
    if plan.secrets:
        write_json(run.job_secrets, {name: environ[name] for name in plan.secrets})


def variables_for(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks get from this shell."""
    assert plan.slurm is not None
    variables = travelling_variables(environ)
    if plan.slurm.container:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), IMPORT_PATH)))
    return variables


def submit_job(
    run: RunDir, plan: Plan, record: RunRecord, environ: Mapping[str, str], *, sweep: SweepDir | None = None
) -> tuple[str, str]:
    """Run sbatch once; return the job's id and sbatch's warnings.

    For the job array of a sweep, `run` is the first of its runs; all have a job if the first has one.
    """
    from clusterddp.places.slurm.executor import JobExecutor

    assert plan.slurm is not None
    place = sweep or run
    executor = JobExecutor(place.launcher_dir, plan.slurm, environ)
    try:
        return executor.submit_job(), executor.warnings
    except SlurmError as error:
        return _adopt(run, record, environ, error, name=place.name), ""


def _adopt(run: RunDir, record: RunRecord, environ: Mapping[str, str], error: SlurmError, *, name: str) -> str:
    """Find the job although sbatch has failed; return its id.

    Raises: SlurmError: Slurm has no job; the error is sbatch's. `transient`: it is unknown whether Slurm has one.
    """
    job = None
    try:
        job = wait_for_job(run, record, environ, num_looks=4 if error.transient else 2)
    except SlurmError as unanswered:
        if error.transient or unanswered.transient:
            raise SlurmError(
                f"{name}: it is not known whether Slurm has taken the job: {error.message}; then {unanswered.message}",
                hint=f"clusterddp status {name} shows it once Slurm answers",
                transient=True,
            ) from unanswered
    if job is None or (is_over(job) and not error.transient):
        # Slurm keeps a job that it refuses after accepting it: the job is in the queue and has failed.
        hint = error.hint or advise_refusal(error.message)
        raise SlurmError(f"{name} was not submitted: {error.message}", hint=hint, transient=False) from error
    log_event(run, "adopted", job_id=job.job_id, sbatch=error.message)
    return job.job_id


def _is_elsewhere(plan: Plan, data_dir: Path) -> bool:
    """Say whether the data may be in a directory that exists on the nodes or in the container only."""
    named = any(change["key"] == "train.data_dir" for change in plan.changes)
    assert plan.slurm is not None
    mounts = (plan.slurm.container or {}).get("mounts", ())
    inside = [Path(parts[1]) for mount in mounts if len(parts := mount.split(":")) > 1]
    return (named and not data_dir.exists()) or any(data_dir.is_relative_to(target) for target in inside)


_START = re.compile(r"to start at (\S+) (?:a )?using (\d+) processors on nodes (\S+)(?: in partition (\S+))?")
"""Slurm 26.05 has an `a` before `using`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The scheduler's answer to `sbatch --test-only`."""

    accepted: bool | None
    """None: the scheduler could not be asked."""
    words: str
    start: str | None = None
    """When the job would start if it were submitted now, in the cluster's local time."""
    nodes: str | None = None
    """Where it would start, as a host list."""
    cores: str | None = None
    """How many cores the job would have on a node, and each of its ranks, as text."""


def ask_scheduler(plan: SlurmPlan, environ: Mapping[str, str]) -> Verdict:
    """Ask the scheduler about the job with the argv of the submit; an error becomes a verdict."""
    try:
        # The script goes over standard input: a dry run writes no file.
        done = call_slurm([*plan.sbatch, "--test-only"], environ=environ, stdin=plan.script, directory=plan.directory)
    except SlurmError as error:
        unasked = error.transient or error.reason in {"no command", "cannot run", "no cluster"}
        return Verdict(accepted=None if unasked else False, words=error.message)
    words = " ".join(line.strip().removeprefix("sbatch: ") for line in done.stderr.splitlines() if line.strip())
    match = _START.search(words)
    if match is None:
        return Verdict(accepted=True, words=words or "no estimate of the start")
    cores = None
    if plan.sbatch_options.keys() >= {"nodes", "ntasks"}:  # a batch script's ranks are not known
        nodes, ranks = int(str(plan.sbatch_options["nodes"])), int(str(plan.sbatch_options["ntasks"]))
        cores = f"{int(match[2]) // nodes} cores on each node, {int(match[2]) // ranks} for each rank"
    return Verdict(accepted=True, words=words, start=match[1], nodes=match[3], cores=cores)
