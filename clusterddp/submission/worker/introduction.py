"""The introduction of a rank that another launcher has started, and the specs that it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from clusterddp.errors import UsageError
from clusterddp.network.interface import own_addresses, read_links
from clusterddp.network.socket_links import report_links
from clusterddp.planning.job_values import spec_text
from clusterddp.planning.prerequisites import check_secrets
from clusterddp.ranks.environment import Variable
from clusterddp.ranks.launched import ask_pmi
from clusterddp.rendezvous.rank_messages import introduce_rank
from clusterddp.rendezvous.ranks import DEFAULT_TIMEOUT_S
from clusterddp.submission.worker.place import count_gpus

if TYPE_CHECKING:
    from clusterddp.ranks.launched import Launched
    from clusterddp.rendezvous.rank_messages import RankHello
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec


def introduce(launched: Launched, resolved: ResolvedSpec, environ: Mapping[str, str]) -> tuple[Launched, RankHello]:
    """Complete the facts from PMI, and return what this rank sends rank 0."""
    timeout_s = start_timeout_s(resolved.job)
    if launched.launcher in {"mpich", "pmi"} and environ.get("PMI_FD"):
        launched = ask_pmi(launched, environ, own_addresses(), timeout_s)
    size = launched.variables.get("WORLD_SIZE")
    port_is_given = launched.master_port is not None and not launched.port_is_taken
    gpus = count_gpus(resolved.job, environ)
    return launched, introduce_rank(
        rank=launched.rank,
        world_size=launched.world_size,
        world_size_from=size.origin if size else "alone",
        spec=hashlib.sha256(spec_text(resolved.job).encode()).hexdigest(),
        local_rank=launched.local_rank,
        gpus=gpus,
        links=report_links(read_links()) if gpus else {},
        identity="" if port_is_given else f"{launched.identity}:{launched.start}",
    )


def start_timeout_s(job: JobSpec) -> float:
    """Return how long the ranks of a run may take to meet, in seconds."""
    return float(job.network.start_timeout.seconds) if job.network.start_timeout else DEFAULT_TIMEOUT_S


def with_spec_port(launched: Launched, job: JobSpec) -> Launched:
    """Take the port that the spec names, where the launcher sets none.

    Raises: UsageError: it sets another one.
    """
    port = job.network.master_port
    given = launched.variables.get("MASTER_PORT")
    if port == "auto" or launched.port_is_taken:
        return launched
    if given and given.origin.endswith("MASTER_PORT") and int(given.value) != port:
        raise UsageError(
            f"{given.origin} is {given.value} and network.master_port is {port}: two numbers for one port",
            hint=f"unset {given.origin}, or network.master_port=auto",
        )
    known = {**launched.variables, "MASTER_PORT": Variable(str(port), "network.master_port")}
    return dataclasses.replace(launched, master_port=port, variables=known)


def refuse_job(job: JobSpec, environ: Mapping[str, str]) -> None:
    """Refuse a spec that ranks of another launcher cannot run.

    Raises: UsageError, PreflightError: it starts ranks itself, is many runs, has a container, or a secret is not set.
    """
    if job.entry and job.entry.owns_ranks:
        raise UsageError(
            "entry.owns_ranks starts its ranks itself, and here each rank has been started already",
            hint="clusterddp submit or join starts one process on each machine",
        )
    if job.sweep:
        raise UsageError("a spec with a sweep is many runs; a worker is of one", hint="~sweep drops the section")
    if job.container:
        raise UsageError(
            "container: another launcher starts the ranks, and it has to start them in the container",
            hint="~container on the command line; srun --container-image=... clusterddp worker SPEC",
        )
    check_secrets(job.all_secrets, environ)
