"""This host: its time and facts, leases on its GPUs, the live processes of runs, and old files."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.agent.operations import Body, Host
from clusterddp.places.ssh.agent.store import find_place
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.leftovers import find_runs
from clusterddp.run.removal import find_stored, remove_stored
from clusterddp.system.devices import list_gpus, visible_gpus
from clusterddp.system.gpu_lease import ENDING_S, busy_gpus, names_to_lease, take_leases

_PAUSE_S = 0.2


def beat(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Receive a heartbeat of the launcher; return the time."""
    return {"time": time.time()}


def read_facts(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return the facts of this host and of `data_dir`, without torch; `variables`: those of the run's ranks.

    `with_gpus`: the agent's own GPUs and who uses them, too; nvidia-smi may have to wake each.
    """
    from clusterddp.facts.machine import read_host  # most agents do not need it

    data_dir = request["data_dir"]
    environ = inherited_environment()
    of_ranks = environ | (request["variables"] or {})
    facts = read_host(
        host.root,
        of_ranks | {"PYTHONPATH": host.python_path(of_ranks)},
        executable=sys.executable,
        data_dir=find_place(data_dir) if data_dir else None,
        with_driver=bool(request["with_driver"]),
    )
    if request["with_gpus"]:
        listed = list_gpus(environ)
        gpus = visible_gpus(environ, listed)
        facts = dataclasses.replace(facts, gpus=tuple(gpus), busy_gpus=busy_gpus(environ, gpus=gpus, listed=listed))
    return {"facts": facts.to_json()}


def lease(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Lease `count` free GPUs for the node of `run` on this host; all or none. `hold`: see `take_leases`.

    The answer has `gpus`, for CUDA_VISIBLE_DEVICES, and `hold`, the descriptors for its supervisor. When too few are
    free for some seconds, `gpus` is null, and `busy` maps GPUs to their users. The agent holds the lease until it ends.

    Raises: ClusterddpError: the host does not have so many.
    """
    environ = inherited_environment()
    listed = list_gpus(environ)
    gpus = visible_gpus(environ, listed)
    count, run, hold = request["count"], request["run"], request["hold"]
    if len(gpus) < count:
        raise ClusterddpError(f"{count} GPUs are asked for, and there are {len(gpus)}")
    names = gpus if count else names_to_lease((), run, hold)
    deadline = time.monotonic() + ENDING_S
    while True:
        busy = busy_gpus(environ, gpus=names, listed=listed, hold=None if hold == run else hold)
        free = [gpu for gpu in gpus if gpu not in busy][:count]
        enough = len(free) == count and (count or not busy)
        if enough and (taken := take_leases(free, run, listed, hold=hold)) is not None:
            return {"gpus": free, "hold": host.hold(taken).descriptors, "busy": {}}
        if time.monotonic() > deadline:
            return {"gpus": None, "hold": [], "busy": busy}
        time.sleep(_PAUSE_S)


def list_here(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """List the live processes of runs (`tokens`: of these only, null: of all), and what is old.

    `older_than_s`: list the directories of ended runs, snapshots and packages that are that old and not in use.
    """
    runs, older_than_s = find_runs([host.root / "runs"], only=request["tokens"]), request["older_than_s"]
    stored = None
    if older_than_s is not None:
        stored = dataclasses.asdict(find_stored(host.root, older_than_s=older_than_s, in_use=[host.package.name]))
    return {"runs": [dataclasses.asdict(run) for run in runs], "stored": stored}


def remove(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Remove those of `places` that are still that old and not in use; `older_than_s` null: ended runs, at any age."""
    older_than_s, in_use = request["older_than_s"], [host.package.name]
    removed = remove_stored(host.root, request["places"], older_than_s=older_than_s, in_use=in_use)
    return {"removed": [dataclasses.asdict(each) for each in removed]}
