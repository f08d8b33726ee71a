"""Hosts of a rack with GPUs that do not exist, and a torch that says it was built for CUDA."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.support.bare_python import lay_out
from tests.testbed.gpus import fit_gpus, remove_gpus
from tests.testbed.rack import Rack

CUDA_PYTHON = "~/claims-cuda/bin/python"


@contextmanager
def cuda_hosts(rack: Rack, gpus: Mapping[str, int]) -> Iterator[None]:
    """Fit hosts with so many GPUs each, and with `CUDA_PYTHON`."""
    for node, count in gpus.items():
        fit_gpus(rack, node, count)
        home = rack.outside(node, rack.home(node)) / "claims-cuda"
        lay_out(home, ())
        (torch,) = (site / "torch" for site in home.glob("lib/*/site-packages"))
        torch.mkdir()
        (torch / "__init__.py").touch()
        (torch / "version.py").write_text("__version__ = '2.13.0'\ncuda = '12.8'\n")
    try:
        yield
    finally:
        for node in gpus:
            remove_gpus(rack, node)
            shutil.rmtree(rack.outside(node, rack.home(node)) / "claims-cuda")
