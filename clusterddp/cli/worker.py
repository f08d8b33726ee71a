"""The command that other launchers start: worker, one rank of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import command, runs_option
from clusterddp.cli.terminal import Terminal, say
from clusterddp.errors import ClusterddpError, SpecError, UsageError
from clusterddp.network.interface import read_links
from clusterddp.network.socket_links import tell_links
from clusterddp.ranks.environment import Variable
from clusterddp.rendezvous.handshake import JOIN_KEY
from clusterddp.rendezvous.rank_messages import introduce_rank
from clusterddp.rendezvous.ranks import DEFAULT_TIMEOUT_S, meet_ranks

if TYPE_CHECKING:
    from clusterddp.ranks.launched import Launched
    from clusterddp.rendezvous.rank_messages import RankHello
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec
    from clusterddp.submission.worker.place import Decided
    from clusterddp.submission.worker.worker import Worker


@command("worker")
@click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
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
    from clusterddp.submission.worker.place import Decided
    from clusterddp.submission.worker.worker import Worker

    try:
        launched = find_place(terminal.environ)
        resolved = load_spec(spec, overrides, environ=terminal.environ, flags={"device": "cpu"} if cpu else None)
        _refuse_what_cannot_be(resolved.job, terminal.environ)
        launched = _with_spec_port(launched, resolved.job)
        launched, own = _introduce(launched, resolved, terminal.environ)
        here = Worker(
            resolved=resolved,
            launched=launched,
            runs_dir=runs_dir,
            working_dir=Path.cwd(),
            environ=terminal.environ,
            resume=resume,
        )
        key = terminal.environ.get(JOIN_KEY, "")
        answer, master = meet_ranks(launched, own, here.decide, _timeout_s(resolved.job), key)
        decided = Decided.from_json(answer, launched.world_size)
        run = here.settle(decided)
        if launched.rank == 0:
            _tell(here, decided, run.path)
        argv, environment = here.become_rank(decided, run)
    except SpecError:
        raise
    except ClusterddpError as error:
        host = socket.gethostname()
        if host not in error.message:
            error.message = f"{host}: {error.message}"
        raise
    environment.pop(JOIN_KEY, None)  # the program needs it for nothing
    if master is not None and not launched.port_is_taken:
        environment |= master.keep_over_exec(listening=here.takes_listener)
    os.execve(argv[0], argv, environment)  # noqa: S606  the same process becomes the rank


def _introduce(launched: Launched, resolved: ResolvedSpec, environ: Mapping[str, str]) -> tuple[Launched, RankHello]:
    """Complete what PMI tells, and introduce this rank to the others."""
    from clusterddp.network.interface import own_addresses
    from clusterddp.planning.job_values import spec_text
    from clusterddp.ranks.launched_pmi import ask_pmi
    from clusterddp.submission.worker.place import count_gpus

    timeout_s = _timeout_s(resolved.job)
    if launched.launcher in {"mpich", "pmi"} and environ.get("PMI_FD"):
        launched = ask_pmi(launched, environ, own_addresses(), timeout_s)
    size = launched.told.get("WORLD_SIZE")
    port_is_given = launched.master_port is not None and not launched.port_is_taken
    gpus = count_gpus(resolved.job, environ)
    return launched, introduce_rank(
        rank=launched.rank,
        world_size=launched.world_size,
        world_size_from=size.origin if size else "alone",
        spec=hashlib.sha256(spec_text(resolved.job).encode()).hexdigest(),
        local_rank=launched.local_rank,
        gpus=gpus,
        links=tell_links(read_links()) if gpus else {},
        identity="" if port_is_given else f"{launched.identity}:{launched.start}",
    )


def _timeout_s(job: JobSpec) -> float:
    return float(job.network.start_timeout.seconds) if job.network.start_timeout else DEFAULT_TIMEOUT_S


def _with_spec_port(launched: Launched, job: JobSpec) -> Launched:
    """Take the port that the spec names, where the launcher tells none.

    Raises: UsageError: it tells another one.
    """
    port = job.network.master_port
    told = launched.told.get("MASTER_PORT")
    if port == "auto" or launched.port_is_taken:
        return launched
    if told and told.origin.endswith("MASTER_PORT") and int(told.value) != port:
        raise UsageError(
            f"{told.origin} is {told.value} and network.master_port is {port}: two numbers for one thing",
            hint=f"unset {told.origin}, or network.master_port=auto",
        )
    known = {**launched.told, "MASTER_PORT": Variable(str(port), "network.master_port")}
    return dataclasses.replace(launched, master_port=port, told=known)


def _refuse_what_cannot_be(job: JobSpec, environ: Mapping[str, str]) -> None:
    from clusterddp.planning.prerequisites import check_secrets

    if job.entry and job.entry.owns_ranks:
        raise UsageError(
            "entry.owns_ranks starts its ranks itself, and here each rank has been started already",
            hint="clusterddp submit or join starts one process on each machine",
        )
    if job.start == "torchrun" and not environ.get("TORCHELASTIC_RUN_ID"):
        raise UsageError(
            "start: torchrun has torchrun start the ranks, and here each rank has been started already",
            hint="torchrun ... -m clusterddp worker SPEC; or start=ranks",
        )
    if job.sweep:
        raise UsageError("a spec with a sweep is many runs; this is about one", hint="~sweep drops the section")
    if job.container:
        raise UsageError(
            "container: another launcher starts the ranks, and it has to start them in the container",
            hint="~container on the command line; srun --container-image=... clusterddp worker SPEC",
        )
    check_secrets(tuple(job.secrets), environ)


def _tell(here: Worker, decided: Decided, run_dir: Path) -> None:
    """Say on rank 0 what has come together."""
    size = sum(len(ranks) for _, ranks in decided.nodes)
    hosts = f"{len(decided.nodes)} hosts" if len(decided.nodes) > 1 else decided.nodes[0][0]
    ranks = f"{size} ranks" if size > 1 else "1 rank"
    title = f"started by {here.launched.title}" if here.launched.launcher else "nobody else has started any"
    say(f"clusterddp: {run_dir.name}: {ranks} on {hosts}, {title}; backend {decided.backend}; {run_dir}")
    asked = here.resolved.job.resources
    if asked.world_size != size and ("resources.nodes" in here.resolved.origins or asked.ranks_per_node > 1):
        say(
            f"note: the spec has {asked.nodes} x {asked.ranks_per_node} = {asked.world_size} ranks; {size} were started"
        )


COMMANDS = {"worker": worker}
