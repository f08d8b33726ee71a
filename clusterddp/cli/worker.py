"""The command worker, which other launchers start; its process becomes one rank of a run."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from clusterddp.cli.arguments import KeyValue, command, runs_option
from clusterddp.cli.terminal import Terminal, say
from clusterddp.errors import ClusterddpError, SpecError
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.rendezvous.ranks import MasterPort, meet_ranks
from clusterddp.system.units import format_count

if TYPE_CHECKING:
    from clusterddp.run.directory import RunDir
    from clusterddp.submission.worker.place import Decided
    from clusterddp.submission.worker.worker import Worker


@command("worker")
@click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, type=KeyValue())
@click.option("--cpu", is_flag=True, help="Run the same ranks on the CPU, with gloo.")
@click.option("--resume", metavar="RUN", help="Go on with an earlier run, from its newest checkpoint.")
@runs_option
@click.pass_obj
def worker(
    terminal: Terminal, *, spec: Path, overrides: tuple[str, ...], cpu: bool, resume: str | None, runs_dir: Path
) -> None:
    """Be one rank of a run: under torchrun, srun, mpirun, or with RANK and WORLD_SIZE set.

    \b
    torchrun --nproc-per-node 2 -m clusterddp worker job.yaml
    srun clusterddp worker job.yaml                            in salloc, or a batch script
    mpirun -n 4 clusterddp worker job.yaml                     Open MPI or MPICH
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=gpu01 MASTER_PORT=29500 clusterddp worker job.yaml
    CLUSTERDDP_JOIN_KEY=... for all ranks                      no process without the key takes part
    """
    from clusterddp.ranks.launched import find_place
    from clusterddp.spec.load import load_spec
    from clusterddp.submission.worker.introduction import introduce, refuse_job, start_timeout_s, with_spec_port
    from clusterddp.submission.worker.place import Decided
    from clusterddp.submission.worker.worker import Worker

    with _naming_host():
        launched = find_place(terminal.environ)
        resolved = load_spec(spec, overrides, environ=terminal.environ, flags={"device": "cpu"} if cpu else None)
        refuse_job(resolved.job, terminal.environ)
        launched, own = introduce(with_spec_port(launched, resolved.job), resolved, terminal.environ)
        here = Worker(
            resolved=resolved,
            launched=launched,
            runs_dir=runs_dir,
            working_dir=Path.cwd(),
            environ=terminal.environ,
            resume=resume,
        )
        key = terminal.environ.get(JOIN_KEY, "")
        answer, master = meet_ranks(launched, own, here.decide, start_timeout_s(resolved.job), key)
        decided = Decided.from_json(answer, launched.world_size)
        run = here.settle(decided)
        if launched.rank == 0:
            _print_met(here, decided, run.path)
        _become_rank(here, decided, run, master)


def _become_rank(here: Worker, decided: Decided, run: RunDir, master: MasterPort | None) -> NoReturn:
    argv, environment = here.become_rank(decided, run)
    environment.pop(JOIN_KEY, None)  # the program does not need it
    if master is not None and not here.launched.port_is_taken:
        environment |= master.keep_over_exec(listening=here.takes_listener)
    os.execve(argv[0], argv, environment)  # the same process becomes the rank


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


def _print_met(here: Worker, decided: Decided, run_dir: Path) -> None:
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


COMMANDS = {"worker": worker}
