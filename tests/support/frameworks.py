"""Scripts of frameworks on machines whose torchvision was built for another torch."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

_BESIDE_ANOTHER_TORCH = """\
# torchvision's wheel here was built for another torch. This stands in front of it and has it imported all the same.
import os, sys
here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
del sys.modules["torchvision"]
from clusterddp.train.data.download import import_torchvision
import_torchvision()
"""


def put_torchvision_beside(scripts: Path) -> None:
    """Let scripts in this directory import torchvision, which frameworks take where it is installed."""
    if not _torchvision_loads():
        (scripts / "torchvision").mkdir()
        (scripts / "torchvision" / "__init__.py").write_text(_BESIDE_ANOTHER_TORCH)


@functools.cache
def _torchvision_loads() -> bool:
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], check=False, capture_output=True).returncode == 0
    )
