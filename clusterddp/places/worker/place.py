"""The place of this process in a run: a rank that another launcher has started, or this machine as a node of the spec.

And what each brings to the meeting, which specs it refuses, and the nodes and devices that follow from all.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from clusterddp import __version__
from clusterddp.errors import PreflightError, UsageError
from clusterddp.network.interface import (
    Interface,
    addresses_of,
    host_name,
    interface_towards,
    is_loopback,
    loopback,
    named_interface,
    read_links,
)
from clusterddp.network.port import walk_ports
from clusterddp.network.rendezvous.connection import JOIN_KEY
from clusterddp.places.worker.meeting import Hello, Seat, digest_spec
from clusterddp.planning.prerequisites import check_secrets
from clusterddp.ranks.environment import Variable

if TYPE_CHECKING:
    from clusterddp.ranks.launched import Launched
    from clusterddp.spec.model import JobSpec

_TIMEOUT_S = {"rank": 120.0, "node": 300.0}
"""How long participants wait for each other where network.start_timeout does not say; people type on every node."""


def start_timeout_s(job: JobSpec, noun: str) -> float:
    """Return how long the participants of a run may take to meet, in seconds."""
    return float(job.network.start_timeout.seconds) if job.network.start_timeout else _TIMEOUT_S[noun]


def complete_launched(launched: Launched, job: JobSpec) -> Launched:
    """Add the port that the spec names, where the launcher sets none."""
    port, given = job.network.master_port, launched.variables.get("MASTER_PORT")
    if port != "auto" and not launched.port_is_taken:
        if given and given.origin.endswith("MASTER_PORT") and int(given.value) != port:
            raise UsageError(
                f"{given.origin} is {given.value} and network.master_port is {port}: two numbers for one port",
                hint=f"unset {given.origin}, or network.master_port=auto",
            )
        known = {**launched.variables, "MASTER_PORT": Variable(str(port), "network.master_port")}
        launched = dataclasses.replace(launched, master_port=port, variables=known)
    return launched


def seat_of_rank(launched: Launched) -> Seat:
    """Return the place of a rank that another launcher has started."""
    size, address, port = (launched.variables.get(name) for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    given = launched.master_port is not None and not launched.port_is_taken
    return Seat(
        noun="rank",
        number=launched.rank,
        size=launched.world_size,
        size_from=size.origin if size else "alone",
        hosts=launched.master_addrs,
        hosts_from=address.origin if address else "the launcher",
        port=launched.master_port if given else None,
        port_from=port.origin if port and given else "the job's name",
        identity="" if given else f"{launched.identity}:{launched.start}",
    )


def seat_of_node(job: JobSpec, node_rank: int | None) -> Seat:
    """Find this machine among the hosts of the spec; `node_rank`: which one it is, if its addresses do not show it.

    Raises: UsageError: the spec has no such node. PreflightError: this machine is none of the hosts, or several.
    """
    from clusterddp.spec.hosts import share_out

    hosts = tuple(share.host.host for share in share_out(job))
    if node_rank is None:
        name = socket.gethostname()
        addresses = {
            entry.address: link.name
            for link in read_links()
            for entry in link.addresses
            if not is_loopback(entry.address)
        }
        known = [(host, addresses_of(host)) for host in hosts]
        node_rank = find_own_index(known, tuple(dict.fromkeys((name, name.partition(".")[0]))), addresses)
    elif node_rank >= len(hosts):
        raise UsageError(f"--node-rank {node_rank}: the spec has nodes 0 to {len(hosts) - 1}: {', '.join(hosts)}")
    port = job.network.master_port
    return Seat(
        noun="node",
        number=node_rank,
        size=len(hosts),
        size_from="ssh.hosts",
        names=hosts,
        hosts=hosts[:1],
        hosts_from="ssh.hosts",
        port=walk_ports(f"join:{job.name}", 1)[0] if port == "auto" else port,
        port_from="the spec's name" if port == "auto" else "network.master_port",
    )


def find_own_index(
    hosts: Sequence[tuple[str, Sequence[str]]], names: Sequence[str], addresses: Mapping[str, str]
) -> int:
    """Return which of the hosts this machine is, counted from 0.

    `hosts`: each with the addresses that it has here; none: the name is not known. `names` and `addresses` are this
    machine's, each address with its interface, without the loopback.
    """
    reasons = {index: why for index, each in enumerate(hosts) if (why := _why(*each, names, addresses))}
    if len(reasons) == 1:
        return next(iter(reasons))
    where = ", ".join(f"{address} on {link}" for address, link in addresses.items()) or "no address"
    own = f"this machine, {names[0]} ({where}),"
    if not reasons:
        listed = []
        for host, found in hosts:
            plain = host_name(host)
            words = ", ".join(found) or "a name that is not known here"
            listed.append(plain if list(found) == [plain] else f"{plain} ({words})")
        raise PreflightError(
            f"{own} is none of the hosts of the spec: {', '.join(listed)}",
            hint="ssh.hosts names each machine once, by a name or address of its own; or --node-rank gives its number",
        )
    all_of = "; ".join(f"node {index} ({hosts[index][0]}): {why}" for index, why in reasons.items())
    raise PreflightError(
        f"{own} is {len(reasons)} of the hosts of the spec: {all_of}",
        hint="ssh.hosts names each machine once, by what no other machine has; or --node-rank gives its number",
    )


def _why(host: str, found: Sequence[str], names: Sequence[str], addresses: Mapping[str, str]) -> str:
    """Return by what this machine is the host; empty when it is not."""
    for address in found:
        if address in addresses:
            return f"{address} is on its {addresses[address]}"
    name = host_name(host).lower().rstrip(".")
    ours = {each.lower() for each in names}
    if name in ours or (name.partition(".")[0] in ours and not found):
        return f"{name} is its name"
    # 127.0.1.1 stands for the own name in Debian's /etc/hosts.
    if found and all(is_loopback(address) for address in found):
        return f"{found[0]} means any machine itself"
    return ""


def introduce(
    seat: Seat, job: JobSpec, environ: Mapping[str, str], *, local_rank: int | None = None, resumes: str | None = None
) -> Hello:
    """Make this participant's first message; torch's version is read without an import of torch.

    `resumes`: the run that this node resumes, which has to be the same on all.
    """
    from clusterddp.spec.load import flatten

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    facts = {"torch": torch, "clusterddp": __version__}
    if seat.noun == "node":
        facts |= {"Python": ".".join(platform.python_version_tuple()[:2]), "--resume": resumes or ""}
    values = {key: json.dumps(value, sort_keys=True) for key, value in flatten(job.model_dump(mode="json")).items()}
    return Hello(
        noun=seat.noun,
        number=seat.number,
        size=seat.size,
        size_from=seat.size_from,
        spec=digest_spec(values, environ.get(JOIN_KEY, "")),
        facts=facts,
        local_rank=local_rank,
        gpus=count_gpus(job, environ) if seat.noun == "rank" else 0,
        identity=seat.identity,
    )


def refuse_job(job: JobSpec, environ: Mapping[str, str]) -> None:
    """Refuse a spec that ranks of another launcher cannot run.

    Raises: UsageError: it starts ranks itself, is many runs, has a container, or a secret is not set.
    """
    if job.entry and job.entry.owns_ranks:
        raise UsageError(
            "entry.owns_ranks starts its ranks itself, and here each rank has been started already",
            hint="clusterddp submit, or worker on the machines of ssh.hosts, starts one process on each",
        )
    if job.sweep:
        raise UsageError("a spec with a sweep is many runs; a worker is of one", hint="~sweep drops the section")
    if job.container:
        raise UsageError(
            "container: another launcher starts the ranks, and it has to start them in the container",
            hint="~container on the command line; srun --container-image=... clusterddp worker SPEC",
        )
    check_secrets(job.all_secrets, environ)


def group_by_host(hellos: tuple[Hello, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Group ranks into nodes by their place, in the order of their first ranks."""
    places: dict[tuple[str, str], list[Hello]] = {}
    for hello in hellos:
        places.setdefault(hello.place, []).append(hello)
    return tuple(
        (host, tuple(hello.number for hello in sorted(ranks, key=lambda each: (each.local_rank or 0, each.number))))
        for (host, _), ranks in places.items()
    )


