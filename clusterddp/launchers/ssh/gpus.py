"""The GPUs of a run over SSH: leased on all hosts, or the run is refused with the names of those that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import SshError
from clusterddp.planning.local import GpusInUseError
from clusterddp.ssh.session import Session
from clusterddp.ssh.sessions import ask_all
from clusterddp.system.gpu_lease import spell_busy

_LEASE_TIMEOUT_S = 60.0
"""Enough for calls of nvidia-smi, each of which may have to wake every GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """The leased GPUs of a node; the agent holds the leases, too, until it ends."""

    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES."""
    hold: tuple[int, ...] = ()
    """For the supervisor's order: descriptors that it inherits from the agent."""


def lease_gpus(sessions: Mapping[int, Session], counts: Mapping[int, int], *, run: str) -> dict[int, Grant]:
    """Lease GPUs for every node (`sessions` and `counts` by node rank).

    After an error the caller closes the sessions, which ends the leases.
    Raises: GpusInUseError: GPUs are in use; the message names their users. SshError: a host has too few GPUs, or does
    not answer.
    """
    by_host = {sessions[node].host: sessions[node] for node in sorted(sessions) if counts.get(node)}
    nodes = {host: [node for node in sorted(sessions) if counts.get(node) and sessions[node].host == host]
             for host in by_host}  # fmt: skip

    def wanted(host: str) -> dict[str, Any]:
        return {"run": run, "counts": [counts[node] for node in nodes[host]]}

    grants = {node: Grant() for node in sessions}
    busy = []
    for host, reply in ask_all(by_host, "gpus.lease", wanted, timeout_s=_LEASE_TIMEOUT_S).items():
        if isinstance(reply, SshError):
            raise reply
        if reply.facts["gpus"] is None:
            busy.append(f"{host}: {spell_busy(reply.facts['busy'])}")
            continue
        for node, gpus, hold in zip(nodes[host], reply.facts["gpus"], reply.facts["hold"], strict=True):
            grants[node] = Grant(gpus=tuple(gpus), hold=tuple(hold))
    if busy:
        raise GpusInUseError("\n".join([f"{run}: GPUs are in use", *sorted(busy)]), hint="submit it when they are free")
    return grants
