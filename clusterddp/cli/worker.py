"""The command worker: its process becomes one rank of a run, or starts the ranks of one of its machines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from clusterddp.cli.arguments import KeyValue, StartOptions, command, runs_option
from clusterddp.cli.terminal import Terminal, say, say_note
from clusterddp.cli.watch import stay_with
from clusterddp.errors import ClusterddpError, SpecError, UsageError
from clusterddp.network.rendezvous.connection import JOIN_KEY
from clusterddp.system.units import format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.places.worker.worker import Decided, RankWorker
    from clusterddp.ranks.launched import Launched
    from clusterddp.spec.load import ResolvedSpec


@command("worker")
@click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, type=KeyValue())
@click.option("--cpu", is_flag=True, help="Run the same ranks on the CPU, with gloo.")
@click.option("--resume", metavar="RUN", help="Go on with an earlier run, from its newest checkpoint.")
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    metavar="N",
    help="The place of this machine in ssh.hosts, from 0, where its addresses do not show it.",
)
@runs_option
@click.pass_obj
def worker(
    terminal: Terminal,
    *,
    spec: Path,
    overrides: tuple[str, ...],
    cpu: bool,
    resume: str | None,
    node_rank: int | None,
    runs_dir: Path,
) -> int:
    """Take part in a run: as one rank, under torchrun, srun, mpirun, or with RANK and WORLD_SIZE set.

    Without such variables, as a machine of ssh.hosts: type it on each of them. Each finds itself by its own addresses
    and names, meets the others at the first one, and starts its ranks. No SSH, no scheduler. The run ends with this
    command, on any of them.

    \b
    torchrun --nproc-per-node 2 -m clusterddp worker job.yaml
    srun clusterddp worker job.yaml                            in salloc, or a batch script
    mpirun -n 4 clusterddp worker job.yaml                     Open MPI or MPICH
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=gpu01 clusterddp worker job.yaml
    clusterddp worker job.yaml                                 on each machine of ssh.hosts
    CLUSTERDDP_JOIN_KEY=... for all                            no process without the key takes part
    """
    from clusterddp.ranks.launched import find_place
    from clusterddp.spec.load import load_spec

    flags = {"device": "cpu"} if cpu else {}
    with _naming_host():
        launched = find_place(terminal.environ)
        resolved = load_spec(spec, overrides, environ=terminal.environ, flags=flags)
        if launched.launcher is None and resolved.job.ssh.hosts:
            resolved = load_spec(spec, overrides, environ=terminal.environ, flags=flags | {"launcher": "ssh"})
            return _be_node(terminal, resolved, runs_dir, resume, node_rank)
        if node_rank is not None:
            raise UsageError(
                "--node-rank is for machines of ssh.hosts"
                + (f", and {launched.title} has started this process" if launched.launcher else ": the spec has none")
            )
        return _be_rank(terminal, resolved, runs_dir, resume, launched)


COMMANDS = {"worker": worker}


def _be_rank(
    terminal: Terminal, resolved: ResolvedSpec, runs_dir: Path, resume: str | None, launched: Launched
) -> NoReturn:
    """Meet the other ranks, and become the rank in this process."""
    from clusterddp.places.worker.meeting import meet
    from clusterddp.places.worker.place import (
        complete_launched,
        introduce,
        refuse_job,
        seat_of_rank,
        start_timeout_s,
    )
    from clusterddp.places.worker.worker import Decided, RankWorker
    from clusterddp.ranks.environment import COOKIE
    from clusterddp.run.cleanup import marking

    job, environ = resolved.job, terminal.environ
    refuse_job(job, environ)
    launched = complete_launched(launched, job)
    seat = seat_of_rank(launched)
    here = RankWorker(
        resolved=resolved,
        seat=seat,
        launched=launched,
        runs_dir=runs_dir,
        working_dir=Path.cwd(),
        environ=environ,
        resume=resume,
    )
    own = introduce(seat, job, environ, local_rank=launched.local_rank)
    key, timeout_s = environ.get(JOIN_KEY, ""), start_timeout_s(job, seat.noun)
    met = meet(seat, own, here.decide, timeout_s=timeout_s, key=key)
    decided = Decided.from_json(met.decided, seat)
    run, _ = here.settle(decided)
    if seat.number == 0:
        _print_met(here, decided, run.path)
    argv, environment = here.become_rank(decided, run, met.port)
    with marking(environment[COOKIE]):
        os.execve(argv[0], argv, environment)  # the same process becomes the rank


def _be_node(
    terminal: Terminal, resolved: ResolvedSpec, runs_dir: Path, resume: str | None, node_rank: int | None
) -> int:
    """Meet the other machines, start the ranks of this one, and show how the run goes on until it has ended."""
    from clusterddp.places.worker.meeting import meet
    from clusterddp.places.worker.place import introduce, seat_of_node, start_timeout_s
    from clusterddp.places.worker.worker import Decided, NodeWorker
    from clusterddp.run.record import WORKER, read_run
    from clusterddp.submission.submit import Submitted
    from clusterddp.system.files import read_json

    job, environ = resolved.job, terminal.environ
    seat = seat_of_node(job, node_rank)
    here = NodeWorker(
        resolved=resolved, seat=seat, runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ, resume=resume
    )
    with contextlib.closing(here.prepare()):
        own = introduce(seat, job, environ, resumes=here.resumes)
        met = meet(
            seat,
            own,
            here.decide,
            timeout_s=start_timeout_s(job, seat.noun),
            key=environ.get(JOIN_KEY, ""),
            report=lambda text: say(printable(text)),
        )
        carried = here.carry(Decided.from_json(met.decided, seat), met.connections, met.unread)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the run is cancelled, not lost
    run = carried.run
    if carried.number == 0:  # the run's notes and the output of rank 0 are shown here only
        for note in (read_json(run.plan) or {}).get("notes", ()):
            say_note(note)
    submitted = Submitted(run=run.name, launcher=WORKER, job_id=read_run(run).job_id, run_dir=run.path)
    options = StartOptions(runs_dir=runs_dir, output="text", follow=carried.number == 0)
    return stay_with(submitted, terminal, options, verb="joined", carried=carried)


@contextlib.contextmanager
def _naming_host() -> Iterator[None]:
    """Name this host in errors, but for those of the spec, which are the same on all hosts."""
    try:
        yield
    except SpecError:
        raise
    except ClusterddpError as error:
        host = socket.gethostname()
        if host not in error.message:
            error.message = f"{host}: {error.message}"
        raise


def _print_met(here: RankWorker, decided: Decided, run_dir: Path) -> None:
    """Print on rank 0 which ranks have met."""
    size = sum(len(ranks) for _, ranks in decided.nodes)
    hosts = f"{len(decided.nodes)} hosts" if len(decided.nodes) > 1 else decided.nodes[0][0]
    title = f"started by {here.launched.title}" if here.launched.launcher else "started without a launcher"
    ranks = format_count(size, "rank")
    say(f"clusterddp: {run_dir.name}: {ranks} on {hosts}, {title}; backend {decided.backend}; {run_dir}")
    asked = here.resolved.job.resources
    if asked.world_size != size and ("resources.nodes" in here.resolved.origins or asked.ranks_per_node > 1):
        say(
            f"note: the spec has {asked.nodes} x {asked.ranks_per_node} = {asked.world_size} ranks; {size} were started"
        )
