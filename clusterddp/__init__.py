"""clusterddp: submit PyTorch DistributedDataParallel runs to Slurm, to LAN machines, or to this machine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterddp.api import Run as Run
    from clusterddp.api import load_spec as load_spec
    from clusterddp.api import plan as plan
    from clusterddp.api import should_stop as should_stop
    from clusterddp.api import submit as submit

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "load_spec", "plan", "should_stop", "submit"]


def __getattr__(name: str) -> object:
    """Import the Python interface when it is first asked for: ranks and supervisors import this package too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("clusterddp.api"), name)
