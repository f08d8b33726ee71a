"""The facts of this host that a run over SSH asks for before it starts; torch is not imported."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from clusterddp.agent.storage import find_place
from clusterddp.agent.types import Body, Host, Operation
from clusterddp.ranks.environment import inherited_environment


def machine(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return the facts of this host, and of `data_dir`; `variables`: what the run sets for its ranks."""
    from clusterddp.facts.machine import read_host  # most agents are never asked for it

    data_dir = request["data_dir"]
    environ = inherited_environment() | (request["variables"] or {})
    python_path = os.pathsep.join(filter(None, (str(host.package), environ.get("PYTHONPATH"))))
    facts = read_host(
        host.root,
        environ | {"PYTHONPATH": python_path},
        executable=sys.executable,
        data_dir=find_place(data_dir) if data_dir else None,
        with_driver=bool(request["with_driver"]),
    )
    return {"facts": facts.to_json()}


def clock(host: Host, request: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return the time."""
    return {"time": time.time()}


OPERATIONS: dict[str, Operation] = {"facts.machine": machine, "facts.clock": clock}
