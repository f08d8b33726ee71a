"""clusterddp: submit PyTorch DistributedDataParallel runs to Slurm, to LAN machines, or to this machine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterddp.api import Run as Run
    from clusterddp.api import load_spec as load_spec
    from clusterddp.api import plan as plan
    from clusterddp.api import submit as submit
    from clusterddp.api import submit_sweep as submit_sweep
    from clusterddp.executor import Executor as Executor
    from clusterddp.script import checkpoint as checkpoint
    from clusterddp.script.place import output_dir as output_dir
    from clusterddp.script.place import resumed_from as resumed_from
    from clusterddp.script.place import should_stop as should_stop
    from clusterddp.script.report import log as log
    from clusterddp.script.report import progress as progress

__version__ = "0.1.0"
_HOMES = {
    "Executor": "clusterddp.executor",
    **dict.fromkeys(("Run", "load_spec", "plan", "submit", "submit_sweep"), "clusterddp.api"),
    **dict.fromkeys(("output_dir", "resumed_from", "should_stop"), "clusterddp.script.place"),
    **dict.fromkeys(("log", "progress"), "clusterddp.script.report"),
}
"""The module of each name."""
__all__ = [
    "Executor",
    "Run",
    "__version__",
    "checkpoint",
    "load_spec",
    "log",
    "output_dir",
    "plan",
    "progress",
    "resumed_from",
    "should_stop",
    "submit",
    "submit_sweep",
]


def __getattr__(name: str) -> object:
    """Import the Python interface when it is first asked for: ranks and supervisors import this package too."""
    if name == "checkpoint":
        return importlib.import_module("clusterddp.script.checkpoint")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