def decide_gpus(job: JobSpec, hellos: tuple[Hello, ...]) -> bool:
    """Decide whether the ranks compute on GPUs: when each has one and the spec does not choose the CPU."""
    if job.device == "cpu" or job.resources.gpus_per_node == 0:
        return False
    sizes = {host: len(ranks) for host, ranks in group_by_host(hellos)}
    without = [hello for hello in hellos if hello.gpus < sizes[hello.host] and hello.gpus != 1] + [
        hello for hello in hellos if hello.gpus == 0
    ]
    demanded = job.device == "cuda" or bool(job.resources.gpus_per_node) or job.network.backend == "nccl"
    if without and demanded:
        raise PreflightError(
            f"{without[0].name} sees {without[0].gpus} GPUs, and {sizes[without[0].host]} ranks are there",
            hint="device=cpu starts the same ranks on the CPU with gloo",
        )
    return not without


def count_gpus(job: JobSpec, environ: Mapping[str, str]) -> int:
    """Count the GPUs that this rank sees; 0 where the spec wants none."""
    from clusterddp.system.devices import visible_gpus

    return 0 if job.device == "cpu" or job.resources.gpus_per_node == 0 else len(visible_gpus(environ))


def count_threads(num_ranks: int) -> int:
    """Return a rank's share of this host's cores, or the cores to which its launcher has bound it."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, mine if mine < (os.cpu_count() or 1) else mine // num_ranks)


def choose_interface(job: JobSpec, reached: str, num_nodes: int) -> Interface:
    """Choose the interface of this host that carries the run's traffic; `reached`: the address of the first host."""
    if job.network.interface != "auto":
        return named_interface(job.network.interface)
    return loopback() if num_nodes == 1 and is_loopback(reached) else interface_towards(reached)
